"""A 4-bit format as data: kernels are made from this description and never ask for a name.

A weight is cut into blocks that share a scale. Its nibbles stand for sixteen values, the codebook:

    value = codebook[nibble] * scale[index // block_size]        in fp32, then one rounding to the output dtype

Blocks run over the weight flattened row-major, whose last block may be shorter and whose odd last weight shares its
byte with a nibble that means nothing; or along K of a weight [..., K], each row cut into whole blocks. A scale is a
float, or a byte that stands for a power of two ("e8m0").

A new format is a file here that makes a `Format`, and its name in `formats/__init__.py`.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from math import frexp, nan, prod
from typing import TYPE_CHECKING

from halfbyte.formats.constants import kept

if TYPE_CHECKING:
    import torch

BLOCK_SIZES = (32, 64, 128, 256, 512, 1024, 2048, 4096)
PER_WORD = 8  # nibbles of an int32
FLOAT, E8M0 = "float", "e8m0"  # what scales may be


@dataclass(frozen=True, eq=False)  # there is one object for each name, and it is compared, and hashed, as such
class Format:
    """What sixteen values, bytes and scales mean. Dtypes are named, so that nothing here needs torch.

    name: what users call it.
    codebook: the value of each nibble, rounded to fp32.
    block_sizes, block_size: how many weights may share a scale, and how many do unless one says otherwise.
    size_name: what users call that number, "block_size" or "group_size".
    low_first: whether the first of a byte's two weights is in its low half.
    words: whether packed is int32 [..., K / 8], low halves first.
    along_k: whether blocks lie along K; then a weight is [N, K] or [E, N, K], scale [..., K / block size], and packed
        words or uint8 [..., K / 2]. Else the weight is flattened, has any shape, scale is [blocks], and packed uint8
        [(numel + 1) // 2, 1].
    scale_dtype: of scales; None is that of the dense weight, and any float dtype is read.
    scale_encoding: "float"; or "e8m0": a uint8 e stands for 2 ** (e - 127), and 255 for NaN (OCP MX).
    nests: whether scales may be uint8 instead, "double quantized" (nested.py).
    flushes: whether products on a GPU flush subnormal numbers to zero, as bitsandbytes' fast-math does.

    How a weight becomes a nibble: scale = largest magnitude of the block / `largest`, rounded to its dtype, and the
    nibble is that of the value nearest to weight / scale. An e8m0 scale is 2 ** (floor(log2(largest magnitude)) -
    floor(log2(`largest`))), 2 ** -127 at least, and NaN where a weight of the block is; weight / scale is exact, its
    magnitude is compared with `thresholds` on every device, and the nibble keeps its sign.

    integers: the codebook is -8 to 7; weight / scale is a true division, rounded with ties to even and clamped to
        -7 to 7. Else weight times the reciprocal of the scale is compared with thresholds, and ties go down.
    signed_magnitude: the high bit of a nibble is a sign, taken apart before a GPU compares.
    ascending: the nibbles in order of their values, ties as bitsandbytes' CPU code has them. Found out unless given.
    thresholds: what a GPU compares with, fp32: the midpoints between ascending values, or with signed_magnitude those
        between ascending magnitudes. Computed unless given.
    cuda_codebook: the codebook that a GPU decodes with, where it differs in the sign of a zero.

    factors: for "float16" and "bfloat16", what the codebook is multiplied by before tensor-core kernels round it, so
        that all sixteen values fall close to numbers that exist in 16 bits. Searched for unless given.
    """

    name: str
    codebook: tuple[float, ...]
    block_sizes: tuple[int, ...]
    block_size: int
    size_name: str = "block_size"
    low_first: bool = False
    words: bool = False
    along_k: bool = False
    scale_dtype: str | None = "float32"
    scale_encoding: str = FLOAT
    nests: bool = False
    flushes: bool = False
    largest: float = 1.0
    integers: bool = False
    signed_magnitude: bool = False
    ascending: tuple[int, ...] = ()
    thresholds: tuple[float, ...] = ()
    cuda_codebook: tuple[float, ...] = ()
    factors: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if len(self.codebook) != 16:
            raise ValueError(f"codebook has {len(self.codebook)} values; a format has sixteen")
        for name in ("codebook", "cuda_codebook"):
            object.__setattr__(self, name, tuple(map(fp32, getattr(self, name))))
        if self.block_size not in self.block_sizes or not set(self.block_sizes) <= set(BLOCK_SIZES):
            raise ValueError(f"block_sizes are {self.block_sizes}, {self.block_size} the usual; known: {BLOCK_SIZES}")
        if self.words and not (self.low_first and self.along_k):
            raise ValueError("words hold the first of two weights in the low half, and lie along K")
        if self.scale_encoding not in (FLOAT, E8M0):
            raise ValueError(f"scale_encoding is {self.scale_encoding!r}; known: {FLOAT!r} and {E8M0!r}")
        if self.has_exponents and not (self.scale_dtype == "uint8" and self.along_k and self.signed_magnitude):
            raise ValueError("e8m0 scales are uint8, of whole blocks along K, whose nibbles have a sign")
        order = self.ascending or tuple(sorted(range(16), key=lambda nibble: (self.codebook[nibble], nibble)))
        values = [self.codebook[nibble] for nibble in order]
        if sorted(order) != list(range(16)) or values != sorted(values):
            raise ValueError(f"ascending is {order}; it holds every nibble once, in order of their values")
        object.__setattr__(self, "ascending", order)
        if not self.thresholds:
            object.__setattr__(self, "thresholds", midpoints([self.codebook[i] for i in self.compared]))

    @cached_property
    def compared(self) -> tuple[int, ...]:
        """The nibbles whose values a GPU compares, in ascending order: eight with `signed_magnitude`, else all."""
        return tuple(nibble for nibble in self.ascending if nibble < 8 or not self.signed_magnitude)

    @cached_property
    def has_exponents(self) -> bool:
        """Whether scales are exponents of two, in a byte."""
        return self.scale_encoding == E8M0

    @cached_property
    def largest_exponent(self) -> int:
        """floor(log2(`largest`))."""
        return frexp(self.largest)[1] - 1

    @cached_property
    def packed_dtype(self) -> str:
        return "int32" if self.words else "uint8"

    def packed_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape in which we write the packed tensor of a dense weight of `shape`."""
        if not self.along_k:
            return (prod(shape) + 1) // 2, 1
        return (*shape[:-1], shape[-1] // (PER_WORD if self.words else 2))

    def scale_shape(self, shape: Sequence[int], block_size: int) -> tuple[int, ...]:
        """The shape of the scales of a dense weight of `shape`."""
        return (*shape[:-1], shape[-1] // block_size) if self.along_k else (-(-prod(shape) // block_size),)

    def check_block_size(self, block_size: int) -> None:
        """Raise ValueError unless this format has blocks of `block_size` weights."""
        if type(block_size) is not int or block_size not in self.block_sizes:
            raise ValueError(f"{self.size_name} is {block_size!r}; {self.name} takes one of {self.block_sizes}")

    def check_shape(self, shape: Sequence[int], block_size: int) -> None:
        """Raise ValueError unless a weight of `shape` can be cut into blocks of `block_size`."""
        self.check_block_size(block_size)
        if not self.along_k:
            return
        if len(shape) not in (2, 3):
            raise ValueError(f"shape is {list(shape)}; {self.name} takes a weight [N, K], or a stack of them [E, N, K]")
        if shape[-1] % block_size:
            raise ValueError(
                f"K is {shape[-1]}, not a multiple of {self.size_name} {block_size}; choose a {self.size_name} that "
                f"divides K{_instead()}"
            )


FORMATS: dict[str, Format] = {}


def register(format: Format) -> Format:
    """Make `format` known by its name. Raises ValueError for a name that is taken."""
    if format.name in FORMATS:
        raise ValueError(f"format {format.name!r} is registered already")
    FORMATS[format.name] = format
    return format


def _instead() -> str:
    names = [format.name for format in FORMATS.values() if not format.along_k]
    return f", or {names[0]}" if names else ""


def midpoints(values: Sequence[float]) -> tuple[float, ...]:
    """The fp32 midpoints between neighbours."""
    return tuple(fp32(fp32(low + high) / 2) for low, high in pairwise(values))


def fp32(number: float) -> float:
    """The nearest fp32 number."""
    return float(struct.unpack("<f", struct.pack("<f", number))[0])


@kept
def codebook_tensor(format: Format, device: torch.device) -> torch.Tensor:
    """The sixteen values of a format, fp32 [16], on `device`; one tensor per device, never to be written to."""
    import torch  # not above: the numbers are read without it (halfbyte explain)

    values = (device.type == "cuda" and format.cuda_codebook) or format.codebook
    return torch.tensor(values, dtype=torch.float32, device=device)


@kept
def exponents_tensor(device: torch.device) -> torch.Tensor:
    """What the 256 bytes of an e8m0 scale stand for, fp32 [256], on `device`; never to be written to."""
    import torch

    return torch.tensor([*(2.0 ** (byte - 127) for byte in range(255)), nan], dtype=torch.float32, device=device)


@kept
def midpoints_tensor(format: Format, device: torch.device) -> torch.Tensor:
    """The fifteen fp32 midpoints between ascending values, with which a CPU compares, as bitsandbytes' code does."""
    import torch

    values = torch.tensor(format.codebook, dtype=torch.float32, device="cpu")[list(format.ascending)]
    return ((values[:-1] + values[1:]) / 2).to(device)
