"""`halfbyte bench search`: L2 distances, nearest rows and token ranks, beside what torch has for them.

Every result is held against fp64: distances by their relative error, nearest rows by how far they really are, ranks one
by one. `c @ q` computes something else; it is here because nothing that reads all candidates can be much faster.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from halfbyte import ops, search
from halfbyte.bench.case import Case
from halfbyte.bench.dequantize import input_sets
from halfbyte.bench.report import by_case
from halfbyte.measure.error import relative_error
from halfbyte.measure.report import OURS, line, provenance

BF16, F32 = torch.bfloat16, torch.float32

# Embeddings of Llama-2 and Llama-3, [V, D].
GPU_SHAPES = ((32000, 4096, F32), (32000, 4096, BF16), (128256, 4096, BF16))
CPU_SHAPES = ((32000, 4096, F32), (32000, 4096, BF16))
QUERIES = {"cuda": 64, "cpu": 8}
TOKENS = {"cuda": 512, "cpu": 16}
NEAREST = (1, 10, 128)

CALLS = {"cuda": 5, "cpu": 1}  # of a pass, at least

# What a result of each dtype may be off by, and still be timed.
BOUND = {F32: 2.0**-16, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-9}

Provider = Callable[[int], Any]


def search_cases(
    device: torch.device, shapes: Sequence[tuple[int, int, torch.dtype]] = (), ranks: bool = True
) -> Iterator[Case]:
    """For each shape one query, several queries, and candidates in 4 bits; ranks for the last of the shapes."""
    shapes = shapes or (GPU_SHAPES if device.type == "cuda" else CPU_SHAPES)
    for v, d, dtype in shapes:
        moved = v * d * dtype.itemsize
        # Searches come in a row: of few calls a pass, too many would find that their code has left the caches.
        sets = max(input_sets(moved, device), CALLS[device.type])
        candidates = [torch.randn(v, d, dtype=torch.float32, device=device).to(dtype) for _ in range(sets)]
        query = torch.randn(QUERIES[device.type], d, dtype=torch.float32, device=device).to(dtype)
        facts = {"v": v, "d": d, "dtype": str(dtype).removeprefix("torch."), "inputs": sets}
        yield _one_query(candidates, query[0], moved, device, facts)
        yield _many_queries(candidates, query, moved, device, facts)
        if dtype != F32:
            yield _packed_candidates(candidates, query[0], device, facts)
    if ranks:
        yield _ranks(candidates, TOKENS[device.type], device, facts)


def _one_query(candidates: list[Tensor], q: Tensor, moved: int, device: torch.device, facts: Mapping[str, Any]) -> Case:
    def nearest(k: int, i: int) -> tuple[Tensor, Tensor]:
        return search.nearest(q, candidates[i], k)

    providers: dict[str, Provider] = {
        OURS: lambda i: search.distances(q, candidates[i]),
        **{f"nearest {k}": partial(nearest, k) for k in NEAREST},
        "torch.norm": lambda i: torch.norm(candidates[i] - q, dim=1),
        "torch.cdist": lambda i: torch.cdist(q[None], candidates[i])[0],
        "norm + topk": lambda i: torch.norm(candidates[i] - q, dim=1).topk(10, largest=False),
        "c @ q": lambda i: candidates[i] @ q,
    }
    exact = cache(lambda i: _exact_distances(q[None], candidates[i])[0])
    right = dict.fromkeys(providers, exact)
    right["c @ q"] = cache(lambda i: _by_parts(lambda c: c.double() @ q.double(), candidates[i]))
    return Case(_name(facts, "1 query"), moved, len(candidates), providers, right, _check, device, facts, _error)


def _many_queries(
    candidates: list[Tensor], query: Tensor, moved: int, device: torch.device, facts: Mapping[str, Any]
) -> Case:
    providers: dict[str, Provider] = {
        OURS: lambda i: search.distances(query, candidates[i]),
        "nearest 10": lambda i: search.nearest(query, candidates[i], 10),
        "one by one": lambda i: torch.stack([search.distances(q, candidates[i]) for q in query]),
        "torch.cdist": lambda i: torch.cdist(query, candidates[i]),
    }
    exact = cache(lambda i: _exact_distances(query, candidates[i]))
    right = dict.fromkeys(providers, exact)
    name = _name(facts, f"{len(query)} queries")
    return Case(name, moved, len(candidates), providers, right, _check, device, {**facts, "p": len(query)}, _error)


def _packed_candidates(candidates: list[Tensor], q: Tensor, device: torch.device, facts: Mapping[str, Any]) -> Case:
    weights = [ops.quantize(c) for c in candidates]
    providers: dict[str, Provider] = {
        OURS: lambda i: search.distances(q, weights[i]),
        "nearest 10": lambda i: search.nearest(q, weights[i], 10),
        "dequantize + norm": lambda i: torch.norm(ops.dequantize(weights[i]) - q, dim=1),
    }
    exact = cache(lambda i: _exact_distances(q[None], ops.dequantize(weights[i]))[0])
    right = dict.fromkeys(providers, exact)
    moved = weights[0].nbytes
    name = _name(facts, "NF4")
    return Case(name, moved, len(weights), providers, right, _check, device, {**facts, "format": "nf4"}, _error)


def _ranks(heads: list[Tensor], tokens: int, device: torch.device, facts: Mapping[str, Any]) -> Case:
    (v, d), dtype = heads[0].shape, heads[0].dtype
    hidden = torch.randn(tokens, d, dtype=torch.float32, device=device).to(dtype)
    index = torch.randint(v, (tokens,), dtype=torch.int64, device=device)

    def logits_and_topk(i: int) -> Tensor:
        """What is written today: all logits, the first five for the share of hits, a comparison for the rank."""
        logits = hidden @ heads[i].T
        logits.topk(5, dim=1)
        return (logits > logits.gather(1, index[:, None])).sum(dim=1)

    providers: dict[str, Provider] = {
        OURS: lambda i: search.token_ranks(hidden, heads[i], index),
        "logits + topk": logits_and_topk,
    }
    exact = cache(lambda i: _exact_ranks(hidden, heads[i], index))
    facts = {**facts, "t": tokens, "flops": 2 * tokens * v * d}
    if device.type == "cuda":
        facts["extra_bytes"] = {name: _extra_bytes(provider) for name, provider in providers.items()}
    right = dict.fromkeys(providers, exact)
    moved = heads[0].nbytes
    return Case(
        _name(facts, f"ranks of {tokens}"), moved, len(heads), providers, right, _check_ranks, device, facts,
        _rank_errors,
    )  # fmt: skip


def _extra_bytes(provider: Provider) -> int:
    provider(0)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    provider(0)
    return torch.cuda.max_memory_allocated() - before


def _by_parts(function: Callable[[Tensor], Tensor], candidates: Tensor) -> Tensor:
    return torch.cat([function(part) for part in candidates.split(4096)], dim=-1)


def _exact_distances(query: Tensor, candidates: Tensor) -> Tensor:
    """fp64 [P, V]."""
    wide = query.double()
    return _by_parts(lambda c: torch.stack([(c.double() - q).norm(dim=1) for q in wide]), candidates)


def _exact_ranks(hidden: Tensor, head: Tensor, index: Tensor) -> Tensor:
    wide = hidden.double()
    logits = _by_parts(lambda rows: wide @ rows.double().T, head)
    own = logits.gather(1, index[:, None])
    earlier = torch.arange(len(head), dtype=torch.int64, device=head.device) < index[:, None]
    return ((logits > own) | ((logits == own) & earlier)).sum(dim=1)


def _check(result: Any, right: Tensor) -> str | None:
    if isinstance(result, Tensor):
        error, bound = relative_error(result, right), BOUND[result.dtype]
        return None if error <= bound else f"error {error:.2e}, more than {bound:.1e}"
    least, rows = result
    bound = BOUND[least.dtype]
    there = right.gather(-1, rows)
    best = right.topk(rows.shape[-1], largest=False).values
    far = float((there / best - 1).max())
    if far > (bound if least.dtype != F32 else 2.0**-22):
        return f"rows {far:.1e} farther than the nearest"
    error = relative_error(least, there)
    return None if error <= bound else f"error {error:.2e}, more than {bound:.1e}"


def _check_ranks(result: Tensor, right: Tensor) -> str | None:
    """Logits in 16 bits have many ties, and the peer is not held to them."""
    off = relative_error(result, right.double())
    return None if off < 0.01 else f"ranks are off by {off:.1%}"


def _rank_errors(result: Tensor, right: Tensor) -> dict[str, float]:
    error = float(f"{relative_error(result, right.double()):.4g}")
    return {"wrong_ranks": int((result != right).sum()), "relative_error": error}


def _error(result: Any, right: Tensor) -> dict[str, float]:
    least = result if isinstance(result, Tensor) else result[0]
    exact = right if isinstance(result, Tensor) else right.gather(-1, result[1])
    return {"relative_error": float(f"{relative_error(least, exact):.4g}")}


def _name(facts: Mapping[str, Any], what: str) -> str:
    return f"{facts['v']}×{facts['d']} {facts['dtype']}, {what}"


def markdown(record: Mapping[str, Any]) -> str:
    """One line a case and provider: time, bandwidth, share of the copy ceiling, times ours, error."""
    heads = ["candidates", "", "µs", "GB/s", "of copy", "× halfbyte", "error"]
    lines = [line(heads), line(["---", "---", *["---:"] * 5])]
    for case, rows in by_case(record):
        ours = rows[OURS].get("median_us")
        for number, (provider, row) in enumerate(rows.items()):
            name = case if number == 0 else ""
            if "median_us" not in row or not ours:
                lines.append(line([name, provider, "wrong", "", "", "", ""]))
                continue
            error = f"{row['wrong_ranks']} wrong" if "wrong_ranks" in row else f"{row['relative_error']:.1e}"
            times = f"**{row['median_us'] / ours:.2f}**" if provider != OURS else ""
            cells = [f"{row['median_us']:,.1f}", f"{row['gb_per_s']:,.0f}", f"{row['of_copy']:.0%}", times, error]
            lines.append(line([name, provider, *cells]))
    return "\n".join([*lines, "", provenance(record)])
