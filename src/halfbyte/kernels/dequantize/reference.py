"""Dequantize in plain torch, on any device: the definition, the fallback where there is no kernel, and what tests use.

Blockwise ("nf4", "fp4"): packed uint8 [(numel + 1) // 2], two weights a byte, the first in the high nibble; one scale
for each `block_size` weights, fp32 or nested.        value = codebook[nibble] * scale
Grouped ("int4"): packed int32 [N, K / 8], scale [N, K / G].        value = (nibble - 8) * scale
Both in fp32, then one rounding to the dtype of `out`. Bytes: about ten times what a kernel moves. Source: formats/.
"""

from __future__ import annotations

import torch
from torch import Tensor

from halfbyte.formats import grouped
from halfbyte.formats.weight import NestedScale


def dequantize_scales(scale: Tensor, nested: NestedScale | None) -> Tensor:
    """The fp32 scale of every block: a rounded multiply, then a rounded add (two torch calls, so never fused)."""
    if nested is None:
        return scale
    absmax = nested.absmax.repeat_interleave(nested.block_size)[: scale.numel()]
    return nested.code[scale.long()] * absmax + nested.offset


def dequantize_blockwise(
    packed: Tensor, scale: Tensor, nested: NestedScale | None, codebook: Tensor, block_size: int, out: Tensor
) -> None:
    """Write the weights of `packed` into `out`: contiguous, fp16, bf16 or fp32, any shape, any number of elements."""
    numel = out.numel()
    octets = packed.reshape(-1)
    nibbles = torch.stack((octets >> 4, octets & 15), dim=1).reshape(-1)[:numel]
    scales = dequantize_scales(scale, nested).repeat_interleave(block_size)[:numel]
    out.view(-1).copy_(codebook[nibbles.long()] * scales)


def dequantize_grouped(packed: Tensor, scale: Tensor, group_size: int, out: Tensor) -> None:
    """Write the weights of int32 `packed` [N, K / 8] and `scale` [N, K / group_size] into `out` [N, K]."""
    shifts = torch.arange(0, 4 * grouped.PER_WORD, 4, dtype=torch.int32, device=packed.device)
    nibbles = (packed.unsqueeze(-1) >> shifts) & 15
    integers = (nibbles - grouped.BIAS).view(out.shape)
    out.copy_(integers.float() * scale.float().repeat_interleave(group_size, dim=1))
