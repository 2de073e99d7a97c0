"""MXFP4 as the OCP Microscaling specification defines it, written from its text in numpy: what tests compare with."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

BLOCK = 32
# Sign, two exponent bits with bias 1, one mantissa bit (section 5.3.3).
E2M1 = [
    (-1) ** (code >> 3) * (2.0 ** ((code >> 1 & 3) - 1) * (1 + (code & 1) / 2) if code & 6 else (code & 1) / 2)
    for code in range(16)
]


def scale_of(byte: int) -> float:
    """E8M0 (section 5.4.1)."""
    return math.nan if byte == 255 else 2.0 ** (byte - 127)


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Packed uint8 [..., K / 2] and scales uint8 [..., K / 32], block by block and weight by weight (section 6.3)."""
    blocks = weight.double().numpy().reshape(-1, BLOCK)
    packed, scales = [], []
    for block in blocks:
        scale = _shared_exponent(np.abs(block))
        codes = [0 if scale == 255 else _nearest_even(value / scale_of(scale)) for value in block]
        packed += [low | high << 4 for low, high in zip(codes[::2], codes[1::2], strict=True)]
        scales.append(scale)
    *sides, k = weight.shape
    return (
        torch.tensor(packed, dtype=torch.uint8).view(*sides, k // 2),
        torch.tensor(scales, dtype=torch.uint8).view(*sides, k // BLOCK),
    )


def _shared_exponent(magnitudes: np.ndarray[Any, Any]) -> int:
    """floor(log2(the largest)) less that of 6, plus the bias; infinity is 2 ** 128 here, and NaN is NaN."""
    largest = magnitudes.max()  # NaN where there is one
    if math.isnan(largest):
        return 255
    if largest == 0:
        return 0
    exponent = 128 if math.isinf(largest) else math.frexp(largest)[1] - 1
    return max(-127, exponent - 2) + 127


def _nearest_even(value: float) -> int:
    """The code whose value is nearest, of two the even one, and at most 6."""
    magnitude = min(abs(value), 6.0)
    code = min(range(8), key=lambda code: (abs(E2M1[code] - magnitude), code & 1))
    return code | 8 * (math.copysign(1, value) < 0)


def dequantize(packed: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """The values [..., K], rounded once. Beyond the largest fp32 number they are infinite."""
    octets = packed.numpy().reshape(-1)
    codes = np.stack((octets & 15, octets >> 4), axis=1).reshape(-1, BLOCK)
    factors = np.array([scale_of(int(byte)) for byte in scales.reshape(-1)])
    values = torch.from_numpy(np.array(E2M1)[codes] * factors[:, None])
    return values.to(torch.float32).to(dtype).view(*scales.shape[:-1], scales.shape[-1] * BLOCK)


def edges(dtype: torch.dtype) -> Tensor:
    """Weights [rows, 32]: midpoints and their neighbours, zeros of both signs, powers of two and what is beside them,
    subnormal and huge numbers, infinities, NaN."""
    torch.manual_seed(0)
    info = torch.finfo(dtype)
    ties = torch.tensor([0.0, 0.25, 0.5, 0.75, 1, 1.25, 1.5, 1.75, 2, 2.5, 3, 3.5, 4, 5, 6, 7, 7.5], dtype=dtype)
    both = torch.cat((ties, -ties))
    around = torch.cat((both, torch.nextafter(both, both + 1), torch.nextafter(both, both - 1)))
    rows = around[torch.randint(0, len(around), (40, BLOCK))]
    rows[:, 0] = 4.0
    exponents = range(-126, 125, 5) if info.max > 1e30 else range(-14, 13)
    powers = [rows.double() * 2.0**exponent for exponent in exponents]
    tiny = torch.randint(-64, 65, (8, BLOCK)).double() * float(info.smallest_normal) * float(info.eps)
    special = torch.zeros(6, BLOCK, dtype=torch.float64)
    special[1] = -0.0
    special[2, 3], special[3, 5], special[4, 7] = math.nan, math.inf, -math.inf
    special[2:5, 8:] = torch.randn(3, BLOCK - 8) * info.max / 8
    special[5, 1], special[5, 2] = math.nan, math.inf
    special[5, 9:] = -1.0
    largest = torch.full((1, BLOCK), info.max, dtype=torch.float64)
    return torch.cat((torch.randn(64, BLOCK).double(), *powers, tiny, special, largest, -largest)).to(dtype)
