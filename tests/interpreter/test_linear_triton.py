"""linear's Triton kernels in Triton's interpreter: every format, dtype and way through W, and nothing past the end.

The interpreter turns fp32 into bf16 by leaving bits out, where a GPU rounds. So errors are those of an fp32 result, and
one of 16 bits is compared with it, bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from kinds import KINDS, quantize
from pairs import every_pair
from torch import Tensor
from torch.nn import functional
from toys import toy as toy
from triton.runtime import interpreter

import halfbyte as hb
from halfbyte import eager
from halfbyte.formats.spec import Format
from halfbyte.formats.weight import FLOAT_DTYPES
from halfbyte.kernels.common.device import DeviceProperties
from halfbyte.kernels.dequantize import cpu
from halfbyte.kernels.linear import reference, triton, triton_plan
from halfbyte.kernels.linear.plan import plan as plan_linear
from halfbyte.kernels.linear.triton_plan import TilePlan, is_valid
from halfbyte.measure.error import relative_error

pytestmark = pytest.mark.filterwarnings("ignore:(invalid value|overflow).*:RuntimeWarning")
POISON = 768.0
MARGIN = 64
SMALL = DeviceProperties("hip", 0, 4)  # with few multiprocessors, so there are few programs to interpret
F16, BF16, F32 = FLOAT_DTYPES

dtypes = pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)


class Bounds:
    """What the interpreter loads and stores with; no address may lie outside of the tensors of a launch."""

    def __init__(self, real: Any) -> None:
        self.real, self.tensors, self.seen = real, [], 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)

    def check(self, addresses: np.ndarray, mask: np.ndarray, size: int) -> None:
        used = addresses[mask].astype(np.int64)
        inside = np.zeros(used.shape, bool)
        for tensor in self.tensors:
            first = tensor.data_ptr()
            inside |= (used >= first) & (used + size <= first + tensor.numel() * tensor.itemsize)
        assert inside.all()
        self.seen += used.size

    def load(self, addresses: np.ndarray, mask: np.ndarray, other: np.ndarray, dtype: np.dtype) -> np.ndarray:
        self.check(addresses, mask, dtype.itemsize)
        return self.real.load(addresses, mask, other, dtype)

    def store(self, addresses: np.ndarray, value: np.ndarray, mask: np.ndarray) -> None:
        self.check(addresses, mask, value.itemsize)
        self.real.store(addresses, value, mask)


@pytest.fixture(autouse=True)
def bounds(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bounds]:
    torch.manual_seed(0)
    bounds = Bounds(interpreter._interpreter)
    monkeypatch.setattr(interpreter, "_interpreter", bounds)

    def launch(kernel: Any, index: int, arguments: tuple[Any, ...], *rest: Any) -> None:
        bounds.tensors = [value for value in arguments if isinstance(value, Tensor)]
        real(kernel, index, arguments, *rest)

    real = triton.launch
    monkeypatch.setattr(triton, "launch", launch)
    yield bounds
    assert bounds.seen


def run(
    x: Tensor,
    q: hb.QuantizedWeight,
    bias: Tensor | None = None,
    plan: TilePlan | None = None,
    dtype: torch.dtype = F32,
    batch_invariant: bool = False,
) -> Tensor:
    """y in `dtype`, of a plan for a small GPU unless there is another; nothing behind its end was written."""
    (m, k), n = x.shape, q.shape[0]
    plan = plan or triton_plan.plan(m, n, k, x.dtype, q.block_size, SMALL, batch_invariant)
    assert is_valid(plan, m, k, q.block_size)
    buffer = torch.full((m * n + MARGIN,), POISON, dtype=dtype)
    out = buffer[: m * n].view(m, n)
    triton.linear(x, q.packed, q.scale, q.nested, q.spec, q.block_size, bias, out, plan=plan)
    assert (buffer[m * n :] == POISON).all()
    return out


def check(x: Tensor, q: hb.QuantizedWeight, bias: Tensor | None = None, plan: TilePlan | None = None) -> None:
    """The error is at most that of the dense weight, a second call gives the same bits, and the result is rounded."""
    wide = run(x, q, bias, plan)
    right = reference.linear_exact(x, hb.dequantize(q, F32), bias)
    dense = functional.linear(x.float(), hb.dequantize(q, x.dtype).float(), None if bias is None else bias.float())
    # Where no dense weight is rounded, two sums in fp32 are left, which differ in their order.
    assert relative_error(wide, right) <= relative_error(dense, right) + 2e-7
    again = run(x, q, bias, plan, x.dtype)
    expected = (wide.view(torch.int32) & -65536).view(F32) if x.dtype == BF16 else wide
    assert torch.equal(again, expected.to(x.dtype))


def sample(m: int, n: int, k: int, dtype: torch.dtype, kind: tuple[str, int, bool]) -> tuple[Tensor, ...]:
    q = quantize(torch.randn(n, k).to(dtype), *kind)
    return torch.randn(m, k).to(dtype), q, torch.randn(n).to(dtype)


@every_pair({"format, size, nested": KINDS, "dtype": FLOAT_DTYPES, "m": [1, 33]})
def test_formats(format: str, size: int, nested: bool, dtype: torch.dtype, m: int) -> None:
    """Nested scales of more than one entry, a last tile that is not full, and for some rows of x K in two parts."""
    x, q, bias = sample(m, 37, 512, dtype, (format, size, nested))
    check(x, q, bias if m > 1 else None)


@pytest.mark.parametrize("m", [1, 3])
@dtypes
def test_toys(toy: Format, dtype: torch.dtype, m: int) -> None:
    x, q, bias = sample(m, 33, 384, dtype, (toy.name, toy.block_size, False))
    check(x, q, bias)


@pytest.mark.parametrize(("dtype", "nested"), [(F16, True), (BF16, False), (F32, True)], ids=str)
def test_rows_that_begin_anywhere(dtype: torch.dtype, nested: bool) -> None:
    """In the middle of a block, and for odd K of a byte."""
    for m, n, k in ((1, 1, 1), (2, 37, 99), (3, 5, 1001), (1, 33, 600), (17, 3, 2)):
        x, q, bias = sample(m, n, k, dtype, ("nf4", 64, nested))
        check(x, q, bias)


PLANS = [
    (1, 320, TilePlan("sum", 1, 8, 64, 2, 3, 4)),
    (1, 320, TilePlan("sum", 1, 4, 1024, 1, 1, 1)),
    (70, 320, TilePlan("product", 32, 32, 32, 4, 3, 4)),
    (20, 320, TilePlan("product", 16, 64, 64, 1, 5, 2)),
    (5, 100, TilePlan("any", 16, 32, 16, 3, 3, 4)),
    (5, 320, TilePlan("any", 16, 16, 64, 5, 1, 4)),
]


@pytest.mark.parametrize(("m", "k", "plan"), PLANS)
@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
def test_plans(m: int, k: int, plan: TilePlan, dtype: torch.dtype) -> None:
    x, q, bias = sample(m, 70, k, dtype, ("fp4", 64, True))
    check(x, q, bias, plan)


@dtypes
def test_identity_gives_the_weights(dtype: torch.dtype) -> None:
    for format in ("int4", "mxfp4"):
        q = hb.quantize(torch.randn(24, 128).to(dtype), format)
        whole = run(torch.eye(128, dtype=dtype), q)
        assert torch.equal(whole.t(), hb.dequantize(q, F32))
        assert torch.equal(torch.cat([run(row[None], q) for row in torch.eye(128, dtype=dtype)[:3]]), whole[:3])


@pytest.mark.parametrize(("dtype", "k"), [(F16, 512), (BF16, 99), (F32, 512), (F32, 99)], ids=str)
def test_batch_invariant(dtype: torch.dtype, k: int) -> None:
    """A row keeps its place in its tile here, for numpy's products, unlike matrix cores, are not the same at each."""
    x, q, bias = sample(70, 40, k, dtype, ("nf4", 64, True))
    whole = run(x, q, bias, batch_invariant=True)
    for begin, end in ((0, 1), (0, 33), (32, 70), (64, 65)):
        assert torch.equal(run(x[begin:end], q, bias, batch_invariant=True), whole[begin:end])
    other = torch.full_like(x, torch.nan)
    other[50] = x[50]
    assert torch.equal(run(other, q, bias, batch_invariant=True)[50], whole[50])


def test_special_numbers() -> None:
    """NaN and infinity of x or of a scale reach those results that they belong to, and no others."""
    q = hb.quantize(torch.randn(6, 128), block_size=64, nested=False)
    q.scale[2 * 2], q.scale[2 * 3 + 1] = torch.nan, torch.inf
    for m, k in ((1, 128), (4, 128), (4, 96)):
        if k == 96:
            q = hb.quantize(torch.randn(6, 96), block_size=64, nested=False)
            q.scale[0] = torch.nan
        x = torch.randn(m, k).half()
        x[m - 1, 5] = torch.inf
        right = reference.linear_exact(x, hb.dequantize(q, F32))
        assert torch.equal(run(x, q).isfinite(), right.isfinite())
        assert not right.isfinite().all()


@pytest.mark.parametrize("rows_at_once", [2, 1024])
def test_rows_go_in_turns(rows_at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton, "ROWS_AT_ONCE", rows_at_once)
    x, q, bias = sample(5, 16, 128, F16, ("nf4", 64, False))
    check(x, q, bias)


def test_nothing_to_do() -> None:
    assert run(torch.empty(0, 64), hb.quantize(torch.randn(8, 64))).shape == (0, 8)
    assert run(torch.empty(3, 64), hb.quantize(torch.empty(0, 64))).shape == (3, 0)
    q, bias = hb.quantize(torch.empty(4, 0)), torch.arange(4.0)
    for m in (1, 3):
        assert torch.equal(run(torch.empty(m, 0), q, bias), bias.expand(m, 4))


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_public_function(batch_invariant: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """`halfbyte.linear` as it would be on an AMD GPU."""
    calls: list[int] = []

    def linear(x: Tensor, *arguments: Any) -> None:
        calls.append(len(x))
        triton.linear(x, *arguments)

    monkeypatch.setattr(eager, "plan_linear", lambda m, n, k, dtype, *rest: plan_linear(m, n, k, dtype, "hip", rest[1]))
    q, bias = hb.quantize(torch.randn(24, 128), nested=True), torch.randn(24)
    kernels = SimpleNamespace(linear=linear, dequantize=cpu.dequantize, GRAIN=cpu.GRAIN)
    monkeypatch.setattr(eager, "backend", lambda *_: kernels)
    for shape in ((128,), (2, 3, 128), (128, 7), (65, 128)):
        x = torch.randn(shape)
        x = x.t() if shape[-1] == 7 else x
        right = reference.linear_exact(x, hb.dequantize(q), bias)
        y = hb.linear(x, q, bias, batch_invariant=batch_invariant)
        assert y.shape == right.shape
        assert relative_error(y, right) < 1e-6
    assert calls == [1, 6, 7] + [65] * batch_invariant
