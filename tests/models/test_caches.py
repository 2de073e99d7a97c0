"""A static cache that begins as long as the prompt gives what one of full length gives."""

from typing import Any

import pytest
import torch
from torch import Tensor

from halfbyte.models.caches import LENGTHS, begin_short, grow, updated

transformers = pytest.importorskip("transformers")

TOTAL, WINDOW = 24, 12


@pytest.fixture(scope="module", params=["full", "sliding"])
def model(request: pytest.FixtureRequest) -> Any:
    torch.manual_seed(0)
    sides = {
        "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 96,
    }  # fmt: skip
    if request.param == "full":
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sides)).eval()
    config = transformers.Gemma3TextConfig(
        **sides, sliding_window=WINDOW, layer_types=["sliding_attention", "full_attention", "sliding_attention"]
    )
    return transformers.Gemma3ForCausalLM(config).eval()


@torch.no_grad()
def logits(model: Any, cache: Any, ids: Tensor, prompt: int, mask: Tensor) -> list[Tensor]:
    found = []
    for first, last in [(0, prompt), *((at, at + 1) for at in range(prompt, ids.shape[1]))]:
        output = model(ids[:, first:last], attention_mask=mask[:, :last], past_key_values=cache, use_cache=True)
        found.append(output.logits)
    return found


@pytest.mark.parametrize("prompt", [1, 7, WINDOW, 15, TOTAL - 1])
@pytest.mark.parametrize("padding", [0, 2])
def test_logits_of_every_step(model: Any, prompt: int, padding: int) -> None:
    ids = torch.randint(3, 96, (2, TOTAL), generator=torch.Generator().manual_seed(prompt))
    mask = torch.ones_like(ids)
    mask[0, : min(padding, prompt - 1)] = 0
    right, short = (transformers.StaticCache(config=model.config, max_cache_len=TOTAL) for _ in range(2))
    begin_short(short)
    expected = logits(model, right, ids, prompt, mask)
    for mine, theirs in zip(logits(model, short, ids, prompt, mask), expected, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-4)
    assert LENGTHS not in vars(short)
    assert "get_mask_sizes" not in vars(short)
    assert [layer.keys.shape for layer in short.layers] == [layer.keys.shape for layer in right.layers]


def test_it_is_short_until_the_prompt_is_done(model: Any) -> None:
    cache = transformers.StaticCache(config=model.config, max_cache_len=TOTAL)
    full = [layer.max_cache_len for layer in cache.layers]
    begin_short(cache)
    with torch.no_grad():
        model(torch.arange(5)[None], past_key_values=cache, use_cache=True)
    assert [layer.keys.shape[2] for layer in cache.layers] == [5] * 3
    kept = [layer.keys.clone() for layer in cache.layers]
    grow(cache)
    for layer, length, keys in zip(cache.layers, full, kept, strict=True):
        assert layer.max_cache_len == layer.keys.shape[2] == layer.values.shape[2] == length
        assert torch.equal(layer.keys[:, :, :5], keys)
        assert not layer.keys[:, :, 5:].any()
    grow(cache)
    assert [layer.max_cache_len for layer in cache.layers] == full


def test_a_cache_that_nobody_asked_about_is_as_it_was(model: Any) -> None:
    cache = transformers.StaticCache(config=model.config, max_cache_len=TOTAL)
    full = [layer.max_cache_len for layer in cache.layers]
    begin_short(cache)
    grow(cache)
    assert vars(cache).keys() == vars(transformers.StaticCache(config=model.config, max_cache_len=TOTAL)).keys()
    assert [layer.max_cache_len for layer in cache.layers] == full


@pytest.mark.parametrize("appends", [False, True])
def test_steps_update_it_as_transformers_does(model: Any, appends: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here the kernel is torch. A window is full from the twelfth token on."""
    kernels = pytest.importorskip("halfbyte.kernels.cache.triton")
    seen = []

    def append(keys: Tensor, values: Tensor, new_keys: Tensor, new_values: Tensor, length: Tensor) -> None:
        assert kernels.supports(keys, values, new_keys, new_values, length)
        seen.append(int(length))
        keys[:, :, length], values[:, :, length] = new_keys[:, :, 0], new_values[:, :, 0]
        length += 1

    monkeypatch.setattr(kernels, "append", append)
    ids = torch.randint(3, 96, (2, TOTAL), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    right, mine = (transformers.StaticCache(config=model.config, max_cache_len=TOTAL) for _ in range(2))
    expected = logits(model, right, ids, 5, mask)
    with updated(mine, appends):
        found = logits(model, mine, ids, 5, mask)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)
    full = sum(not layer.is_sliding for layer in mine.layers)
    assert len(seen) == (full * (TOTAL - 5) + (3 - full) * (WINDOW - 5) if appends else 0)
    for a, b in zip(mine.layers, right.layers, strict=True):
        assert "update" not in vars(a)
        torch.testing.assert_close(a.keys, b.keys)
        assert a.get_seq_length() == b.get_seq_length()
