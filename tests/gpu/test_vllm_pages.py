"""The kernel for a cache in pages as vLLM keeps it, on a GPU: texts of any length, alone and many, and captured
launches that serve other batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from halfbyte.kernels.attention import reference

from .conftest import BF16, DEVICE, F16, captured, error

paged = pytest.importorskip("halfbyte.kernels.attention.sm90.paged")
pytestmark = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability()[0] < 9, reason="needs Hopper or later"
)

BOUND = {F16: 1e-3, BF16: 6e-3}
PAGE = 16
# Of a batch of texts, and the most pages of one: where long ones have helpers, and where all are long.
LENGTHS = [
    ([9000], 8192),
    ([1, 16, 17, 0, 5000, 300, 129], 400),
    ([512] * 32, 40),
    ([300] * 5 + [40000, 300, 17000], 4096),
    ([20, 200] * 60 + [9000] + [50] * 79, 1024),
    ([3000] * 40, 4096),
]


class Batch:
    """Keys and values of a head side by side, heads within a token, pages in random order. Rows of no text are NaN."""

    def __init__(self, lengths: list[int], heads: int, shared: int, size: int, dtype: torch.dtype, width: int) -> None:
        texts, self.lengths = len(lengths), torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
        pages = sum(-(-length // PAGE) for length in lengths)
        self.all = torch.full((pages + 1, PAGE, shared, 2 * size), torch.nan, dtype=dtype, device=DEVICE)
        self.keys, self.values = self.all.split(size, -1)
        self.table = torch.full((texts, width), 1 << 30, dtype=torch.int32, device=DEVICE)
        self.slots = torch.full((texts,), -1, device=DEVICE)
        joined = torch.randn(texts, heads + 2 * shared, size, device=DEVICE).to(dtype)
        self.query, self.key, self.value = joined.split([heads, shared, shared], 1)
        self.counters = torch.zeros(texts * shared, dtype=torch.int32, device=DEVICE)
        numbers = torch.randperm(pages, device=DEVICE).to(torch.int32)
        self.texts: list[list[Tensor]] = []
        for text, length in enumerate(lengths):
            used, numbers = numbers[: -(-length // PAGE)], numbers[-(-length // PAGE) :]
            self.table[text, : len(used)] = used
            own = [torch.randn(length, shared, size, device=DEVICE).to(dtype) for _ in "kv"]
            self.texts.append(own)
            if length:
                places = torch.arange(length, device=DEVICE)
                rows = used[places // PAGE].long() * PAGE + places % PAGE
                self.slots[text] = rows[-1]
                self.all.view(-1, shared, 2 * size)[rows[:-1]] = torch.cat(own, -1)[:-1]
                own[0][-1], own[1][-1] = self.key[text], self.value[text]

    def right(self, window: int = 0, softcap: float | None = None, sinks: Tensor | None = None) -> Tensor:
        found = torch.zeros(self.query.shape, dtype=torch.float64, device=DEVICE)
        for text, (keys, values) in enumerate(self.texts):
            if len(keys):
                seen = [own[-window:].transpose(0, 1)[None].double() for own in (keys, values)]
                query = self.query[text][None, :, None].double()
                exact = None if sinks is None else sinks.double()
                found[text] = reference.attend(query, *seen, None, 0.09, softcap, exact)[0, 0]
        return found

    def found(self, **options: Any) -> Tensor:
        out = torch.full(self.query.shape, 777.0, dtype=self.query.dtype, device=DEVICE)
        cache = paged.PagedCache(self.keys, self.values, self.table, self.lengths, self.slots)
        new = self.query, self.key, self.value
        assert paged.is_readable(*new, cache)
        paged.attend_pages(*new, cache, self.counters, 0.09, out, **options)
        return out


@pytest.mark.parametrize("dtype", [F16, BF16])
@pytest.mark.parametrize(
    ("heads", "shared", "size"), [(32, 8, 128), (64, 8, 64), (7, 7, 64), (40, 2, 128), (24, 1, 64)]
)
@pytest.mark.parametrize(("lengths", "width"), LENGTHS)
def test_texts(heads: int, shared: int, size: int, dtype: torch.dtype, lengths: list[int], width: int) -> None:
    batch = Batch(lengths, heads, shared, size, dtype, width)
    right = batch.right()
    found = batch.found()
    assert error(found, right) < BOUND[dtype]
    assert torch.equal(found, batch.found())
    assert not batch.counters.any()
    for text, slot in enumerate(batch.slots.tolist()):
        if slot >= 0:
            kept = batch.all.view(-1, shared, 2 * size)[slot]
            assert torch.equal(kept, torch.cat((batch.key[text], batch.value[text]), -1))


@pytest.mark.parametrize(
    ("window", "softcap", "sinks"), [(100, None, None), (1, 20.0, BF16), (4096, None, torch.float32)]
)
def test_what_changes_scores(window: int, softcap: float | None, sinks: torch.dtype | None) -> None:
    batch = Batch([50, 3000, 100, 101], 64, 8, 64, BF16, 300)
    of_heads = None if sinks is None else torch.randn(64, device=DEVICE).to(sinks)
    found = batch.found(window=window, softcap=softcap or 0.0, sinks=of_heads)
    assert error(found, batch.right(window, softcap, of_heads)) < BOUND[BF16]


def test_a_captured_launch_serves_other_batches() -> None:
    """Of other lengths and pages, and of fewer texts, whose rows come out as zeros and go nowhere."""
    of = [Batch(lengths, 32, 8, 128, BF16, 700) for lengths in ([3000, 5, 64, 10000], [1, 9000, 2, 3], [700, 0, 0, 0])]
    held = of[0]
    graph, found = captured(held.found)
    for batch in of:
        for name in ("lengths", "table", "slots"):
            getattr(held, name).copy_(getattr(batch, name))
        for name in ("query", "key", "value"):
            getattr(held, name).copy_(getattr(batch, name))
        if batch is not held:
            pages = torch.zeros_like(held.all)
            assert len(batch.all) <= len(pages)
            pages[: len(batch.all)] = batch.all
            held.all.copy_(pages)
        found.fill_(77)
        graph.replay()
        assert error(found, batch.right()) < BOUND[BF16]
        assert not held.counters.any()
