"""NF4 and FP4 as bitsandbytes stores them: sixteen values, and one scale ("absmax") for every block of weights.

A weight of any shape is flattened row-major and cut into blocks of `block_size` weights. A byte holds two weights, the
first in its high nibble; an odd last weight shares its byte with a nibble that means nothing.

    value = codebook[nibble] * absmax[index // block_size]        in fp32, then one rounding to the output dtype

With nested ("double quantized") scales, absmax itself is one byte a block:

    absmax[b] = code2[q[b]] * absmax2[b // 256] + offset          a rounded multiply, then a rounded add

How a weight becomes a nibble is not quite one rule: bitsandbytes compares with midpoints, but its CUDA kernels and its
CPU code disagree in the last digits of FP4's midpoints, on the sign of FP4's zero, and on blocks that hold nothing but
zeros. Each of our kernels follows the bitsandbytes of its own device. Source: QLoRA, arXiv 2305.14314, and the
behaviour of bitsandbytes 0.50.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

BLOCK_SIZES = (32, 64, 128, 256, 512, 1024, 2048, 4096)
NESTED_BLOCK_SIZE = 256


@dataclass(frozen=True)
class BlockwiseFormat:
    """Sixteen values and the rule that rounds to them.

    codebook: the value of each nibble; every one is exact in fp32.
    ascending: the nibbles in order of their values, as bitsandbytes' CPU code orders them (FP4 has two zeros).
    cuda_thresholds: what bitsandbytes' CUDA kernels compare a scaled weight with. For NF4 these are all fifteen
        midpoints; for FP4 the seven of the magnitudes, the sign being taken apart first. Exact in fp32, every one.
    """

    name: str
    codebook: tuple[float, ...]
    ascending: tuple[int, ...]
    cuda_thresholds: tuple[float, ...]

    @property
    def signed_magnitude(self) -> bool:
        """True where the high bit of a nibble is a sign (FP4), False where nibbles ascend with their values (NF4)."""
        return self.name == "fp4"


NF4 = BlockwiseFormat(
    name="nf4",
    codebook=(
        -1.0,
        -0.6961928009986877,
        -0.5250730514526367,
        -0.39491748809814453,
        -0.28444138169288635,
        -0.18477343022823334,
        -0.09105003625154495,
        0.0,
        0.07958029955625534,
        0.16093020141124725,
        0.24611230194568634,
        0.33791524171829224,
        0.44070982933044434,
        0.5626170039176941,
        0.7229568362236023,
        1.0,
    ),
    ascending=tuple(range(16)),
    # Several are the fp32 number below the midpoint: bitsandbytes' source writes midpoints as decimals cut off after 16
    # digits, which a compiler rounds once, down, where two roundings by way of fp64 would reach the even neighbour.
    cuda_thresholds=(
        -0.8480964303016663,
        -0.6106328964233398,
        -0.4599952697753906,
        -0.33967941999435425,
        -0.23460739850997925,
        -0.13791173696517944,
        -0.045525018125772476,
        0.03979014977812767,
        0.1202552542090416,
        0.2035212516784668,
        0.2920137643814087,
        0.3893125355243683,
        0.5016633868217468,
        0.6427869200706482,
        0.8614783883094788,
    ),
)

# A sign, two exponent bits and a mantissa bit, over 12 so that the largest is 1. Written as the fp32 quotients.
_FP4_MAGNITUDES = (0.0, 0.0052083334885537624, 2 / 3, 1.0, 1 / 3, 0.5, 1 / 6, 0.25)
FP4 = BlockwiseFormat(
    name="fp4",
    codebook=(*_FP4_MAGNITUDES, 0.0, *(-value for value in _FP4_MAGNITUDES[1:])),
    ascending=(11, 10, 13, 12, 15, 14, 9, 0, 8, 1, 6, 7, 4, 5, 2, 3),
    cuda_thresholds=(
        0.0026041700039058924,
        0.0859375,
        0.2083333283662796,
        0.2916666567325592,
        0.4166666865348816,
        0.5833330154418945,
        0.8333333134651184,
    ),
)

FORMATS = {format.name: format for format in (NF4, FP4)}


def check_block_size(format: str, block_size: int) -> None:
    """Raise ValueError unless `format` can be cut into blocks of `block_size`."""
    if type(block_size) is not int or block_size not in BLOCK_SIZES:
        raise ValueError(f"block_size is {block_size!r}; {format} takes one of {BLOCK_SIZES}")


@cache
def codebook_tensor(name: str, device: torch.device) -> torch.Tensor:
    """The sixteen values of a format, fp32 [16], on `device`; one tensor per device, never to be written to.

    On a GPU, FP4's nibble 8 is -0.0 and elsewhere +0.0: so it is in bitsandbytes' CUDA kernels and in its tables.
    """
    import torch  # not above: the numbers are read without it (halfbyte explain)

    values = list(FORMATS[name].codebook)
    if name == "fp4" and device.type == "cuda":
        values[8] = -0.0
    return torch.tensor(values, dtype=torch.float32, device=device)


@cache
def midpoints_tensor(name: str, device: torch.device) -> torch.Tensor:
    """The fifteen fp32 midpoints between ascending codebook values, as bitsandbytes' CPU code compares with them."""
    import torch

    format = FORMATS[name]
    values = torch.tensor(format.codebook, dtype=torch.float32, device="cpu")[list(format.ascending)]
    return ((values[:-1] + values[1:]) / 2).to(device)


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


@cache
def dynamic_code(device: torch.device) -> torch.Tensor:
    """`dynamic_values` as a tensor, fp32 [256], on `device`; one tensor per device, never to be written to."""
    import torch

    return torch.tensor(dynamic_values(), dtype=torch.float32, device=device)


def fp32(number: float) -> float:
    """The nearest fp32 number."""
    return float(struct.unpack("<f", struct.pack("<f", number))[0])
