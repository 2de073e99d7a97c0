"""Attention over a cache in pages on a GPU: long requests, captured launches that serve other batches, and
transformers' continuous batching on CUDA graphs."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor

from halfbyte.kernels.attention import reference
from halfbyte.kernels.attention.pages import Pages
from halfbyte.models import paged as continuous
from halfbyte.models import transformers as host

from .conftest import BF16, DEVICE, F16, F32, captured, error, every_dtype

kernels = pytest.importorskip("halfbyte.kernels.attention.paged")


BOUND = {F16: 8e-4, BF16: 6e-3, F32: 2e-5}
PAGE = 64


def random(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype)


def ends(numbers: Any) -> Tensor:
    return torch.tensor([0, *accumulate(numbers)], dtype=torch.int32, device=DEVICE)


class Cache:
    """Pages in random order; rows that no request has are NaN."""

    def __init__(self, lengths: list[int], shared: int, size: int, dtype: torch.dtype) -> None:
        counts = [-(-(length + 1) // PAGE) for length in lengths]
        numbers = torch.randperm(sum(counts), device=DEVICE).to(torch.int32).split(counts)
        self.table = torch.full((len(lengths), max(counts)), -1, dtype=torch.int32, device=DEVICE)
        caches = [
            torch.full((sum(counts) * PAGE, 2, shared, size), torch.nan, dtype=dtype, device=DEVICE) for _ in "kv"
        ]
        self.keys, self.values = (cache[:, 1] for cache in caches)
        self.rows = []
        for request, (own, length) in enumerate(zip(numbers, lengths, strict=True)):
            self.table[request, : len(own)] = own
            token = torch.arange(length, device=DEVICE)
            rows = own[token // PAGE].long() * PAGE + token % PAGE
            self.rows.append(rows)
            for cache in (self.keys, self.values):
                cache[rows] = random(length, shared, size, dtype=dtype)

    def exact(self, pages: Pages) -> Pages:
        return pages._replace(keys=pages.keys.double(), values=pages.values.double())


def states(tokens: int, heads: int, shared: int, size: int, dtype: torch.dtype) -> list[Tensor]:
    joined = random(tokens, heads + 2 * shared, size, dtype=dtype)
    return list(joined.split([heads, shared, shared], 1))


@every_dtype
@pytest.mark.parametrize("size", [64, 80, 128])
@pytest.mark.parametrize(("heads", "shared"), [(8, 8), (8, 2), (24, 1)])
@pytest.mark.parametrize("paged", [True, False])
def test_a_token_of_each(size: int, heads: int, shared: int, paged: bool, dtype: torch.dtype) -> None:
    lengths = [4000, 0, 63, 64, 1, 777]
    cache = Cache(lengths, shared, size, dtype)
    given = states(len(lengths), heads, shared, size, dtype)
    nowhere = torch.full((1,), 1 << 40, device=DEVICE)
    places = torch.cat([torch.cat((rows, nowhere)) for rows in cache.rows])
    pages = Pages(cache.keys, cache.values, cache.table, PAGE) if paged else Pages(cache.keys, cache.values, places)
    query_ends, key_ends = ends([1] * len(lengths)), ends(length + 1 for length in lengths)
    right = cache.exact(pages)
    exactly = reference.attend_pages(*(x.double() for x in given), right, query_ends, key_ends, 0.09)
    found = [
        kernels.attend_pages(*given, pages, query_ends, key_ends, 0.09, most_new=1, most_tokens=most)
        for most in (4001, 1 << 17, 4001)
    ]
    assert error(found[0], exactly) < BOUND[dtype]
    assert error(found[1], exactly) < BOUND[dtype]
    assert torch.equal(found[0], found[2])
    if paged:
        assert torch.equal(cache.keys.nan_to_num(7).double(), right.keys.nan_to_num(7))
        assert torch.equal(cache.values.nan_to_num(7).double(), right.values.nan_to_num(7))


@every_dtype
@pytest.mark.parametrize("window", [0, 100])
@pytest.mark.parametrize(("size", "heads", "shared"), [(128, 8, 2), (256, 4, 4), (64, 64, 8)])
def test_prompts_in_chunks(size: int, heads: int, shared: int, window: int, dtype: torch.dtype) -> None:
    """Beside requests that decode, with soft caps and sinks."""
    if not kernels.supports(dtype, size, heads, shared, 0):
        pytest.skip("no kernel")
    cached, new = [300, 1000, 0, 77, 0], [400, 1, 333, 1, 0]
    cache = Cache(cached, shared, size, dtype)
    given = states(sum(new) + 5, heads, shared, size, dtype)
    nowhere = torch.full((500,), 1 << 40, device=DEVICE)
    places = torch.cat([torch.cat((rows, nowhere[:one])) for rows, one in zip(cache.rows, new, strict=True)])
    pages = Pages(cache.keys, cache.values, places)
    where = ends(new), ends(map(sum, zip(cached, new, strict=True)))
    options: dict[str, Any] = {"window": window, "softcap": 20.0, "sinks": random(heads, dtype=dtype)}
    most = {"most_new": 400, "most_tokens": 1001}
    exactly = reference.attend_pages(*(x.double() for x in given), cache.exact(pages), *where, 0.09, **options)
    found = kernels.attend_pages(*given, pages, *where, 0.09, **most, **options)
    assert error(found, exactly) < BOUND[dtype]
    assert not found[-5:].any()


def test_a_captured_launch_serves_other_batches() -> None:
    """Of other lengths, and of fewer requests, whose rows come out as zeros."""
    heads, shared, size, requests = 8, 2, 128, 8
    lengths = [3000, 5, 64, 700, 1, 0, 2500, 129]
    cache = Cache(lengths, shared, size, BF16)
    given = states(requests, heads, shared, size, BF16)
    pages = Pages(cache.keys, cache.values, cache.table, PAGE)
    query_ends, key_ends = ends([1] * requests), ends(length + 1 for length in lengths)
    graph, found = captured(
        lambda: kernels.attend_pages(*given, pages, query_ends, key_ends, 0.09, most_new=1, most_tokens=4096)
    )
    for many in (8, 3, 1, 0):
        query_ends.copy_(ends([1] * many + [0] * (requests - many)))
        key_ends.copy_(ends([length + 1 for length in lengths[:many]] + [0] * (requests - many)))
        right = reference.attend_pages(*(x.double() for x in given), cache.exact(pages), query_ends, key_ends, 0.09)
        found.fill_(77)
        graph.replay()
        assert error(found[:many], right[:many]) < BOUND[BF16] if many else True
        assert not found[many:].any()


@pytest.mark.parametrize("window", [None, 20])
def test_generate_batch_on_graphs(window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokens of `generate`, in fp32, where no rounding decides; captured once for each size, not for each step."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("transformers.generation.continuous_batching.cache_allocators")  # whose pages these are
    sides = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "vocab_size": 512}
    config = transformers.MistralConfig(**sides, num_attention_heads=4, num_key_value_heads=2, sliding_window=window)
    model = transformers.MistralForCausalLM(config).to(DEVICE).eval()
    model.requires_grad_(False)
    model.lm_head.weight.mul_(20)
    greedy = transformers.GenerationConfig(max_new_tokens=40, do_sample=False, eos_token_id=-1, pad_token_id=0)
    settings = transformers.ContinuousBatchingConfig(block_size=16, num_blocks=256, max_batch_tokens=128)
    prompts = [[5, 6, 7], [9, 3, 4] * 60, list(range(20, 90))]
    right = []
    for prompt in prompts:
        ids = torch.tensor([prompt], device=DEVICE)
        right.append(model.generate(ids, generation_config=greedy)[0, len(prompt) :].tolist())
    made: list[int] = []
    end = torch.cuda.CUDAGraph.capture_end

    def counted(graph: torch.cuda.CUDAGraph) -> None:
        made.append(1)
        end(graph)

    assert host.apply(model) == host.ON_GRAPHS
    monkeypatch.setattr(torch.cuda.CUDAGraph, "capture_end", counted)
    continuous.apply(model)
    try:
        found = model.generate_batch(prompts, generation_config=greedy, continuous_batching_config=settings)
    finally:
        continuous.undo(model)
        host.undo(model)
        continuous.undo_in_library()
    assert [result.generated_tokens for result in found.values()] == right
    assert 0 < len(made) < 40
    assert model.config._attn_implementation == "sdpa"
