"""Attention over a cache in pages agrees with fp64, for random requests, page tables and cuts."""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from halfbyte.kernels.attention import reference
from halfbyte.kernels.attention.paged import attend_pages, supports
from halfbyte.kernels.attention.pages import Pages, PagesPlan, plan_pages
from halfbyte.kernels.attention.plan import MOST_PARTS
from halfbyte.kernels.common.device import properties_for
from halfbyte.models import paged as continuous

PAGE = 8
NOWHERE = float("nan")
CUTS = PagesPlan(16, 16, 3, 16, 2), PagesPlan(16, 16, 5, 32, 3, least=2), PagesPlan(32, 16, 1, 64, 5)
#         new and cached tokens of each request
BATCHES = [
    [(1, 20), (1, 1), (1, 0), (1, 41)],
    [(5, 20), (1, 9), (18, 0)],
    [(0, 0), (2, 17), (0, 12), (4, 11), (0, 0)],
]


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


class Batch:
    """Requests whose tokens lie in pages of one cache in random order; what nobody may read is NaN."""

    def __init__(self, sizes: list[tuple[int, int]], heads: int, shared: int, size: int, dtype: torch.dtype) -> None:
        new, self.cached = zip(*sizes, strict=True)
        self.query_ends = torch.tensor([0, *accumulate(new)], dtype=torch.int32)
        self.key_ends = torch.tensor([0, *accumulate(map(sum, sizes))], dtype=torch.int32)
        self.most = {"most_new": max(new), "most_tokens": max(map(sum, sizes))}
        tokens = sum(new)
        joined = random(tokens + 2, (heads + 2 * shared) * size).to(dtype)  # two rows of padding
        parts = joined.split([heads * size, shared * size, shared * size], -1)
        self.query, self.key, self.value = (part.unflatten(-1, (-1, size)) for part in parts)
        counts = [-(-(one + cached) // PAGE) for one, cached in sizes]
        generator = torch.Generator().manual_seed(tokens)
        numbers = iter(torch.randperm(sum(counts) + 3, generator=generator).tolist())
        table = [[next(numbers) for _ in range(count)] for count in counts]
        wide = max(counts) + 1
        self.table = torch.tensor([row + [-1] * (wide - len(row)) for row in table], dtype=torch.int32)
        rows = (sum(counts) + 3) * PAGE
        self.keys = torch.full((rows, 2, shared, size), NOWHERE, dtype=dtype)  # as a cache with two layers
        self.values = self.keys.clone()
        places: list[int] = []
        for row, (one, cached) in zip(table, sizes, strict=True):
            own = [row[token // PAGE] * PAGE + token % PAGE for token in range(cached)]
            self.keys[own, 1] = random(len(own), shared, size, seed=1).to(dtype)
            self.values[own, 1] = random(len(own), shared, size, seed=2).to(dtype)
            places += own + [10**9] * one
        self.places = torch.tensor([*places, 10**9], dtype=torch.int64)

    def given(self, paged: bool, dtype: torch.dtype | None = None) -> tuple[Any, ...]:
        """What attends; with pages the cache is written to, so it is a copy."""
        keys, values = (cache.to(dtype or cache.dtype, copy=True)[:, 1] for cache in (self.keys, self.values))
        pages = Pages(keys, values, self.table, PAGE) if paged else Pages(keys, values, self.places)
        states = (x.to(dtype or x.dtype) for x in (self.query, self.key, self.value))
        return *states, pages, self.query_ends, self.key_ends, 0.3


def check(batch: Batch, paged: bool, plan: PagesPlan | None, close: float, **options: Any) -> None:
    given, right = batch.given(paged), batch.given(paged, torch.float64)
    found = attend_pages(*given, **batch.most, plan=plan, **options)
    expected = reference.attend_pages(*right, **batch.most, **options)
    torch.testing.assert_close(found.double(), expected, rtol=close, atol=close)
    assert not found[batch.query_ends[-1] :].any()  # padding
    for mine, theirs in zip(given[3][:2], right[3][:2], strict=True):
        assert torch.equal(mine.nan_to_num(77), theirs.to(mine.dtype).nan_to_num(77))


@pytest.mark.parametrize(
    ("sizes", "plan", "options"),
    [
        *((sizes, None, "plain") for sizes in BATCHES),
        *zip(BATCHES, CUTS, ("sinks and window", "cap and sinks", "window"), strict=True),
    ],
    ids=str,
)
def test_places(sizes: list[tuple[int, int]], plan: PagesPlan | None, options: str) -> None:
    batch = Batch(sizes, 6, 2, 24, torch.float16)
    given: dict[str, Any] = {"window": 7} if "window" in options else {}
    given |= {"softcap": 1.5} if "cap" in options else {}
    given |= {"sinks": random(6).half()} if "sinks" in options else {}
    check(batch, False, plan, 2e-3, **given)


@pytest.mark.parametrize(("heads", "shared"), [(4, 2), (40, 1)])
@pytest.mark.parametrize(("plan", "sinks"), [(None, False), (PagesPlan(16, 16, 3, 32, least=2), True)], ids=str)
def test_a_token_of_each(heads: int, shared: int, plan: PagesPlan | None, sinks: bool) -> None:
    """Its key and value are put into the page that is its turn. Requests of no token are padding."""
    batch = Batch([(1, 37), (1, 0), (1, 8), (0, 0), (0, 0)], heads, shared, 40, torch.float16)
    check(batch, True, plan, 2e-3, sinks=random(heads) if sinks else None)


def test_fp32() -> None:
    check(Batch([(1, 20), (3, 5)], 4, 2, 16, torch.float32), False, None, 1e-5)
    check(Batch([(1, 20), (1, 5)], 4, 2, 16, torch.float32), True, None, 1e-5, softcap=2.0)


def test_no_requests() -> None:
    batch = Batch([(1, 3)], 2, 1, 16, torch.float16)
    query, key, value, pages, _, _, scale = batch.given(False)
    nobody = torch.zeros(1, dtype=torch.int32)
    for ends, rows in ((nobody, 0), (nobody, 3), (torch.zeros(4, dtype=torch.int32), 3)):
        given = (query[:rows], key[:rows], value[:rows], pages, ends, ends, scale)
        found = attend_pages(*given, most_new=1, most_tokens=0)
        assert found.shape == (rows, 2, 16)
        assert not found.any()


def test_what_it_does_not_take() -> None:
    assert supports(torch.float16, 128, 32, 8, 75)
    assert supports(torch.float32, 128, 32, 8, 0)
    for wrong in (
        (torch.bfloat16, 128, 32, 8, 75),
        (torch.float64, 64, 32, 8, 90),
        (torch.float32, 256, 32, 8, 90),
        (torch.float16, 512, 32, 8, 90),
        (torch.float16, 128, 30, 8, 90),
        (torch.float16, 128, 1024, 1, 90),
    ):
        assert not supports(*wrong)


@pytest.mark.parametrize("target", ["sm_90", "sm_75"])
@pytest.mark.parametrize("group", [1, 3, 128])
@pytest.mark.parametrize(("tokens", "most_new"), [(1, 1), (64, 1), (64, 64), (2000, 512)])
def test_plans(target: str, group: int, tokens: int, most_new: int) -> None:
    """Every new token has a tile, wherever requests begin."""
    for cached in (0, 300):
        plan = plan_pages(properties_for(target), tokens, most_new, cached, group, 8, 128)
        assert 1 <= plan.parts <= MOST_PARTS
        assert plan.new == 1 or plan.new * group <= plan.rows
        for step in (1, 5, most_new):
            ends = [*range(0, tokens, step), tokens]
            begins = [end // plan.new + number for number, end in enumerate(ends)]
            needed = [-(-(end - begin) // plan.new) for begin, end in pairwise(ends)]
            assert all(b - a >= n for (a, b), n in zip(pairwise(begins), needed, strict=True))
            assert begins[-1] <= plan.tiles(tokens, len(ends) - 1, False)


@pytest.mark.parametrize("window", [None, 6])
def test_continuous_batching(window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through transformers' pages, tables and places: a prompt in chunks, and tokens of several requests, padded as for
    a captured step."""
    transformers = pytest.importorskip("transformers")
    runner = pytest.importorskip("transformers.generation.continuous_batching.model_runner").ModelRunner
    begin = runner.__init__

    def padded(self: Any, *given: Any, **named: Any) -> None:
        begin(self, *given, **named)
        self.pad_inputs = True

    sides = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": 64}
    sides |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    config = transformers.MistralConfig(**sides, sliding_window=window)
    torch.manual_seed(0)
    model = transformers.MistralForCausalLM(config).eval()
    settings = transformers.ContinuousBatchingConfig(
        block_size=4, num_blocks=32, max_batch_tokens=8, q_padding_interval_size=4
    )
    greedy = transformers.GenerationConfig(max_new_tokens=2, do_sample=False, eos_token_id=-1, pad_token_id=0)
    prompts = [[5, 6, 7], list(range(20, 30))]
    found: tuple[list[Any], list[Any]] = [], []
    monkeypatch.setattr(continuous, "DEVICES", ("cpu",))
    monkeypatch.setattr(runner, "__init__", padded)
    for attend, tokens in zip((reference.attend_pages, attend_pages), found, strict=True):
        monkeypatch.setattr(reference, "attend_pages", attend)
        continuous.apply(model)
        made = model.generate_batch(prompts, greedy, settings, warmup=False)
        tokens += [result.generated_tokens for result in made.values()]
    continuous.undo_in_library()
    assert found[0] == found[1]
    assert list(map(len, found[0])) == [2, 2]
