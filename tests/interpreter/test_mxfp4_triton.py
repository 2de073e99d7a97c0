"""MXFP4 in Triton's interpreter, against the OCP specification."""

from __future__ import annotations

import ocp
import pytest
import torch

from halfbyte.formats.mxfp4 import MXFP4
from halfbyte.formats.weight import FLOAT_DTYPES
from halfbyte.kernels.dequantize import triton as dequantize
from halfbyte.kernels.quantize import triton as quantize

dtypes = pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)


@dtypes
def test_quantize(dtype: torch.dtype) -> None:
    weight = ocp.edges(dtype)
    if dtype == torch.bfloat16:  # whose subnormal numbers the interpreter misreads
        weight[weight.abs() < torch.finfo(dtype).smallest_normal] = 0
    packed, scale = ocp.quantize(weight)
    ours, our_scale = torch.full_like(packed, 77), torch.full_like(scale, 77)
    quantize.quantize(weight, MXFP4, 32, ours, our_scale)
    assert torch.equal(our_scale, scale)
    assert torch.equal(ours, packed)


@dtypes
def test_every_byte_with_every_scale(dtype: torch.dtype) -> None:
    packed = torch.arange(256, dtype=torch.uint8).repeat(256, 1)
    scale = torch.arange(256, dtype=torch.uint8)[:, None].repeat(1, 16)
    out = torch.full((256, 512), 12345.0, dtype=dtype)
    dequantize.dequantize(packed, scale, None, MXFP4, 32, out)
    right = ocp.dequantize(packed, scale, dtype)
    if dtype == torch.bfloat16:  # where the interpreter writes 0 for subnormal numbers
        tiny = right.abs() < torch.finfo(dtype).smallest_normal
        out, right = torch.where(tiny, 0, out), torch.where(tiny, 0, right)
    torch.testing.assert_close(out, right, rtol=0, atol=0, equal_nan=True)
