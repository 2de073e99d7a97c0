"""bf16 as fp16, for GPUs whose tensor cores know no bf16: exact, row by row, and chosen where it is faster."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import halfbyte as hb
from halfbyte import eager
from halfbyte.kernels.common.device import DeviceProperties, properties_for
from halfbyte.kernels.linear import cuda, dispatch, halves, reach
from halfbyte.kernels.linear.problem import Problem
from halfbyte.measure.error import relative_error

BF16, F16 = torch.bfloat16, torch.float16
T4 = properties_for("sm_75", 40)


def numbers(m: int, k: int) -> Tensor:
    """Rows of all sizes that bf16 has, one with an outlier and one of zeros."""
    x = torch.randn(m, k, generator=torch.Generator().manual_seed(0))
    x *= torch.logspace(-37, 36, m).unsqueeze(1)
    x[m // 2, 0] *= 1000
    x[m // 3] = 0
    return x.bfloat16()


def test_conversion() -> None:
    """Exact down to 2^-14 of the largest number of a row, near it below; there and back."""
    x = numbers(40, 200)
    got: list[Tensor] = []
    found = halves.multiply(x, None, lambda rows: got.append(rows) or rows)  # type: ignore[func-returns-value]
    (rows,) = got
    most = x.abs().amax(1, keepdim=True).float()
    full = (most >= 2.0**-125) & (most < 2.0**127)
    assert ((rows.abs().amax(1, keepdim=True) >= 0.5) | ~full)[most > 0].all()
    assert rows.abs().max() <= 2
    near = x.float().abs() >= 2.0**-13 * most
    assert near.float().mean() > 0.5
    assert torch.equal(found[near], x[near])
    assert ((found.float() - x.float()).abs() <= 2.0**-24 * most + 2.0**-8 * x.float().abs() * ~near).all()


@pytest.mark.parametrize("bias", [True, False])
def test_error(bias: bool) -> None:
    """Not above that of a product in bf16; rows are independent of each other, and strides of nothing."""
    weight = torch.randn(96, 256) / 16
    x = torch.randn(30, 256).mul_(torch.logspace(-6, 6, 30).unsqueeze(1)).bfloat16()
    added = torch.randn(96).bfloat16() if bias else None
    multiply = lambda rows: (rows.double() @ weight.half().double().t()).half()  # noqa: E731
    found = halves.multiply(x, added, multiply)
    assert found.dtype is BF16
    right = x.double() @ weight.half().double().t() + (0 if added is None else added.double())
    for row in range(len(x)):
        rounded = relative_error(right[row].bfloat16(), right[row])
        assert relative_error(found[row], right[row]) <= 1.2 * rounded
        assert torch.equal(halves.multiply(x[row], added, multiply), found[row])
    strided = x.t().contiguous().t().view(5, 6, 256)
    assert torch.equal(halves.multiply(strided, added, multiply).view(30, 96), found)


def test_rows_that_are_not_finite() -> None:
    weight, x = torch.randn(8, 64), torch.randn(4, 64).bfloat16()
    x[0, 3], x[1, 5] = torch.inf, torch.nan
    found = halves.multiply(x, None, lambda rows: (rows.float() @ weight.t()).half())
    assert torch.equal(found[0].float(), x[0].float() @ weight.t())
    assert found[0].isinf().all()
    assert found[1].isnan().all()
    assert found[2:].isfinite().all()


def test_when() -> None:
    """Not for the one row that `simt` multiplies at the speed of memory, nor on GPUs with bf16, nor in fp16."""
    weight = Problem(BF16, 14336, 4096, "nf4", 64, torch.uint8, 256)
    found = [dispatch.takes_halves(m, weight, T4, False) for m in (1, 8, 16, 64, 65, 4096)]
    assert found == [False, True, True, True, True, True]
    assert not any(dispatch.takes_halves(m, weight, T4, True) for m in (1, 64, 4096))
    assert not dispatch.takes_halves(64, weight, properties_for("sm_80"), False)
    assert not dispatch.takes_halves(64, replace(weight, dtype=F16), T4, False)
    odd = replace(weight, k=4090)  # no tensor cores then, but torch's with a dense weight
    assert not dispatch.takes_halves(1, odd, T4, False)
    assert dispatch.takes_halves(64, odd, T4, False)


@pytest.mark.parametrize(("properties", "asked"), [(T4, True), (properties_for("sm_80"), False)])
def test_who_is_asked(properties: DeviceProperties, asked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without NVRTC too: torch has no tensor cores for bf16 either."""
    monkeypatch.setattr(cuda, "properties_of", lambda index: properties)
    q = hb.quantize(torch.randn(64, 128))
    for lack in (None, reach.Lack("NVRTC is missing", "install it")):
        monkeypatch.setattr(reach, "without_kernels", lambda properties, lack=lack: lack)
        assert cuda.takes_halves(torch.randn(100, 128).bfloat16(), q, False) == asked
        assert cuda.takes_halves_back(torch.randn(100, 64).bfloat16(), q) == asked
        assert not cuda.takes_halves(torch.randn(100, 128).bfloat16(), q, True)
        assert not cuda.takes_halves(torch.randn(100, 128).half(), q, False)
        assert not cuda.takes_halves_back(torch.randn(100, 64).half(), q)
        assert not cuda.takes_halves(torch.randn(0, 128).bfloat16(), q, False)
        assert not cuda.takes_halves_back(torch.randn(0, 64).bfloat16(), q)


class OnGpu(torch.Tensor):
    """A tensor of the CPU that says that it is on a GPU."""

    is_cuda = True  # type: ignore[assignment]


def test_the_whole_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """linear and its gradient, from bf16 to what multiplies fp16, and back."""
    dtypes: list[torch.dtype] = []

    def product(x: Tensor, q: hb.QuantizedWeight, bias: Tensor | None, batch_invariant: bool) -> Tensor:
        dtypes.append(x.dtype)
        assert bias is None
        return (x.float() @ hb.dequantize(q, torch.float32).t()).to(x.dtype)

    def halved(x: Tensor, *_: Any) -> bool:
        return x.dtype is BF16

    products = SimpleNamespace(
        takes_halves=halved, takes_halves_back=halved, ready=lambda *_: None, linear=product, backward=lambda *_: None
    )
    monkeypatch.setattr(eager, "cuda_products", lambda: products)
    q, x, bias = hb.quantize(torch.randn(64, 128).bfloat16()), torch.randn(3, 5, 128).bfloat16(), torch.randn(64)
    found = eager.linear(x.as_subclass(OnGpu), q, bias.bfloat16(), False)
    dense = hb.dequantize(q, torch.float32)
    assert (found.shape, found.dtype, dtypes) == ((3, 5, 64), BF16, [F16])
    assert relative_error(found, x.double() @ dense.t().double() + bias.bfloat16().double()) < 3e-3
    grad = torch.randn(3, 5, 64).bfloat16()
    back = eager.linear_backward(grad.as_subclass(OnGpu), q)
    assert (back.shape, back.dtype) == ((3, 5, 128), BF16)
    assert relative_error(back, grad.double() @ dense.double()) < 3e-3
