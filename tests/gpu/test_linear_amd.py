"""linear's Triton kernels are for AMD GPUs, but Triton compiles them for any: here they run on an NVIDIA GPU.

This says nothing of AMD's compiler, but more than an interpreter does: threads, layouts, matrix cores, rounding.
"""

from __future__ import annotations

import pytest
import torch
from kinds import kinds, quantize
from torch import Tensor
from torch.nn import functional

import halfbyte as hb
from halfbyte.kernels.linear import triton
from halfbyte.measure.error import relative_error as error

from .conftest import DEVICE, F32, every_dtype, poisoned


def multiplied(x: Tensor, q: hb.QuantizedWeight, bias: Tensor | None = None, batch_invariant: bool = False) -> Tensor:
    with poisoned((len(x), q.shape[0]), x.dtype) as out:
        triton.linear(x, q.packed, q.scale, q.nested, q.spec, q.block_size, bias, out, batch_invariant)
    return out


def check(q: hb.QuantizedWeight, m: int, dtype: torch.dtype) -> None:
    n, k = q.shape
    x, bias = torch.randn((m, k), device=DEVICE).to(dtype), torch.randn(n, device=DEVICE).to(dtype)
    right = functional.linear(x.double(), hb.dequantize(q, F32).double(), bias.double())
    dense = functional.linear(x, hb.dequantize(q, dtype), bias)
    # Where both round the same numbers, or nothing but sums, these differ in the order of sums alone.
    slack = 1e-6 if dtype == F32 else 1e-3 * error(dense, right)
    for batch_invariant in (False, True):
        out = multiplied(x, q, bias, batch_invariant)
        assert error(out, right) <= error(dense, right) + slack
        assert torch.equal(out, multiplied(x, q, bias, batch_invariant))


@pytest.mark.parametrize("m", [1, 2, 20, 64, 100])
@every_dtype
@kinds
def test_every_format(format: str, size: int, nested: bool, dtype: torch.dtype, m: int) -> None:
    for n, k in ((512, 4096), (2049, 1024)):
        check(quantize(torch.randn((n, k), device=DEVICE), format, size, nested), m, dtype)


@pytest.mark.parametrize("shape", [(777, 1001), (1000, 1000), (129, 2050)], ids=str)
@every_dtype
def test_rows_that_begin_anywhere(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    for m in (1, 20, 64):
        check(hb.quantize(torch.randn(shape, device=DEVICE)), m, dtype)


@pytest.mark.parametrize("k", [1024, 1001])
@every_dtype
def test_batch_invariant(dtype: torch.dtype, k: int) -> None:
    q, x = hb.quantize(torch.randn((300, k), device=DEVICE)), torch.randn((200, k), device=DEVICE).to(dtype)
    whole = multiplied(x, q, batch_invariant=True)
    for begin, end in ((0, 1), (199, 200), (3, 70), (100, 200)):
        assert torch.equal(multiplied(x[begin:end].clone(), q, batch_invariant=True), whole[begin:end])


@pytest.mark.parametrize("m", [1, 3])
@pytest.mark.parametrize("k", [4096, 4099])
def test_more_than_two_to_the_31_weights(k: int, m: int) -> None:
    n = (1 << 31) // k + 9
    packed = torch.randint(0, 256, ((n * k + 1) // 2,), dtype=torch.uint8, device=DEVICE)
    q = hb.QuantizedWeight("nf4", packed, torch.rand(-(-n * k // 64), device=DEVICE), (n, k), torch.float16, 64)
    dense = hb.dequantize(q)
    for at in (0, 511, k - 1):
        x = torch.zeros((m, k), dtype=torch.float16, device=DEVICE)
        x[:, at] = 1
        torch.testing.assert_close(multiplied(x, q), dense[:, at].expand(m, n), rtol=2e-3, atol=1e-6)
