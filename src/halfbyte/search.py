"""Search among the rows of a matrix: L2 distances, the nearest rows, and the rank of a token under an LM head.

Candidates are dense or 4-bit. A QuantizedWeight stands for what `halfbyte.dequantize` makes of it, and no more than a
few megabytes of that exist at a time. Results carry no gradients. Like all public functions (ops.py), these go straight
to the kernel when called eagerly and are one operator each under tracing (library.py).

With `group`, the candidates' rows are split over the processes of a torch.distributed group, in the order of their
ranks: every process passes its own rows and the same queries, and gets the result for all of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from halfbyte import eager_search, sharded, transforms
from halfbyte.eager_search import MOST_NEAREST
from halfbyte.formats.parts import Matrix, matrix_parts
from halfbyte.formats.weight import FLOAT_DTYPES, QuantizedWeight


def distances(query: Tensor, candidates: Matrix) -> Tensor:
    """The L2 distance of each query to each row of `candidates`, fp32 [V], or [P, V] of several queries.

    query: [D] or [P, D]. candidates: [V, D], dense or a QuantizedWeight. Both fp16, bf16 or fp32, not necessarily the
    same, on one device.

    One query: the sum of (c - q)^2 in fp32, within (log2(D) + 4) ulps of the fp64 one. Several queries on a GPU go
    through tensor cores as |c|^2 + |q|^2 - 2 c.q; where that leaves less than 1/16 of |c|^2 + |q|^2, and digits would
    cancel, (c - q)^2 is summed after all, so the relative error stays below 2^-16. Raises TypeError or ValueError.
    """
    _check_search(query, candidates)
    _check_transforms("distances", query, candidates)
    if transforms.is_tracing():
        return torch.ops.halfbyte.distances(query, *matrix_parts(candidates))  # type: ignore[no-any-return]
    return eager_search.distances(query, candidates)


def nearest(query: Tensor, candidates: Matrix, k: int = 1, *, group: Any = None) -> tuple[Tensor, Tensor]:
    """The k rows of `candidates` that are nearest to each query, and how far they are.

    query: [D] or [P, D]. candidates: [V, D], dense or a QuantizedWeight. k: 1 to 128, at most V.
    group: a torch.distributed group whose processes hold the candidates' rows between them; None for one process.

    Returns (distances fp32, rows int64), [k] or [P, k], ascending; of rows equally far the lower comes first, and NaN
    is farthest. Exact: these are the first k of `distances` to one query, sorted. Meanwhile 4 bytes a row are written
    for one query; for several, two numbers for every 16 rows. Raises TypeError or ValueError.
    """
    _check_search(query, candidates)
    _check_transforms("nearest", query, candidates)
    rows = candidates.shape[0]
    if not isinstance(k, int) or isinstance(k, bool):
        raise TypeError(f"k is a {type(k).__name__}; nearest takes an int from 1 to {MOST_NEAREST}")
    if group is not None:
        return sharded.nearest(query, candidates, k, group)
    if not 1 <= k <= min(MOST_NEAREST, rows):
        raise ValueError(f"k is {k}; nearest takes 1 to {MOST_NEAREST}, and no more than the {rows} candidates")
    if transforms.is_tracing():
        found: tuple[Tensor, Tensor] = torch.ops.halfbyte.nearest(query, *matrix_parts(candidates), k)
        return found
    return eager_search.nearest(query, candidates, k)


def token_ranks(hidden: Tensor, lm_head: Matrix, tokens: Tensor, *, group: Any = None) -> Tensor:
    """How many tokens of the vocabulary have a logit above that of each given token: int64 [T], 0 for the first choice.

    hidden: [T, D], the states that the head is applied to. lm_head: [V, D], dense or a QuantizedWeight. tokens: [T],
    integers from 0 to V - 1. group: as for `nearest`; `tokens` then counts all rows.

    The logits are exact products of the stored numbers: those too close to call in fp32 are computed anew in fp64. Of
    equal logits (within 2^-45 of |h| |w|) the lower index ranks first, as in a stable sort. Nothing is sorted, and no
    [T, V] logits are written. Raises TypeError or ValueError for what does not fit.
    """
    _check_ranks(hidden, lm_head, tokens)
    _check_transforms("token_ranks", hidden, lm_head, tokens)
    if group is not None:
        return sharded.token_ranks(hidden, lm_head, tokens, group)
    if transforms.is_tracing():
        return torch.ops.halfbyte.token_ranks(hidden, *matrix_parts(lm_head), tokens)  # type: ignore[no-any-return]
    return eager_search.token_ranks(hidden, lm_head, tokens)


@dataclass(frozen=True)
class Fidelity:
    """How well hidden states predict given tokens. ranks: int64 [T], 0 for the head's first choice. top_k: as asked.

    top_1: the share of tokens that are the first choice. within: the share among the first `top_k`. median_rank and
    mean_rank: of the ranks, from 0. reciprocal_rank: the mean of 1 / (rank + 1).
    """

    ranks: Tensor
    top_k: int
    top_1: float
    within: float
    median_rank: float
    mean_rank: float
    reciprocal_rank: float


def fidelity(hidden: Tensor, lm_head: Matrix, tokens: Tensor, top_k: int = 5, *, group: Any = None) -> Fidelity:
    """`token_ranks`, and what they come to: shares of first choices and of the first `top_k`, mean ranks.

    Arguments as for `token_ranks`; there must be at least one token. Waits for the device.
    """
    if not isinstance(top_k, int) or top_k < 1:
        raise ValueError(f"top_k is {top_k!r}; it must be an int of at least 1")
    ranks = token_ranks(hidden, lm_head, tokens, group=group)
    if not len(ranks):
        raise ValueError("there are no tokens; fidelity is a mean over at least one")
    numbers = ranks.double()
    return Fidelity(
        ranks,
        top_k,
        float((ranks == 0).double().mean()),
        float((ranks < top_k).double().mean()),
        float(numbers.quantile(0.5)),
        float(numbers.mean()),
        float((1 / (numbers + 1)).mean()),
    )


def _check_transforms(function: str, *arguments: Matrix) -> None:
    """Raise RuntimeError under torch.jit.trace, and inside torch.func where an argument is what it transforms."""
    if torch.compiler.is_compiling():
        return
    transforms.refuse_script(function)
    if transforms.is_active():
        for argument in arguments:
            tensors = argument.tensors if isinstance(argument, QuantizedWeight) else (argument,)
            transforms.refuse(function, "an argument", *tensors)


def _check_search(query: Tensor, candidates: Matrix) -> None:
    _check_pair("query", query, "candidates", candidates)
    if query.dim() not in (1, 2) or query.shape[-1] != candidates.shape[1]:
        raise ValueError(
            f"query has shape {list(query.shape)}; candidates of shape {list(candidates.shape)} take "
            f"[{candidates.shape[1]}] or [P, {candidates.shape[1]}]"
        )


def _check_ranks(hidden: Tensor, lm_head: Matrix, tokens: Tensor) -> None:
    _check_pair("hidden", hidden, "lm_head", lm_head)
    if hidden.dim() != 2 or hidden.shape[1] != lm_head.shape[1]:
        raise ValueError(
            f"hidden has shape {list(hidden.shape)}; an lm_head of shape {list(lm_head.shape)} takes "
            f"[T, {lm_head.shape[1]}]"
        )
    if not isinstance(tokens, Tensor):
        raise TypeError(f"tokens is a {type(tokens).__name__}; it must be a torch.Tensor of integers")
    if tokens.is_floating_point() or tokens.is_complex() or tokens.dtype == torch.bool:
        raise TypeError(f"tokens has dtype {tokens.dtype}; it must hold integers, such as torch.int64")
    if tokens.shape != hidden.shape[:1]:
        raise ValueError(
            f"tokens has shape {list(tokens.shape)}; hidden of shape {list(hidden.shape)} takes one a line"
        )
    if tokens.device != hidden.device:
        raise ValueError(f"tokens is on {tokens.device} and hidden on {hidden.device}; they must be on one device")


def _check_pair(name: str, lines: Tensor, matrix_name: str, matrix: Matrix) -> None:
    if not isinstance(lines, Tensor):
        raise TypeError(f"{name} is a {type(lines).__name__}; it must be a torch.Tensor")
    if not isinstance(matrix, Tensor | QuantizedWeight):
        raise TypeError(f"{matrix_name} is a {type(matrix).__name__}; it must be a torch.Tensor or a QuantizedWeight")
    for what, dtype in ((name, lines.dtype), (matrix_name, matrix.dtype)):
        if dtype not in FLOAT_DTYPES:
            raise TypeError(f"{what} has dtype {dtype}; it must be torch.float16, torch.bfloat16 or torch.float32")
    for what, tensor in ((name, lines), (matrix_name, matrix)):
        if isinstance(tensor, Tensor) and tensor.layout != torch.strided:
            raise TypeError(f"{what} has layout {tensor.layout}; it must be dense, such as {what}.to_dense()")
    if len(matrix.shape) != 2:
        raise ValueError(f"{matrix_name} has shape {list(matrix.shape)}; it must be [V, D]")
    if matrix.shape[0] >= 2**31:
        raise ValueError(f"{matrix_name} has {matrix.shape[0]} rows; there may be up to {2**31 - 1}")
    if lines.device != matrix.device:
        raise ValueError(
            f"{name} is on {lines.device} and {matrix_name} on {matrix.device}; they must be on one device"
        )
