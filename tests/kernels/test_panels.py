"""The dense product on a CPU, a panel of W at a time."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch.nn import functional

import halfbyte as hb
from halfbyte import eager, eager_experts, experts
from halfbyte.kernels.dequantize import cpu
from halfbyte.kernels.linear import panels

pytest.importorskip("numba")
KINDS = [("nf4", {"nested": True}), ("fp4", {"nested": False, "block_size": 128}), ("int4", {"group_size": 32})]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def part_of(q: hb.QuantizedWeight, out: torch.Tensor, first: int) -> None:
    cpu.dequantize(q.packed, q.scale, q.nested, q.spec, q.block_size, out, first)


@pytest.fixture
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(panels, "WEIGHTS", 2000)
    monkeypatch.setattr(cpu, "GRAIN", 256)


@pytest.mark.parametrize(("format", "options"), KINDS, ids=str)
@pytest.mark.parametrize(("n", "k"), [(300, 96), (131, 256), (700, 64)])
def test_a_part_has_the_bits_of_the_whole(format: str, options: dict[str, object], n: int, k: int) -> None:
    q = hb.quantize(torch.randn(n, k), format, **options)
    whole, step = hb.dequantize(q), q.block_size
    for first, last in ((0, 5 * step), (7 * step, 8 * step), (n * k // 2 // step * step, n * k)):
        part = torch.full((last - first + 3,), 7.0)[: last - first]
        part_of(q, part, first)
        assert torch.equal(part, whole.view(-1)[first:last])


@pytest.mark.usefixtures("_small")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("format", "options"), KINDS, ids=str)
@pytest.mark.parametrize(("n", "k"), [(300, 96), (131, 256), (197, 36), (5000, 1)])
def test_panels(dtype: torch.dtype, format: str, options: dict[str, object], n: int, k: int) -> None:
    """Blocks that go over the ends of rows, a last panel that is shorter, x of any strides, a bias."""
    if format == "int4" and k % 32:
        pytest.skip("groups lie within rows")
    q = hb.quantize(torch.randn(n, k), format, **options)
    dense = hb.dequantize(q, dtype)
    rows = panels.panel_rows(n, k, q.block_size, 512)
    assert 0 < rows < n
    assert rows * k % q.block_size == 0
    for x in (torch.randn(70, k), torch.randn(3, 5, k), torch.randn(k, 70).mT, torch.randn(0, k)):
        given, bias = x.to(dtype), torch.randn(n).to(dtype)
        out = torch.full((*x.shape[:-1], n), 7.0, dtype=dtype)
        panels.linear(given, partial(part_of, q), bias, out, rows)
        operands = given.double(), dense.double(), bias.double()
        right, bound = functional.linear(*operands), functional.linear(*map(torch.abs, operands))
        assert ((out.double() - right).abs() <= 4 * torch.finfo(dtype).eps * bound).all()


@pytest.mark.usefixtures("_small")
def test_no_dense_weight_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a product with many rows on a CPU."""
    q, x = hb.quantize(torch.randn(300, 64)), torch.randn(1500, 64)
    right = functional.linear(x, hb.dequantize(q))
    monkeypatch.setattr(eager, "dequantize", None)  # of a whole weight
    torch.testing.assert_close(hb.linear(x, q), right)


@pytest.mark.usefixtures("_small")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_sixteen_bits_in_fp32(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """On CPUs where torch is slow in 16 bits: the product and its gradient are those in fp32, rounded once; so are
    those of experts."""
    for module in (eager, eager_experts):
        monkeypatch.setattr(module, "cpu_capability", lambda: "AVX2")
    q, bias = hb.quantize(torch.randn(300, 64)), torch.randn(300).to(dtype)
    x, grad = torch.randn(2, 50, 64).to(dtype).requires_grad_(), torch.randn(2, 50, 300).to(dtype)
    wide = x.detach().float().requires_grad_()
    y, right = hb.linear(x, q, bias), hb.linear(wide, q, bias.float())
    y.backward(grad)
    right.backward(grad.float())
    assert torch.equal(y, right.to(dtype))
    assert x.grad is not None
    assert wide.grad is not None
    assert torch.equal(x.grad, wide.grad.to(dtype))
    stack, expert = hb.quantize(torch.randn(2, 40, 64)), torch.arange(100) % 2
    rows = x.detach().view(100, 64)
    found = experts.grouped_linear(rows, stack, expert)
    assert torch.equal(found, experts.grouped_linear(rows.float(), stack, expert).to(dtype))


def test_few_large_panels() -> None:
    assert panels.panel_rows(14336, 4096, 64, 2**21) == 1024
    assert panels.panel_rows(14336, 4096, 64, 2**24) == 4096
    assert panels.panel_rows(1500, 4096, 64, 2**21) == 1500
    assert panels.panel_rows(14337, 4100, 64, 2**21) % 16 == 0
    assert panels.panel_rows(10, 0, 64, 2**21) == 10
