"""Decoder layers of captured steps in few launches: the tokens and numbers of transformers' own, family by family."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import halfbyte as hb
from halfbyte import eager_fused
from halfbyte.kernels.linear.fusion import Beside, Fusion
from halfbyte.models import fused, outside, whole
from halfbyte.models.attention import StepAttention
from halfbyte.models.fused import AGREES, fused_layers
from halfbyte.models.layers import FAMILIES as KNOWN
from halfbyte.models.layers import activation_of, family_of_type, fusions, layer_of, norm_of
from halfbyte.models.whole import agree
from halfbyte.nn import Linear4bit

from .families import FAMILIES, OF_EXPERTS, counted, generate, make, plainly, prompt

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("captures")
NEW = 8  # tokens; windows of 20 fill on the way


def in_4_bits(model: Any) -> Any:
    """Its projections in halfbyte's own layers."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear) and name != "lm_head":
                setattr(parent, name, hb.nn.Linear4bit.from_linear(child))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:  # so that it matters
                noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name)))
                parameter.add_(0.2 * noise.to(parameter.device))
    return model.requires_grad_(False)


def accelerated(model: Any) -> Any:
    """Its experts are in 4 bits too."""
    hb.accelerate(model, experts="nf4" if any(name.endswith(".experts") for name, _ in model.named_modules()) else None)
    return model


def quantized(model: Any) -> Any:
    return accelerated(in_4_bits(model))


@pytest.fixture
def layers(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by one with every layer that was computed as a whole."""
    return counted(monkeypatch, fused._Layer, "_attend")


def decoder_layers(model: Any) -> list[Any]:
    return [module for module in model.modules() if layer_of(module) is not None]


@pytest.mark.parametrize("family", FAMILIES | OF_EXPERTS)
def test_tokens_of_every_family(family: str, layers: list[int]) -> None:
    model = quantized(make(family))
    assert len(decoder_layers(model)) == 3
    for texts, tokens, padding in ((1, 15, 0), (3, 25, 4)):
        inputs = prompt(texts, tokens, padding)
        layers.clear()
        found = generate(model, inputs, max_new_tokens=NEW)
        assert len(layers) == 3 * (NEW - 1)
        assert torch.equal(found, plainly(model, inputs, max_new_tokens=NEW))
        assert len(layers) == 3 * (NEW - 1)
    assert [vars(layer)[AGREES] for layer in decoder_layers(model)] == [{1: True}] * 3
    hb.restore(model)
    assert not any(AGREES in vars(layer) for layer in decoder_layers(model))
    assert not any("forward" in vars(module) for module in model.modules())


@pytest.mark.parametrize("family", ["llama", "qwen3", "phi3", "granite", "qwen3_moe", "mixtral"])
def test_several_new_tokens(family: str, layers: list[int]) -> None:
    """Guesses, in steps of eight tokens and of one; and beams."""
    model = quantized(make(family, sliding_window=None))
    for inputs in (prompt(1, 15), prompt(1, 25, 4)):
        found = generate(model, inputs, prompt_lookup_num_tokens=7, max_new_tokens=30)
        assert torch.equal(found, plainly(model, inputs, max_new_tokens=30))
    assert all(vars(layer)[AGREES][8] for layer in decoder_layers(model))
    layers.clear()
    found = generate(model, prompt(2, 15, 3), num_beams=3, max_new_tokens=NEW)
    assert torch.equal(found, plainly(model, prompt(2, 15, 3), num_beams=3, max_new_tokens=NEW))
    assert len(layers) == 3 * (NEW - 1)


@pytest.mark.parametrize("family", FAMILIES)
def test_an_mlp_at_once(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where gate, up and down are asked for together, they are those three, and what stands beside them is the same."""
    model = quantized(make(family))
    inputs = prompt(2, 9)
    right, asked = generate(model, inputs, max_new_tokens=NEW), 0

    def mlp(x: Tensor, weights: Any, biases: Any, beside: Beside) -> Tensor:
        nonlocal asked
        asked += 1
        (inner,) = eager_fused.products(x, weights[:2], biases[:2], beside._replace(residual=None))
        return eager_fused.products(inner, weights[2:], biases[2:], Beside(residual=beside.residual))[0]

    monkeypatch.setattr(eager_fused, "mlp", mlp)
    hb.restore(model)
    accelerated(model)
    assert torch.equal(generate(model, inputs, max_new_tokens=NEW), right)
    assert (asked > 0) == (len(layer_of(decoder_layers(model)[0]).gates) == 2 and not family.startswith("gemma"))


@pytest.mark.parametrize("family", FAMILIES | OF_EXPERTS)
def test_what_is_warmed_is_what_is_fused(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = quantized(make(family))
    asked: dict[tuple[str, ...], Any] = {}
    names = {id(m.weight): name.rpartition(".")[2] for name, m in model.named_modules() if isinstance(m, Linear4bit)}

    def products(x: Tensor, weights: Any, biases: Any, beside: Beside, many: bool) -> Any:
        key = tuple(names[id(q)] for q in weights)
        asked[key] = replace(beside.fusion, norm=beside.norm and (0.0, 0.0), residual=beside.residual and 1.0)
        return theirs(x, weights, biases, beside, many)

    theirs = whole.products
    for home in (whole, eager_fused):
        monkeypatch.setattr(home, "products", products)
    generate(model, prompt(1, 9), max_new_tokens=3)
    kind = family_of_type(model.config.model_type)
    assert kind is not None
    warmed = fusions(kind, activation_of(model.config) or "")
    assert {key: one for key, one in asked.items() if one != Fusion(static=True)} == {
        key: one for key, one in warmed.items() if key in asked
    }


def test_every_family_is_tried() -> None:
    assert {name.lower() for name in KNOWN} == {name.replace("_", "") for name in FAMILIES | OF_EXPERTS}


@pytest.mark.parametrize("family", ["llama", "gemma2", "phi3", "mixtral"])
def test_results_in_16_bits(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not farther from fp32 than transformers' own."""
    from halfbyte.models.loop import TokenStep

    model = quantized(make(family))
    inputs = prompt(2, 12, 3)

    def logits(model: Any) -> Tensor:
        out = generate(model, inputs, output_logits=True, return_dict_in_generate=True, max_new_tokens=6)
        return torch.stack(out.logits).float()

    steps = counted(monkeypatch, TokenStep, "advance")
    right = logits(model)
    model.to(torch.bfloat16)
    ours = logits(model)
    monkeypatch.setattr(fused, "whole_of", lambda module: None)
    hb.release(model)
    theirs = logits(model)
    assert len(steps) == 3 * 5
    assert (ours - right).norm() <= 1.1 * (theirs - right).norm()
    assert not torch.equal(ours, theirs)


def test_a_layer_that_computes_something_else(layers: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """As that of a version to come might: it stays as it is."""
    model = quantized(make("llama"))
    other = decoder_layers(model)[1]

    def forward(self: Any, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        return hidden_states + 0.7 * (theirs(self, hidden_states, **kwargs) - hidden_states)

    theirs = type(other).forward
    kind = type("LlamaDecoderLayer", (type(other),), {"forward": forward, "__module__": type(other).__module__})
    other.__class__ = kind
    inputs = prompt(2, 9)
    with pytest.warns(UserWarning, match="leaves LlamaDecoderLayer to transformers"):
        found = generate(model, inputs, max_new_tokens=NEW)
    assert torch.equal(found, plainly(model, inputs, max_new_tokens=NEW))
    assert [vars(layer).get(AGREES) for layer in decoder_layers(model)] == [{1: True}, {1: False}, {1: True}]
    assert len(layers) == 1 + 2 * (NEW - 1)
    generate(model, inputs, max_new_tokens=NEW)
    assert len(layers) == 1 + 4 * (NEW - 1)


@pytest.mark.parametrize("half", ["_attend", "_feed"])
def test_experts_agree_by_halves(half: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A difference on either side of the router is seen, though the experts that it chooses may differ by rounding."""
    model = quantized(make("mixtral"))
    hb.accelerate(model, experts="nf4")
    compute = getattr(fused._Layer, half)

    def other(self: Any, x: Tensor, **kwargs: Any) -> Any:
        found = compute(self, x, **kwargs)
        return None if found is None else x + 0.6 * (found - x)

    monkeypatch.setattr(fused._Layer, half, other)
    with pytest.warns(UserWarning, match="leaves MixtralDecoderLayer to transformers"):
        generate(model, prompt(2, 9), max_new_tokens=NEW)
    assert [vars(layer).get(AGREES) for layer in decoder_layers(model)] == [{1: False}] * 3


def test_what_is_left_alone() -> None:
    """Layers with anything in them that transformers did not make, or that somebody listens to."""
    model = quantized(make("llama"))
    first, second, third = decoder_layers(model)
    handle = first.self_attn.register_forward_hook(lambda module, args, output: None)
    second.mlp.act_fn = nn.Tanh()
    third.input_layernorm.forward = lambda x: -x
    assert not decoder_layers(model)
    handle.remove()
    assert decoder_layers(model) == [first]
    handle = first.mlp.down_proj.register_forward_hook(lambda module, args, output: None)
    with fused_layers(model, StepAttention()):
        assert "forward" not in vars(first)
    handle.remove()
    with fused_layers(model, StepAttention()):
        assert isinstance(vars(first)["forward"], fused._Layer)
        assert isinstance(vars(model.model.norm)["forward"], outside.NormOutside)
        assert isinstance(vars(model.lm_head)["forward"], outside.Head)
        assert "forward" not in vars(second)
    assert "forward" not in vars(first)
    assert not isinstance(vars(model.model.norm).get("forward"), outside.NormOutside)
    hb.restore(model)
    with fused_layers(model, StepAttention()):  # no projection is computed by halfbyte
        assert "forward" not in vars(first)
    assert norm_of(first.mlp) is None
    assert layer_of(model.model) is None


def test_hidden_states_are_still_told(layers: list[int]) -> None:
    model = quantized(make("llama"))
    inputs = prompt(2, 9)
    wanted = {"output_hidden_states": True, "return_dict_in_generate": True, "max_new_tokens": 4}
    found, right = generate(model, inputs, **wanted), plainly(model, inputs, **wanted)
    for ours, theirs in zip(found.hidden_states, right.hidden_states, strict=True):
        for one, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_agree() -> None:
    x, added = torch.randn(2, 1, 64, dtype=torch.float64), torch.randn(2, 1, 64, dtype=torch.float64)
    theirs = (x + added).bfloat16()
    assert agree(x.bfloat16(), (x + added * 1.01).bfloat16(), theirs)
    assert not agree(x.bfloat16(), (x + added * 1.2).bfloat16(), theirs)
    assert not agree(x.bfloat16(), theirs.float(), theirs)
    assert not agree(x.bfloat16(), theirs, (theirs,))
    theirs[1] = float("nan")  # what fills up a bucket
    assert agree(x.bfloat16(), (x + added).bfloat16(), theirs)
    assert not agree(x.bfloat16(), torch.full_like(theirs, float("nan")), theirs)
