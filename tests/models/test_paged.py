"""Continuous batching of an accelerated model gives the tokens of `generate`. Without a GPU our attention is torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import halfbyte as hb
from halfbyte.kernels.attention import reference
from halfbyte.kernels.common import slow
from halfbyte.models import paged

from .families import DEVICE, make

transformers = pytest.importorskip("transformers")
batching = pytest.importorskip("transformers.generation.continuous_batching")

FUNCTIONS = transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS
PROMPTS = [[5, 6, 7], [9, 3, 4] * 9, [9, 3, 4] * 8]  # the last two share pages
NEW_TOKENS = 6


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """(pages, new tokens) of every call of our attention, which CPUs have here, too."""
    found: list[Any] = []
    attend = reference.attend_pages

    def counted(query: Any, key: Any, value: Any, pages: Any, *others: Any, **options: Any) -> Any:
        found.append((pages, len(query)))
        return attend(query, key, value, pages, *others, **options)

    monkeypatch.setattr(paged, "DEVICES", (DEVICE.type,))
    if DEVICE.type == "cpu":
        monkeypatch.setattr(reference, "attend_pages", counted)
    return found


@pytest.fixture
def model(calls: list[Any]) -> Iterator[Any]:
    made = make("llama")
    paged.apply(made)
    yield made
    paged.undo(made)
    paged.undo_in_library()


def settings(**options: Any) -> Any:
    small = {"block_size": 4, "num_blocks": 96, "max_batch_tokens": 16}
    return transformers.ContinuousBatchingConfig(**small | options)


def greedy() -> Any:
    return transformers.GenerationConfig(
        max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=-1, pad_token_id=0, bos_token_id=None
    )


def batched(model: Any, **options: Any) -> list[list[int]]:
    found = model.generate_batch(
        PROMPTS, generation_config=greedy(), continuous_batching_config=settings(**options), warmup=False
    )
    assert [result.error for result in found.values()] == [None] * len(PROMPTS)
    return [result.generated_tokens for result in found.values()]


def one_by_one(model: Any) -> list[list[int]]:
    found = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt], device=DEVICE)
        made = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=greedy())
        found.append(made[0, len(prompt) :].tolist())
    return found


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss"])
def test_tokens_are_those_of_generate(family: str, calls: list[Any]) -> None:
    """Prompts come in chunks, beside requests that decode; windows are full before the end."""
    model = make(family)
    right, before = one_by_one(model), model.config._attn_implementation
    paged.apply(model)
    assert batched(model) == right
    assert model.config._attn_implementation == before
    if DEVICE.type == "cpu":
        tables = {pages.page for pages, _ in calls}
        assert tables == ({0, 4} if family == "llama" else {0})  # transformers has none for windows
        assert max(tokens for _, tokens in calls) == 16
    paged.undo(model)
    paged.undo_in_library()


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_padded_batches(family: str, calls: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of captured steps are: with requests of no tokens, and new tokens of no request."""
    runner = batching.model_runner.ModelRunner
    begin = runner.__init__

    def padded(self: Any, *given: Any, **named: Any) -> None:
        begin(self, *given, **named)
        self.pad_inputs = True

    model = make(family)
    right = one_by_one(model)
    monkeypatch.setattr(runner, "__init__", padded)
    paged.apply(model)
    assert batched(model, q_padding_interval_size=8, kv_padding_interval_size=32) == right
    if DEVICE.type == "cpu":
        assert {tokens for pages, tokens in calls if not pages.page} == {8, 16}
        assert all(tokens in (1, 2, 3) for pages, tokens in calls if pages.page)
    paged.undo(model)
    paged.undo_in_library()


def test_tables_can_be_turned_off_and_run_out(model: Any, calls: list[Any]) -> None:
    """Requests that need more pages than a table holds are read by their tokens' rows."""
    right = one_by_one(model)
    for most in (0, 3):
        calls.clear()
        assert batched(model, max_blocks_per_request=most) == right
        assert {pages.page for pages, _ in calls} <= ({0, 4} if most else {0})


def test_accelerate_and_restore(calls: list[Any]) -> None:
    model = make("llama")
    dense = model.model.layers[0].mlp.down_proj
    model.model.layers[0].mlp.down_proj = hb.nn.Linear4bit.from_linear(dense, "int4", group_size=32)
    right = one_by_one(model)
    hb.accelerate(model)
    try:
        assert batched(model) == right
        assert paged.NAME in FUNCTIONS
        assert DEVICE.type == "cuda" or calls
    finally:
        hb.restore(model)
    assert paged.HOOK not in vars(model)
    assert paged.NAME not in FUNCTIONS


@pytest.mark.parametrize("captured", [True, False])
def test_steps_are_captured_where_those_of_generate_are(
    captured: bool, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And where the user says nothing else."""
    monkeypatch.setattr(batching.initialization, "get_accelerator_graph_name", lambda: "cuda")
    monkeypatch.setattr(paged, "pool_of", lambda _: object() if captured else None)
    for asked, expected in ((None, captured), (True, True), (False, False)):
        manager = model.init_continuous_batching(greedy(), settings(use_cuda_graph=asked))
        found = manager.continuous_batching_config
        assert found.use_cuda_graph == (expected, expected)
        assert found.use_async_batching == expected
        assert found.max_blocks_per_request == 32


def test_a_model_without_a_kernel(model: Any, calls: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers' own attention serves it, which one warning says."""
    monkeypatch.setattr(slow, "_told", set())
    monkeypatch.setattr(paged, "_not_supported", lambda *_: "its heads are too large")
    right = one_by_one(model)
    with pytest.warns(UserWarning, match="slower: its heads are too large"):
        assert batched(model) == right
    assert not calls


def test_a_kept_manager_ends_with_ours(model: Any, calls: list[Any]) -> None:
    """Without a mask another attention would see the future."""
    right = one_by_one(model)
    options = {"generation_config": greedy(), "continuous_batching_config": settings(), "persistent_manager": True}
    for ours in (True, False):
        if not ours:
            paged.undo(model)
        calls.clear()
        found = model.generate_batch(PROMPTS, warmup=False, **options)
        assert [result.generated_tokens for result in found.values()] == right
        assert DEVICE.type == "cuda" or bool(calls) == ours
    model.destroy_cached_continuous_batching_manager()


def test_another_attention_is_left_alone(model: Any) -> None:
    model.config._attn_implementation = "paged|eager"
    assert paged.reason_against(model) == "paged|eager was asked for"
    model.init_continuous_batching(greedy(), settings())
    assert model.config._attn_implementation == "paged|eager"


def test_an_error_leaves_the_model_as_it_was(model: Any) -> None:
    with pytest.raises(ValueError, match="_size"):
        model.init_continuous_batching(greedy(), settings(block_size=1))
    assert model.config._attn_implementation == "sdpa"


def test_what_is_no_continuous_batching(model: Any) -> None:
    model.init_continuous_batching(greedy(), settings())
    with pytest.raises(ValueError, match="stop the manager"):
        model(torch.tensor([PROMPTS[0]], device=DEVICE))
    states = torch.zeros(1, 4, 1, 16)
    with pytest.raises(ValueError, match="dropout"):
        paged.attention(model, states, states, states, None, dropout=0.1, cache=object())
    paged.undo(model)  # though nobody has stopped the manager
    assert model.config._attn_implementation == "sdpa"
    model(torch.tensor([PROMPTS[0]], device=DEVICE))
