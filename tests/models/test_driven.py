"""Beam search and speculation give on captured steps what they give without them."""

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

import halfbyte as hb
from halfbyte.models import driven, steps

from .families import DEVICE, counted, generate, hooked, make, plainly, prompt

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("captures")


@pytest.fixture
def verified(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by one with every captured step."""
    return counted(monkeypatch, driven.DrivenStep, "advance")


def repeating(tokens: int) -> dict[str, Tensor]:
    """A text that repeats itself, of which something can be guessed."""
    ids = (torch.arange(tokens) % 5 + 3)[None].to(DEVICE)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


@pytest.mark.parametrize(("family", "guesses"), [("llama", 3), ("llama", 9), ("qwen2", 3), ("qwen3", 9), ("phi3", 3)])
def test_looked_up_in_the_prompt(family: str, guesses: int, verified: list[int]) -> None:
    model = hooked(make(family))
    for inputs in (repeating(20), prompt(1, 9), repeating(45), prompt(1, 12, 3)):
        verified.clear()
        found = generate(model, inputs, prompt_lookup_num_tokens=guesses, max_new_tokens=40)
        assert torch.equal(found, generate(model, inputs, max_new_tokens=40))
        assert torch.equal(found, plainly(model, inputs, max_new_tokens=40))
        assert 0 < len(verified) < 40


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_guessed_by_an_assistant(attention: str, verified: list[int]) -> None:
    model, assistant = hooked(make("llama", attn_implementation=attention)), make("llama")
    assistant.model.layers[1].mlp.up_proj.weight.mul_(1.01)  # so that it is sometimes wrong
    inputs = prompt(1, 15)
    for _ in range(2):
        found = generate(model, inputs, assistant_model=assistant, max_new_tokens=40)
        assert torch.equal(found, plainly(model, inputs, max_new_tokens=40))
    assert 0 < len(verified) < 80
    hooked(assistant)  # which makes no difference
    assert torch.equal(generate(model, inputs, assistant_model=assistant, max_new_tokens=40), found)


def test_processors_ends_and_streamers(verified: list[int]) -> None:
    model = hooked(make("llama"))
    inputs = repeating(20)
    free = plainly(model, inputs, max_new_tokens=40)
    for options in ({"repetition_penalty": 1.2}, {"eos_token_id": int(free[0, 20 + 17])}, {"max_new_tokens": 3}):
        settings = {"max_new_tokens": 40} | options
        found = generate(model, inputs, prompt_lookup_num_tokens=4, **settings)
        assert torch.equal(found, plainly(model, inputs, **settings))
    assert verified
    seen: list[Tensor] = []

    class Streamer:
        def put(self, value: Tensor) -> None:
            seen.append(value.flatten())

        def end(self) -> None:
            seen.append(torch.tensor([-1]))

    generate(model, inputs, prompt_lookup_num_tokens=4, max_new_tokens=40, streamer=Streamer())
    assert torch.equal(torch.cat(seen)[:-1], free[0].cpu())


def test_the_bucket_is_shared_with_other_calls(verified: list[int]) -> None:
    model = hooked(make("llama"))
    inputs = repeating(20)
    right = plainly(model, inputs)
    for _ in range(2):
        assert torch.equal(generate(model, inputs, prompt_lookup_num_tokens=4), right)
        assert torch.equal(generate(model, inputs), right)
        assert torch.equal(generate(model, inputs, max_time=100.0), right)
    pool = steps.pool_of(model)
    assert pool is not None
    (bucket,) = pool.buckets
    kept = [weakref.ref(keys) for pair in bucket.store.layers if pair for keys in pair]
    del bucket
    gc.disable()
    try:
        hb.release(model)
        assert not any(reference() is not None for reference in kept)
    finally:
        gc.enable()
    assert torch.equal(generate(model, inputs, prompt_lookup_num_tokens=4), right)
    assert verified


def test_calls_that_go_as_before(verified: list[int]) -> None:
    windowed = hooked(make("mistral"))
    inputs = repeating(20)
    assert torch.equal(generate(windowed, inputs, prompt_lookup_num_tokens=4), plainly(windowed, inputs))
    model = hooked(make("llama"))
    right = plainly(model, inputs)
    options = {"prompt_lookup_num_tokens": 4}
    found = generate(model, inputs, return_dict_in_generate=True, output_hidden_states=True, **options)
    assert torch.equal(found.sequences, right)
    own = transformers.DynamicCache(config=model.config)
    assert torch.equal(generate(model, inputs, past_key_values=own, **options), right)
    assert torch.equal(plainly(model, inputs, **options), right)
    assert not verified
    assert torch.equal(generate(model, inputs, **options), right)
    assert verified
    hb.restore(model)
    hb.restore(windowed)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("beams", [2, 3])
def test_beams(family: str, beams: int, verified: list[int]) -> None:
    model = hooked(make(family))
    for texts, tokens, padding in ((1, 9, 0), (2, 14, 3), (3, 21, 1)):
        inputs = prompt(texts, tokens, padding)
        eos = int(plainly(model, inputs)[0, tokens + 9])
        for options in ({}, {"eos_token_id": eos, "length_penalty": 2.0}, {"num_return_sequences": 2}):
            verified.clear()
            found = generate(model, inputs, num_beams=beams, **options)
            assert torch.equal(found, plainly(model, inputs, num_beams=beams, **options))
            assert 0 < len(verified) < 24
    torch.manual_seed(1)
    samples = generate(model, inputs, num_beams=beams, do_sample=True)
    torch.manual_seed(1)
    assert torch.equal(samples, plainly(model, inputs, num_beams=beams, do_sample=True))


@pytest.mark.parametrize("options", [{"prompt_lookup_num_tokens": 4}, {"num_beams": 3}])
def test_what_is_handed_out(options: dict[str, Any], verified: list[int]) -> None:
    model = hooked(make("llama"))
    inputs = repeating(20)
    settings = options | {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    found, right = generate(model, inputs, **settings), plainly(model, inputs, **settings)
    assert verified
    assert type(found) is type(right)
    assert torch.equal(found.sequences, right.sequences)
    for ours, theirs in ((found.scores, right.scores), (found.logits, right.logits)):
        torch.testing.assert_close(torch.stack(ours), torch.stack(theirs), rtol=1e-4, atol=1e-3)
    cache = found.past_key_values
    assert type(cache) is transformers.DynamicCache
    generate(model, prompt(1, 12), **options)  # does not write to what was handed out
    for ours, theirs in zip(cache.layers, right.past_key_values.layers, strict=True):
        torch.testing.assert_close(ours.keys, theirs.keys, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(ours.values, theirs.values, rtol=1e-4, atol=1e-4)
        assert "update" not in vars(ours)


def test_more_guesses_than_a_step_takes(verified: list[int]) -> None:
    model = hooked(make("llama"))
    inputs = repeating(60)
    found = generate(model, inputs, prompt_lookup_num_tokens=50, max_new_tokens=60)
    assert torch.equal(found, plainly(model, inputs, max_new_tokens=60))
