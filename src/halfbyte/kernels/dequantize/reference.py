"""Dequantize in plain torch, on any device: the definition, the fallback where there is no kernel, and what tests use.

packed and scale as formats/spec.py describes them, scale plain or nested.        value = codebook[nibble] * scale
In fp32, then one rounding to the dtype of `out`. Bytes: about ten times what a kernel moves. Source: formats/.
"""

from __future__ import annotations

import torch
from torch import Tensor

from halfbyte.formats.spec import Format, codebook_tensor, exponents_tensor
from halfbyte.formats.weight import NestedScale


def dequantize_scales(scale: Tensor, nested: NestedScale | None, format: Format) -> Tensor:
    """The scale of every block, fp32; where it is nested, a rounded multiply, then a rounded add: two torch calls."""
    if format.has_exponents:
        return exponents_tensor(scale.device)[scale.long()]
    if nested is None:
        return scale.float()
    absmax = nested.absmax.repeat_interleave(nested.block_size)[: scale.numel()]
    return nested.code[scale.long()] * absmax + nested.offset


def dequantize(
    packed: Tensor, scale: Tensor, nested: NestedScale | None, format: Format, block_size: int, out: Tensor
) -> None:
    """Write the weights of `packed` into `out`: contiguous, fp16, bf16 or fp32, the shape of the dense weight."""
    numel = out.numel()
    octets = packed.view(torch.uint8).reshape(-1)
    halves = (octets & 15, octets >> 4) if format.low_first else (octets >> 4, octets & 15)
    nibbles = torch.stack(halves, dim=1).reshape(-1)[:numel]
    scales = dequantize_scales(scale, nested, format).reshape(-1).repeat_interleave(block_size)[:numel]
    out.view(-1).copy_(codebook_tensor(format, packed.device)[nibbles.long()] * scales)
