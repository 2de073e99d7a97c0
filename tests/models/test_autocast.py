"""Models under torch.autocast, loaded by a HalfbyteConfig and accelerated: dtypes and numbers of the dense model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import halfbyte as hb
from halfbyte.models import projections
from halfbyte.nn import Linear4bit

transformers = pytest.importorskip("transformers")

# OPT and GPT-2 were written for fp16 and fp32: fp32 norms between layers, weights that are stored transposed (Conv1D).
FAMILIES: dict[str, dict[str, Any]] = {
    "opt": {
        "vocab_size": 256, "hidden_size": 64, "ffn_dim": 128, "num_hidden_layers": 2, "num_attention_heads": 2,
        "word_embed_proj_dim": 64, "max_position_embeddings": 64,
    },
    "gpt2": {"vocab_size": 256, "n_embd": 64, "n_layer": 2, "n_head": 2, "n_positions": 64},
}  # fmt: skip
families = pytest.mark.parametrize("family", FAMILIES)
halves = pytest.mark.parametrize("half", [torch.bfloat16, torch.float16], ids=str)
TOKENS = torch.arange(24).view(2, 12)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Dense fp32 checkpoints of small random models."""
    paths = {}
    for family, sizes in FAMILIES.items():
        torch.manual_seed(0)
        config = transformers.AutoConfig.for_model(family, bos_token_id=0, eos_token_id=None, **sizes)
        paths[family] = tmp_path_factory.mktemp(family)
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(paths[family])
    return paths


def load(path: Path) -> tuple[Any, Any]:
    """The model in 4 bits, and a dense one of the same numbers."""
    config = hb.HalfbyteConfig("nf4", block_size=32)
    options = {"quantization_config": config, "dtype": torch.float32}
    ours = transformers.AutoModelForCausalLM.from_pretrained(path, **options)
    assert sum(isinstance(module, Linear4bit) for module in ours.modules()) == (12 if "opt" in str(path) else 8)
    dense = transformers.AutoModelForCausalLM.from_pretrained(path, **options).dequantize()
    assert not any(isinstance(module, Linear4bit) for module in dense.modules())
    return ours, dense


@pytest.mark.parametrize("accelerated", [False, True])
@families
@halves
def test_forward_and_generate(checkpoints: dict[str, Path], family: str, half: torch.dtype, accelerated: bool) -> None:
    ours, dense = load(checkpoints[family])
    right = dense(TOKENS).logits.detach()
    if accelerated:
        hb.accelerate(ours)
    with torch.no_grad(), torch.autocast("cpu", half):
        found, other = ours(TOKENS).logits, dense(TOKENS).logits
        texts = [model.generate(TOKENS, max_new_tokens=6, do_sample=False, pad_token_id=0) for model in (ours, dense)]
    assert found.dtype is other.dtype
    # The same roundings in the same places; sums are made in another order.
    assert (found - right).norm() <= 1.2 * (other - right).norm() + 1e-6
    assert texts[0].shape == texts[1].shape == (2, 18)
    with torch.no_grad():
        torch.testing.assert_close(ours(TOKENS).logits, right, rtol=1e-4, atol=1e-5)  # without autocast: fp32


@families
@halves
def test_backward(checkpoints: dict[str, Path], family: str, half: torch.dtype) -> None:
    ours, dense = load(checkpoints[family])
    gradients = []
    for model in (ours.train(), dense.train()):
        torch.manual_seed(0)  # of dropout
        with torch.autocast("cpu", half):
            loss = model(TOKENS, labels=TOKENS).loss
        loss.backward()
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    assert gradients[0].keys() <= gradients[1].keys()
    assert any(name.endswith("bias") for name in gradients[0])
    for name, gradient in gradients[0].items():
        assert gradient.dtype is torch.float32
        assert torch.isfinite(gradient).all()
        apart = (gradient - gradients[1][name]).norm() / gradients[1][name].norm().clamp_min(1e-3)
        assert apart <= 0.1, name


@halves
def test_fused_projections_under_autocast(half: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was made for a projection under autocast is taken under autocast alone."""
    monkeypatch.setattr(projections, "ON_CPU", True)
    torch.manual_seed(0)
    parent = nn.Module()
    parent.q_proj, parent.k_proj = Linear4bit(64, 32), Linear4bit(64, 32)
    hb.accelerate(parent)
    x = torch.randn(2, 64)
    with torch.no_grad():
        with torch.autocast("cpu", half):
            first = parent.q_proj(x)
            assert projections.RESULTS in x.__dict__
        second = parent.k_proj(x)
    assert first.dtype is half
    assert second.dtype is torch.float32
    assert torch.equal(second, hb.linear(x, parent.k_proj.weight, parent.k_proj.bias))


@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("compute", [None, torch.float32, torch.float16], ids=str)
@halves
def test_bitsandbytes_goes_by_its_compute_dtype(
    given: torch.dtype, compute: torch.dtype | None, half: torch.dtype
) -> None:
    bnb = pytest.importorskip("bitsandbytes")
    torch.manual_seed(0)
    theirs = bnb.nn.Linear4bit(128, 96, quant_type="nf4", compute_dtype=compute).to("cpu").train()
    ours = bnb.nn.Linear4bit(128, 96, quant_type="nf4", compute_dtype=compute).to("cpu").train()
    ours.weight, ours.bias = theirs.weight, nn.Parameter(theirs.bias.detach().clone())
    assert hb.accelerate(ours).modules
    x = torch.randn(3, 128).to(given)
    results: list[Tensor] = []
    for layer in (theirs, ours):
        leaf = x.clone().requires_grad_()
        with torch.autocast("cpu", half):
            y = layer(leaf)
        y.float().sum().backward()
        results += [y, leaf.grad]
    assert results[0].dtype is results[2].dtype is given
    assert results[1].dtype is results[3].dtype is given
    torch.testing.assert_close(results[2], results[0], rtol=0.05, atol=0.05)
    torch.testing.assert_close(results[3], results[1], rtol=0.05, atol=0.05)
