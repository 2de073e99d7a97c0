"""Search among the rows of a matrix: L2 distances, the nearest rows, and the rank of a token under an LM head.

Candidates are dense or 4-bit. A QuantizedWeight stands for what `halfbyte.dequantize` makes of it, and no more than a
few megabytes of that exist at a time. Results carry no gradients. Like all public functions (ops.py), these go straight
to the kernel when called eagerly and are one operator each under tracing (library.py).

With `group`, the candidates' rows are split over the processes of a torch.distributed group, in the order of their
ranks: every process passes its own rows and the same queries, and gets the result for all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, wraps
from importlib import import_module
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from halfbyte import transforms
from halfbyte.formats.rows import row_chunks
from halfbyte.formats.weight import FLOAT_DTYPES, QuantizedWeight
from halfbyte.kernels.common.slow import no_kernels
from halfbyte.kernels.distance.reference import first_of
from halfbyte.ops import _backend, _dequantize, _is_tracing, _parts

MOST_NEAREST = 128
# 4-bit weights that are dense at a time: as bf16 they fit into the last cache of a large GPU, or of a CPU.
CHUNK = {"cuda": 2**24, "cpu": 2**21}

Matrix = Tensor | QuantizedWeight


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
    if _is_tracing():
        return torch.ops.halfbyte.distances(query, *_matrix_parts(candidates))  # type: ignore[no-any-return]
    return _distances(query, candidates)


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
        return _nearest_of_all(query, candidates, k, group)
    if not 1 <= k <= min(MOST_NEAREST, rows):
        raise ValueError(f"k is {k}; nearest takes 1 to {MOST_NEAREST}, and no more than the {rows} candidates")
    if _is_tracing():
        found: tuple[Tensor, Tensor] = torch.ops.halfbyte.nearest(query, *_matrix_parts(candidates), k)
        return found
    return _nearest(query, candidates, k)


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
        return _ranks_of_all(hidden, lm_head, tokens, group)
    if _is_tracing():
        return torch.ops.halfbyte.token_ranks(hidden, *_matrix_parts(lm_head), tokens)  # type: ignore[no-any-return]
    return _token_ranks(hidden, lm_head, tokens)


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


Function = TypeVar("Function", bound=Callable[..., Any])


def _on_its_device(function: Function) -> Function:
    """The function, with the device of its first argument as the current one."""

    @wraps(function)
    def run(first: Tensor, *arguments: Any) -> Any:
        device = first.device
        if device.type == "cuda" and device.index != torch._C._cuda_getDevice():
            with torch.cuda.device(device):
                return function(first, *arguments)
        return function(first, *arguments)

    return cast(Function, run)


@_on_its_device
def _distances(query: Tensor, candidates: Matrix) -> Tensor:
    queries = _lines(query)
    out = queries.new_empty((len(queries), candidates.shape[0]), dtype=torch.float32)
    packed = _packed_kernels(queries, candidates)
    if packed is not None:
        packed.distances(queries, candidates, out)
    else:
        kernels = _backend("distance", queries.device.type)
        for first, dense in _dense(candidates):
            kernels.distances(queries, dense, out[:, first : first + len(dense)])
    return out[0] if query.dim() == 1 else out


@_on_its_device
def _nearest(query: Tensor, candidates: Matrix, k: int) -> tuple[Tensor, Tensor]:
    queries = _lines(query)
    packed = _packed_kernels(queries, candidates)
    if packed is not None:
        least, rows = packed.nearest(queries, candidates, k)
        return (least[0], rows[0]) if query.dim() == 1 else (least, rows)
    kernels = _backend("distance", queries.device.type)
    found: list[tuple[Tensor, Tensor]] = []
    for first, dense in _dense(candidates):
        least, rows = kernels.nearest(queries, dense, min(k, len(dense)))
        found.append((least, rows + first if first else rows))
    least, rows = found[0] if len(found) == 1 else _merged(found, k)
    return (least[0], rows[0]) if query.dim() == 1 else (least, rows)


def _merged(found: list[tuple[Tensor, Tensor]], k: int) -> tuple[Tensor, Tensor]:
    """The first k of several lists, whose rows ascend from list to list."""
    least, rows = (torch.cat(parts, dim=1) for parts in zip(*found, strict=True))
    return first_of(least, rows, k)


@_on_its_device
def _token_ranks(hidden: Tensor, lm_head: Matrix, tokens: Tensor) -> Tensor:
    lines, tokens = _lines(hidden), tokens.detach().long()
    check = _Tokens(tokens, lm_head.shape[0])
    kernels = _backend("rank", lines.device.type)
    own = kernels.own_logits(lines, *_rows_of(lm_head, tokens))
    above = torch.zeros_like(tokens)
    for first, dense in _dense(lm_head):
        kernels.count_above(lines, dense, own, tokens, first, above)
    check()
    return above


def _packed_kernels(queries: Tensor, candidates: Matrix) -> Any:
    """The kernels that take 4-bit candidates as they are, or None where their rows are made dense first."""
    if not isinstance(candidates, QuantizedWeight):
        return None
    kernels = _packed_backend(queries.device.type)
    return kernels if kernels is not None and kernels.takes(candidates, len(queries)) else None


@cache
def _packed_backend(device_type: str) -> Any:
    if no_kernels(device_type) is not None:
        return None
    return import_module(f"halfbyte.kernels.distance.{'packed_cpu' if device_type == 'cpu' else 'packed'}")


def _lines(query: Tensor) -> Tensor:
    """[P, D], contiguous."""
    lines = query.detach().resolve_neg()
    return (lines[None] if lines.dim() == 1 else lines).contiguous()


def _dense(candidates: Matrix) -> Iterator[tuple[int, Tensor]]:
    """(first row, rows) of a matrix: all of a dense one, a few megabytes after the other of a 4-bit one."""
    if not isinstance(candidates, QuantizedWeight):
        dense = candidates.detach().resolve_neg()
        yield 0, dense if dense.stride(-1) == 1 else dense.contiguous()
        return
    buffer: Tensor | None = None
    for first, chunk in row_chunks(candidates, CHUNK.get(candidates.device.type, 2**24)):
        if buffer is None:
            buffer = candidates.scale.new_empty(chunk.shape, dtype=candidates.dtype)
        dense = buffer[: chunk.shape[0]]
        _dequantize(chunk, dense)
        yield first, dense


def _rows_of(matrix: Matrix, index: Tensor) -> tuple[Tensor, Tensor]:
    """(dense rows, which of them) so that the second picks rows `index` of the matrix from the first."""
    if not isinstance(matrix, QuantizedWeight):
        return next(_dense(matrix))[1], index
    rows = matrix.scale.new_zeros((len(index), matrix.shape[1]), dtype=matrix.dtype)
    for first, dense in _dense(matrix):
        inside = (index >= first) & (index < first + len(dense))
        rows = torch.where(inside[:, None], dense[(index - first).clamp(0, len(dense) - 1)], rows)
    return rows, torch.arange(len(index), dtype=torch.int64, device=index.device)


@_on_its_device
def _nearest_of_all(query: Tensor, candidates: Matrix, k: int, group: Any) -> tuple[Tensor, Tensor]:
    """One small gather, and no process waits for its GPU: how many rows each has travels with what it found.

    Only a process with fewer rows than k looks at the sum of all, to see whether there are so many; where there are
    not, every process has fewer, so all of them raise.
    """
    if not 1 <= k <= MOST_NEAREST:
        raise ValueError(f"k is {k}; nearest takes 1 to {MOST_NEAREST}, and no more than there are candidates")
    queries, rows = _lines(query), candidates.shape[0]
    shards = _shards(queries.device.type)
    if rows:
        least, found = _nearest(queries, candidates, min(k, rows))
    else:
        least, found = (queries.new_empty((len(queries), 0), dtype=kind) for kind in (torch.float32, torch.int64))
    everyone = _gathered(shards.pack(least, found, rows, k), group)
    if k > rows and (total := int(everyone[:, 0].sum())) < k:
        raise ValueError(f"k is {k}; nearest takes 1 to {MOST_NEAREST}, and no more than the {total} candidates")
    least, found = shards.merge(everyone, len(queries), k)
    return (least[0], found[0]) if query.dim() == 1 else (least, found)


@cache
def _shards(device_type: str) -> Any:
    in_triton = device_type == "cuda" and no_kernels(device_type) is None
    return import_module(f"halfbyte.kernels.distance.shards{'_triton' if in_triton else ''}")


@_on_its_device
def _ranks_of_all(hidden: Tensor, lm_head: Matrix, tokens: Tensor, group: Any) -> Tensor:
    import torch.distributed as dist

    sizes = _sizes(lm_head.shape[0], hidden.device, group)
    lines, tokens = _lines(hidden), tokens.detach().long()
    check = _Tokens(tokens, sum(sizes))
    kernels = _backend("rank", lines.device.type)
    start = sum(sizes[: dist.get_rank(group)])
    mine = ((tokens >= start) & (tokens < start + lm_head.shape[0])).nonzero()[:, 0]
    own = lines.new_zeros((2, len(lines)), dtype=torch.float64)
    if len(mine):
        own[:, mine] = kernels.own_logits(lines[mine], *_rows_of(lm_head, tokens[mine] - start))
    dist.all_reduce(own, group=group)
    above = torch.zeros_like(tokens)
    for first, dense in _dense(lm_head):
        kernels.count_above(lines, dense, own, tokens, start + first, above)
    dist.all_reduce(above, group=group)
    check()
    return above


def _sizes(rows: int, device: torch.device, group: Any) -> list[int]:
    """How many rows each process of the group has."""
    return _gathered(torch.full((1,), rows, dtype=torch.int64, device=device), group)[:, 0].tolist()


def _gathered(mine: Tensor, group: Any) -> Tensor:
    """[processes, n]: what every process of the group has, each n numbers."""
    import torch.distributed as dist

    count = dist.get_world_size(group)
    everyone = mine.new_empty(count * len(mine))
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # the name before torch 2.13
    gather(everyone, mine, group=group)
    return everyone.view(count, -1)


def _matrix_parts(matrix: Matrix) -> tuple[Any, ...]:
    """A matrix as operators take it: a 4-bit one in its parts, a dense one as `packed` of the format "dense"."""
    if isinstance(matrix, QuantizedWeight):
        return (*_parts(matrix), matrix.dtype)
    return (matrix, matrix, [], "dense", matrix.shape, 0, 0, matrix.dtype)


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


class _Tokens:
    """The check of numbers that are on a device: they are fetched first, and looked at when the work is under way.

    A capture cannot wait, and then nobody looks.
    """

    def __init__(self, tokens: Tensor, vocabulary: int) -> None:
        self.tokens, self.vocabulary = tokens, vocabulary
        self.fetched = None
        if tokens.is_cuda:
            if torch.cuda.is_current_stream_capturing():
                self.tokens = tokens[:0]
                return
            self.tokens = torch.empty(tokens.shape, dtype=tokens.dtype, device="cpu", pin_memory=True)
            self.tokens.copy_(tokens, non_blocking=True)
            self.fetched = torch.cuda.Event()
            self.fetched.record()

    def __call__(self) -> None:
        if self.fetched is not None:
            self.fetched.synchronize()
        if not len(self.tokens):
            return
        least, most = (int(end) for end in self.tokens.aminmax())
        if least < 0 or most >= self.vocabulary:
            wrong, last = least if least < 0 else most, self.vocabulary - 1
            raise ValueError(f"tokens holds {wrong}; the vocabulary has {self.vocabulary} tokens, 0 to {last}")


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
