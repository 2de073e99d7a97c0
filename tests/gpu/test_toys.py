"""Formats that are nothing but data, on a GPU: in every kernel that takes 4-bit weights."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional
from toys import toy as toy

import halfbyte as hb
from halfbyte.formats.spec import Format
from halfbyte.kernels.dequantize import reference as dequantized
from halfbyte.kernels.quantize import reference as quantized
from halfbyte.measure.error import relative_error

from .conftest import DEVICE


@pytest.mark.parametrize("block_size", [32, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_there_and_back(toy: Format, block_size: int, dtype: torch.dtype) -> None:
    weight = torch.randn((257, 320), device=DEVICE).to(dtype)
    q = hb.quantize(weight, toy.name, block_size=block_size)
    packed, scale, out = torch.zeros_like(q.packed), torch.zeros_like(q.scale), torch.empty_like(weight)
    quantized.quantize(weight, toy, block_size, packed, scale, like="cuda")
    # The reciprocal of a scale is approximate on a GPU, so what lies on a midpoint may fall to either side.
    assert (packed != q.packed).float().mean() < 1e-3
    assert torch.equal(scale, q.scale)
    dequantized.dequantize(q.packed, q.scale, None, toy, block_size, out)
    assert torch.equal(hb.dequantize(q), out)


@pytest.mark.parametrize("m", [1, 8, 33, 200, 500])
@pytest.mark.parametrize("shape", [(512, 1024, 64), (512, 1056, 32), (255, 513, 32)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_linear(toy: Format, dtype: torch.dtype, shape: tuple[int, int, int], m: int) -> None:
    """By all kernels of `linear`: rows and shapes choose among them."""
    n, k, block_size = shape
    q = hb.quantize(torch.randn((n, k), device=DEVICE), toy.name, block_size=block_size)
    x, bias = torch.randn((m, k), device=DEVICE).to(dtype), torch.randn(n, device=DEVICE).to(dtype)
    exact = functional.linear(x.double(), hb.dequantize(q, torch.float32).double(), bias.double())
    theirs = functional.linear(x, hb.dequantize(q, dtype), bias)
    assert relative_error(hb.linear(x, q, bias), exact) <= 1.02 * relative_error(theirs, exact)
