"""`halfbyte bench pages`: one new token of each request over a cache in pages, as vLLM keeps it.

Every result is held against fp64. The floor is the time of reading the keys and values of all tokens once. The peer is
vLLM's FlashAttention, where vLLM is installed, as its CUDA graphs ask for it, with the launch ahead that puts new keys
and values into the cache; halfbyte's kernel does that on the way. The schedule that FlashAttention wants for each step
is made before, and not timed. Heads are those of models; sinks are left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from halfbyte.bench.attention import MODELS, MOST_BYTES, Heads, Provider, check, error_of
from halfbyte.bench.case import Case
from halfbyte.bench.dequantize import input_sets
from halfbyte.bench.report import by_case
from halfbyte.kernels.attention import reference
from halfbyte.kernels.common.slow import has_triton
from halfbyte.measure.report import OURS, line, provenance
from halfbyte.serving.choice import is_installed

FLASH = "FlashAttention"
PAGE = 16  # tokens, as vLLM has it on GPUs
MOST_TOKENS = 1 << 17  # that a request could have: as far as the table of pages goes
SPLITS = 32  # of a request, at most, in vLLM's graphs
NAMES = ("llama-3-8b", "qwen3-30b-a3b", "gpt-oss-120b")


@dataclass(frozen=True)
class Batch:
    """Requests at once, tokens of each, and of the longest, if one has more."""

    requests: int
    tokens: int
    longest: int = 0

    @property
    def lengths(self) -> list[int]:
        others = [self.tokens] * (self.requests - 1)
        middle = len(others) // 2
        return [*others[:middle], max(self.tokens, self.longest), *others[middle:]]

    @property
    def name(self) -> str:
        if self.longest <= self.tokens:
            return f"{self.requests} × {self.tokens} tokens"
        return f"{self.requests} × {self.tokens} tokens, one of {self.longest}"


BATCHES = (
    *(Batch(requests, tokens) for requests in (1, 8, 32, 128) for tokens in (300, 1024)),
    *(Batch(requests, tokens) for requests, tokens in ((256, 300), (1, 8192), (8, 8192), (1, 32768))),
    *(Batch(requests, 300, 32768) for requests in (8, 32, 128)),
)


class Pages:
    """A batch's cache and new tokens, with pages in random order."""

    def __init__(self, heads: Heads, batch: Batch, dtype: torch.dtype, device: torch.device) -> None:
        def random(*shape: int) -> Tensor:
            return torch.randn(shape, dtype=dtype, device=device)

        self.heads, lengths = heads, batch.lengths
        counts = [-(-length // PAGE) for length in lengths]
        self.held = random(sum(counts), PAGE, heads.keys, 2 * heads.size)
        self.keys, self.values = self.held.split(heads.size, -1)
        self.table = torch.zeros(batch.requests, MOST_TOKENS // PAGE, dtype=torch.int32, device=device)
        for row, pages in zip(
            self.table, torch.randperm(sum(counts), dtype=torch.int64, device=device).split(counts), strict=True
        ):
            row[: len(pages)] = pages
        self.lengths = torch.tensor(lengths, dtype=torch.int32, device=device)
        last = self.lengths.long() - 1
        self.slots = self.table.gather(1, last[:, None] // PAGE)[:, 0] * PAGE + last % PAGE
        shape = (heads.queries, heads.keys, heads.keys)
        self.query, self.key, self.value = random(batch.requests, sum(shape), heads.size).split(shape, 1)

    def right(self) -> Tensor:
        """In fp64, request by request."""
        found = []
        for number, length in enumerate(self.lengths.tolist()):
            places = torch.arange(length, dtype=torch.int64, device=self.table.device)
            rows = self.table[number][places // PAGE].long(), places % PAGE
            keys, values = self.keys[rows].double(), self.values[rows].double()
            keys[-1], values[-1] = self.key[number], self.value[number]
            query = self.query[number][None, :, None].double()
            seen = keys.transpose(0, 1)[None], values.transpose(0, 1)[None]
            found.append(reference.attend(query, seen[0], seen[1], None, self.heads.size**-0.5)[0])
        return torch.cat(found)


def pages_cases(
    device: torch.device,
    models: Mapping[str, Heads],
    batches: Sequence[Batch] = BATCHES,
    dtype: torch.dtype = torch.bfloat16,
) -> Iterator[Case]:
    """One case a model and batch. Raises ValueError where the kernel cannot run."""
    can_run = False
    if device.type == "cuda" and has_triton():
        from halfbyte.kernels.attention.sm90 import paged
        from halfbyte.kernels.common.device import properties_of

        kinds = [paged.Kind(dtype, heads.queries, heads.keys, heads.size, PAGE) for heads in models.values()]
        can_run = all(paged.can_compile(kind, properties_of(device.index or 0)) for kind in kinds)
    if not can_run:
        raise ValueError(
            f"attention over vLLM's pages is for Hopper and later GPUs, and cannot be measured on {device}"
        )
    for name, heads in models.items():
        for batch in batches:
            yield _case(f"{name}, {batch.name}", heads, batch, dtype, device)


def _case(name: str, heads: Heads, batch: Batch, dtype: torch.dtype, device: torch.device) -> Case:
    from halfbyte.kernels.attention.sm90 import paged

    tokens = sum(batch.lengths)
    moved = 2 * tokens * heads.keys * heads.size * dtype.itemsize
    sets = max(1, min(input_sets(moved, device), MOST_BYTES // moved))
    inputs = [Pages(heads, batch, dtype, device) for _ in range(sets)]
    counters = torch.zeros(batch.requests * heads.keys, dtype=torch.int32, device=device)

    def ours(i: int) -> Tensor:
        own = inputs[i]
        held = paged.PagedCache(own.keys, own.values, own.table, own.lengths, own.slots)
        out = torch.empty(own.query.shape, dtype=dtype, device=device)
        paged.attend_pages(own.query, own.key, own.value, held, counters, heads.size**-0.5, out)
        return out

    providers: dict[str, Provider] = {OURS: ours}
    left_out: dict[str, str] = {}
    try:
        providers[FLASH] = _flash(inputs, heads, batch, dtype, device)
    except ImportError as missing:
        left_out[FLASH] = str(missing)

    @cache
    def exact(i: int) -> Tensor:
        return inputs[i].right()

    facts = {
        "heads": heads.queries, "key_heads": heads.keys, "size": heads.size, "requests": batch.requests,
        "tokens": batch.tokens, "longest": max(batch.lengths), "dtype": str(dtype).removeprefix("torch."),
        "inputs": sets,
    }  # fmt: skip
    ends = 2 * batch.requests * heads.queries * heads.size * dtype.itemsize
    right = dict.fromkeys(providers, exact)
    return Case(name, moved + ends, sets, providers, right, check, device, facts, error_of, left_out)


def _flash(inputs: Sequence[Pages], heads: Heads, batch: Batch, dtype: torch.dtype, device: torch.device) -> Provider:
    """vLLM's way. Raises ImportError where there is none."""
    if not is_installed("vllm"):
        raise ImportError("vLLM is not installed")
    from vllm._custom_ops import reshape_and_cache_flash
    from vllm.vllm_flash_attn import flash_attn_varlen_func, get_scheduler_metadata

    ends = torch.arange(batch.requests + 1, dtype=torch.int32, device=device)
    one, longest = torch.ones((), dtype=torch.float32, device=device), max(batch.lengths)
    schedule = get_scheduler_metadata(
        batch_size=batch.requests, max_seqlen_q=1, max_seqlen_k=longest, num_heads_q=heads.queries,
        num_heads_kv=heads.keys, headdim=heads.size, cache_seqlens=inputs[0].lengths, qkv_dtype=dtype,
        cu_seqlens_q=ends, page_size=PAGE, causal=True, num_splits=SPLITS,
    )  # fmt: skip

    def flash(i: int) -> Tensor:
        own = inputs[i]
        reshape_and_cache_flash(own.key, own.value, own.keys, own.values, own.slots, "auto", one, one)
        out = torch.empty(own.query.shape, dtype=dtype, device=device)
        flash_attn_varlen_func(
            q=own.query, k=own.keys, v=own.values, out=out, cu_seqlens_q=ends, max_seqlen_q=1, seqused_k=own.lengths,
            max_seqlen_k=longest, softmax_scale=heads.size**-0.5, causal=True, block_table=own.table,
            scheduler_metadata=schedule, fa_version=3, num_splits=SPLITS,
        )  # fmt: skip
        return out

    return flash


def markdown(record: Mapping[str, Any]) -> str:
    """One line a case: our time, bandwidth and share of the copy ceiling, and the peer's time over it."""
    lines = [line(["attention over pages", "µs", "GB/s", "of copy", f"{FLASH}, µs", "× halfbyte"])]
    lines.append(line(["---", *["---:"] * 5]))
    for case, rows in by_case(record):
        ours, theirs = rows[OURS], rows.get(FLASH, {})
        cells = ["wrong", "", ""]
        if "median_us" in ours:
            cells = [f"{ours['median_us']:,.1f}", f"{ours['gb_per_s']:,.0f}", f"{ours['of_copy']:.0%}"]
        peer = f"{theirs['median_us']:,.1f}" if "median_us" in theirs else "wrong" if theirs else ""
        both = "median_us" in ours and "median_us" in theirs
        lines.append(line([case, *cells, peer, f"**{theirs['median_us'] / ours['median_us']:.2f}**" if both else ""]))
    return "\n".join([*lines, "", provenance(record)])


def models_of(text: str) -> dict[str, Heads]:
    """Of comma-separated names of NAMES. Raises ValueError for others."""
    chosen = [name.strip() for name in text.split(",")]
    if unknown := [name for name in chosen if name not in NAMES]:
        raise ValueError(f"{unknown[0]!r} is none of {', '.join(NAMES)}")
    return {name: MODELS[name] for name in chosen}


def batches_of(text: str) -> list[Batch]:
    """Of comma-separated REQUESTSxTOKENS or REQUESTSxTOKENSxLONGEST. Raises ValueError for others."""
    batches = []
    for part in text.split(","):
        numbers = part.strip().replace("×", "x").split("x")
        if len(numbers) not in (2, 3) or not all(number.isdigit() and int(number) > 0 for number in numbers):
            raise ValueError(f"{part!r} is no batch; write 8x300, or 8x300x32768 where one has more tokens")
        batches.append(Batch(*map(int, numbers)))
        if max(batches[-1].lengths) > MOST_TOKENS:
            raise ValueError(f"{part!r}: {MOST_TOKENS} tokens are the most")
    return batches
