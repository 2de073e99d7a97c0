"""Formats that are nothing but data, in Triton's interpreter: to the bit what the reference gives."""

from __future__ import annotations

import pytest
import torch
from toys import toy as toy

import halfbyte as hb
from halfbyte.formats.spec import Format
from halfbyte.kernels.dequantize import reference as dequantized
from halfbyte.kernels.dequantize import triton as dequantize
from halfbyte.kernels.distance import packed as distance
from halfbyte.kernels.quantize import reference as quantized
from halfbyte.kernels.quantize import triton as quantize


@pytest.mark.parametrize("block_size", [32, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_there_and_back(toy: Format, block_size: int, dtype: torch.dtype) -> None:
    weight = torch.randn(7, 3 * 64).to(dtype)
    weight[0, :64] = 0
    blocks = weight.numel() // block_size
    ours = torch.zeros(weight.numel() // 2, 1, dtype=torch.uint8), torch.zeros(blocks, dtype=torch.float16)
    theirs = tuple(map(torch.zeros_like, ours))
    quantize.quantize(weight, toy, block_size, *ours)
    quantized.quantize(weight, toy, block_size, *theirs, like="cuda")
    assert all(map(torch.equal, ours, theirs))
    out, expected = torch.empty_like(weight), torch.empty_like(weight)
    dequantize.dequantize(*ours, None, toy, block_size, out)
    dequantized.dequantize(*theirs, None, toy, block_size, expected)
    step = 2**-7 if dtype == torch.bfloat16 else 0  # to which the interpreter rounds towards zero
    torch.testing.assert_close(out, expected, rtol=step, atol=0)


def test_linear_and_distances(toy: Format) -> None:
    """A product is one with the dequantized weight where no other kernel is; distances are from the packed bytes."""
    q = hb.quantize(torch.randn(16, 256), toy.name)
    dense, x = torch.empty(16, 256), torch.randn(2, 256)
    dequantize.dequantize(q.packed, q.scale, None, toy, q.block_size, dense)
    torch.testing.assert_close(hb.linear(x, q), x @ dense.T, rtol=1e-4, atol=1e-4)
    out = torch.empty(2, 16)
    distance.distances(x, q, out)
    torch.testing.assert_close(out, torch.cdist(x, dense), rtol=1e-5, atol=1e-5)
