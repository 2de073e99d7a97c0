"""Nested ("double quantized") scales as bitsandbytes stores them: a scale is one byte.

    absmax[b] = code2[q[b]] * absmax2[b // 256] + offset          a rounded multiply, then a rounded add

Source: QLoRA, arXiv 2305.14314, and the behaviour of bitsandbytes 0.50.
"""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING

from halfbyte.formats.constants import kept
from halfbyte.formats.spec import fp32

if TYPE_CHECKING:
    import torch

NESTED_BLOCK_SIZE = 256


@cache
def dynamic_values() -> tuple[float, ...]:
    """bitsandbytes' signed 8-bit "dynamic" code, 256 fp32 numbers ascending: what nested scales are written in.

    Seven decades; decade i, counted from the smallest, is cut into 2**i equal parts whose middles are the values, with
    both signs; then 0 and 1. Source: 8-bit Approximations for Parallelism in Deep Learning, arXiv 1511.04561.
    """
    values = [0.0, 1.0]
    for decade in range(7):
        parts = 2**decade
        # In the fp32 steps of torch.linspace, which bitsandbytes calls: from either end towards the middle.
        first, step = fp32(0.1), fp32((1 - fp32(0.1)) / parts)
        edges = [fp32(first + step * i) for i in range(parts // 2 + 1)]
        edges += [fp32(1 - step * (parts - i)) for i in range(parts // 2 + 1, parts + 1)]
        for low, high in pairwise(edges):
            value = fp32(fp32(10.0 ** (decade - 6)) * fp32(fp32(low + high) / 2))
            values += [value, -value]
    return tuple(sorted(values))


@kept
def dynamic_code(device: torch.device) -> torch.Tensor:
    """`dynamic_values` as a tensor, fp32 [256], on `device`; one tensor per device, never to be written to."""
    import torch

    return torch.tensor(dynamic_values(), dtype=torch.float32, device=device)
