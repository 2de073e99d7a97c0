"""`halfbyte bench attention`: few new tokens of each text over caches that are filled wholly or by a part.

It is called as by a layer of a step, behind the first: it turns new tokens and puts them into the cache on the way. The
angles are 0, so that peers, whose cache has these tokens already, get the same. All calls have the same queries and new
tokens, and each a cache of its own: in a step L2 has what projections have just written, and no keys and values.
Every result is held against fp64. The floor is the time of reading the filled keys and values once, by the bandwidth of
a copy, and by a kernel that reads them and does nothing else ("reading"). Peers: torch's scaled_dot_product_attention,
given the mask as transformers gives it; the same over the filled tokens alone and without a mask, which no static cache
can have, for the best that its kernels reach; and what transformers computes where there is a soft cap or a sink, in
torch's operations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from halfbyte.bench.case import Case
from halfbyte.bench.dequantize import input_sets
from halfbyte.bench.report import by_case
from halfbyte.kernels.attention import reference
from halfbyte.kernels.common.slow import has_triton
from halfbyte.measure.error import relative_error
from halfbyte.measure.report import OURS, line, provenance


@dataclass(frozen=True)
class Heads:
    """A layer's: of queries, of keys, their size; its soft cap, and whether it has sinks."""

    queries: int
    keys: int
    size: int
    softcap: float | None = None
    sinks: bool = False


@dataclass(frozen=True)
class Load:
    """Texts at once, tokens that a cache has room for, tokens that fill it, new ones of each text among them."""

    texts: int
    tokens: int
    filled: int
    new: int = 1


MODELS = {
    "llama-3-8b": Heads(32, 8, 128),
    "qwen3-30b-a3b": Heads(32, 4, 128),
    "llama-2-7b": Heads(32, 32, 128),
    "gemma-2-9b": Heads(16, 8, 256, softcap=50.0),
    "gpt-oss-120b": Heads(64, 8, 64, sinks=True),
}
LOADS = (
    *(Load(texts, tokens, tokens) for texts in (1, 8, 32) for tokens in (512, 8192, 32768)),
    *(Load(texts, 32768, 16384) for texts in (1, 8)),
    *(Load(texts, tokens, tokens, 4) for texts, tokens in ((1, 512), (1, 8192), (8, 8192), (1, 32768))),
)
MOST_BYTES = 40 << 30  # of a case's caches: at most half of them are to be in use
BOUND = {torch.bfloat16: 2.0**-6, torch.float16: 2.0**-9}  # weights and results are rounded to it; eager, scores too

Provider = Callable[[int], Tensor]


def attention_cases(
    device: torch.device,
    models: Mapping[str, Heads] = MODELS,
    loads: Sequence[Load] = LOADS,
    dtype: torch.dtype = torch.bfloat16,
) -> Iterator[Case]:
    """One case a model and load. Raises ValueError where the kernel cannot run."""
    if device.type != "cuda" or not has_triton():
        raise ValueError(f"attention is a Triton kernel for GPUs, and cannot be measured on {device.type}")
    for name, heads in models.items():
        for load in loads:
            yield _case(f"{name}, {_name(load)}", heads, load, dtype, device)


def _name(load: Load) -> str:
    new = "" if load.new == 1 else f", {load.new} new"
    return f"{load.texts} × {load.filled} of {load.tokens} tokens{new}"


def _case(name: str, heads: Heads, load: Load, dtype: torch.dtype, device: torch.device) -> Case:
    from halfbyte.bench import reading
    from halfbyte.kernels.attention.attend import attend
    from halfbyte.kernels.attention.fresh import Fresh
    from halfbyte.kernels.attention.spans import spans_of

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=dtype, device=device)

    moved = 2 * load.texts * heads.keys * load.filled * heads.size * dtype.itemsize
    allocated = moved * load.tokens // load.filled
    sets = max(1, min(input_sets(moved, device), MOST_BYTES // allocated))
    shape = (load.texts, heads.keys, load.tokens, heads.size)
    begin = load.filled - load.new
    query = random(load.texts, load.new, heads.queries, heads.size).transpose(1, 2)
    added = [random(load.texts, heads.keys, load.new, heads.size) for _ in range(2)]
    inputs = [(query, random(*shape), random(*shape)) for _ in range(sets)]
    for _, *caches in inputs:
        for tokens, new in zip(caches, added, strict=True):
            tokens[:, :, begin : load.filled] = new
    place = torch.arange(load.tokens, dtype=torch.int64, device=device)
    row = torch.arange(load.new, dtype=torch.int64, device=device)[:, None]
    mask = (place <= begin + row).expand(load.texts, 1, load.new, load.tokens)
    sinks = random(heads.queries) if heads.sinks else None
    scale = heads.size**-0.5
    spans = spans_of(mask, load.texts)
    cos = torch.ones((1, load.new, heads.size), dtype=dtype, device=device)
    slot = torch.tensor(begin, dtype=torch.int64, device=device)
    fresh = Fresh(added[0], added[1], cos, cos - 1, slot)
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # or the spans would not be settled when they are first read

    def ours(i: int, spans: Tensor | None) -> Tensor:
        return attend(
            *inputs[i], mask, scale, softcap=heads.softcap, sinks=sinks, spans=spans, fresh=fresh,
            settled=spans is not None,
        )  # fmt: skip

    providers: dict[str, Provider] = {
        OURS: lambda i: ours(i, spans),
        "with its spans": lambda i: ours(i, None),
        "reading": lambda i: reading.highest(*inputs[i][1:], load.filled),
    }
    if heads.softcap or heads.sinks:
        providers["eager"] = lambda i: reference.attend(*inputs[i], mask, scale, heads.softcap, sinks)
    else:
        sdpa = partial(torch.nn.functional.scaled_dot_product_attention, scale=scale, enable_gqa=True)
        providers["torch"] = lambda i: sdpa(*inputs[i], attn_mask=mask).transpose(1, 2)
    if load.new == 1 and "torch" in providers:

        def filled(i: int) -> Tensor:
            query, keys, values = inputs[i]
            return sdpa(query, keys[:, :, : load.filled], values[:, :, : load.filled]).transpose(1, 2)

        providers["torch, filled"] = filled

    @cache
    def exact(i: int) -> Tensor:
        """Text by text: in fp64, and with keys of their own for all heads, they take twenty times the memory."""
        texts = zip(*(tensor.split(1) for tensor in (*inputs[i], mask)), strict=True)
        return torch.cat(
            [
                reference.attend(q.double(), k.double(), v.double(), seen, scale, heads.softcap, sinks)
                for q, k, v, seen in texts
            ]
        )

    facts = {
        "heads": heads.queries, "key_heads": heads.keys, "size": heads.size, "softcap": heads.softcap,
        "sinks": heads.sinks, "texts": load.texts, "tokens": load.tokens, "filled": load.filled, "new": load.new,
        "dtype": str(dtype).removeprefix("torch."), "inputs": sets,
    }  # fmt: skip
    bytes_of_ends = 2 * load.texts * load.new * heads.queries * heads.size * dtype.itemsize
    right = dict.fromkeys(providers, exact) | {"reading": lambda i: reading.right(*inputs[i][1:], load.filled)}
    return Case(name, moved + bytes_of_ends, sets, providers, right, check, device, facts, error_of)


def check(result: Tensor, right: Tensor) -> str | None:
    error, bound = relative_error(result, right), BOUND[result.dtype]
    return None if error <= bound else f"error {error:.2e}, more than {bound:.1e}"


def error_of(result: Tensor, right: Tensor) -> dict[str, float]:
    return {"relative_error": float(f"{relative_error(result, right):.4g}")}


def markdown(record: Mapping[str, Any]) -> str:
    """One line a case and peer: our time, bandwidth and share of the copy ceiling, times ours, errors."""
    heads = ["attention", "µs", "GB/s", "of copy", "with its spans, µs", "peer", "× halfbyte", "error", "peer's"]
    lines = [line(heads), line(["---", *["---:"] * 4, "---", *["---:"] * 3])]
    for case, rows in by_case(record):
        ours = rows.pop(OURS)
        spans = rows.pop("with its spans")
        if "median_us" not in ours:
            lines.append(line([case, "wrong", *[""] * 7]))
            continue
        time = ours["median_us"]
        cells = [f"{time:,.1f}", f"{ours['gb_per_s']:,.0f}", f"{ours['of_copy']:.0%}"]
        cells.append(f"{spans['median_us']:,.1f}" if "median_us" in spans else "wrong")
        for number, (name, row) in enumerate(rows.items()):
            theirs = f"**{row['median_us'] / time:.2f}**" if "median_us" in row else "wrong"
            errors = [f"{one['relative_error']:.1e}" if "median_us" in one else "" for one in (ours, row)]
            lines.append(line([*([case, *cells] if number == 0 else [""] * 5), name, theirs, *errors]))
    return "\n".join([*lines, "", provenance(record)])


def models_of(text: str) -> dict[str, Heads]:
    """Of comma-separated names of MODELS, or HEADSxKEY_HEADSxSIZE. Raises ValueError for others."""
    chosen = {}
    for name in _parts(text):
        if name not in MODELS:
            queries, keys, size = _numbers(name, 3)
            if queries % keys:
                raise ValueError(f"{name}: {queries} heads cannot share {keys} heads of keys evenly")
        chosen[name] = MODELS[name] if name in MODELS else Heads(queries, keys, size)
    return chosen


def loads_of(text: str) -> list[Load]:
    """Of comma-separated TEXTSxTOKENSxFILLED or TEXTSxTOKENSxFILLEDxNEW. Raises ValueError for others."""
    loads = [Load(*_numbers(part, 3, 4)) for part in _parts(text)]
    for load in loads:
        if not load.new <= load.filled <= load.tokens:
            raise ValueError(f"{_name(load)}: a cache holds the new tokens, and has room for all that fill it")
    return loads


def _parts(text: str) -> list[str]:
    return [part.strip().replace("×", "x") for part in text.split(",")]


def _numbers(text: str, *counts: int) -> list[int]:
    parts = text.split("x")
    if len(parts) not in counts or not all(part.isdigit() and int(part) > 0 for part in parts):
        known = f"one of {', '.join(MODELS)}, or 32x8x128" if counts == (3,) else "8x32768x16384 or 8x32768x16384x4"
        raise ValueError(f"{text!r} cannot be measured; write {known}")
    return [int(part) for part in parts]
