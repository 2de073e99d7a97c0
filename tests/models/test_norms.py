"""Norms in training: torch's kernel, which rounds once, where no GPU is through what it is made of."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import halfbyte as hb
from halfbyte.measure.error import relative_error
from halfbyte.models import norms
from halfbyte.models.regions import compiled_regions, is_region

pytestmark = pytest.mark.skipif(norms._rms_norm is None, reason="needs torch 2.9, which has the kernel")


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(norms, "ON_CPU", True)


def norm_of(model: nn.Module) -> Any:
    return next(module for module in model.modules() if norms.supports(module))


def is_applied(module: nn.Module) -> bool:
    return "forward" in vars(module)


@pytest.mark.parametrize("autocast", [False, True])
def test_results_and_gradients(load: Any, autocast: bool) -> None:
    """At most as far from float64 as the module's own are, and in its dtypes."""
    model = load().train()
    norm = norm_of(model)
    generator = torch.Generator().manual_seed(0)
    norm.weight.data = 1 + 0.1 * torch.randn(norm.weight.shape, generator=generator).to(norm.weight)
    x = torch.randn(5, 9, len(norm.weight), generator=generator).to(norm.weight)
    upstream = torch.randn(x.shape, generator=generator).to(x)

    def run() -> tuple[Tensor, ...]:
        inputs = x.clone().requires_grad_()
        norm.weight.grad = None
        with torch.autocast(x.device.type, torch.bfloat16, enabled=autocast):
            y = norm(inputs)
        y.backward(upstream)
        return y.detach(), inputs.grad, norm.weight.grad  # type: ignore[return-value]

    norm.weight.requires_grad_()
    theirs = run()
    hb.accelerate(model)
    assert is_applied(norm)
    ours = run()
    exact = [tensor.detach().double().requires_grad_() for tensor in (x, norm.weight)]
    y = exact[1] * exact[0] * (exact[0].square().mean(-1, keepdim=True) + norm.variance_epsilon).rsqrt()
    y.backward(upstream.double())
    for mine, other, right in zip(ours, theirs, (y.detach(), exact[0].grad, exact[1].grad), strict=True):
        assert mine.dtype == other.dtype
        assert right is not None
        assert relative_error(mine, right) <= 1.05 * relative_error(other, right)
    assert relative_error(ours[0], y.detach()) < 0.8 * relative_error(theirs[0], y.detach())  # rounded once, not twice


def test_what_is_not_trained_keeps_its_bits(load: Any) -> None:
    model = load().eval()
    norm = norm_of(model)
    x = torch.randn(3, len(norm.weight)).to(norm.weight)
    before = norm(x)
    hb.accelerate(model)
    assert torch.equal(norm(x), before)
    model.train()
    with torch.no_grad():
        assert torch.equal(norm(x), before)
    assert torch.equal(norm(x.double()), type(norm).forward(norm, x.double()))  # of another dtype than the weight
    hb.restore(model)
    assert not is_applied(norm)


def test_a_norm_that_others_have_changed_is_left_alone(load: Any) -> None:
    model = load().train()
    norm = norm_of(model)
    norm.forward = lambda x: x
    hb.accelerate(model)
    x = torch.randn(2, len(norm.weight)).to(norm.weight)
    assert norm(x) is x
    hb.restore(model)
    assert norm(x) is x


def test_norms_of_another_formula_are_not_taken() -> None:
    from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
    from transformers.models.llama.modeling_llama import LlamaRMSNorm
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

    class OfTheUser(LlamaRMSNorm):
        pass

    assert norms.supports(LlamaRMSNorm(8))
    assert norms.supports(Qwen3RMSNorm(8))
    assert not norms.supports(Gemma3RMSNorm(8))
    assert not norms.supports(OfTheUser(8))
    assert not norms.supports(nn.LayerNorm(8))


def test_a_capture_compiles_what_the_class_computes_and_puts_ours_back(load: Any) -> None:
    model = load()
    hb.accelerate(model)
    norm = norm_of(model)
    mine = norm.forward
    assert is_region(norm)
    with compiled_regions(model):
        assert norm.forward is not mine
    assert norm.forward is mine


def test_an_operator_of_that_name_that_is_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch 2.8 has one, with one result, for Apple's GPUs."""
    assert norms._fused() is not None
    schema = SimpleNamespace(returns=["Tensor"])
    other = SimpleNamespace(default=SimpleNamespace(_schema=schema))
    monkeypatch.setattr(torch.ops.aten, "_fused_rms_norm", other)
    assert norms._fused() is None
