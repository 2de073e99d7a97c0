"""RMS norms of a few rows on a CPU: no further from fp64 than transformers' own, and only of what the kernel is for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from halfbyte.kernels.pointwise import cpu
from halfbyte.measure.error import relative_error
from halfbyte.models import norms

BF16 = torch.bfloat16


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[torch.Size]:
    """Shapes of each x that the kernel was called with."""
    found: list[torch.Size] = []
    rms_norm = cpu.rms_norm
    monkeypatch.setattr(cpu, "rms_norm", lambda x, *given: found.append(x.shape) or rms_norm(x, *given))
    return found


def norm_of(k: int, dtype: torch.dtype = BF16) -> Any:
    module = LlamaRMSNorm(k, eps=1e-5).to(dtype).eval().requires_grad_(False)
    module.weight.data = (1 + torch.randn(k) / 4).to(dtype)
    norms.apply(module)
    return module


@pytest.mark.parametrize("dtype", cpu.DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 1, 896), (3, 7), (4096,), (2, 5, 1)], ids=str)
def test_results(shape: tuple[int, ...], dtype: torch.dtype, seen: list[torch.Size]) -> None:
    module, x = norm_of(shape[-1], dtype), (3 * torch.randn(shape)).to(dtype)
    y, theirs = module(x), LlamaRMSNorm.forward(module, x)
    assert seen == [x.shape]
    assert (y.shape, y.dtype, y.is_contiguous()) == (x.shape, dtype, True)
    wide = x.double()
    right = module.weight.double() * wide * (wide.square().mean(-1, keepdim=True) + 1e-5).rsqrt()
    assert relative_error(y, right) <= 1.05 * relative_error(theirs, right) + 1e-7
    assert (y != theirs).float().mean() < 0.02  # both round twice


def test_numbers_at_the_ends() -> None:
    for dtype in cpu.DTYPES:
        module = norm_of(4, dtype)
        for row in ([0, 0, 0, 0], [float("inf"), 1, 0, 0], [float("nan"), 1, 2, 3], [1e-30, 0, 0, 1e-30]):
            x = torch.tensor(row, dtype=dtype)
            torch.testing.assert_close(module(x), LlamaRMSNorm.forward(module, x), equal_nan=True)


def test_what_goes_on_as_it_did(seen: list[torch.Size]) -> None:
    wide = norm_of(8, torch.float32)
    assert torch.equal(wide(torch.ones(2, 8)), LlamaRMSNorm.forward(wide, torch.ones(2, 8)))
    module, x = norm_of(8), torch.randn(4, 8).to(BF16)
    many = torch.randn(cpu.MOST // 8 + 1, 8).to(BF16)
    for given in (torch.randn(8, 4).to(BF16).t(), torch._neg_view(x), x.float(), many, x[:0]):
        assert torch.equal(module(given), LlamaRMSNorm.forward(module, given))
    needs = x.clone().requires_grad_()
    module(needs).sum().backward()
    assert needs.grad is not None
    assert torch.equal(torch.func.vmap(module)(x), LlamaRMSNorm.forward(module, x))
    _, tangent = torch.func.jvp(module, (x.float().to(BF16),), (x,))
    assert tangent.isfinite().all()
    assert seen == []
    with torch.no_grad():
        module(needs)
    assert seen == [x.shape]


def test_a_wrong_size_is_the_modules_error(seen: list[torch.Size]) -> None:
    with pytest.raises(RuntimeError, match="must match"):
        norm_of(8)(torch.randn(2, 6).to(BF16))
    assert seen == []


def test_without_numba(monkeypatch: pytest.MonkeyPatch, seen: list[torch.Size]) -> None:
    monkeypatch.setattr(norms, "has_numba", lambda: False)
    module, x = norm_of(8), torch.randn(4, 8).to(BF16)
    assert torch.equal(module(x), LlamaRMSNorm.forward(module, x))
    assert seen == []


def test_a_parameter_in_place_of_x(seen: list[torch.Size]) -> None:
    """What is more than a plain tensor goes on as it did, as do subclasses."""

    class Named(Tensor):
        pass

    module = norm_of(8)
    for x in (
        nn.Parameter(torch.randn(2, 8).to(BF16), requires_grad=False),
        torch.randn(2, 8).to(BF16).as_subclass(Named),
    ):
        assert torch.equal(module(x), LlamaRMSNorm.forward(module, x))
    assert seen == []
