"""Decoder layers of prompts in few launches: the tokens, logits and caches of transformers' own, family by family."""

from __future__ import annotations

from contextlib import nullcontext
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor

import halfbyte as hb
from halfbyte.models import paged, prompt_layers
from halfbyte.models.layers import layer_of
from halfbyte.models.prompt_layers import BATCHED, _PromptLayer
from halfbyte.models.steps import pool_of

from .families import DEVICE, FAMILIES, OF_EXPERTS, counted, generate, make, plainly, prompt
from .test_fused import accelerated, decoder_layers, in_4_bits
from .test_paged import greedy, settings

pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("captures")
REQUESTS = [prompt(1, tokens) for tokens in (3, 27, 41, 9)]


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_layers, "ON_CPU", True)


@pytest.fixture
def layers(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by one with every layer whose attention was ours."""
    return counted(monkeypatch, _PromptLayer, "_attend")


def quantized(family: str, **options: Any) -> Any:
    return accelerated(in_4_bits(make(family, **options)))


def agreed(model: Any) -> list[bool | None]:
    pool = pool_of(model)
    assert pool is not None
    return [None if layer is None else layer.agrees for layer in pool.prompt_layers.known.values()]


@pytest.mark.parametrize("family", FAMILIES | OF_EXPERTS)
def test_tokens_of_every_family(family: str, layers: list[int]) -> None:
    """In windows that the prompt fills, and more than fills; of texts that are padded; and in a kept cache."""
    model = quantized(family)
    wanted: dict[str, Any] = {"max_new_tokens": 6, "output_logits": True, "return_dict_in_generate": True}
    for texts, tokens, padding in ((1, 15, 0), (3, 25, 4), (1, 15, 0), (2, 90, 7)):
        inputs = prompt(texts, tokens, padding)
        layers.clear()
        found = generate(model, inputs, **wanted)
        assert len(layers) == 3
        right = plainly(model, inputs, **wanted)
        assert len(layers) == 3
        assert torch.equal(found.sequences, right.sequences)
        torch.testing.assert_close(torch.stack(found.logits), torch.stack(right.logits), rtol=1e-3, atol=1e-3)
    assert agreed(model) == [True] * 3
    hb.restore(model)
    assert not any("forward" in vars(module) for module in model.modules())


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "gpt_oss", "qwen3_moe"])
def test_batches_of_requests(family: str, layers: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts in chunks beside requests that decode, in windows that are full and not; a batch may have few tokens."""
    monkeypatch.setattr(paged, "DEVICES", (DEVICE.type,))
    model = quantized(family)
    right = [plainly(model, {name: x[:1] for name, x in inputs.items()}, max_new_tokens=6) for inputs in REQUESTS]
    for _ in range(2):  # the second manager compares layers anew
        layers.clear()
        found = model.generate_batch(
            [inputs["input_ids"][0].tolist() for inputs in REQUESTS],
            generation_config=greedy(), continuous_batching_config=settings(), warmup=False,
        )  # fmt: skip
        assert [one.generated_tokens for one in found.values()] == [
            ids[0, inputs["input_ids"].shape[1] :].tolist() for ids, inputs in zip(right, REQUESTS, strict=True)
        ]
        assert len(layers) >= 3 * 6
    batches = {vars(layer)[BATCHED] for layer in decoder_layers(model)}
    assert [one.agrees for one in batches.pop().known.values() if one is not None] == [True] * 3
    assert not batches
    assert not any(layer.known for layer in (vars(one)[BATCHED] for one in decoder_layers(deepcopy(model))))
    hb.restore(model)
    assert not any(BATCHED in vars(module) for module in model.modules())


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt_oss"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_caches_of_others(family: str, attention: str, layers: list[int]) -> None:
    """One that is longer than the prompt, one that grows, none at all; and a second prompt behind the first."""
    from transformers import DynamicCache, StaticCache

    model = quantized(family)
    if family != "gpt_oss":
        model.set_attn_implementation(attention)
    pool = pool_of(model)
    assert pool is not None
    first, second = (prompt(2, tokens)["input_ids"] for tokens in (15, 12))
    for make_cache in (
        lambda: StaticCache(config=model.config, max_cache_len=40), lambda: DynamicCache(config=model.config), None,
    ):  # fmt: skip
        found: list[list[Tensor]] = []
        for work in (pool.prompt_layers.at_work(), nullcontext()):
            cache = make_cache() if make_cache else None
            with torch.no_grad(), work:
                texts = (first, second) if cache is not None else (first,)
                found.append([model(ids, past_key_values=cache, use_cache=cache is not None).logits for ids in texts])
        for ours, theirs in zip(*found, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)
    assert len(layers) == 5 * 3
    assert agreed(model) == [True] * 3


@pytest.mark.parametrize("options", [{"num_beams": 3}, {"prompt_lookup_num_tokens": 4}], ids=str)
def test_other_loops(options: dict[str, Any], layers: list[int]) -> None:
    model = quantized("llama")
    inputs = prompt(1, 25)
    found = generate(model, inputs, **options)
    assert torch.equal(found, plainly(model, inputs, **options))


def test_eager_attention(layers: list[int]) -> None:
    model = quantized("qwen3")
    model.set_attn_implementation("eager")
    inputs = prompt(2, 25, 3)
    assert torch.equal(generate(model, inputs), plainly(model, inputs))
    assert len(layers) == 3


def test_what_transformers_computes(layers: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that is asked by itself, too many tokens to begin with, and a layer that somebody listens to."""
    model = quantized("llama")
    model(**prompt(1, 25))
    monkeypatch.setattr(prompt_layers, "MOST_COMPARED", 49)
    generate(model, prompt(2, 25))
    assert not layers
    for texts in (1, 2):
        generate(model, prompt(texts, 25))
    assert len(layers) == 2 * 3
    layers.clear()
    handle = decoder_layers(model)[1].mlp.register_forward_hook(lambda module, args, output: None)
    generate(model, prompt(1, 25))
    assert len(layers) == 2
    handle.remove()
    generate(model, prompt(1, 25))
    assert len(layers) == 2 + 3


def test_what_may_change_within_a_prompt(layers: list[int]) -> None:
    """Few tokens, gradients, autocast, and hooks on a layer that is known by then."""
    model = quantized("llama")
    pool, mlp = pool_of(model), decoder_layers(model)[1].mlp
    assert pool is not None
    with torch.no_grad(), pool.prompt_layers.at_work():
        model(**prompt(1, 8))
        assert not layers
        for within in (nullcontext(), torch.enable_grad(), torch.autocast(DEVICE.type)):
            with within:
                model(**prompt(1, 25))
            assert len(layers) == 3
        for number, listen in enumerate((mlp.register_forward_hook, mlp.register_forward_pre_hook), start=1):
            handle = listen(lambda *given: None)
            model(**prompt(1, 25))
            handle.remove()
            assert len(layers) == 3 + 2 * number


@pytest.mark.parametrize("wanted", ["attentions", "hidden_states"])
def test_outputs_of_layers(wanted: str, layers: list[int]) -> None:
    """transformers listens to layers from the call on that asks for what they give."""
    model = quantized("mixtral")
    model.set_attn_implementation("eager")
    inputs = prompt(1, 25)
    generate(model, inputs, max_new_tokens=3)
    asked = {f"output_{wanted}": True, "return_dict_in_generate": True, "max_new_tokens": 3}
    found, right = generate(model, inputs, **asked), plainly(model, inputs, **asked)
    for one, other in zip(found[wanted][0], right[wanted][0], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)


def test_router_logits(layers: list[int]) -> None:
    """transformers makes a loss of them, too, by a mask that a static cache does not have."""
    model = quantized("mixtral")
    asked = {"output_router_logits": True, "return_dict_in_generate": True, "max_new_tokens": 3}
    found, right = generate(model, prompt(1, 25), **asked), plainly(model, prompt(1, 25), **asked)
    assert torch.equal(found.sequences, right.sequences)


def test_a_model_that_is_trained_since(layers: list[int]) -> None:
    model = quantized("llama")
    inputs = prompt(1, 25)
    generate(model, inputs)
    layers.clear()
    model.train()
    generate(model, inputs)
    assert not layers
    model.eval()
    generate(model, inputs)
    assert len(layers) == 3


def test_a_layer_that_computes_something_else(layers: list[int]) -> None:
    """As that of a version to come might: it stays as it is."""
    model = quantized("llama")
    other = decoder_layers(model)[1]

    def forward(self: Any, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        return hidden_states + 0.7 * (theirs(self, hidden_states, **kwargs) - hidden_states)

    theirs = type(other).forward
    other.__class__ = type(
        "LlamaDecoderLayer", (type(other),), {"forward": forward, "__module__": type(other).__module__}
    )
    assert layer_of(other) is not None
    inputs = prompt(2, 15)
    with pytest.warns(UserWarning, match="leaves prompts in LlamaDecoderLayer to transformers"):
        found = generate(model, inputs)
    assert torch.equal(found, plainly(model, inputs))
    assert agreed(model) == [True, False, True]
    layers.clear()
    assert torch.equal(generate(model, inputs), found)
    assert len(layers) == 2
