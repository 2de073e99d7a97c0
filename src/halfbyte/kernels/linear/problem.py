"""What is multiplied: all that the choice of a CUDA kernel and its machine code depend on, but for the rows of x."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

import torch
from torch import Tensor

from halfbyte.formats.nested import NESTED_BLOCK_SIZE
from halfbyte.formats.spec import E8M0, FORMATS
from halfbyte.formats.weight import QuantizedWeight
from halfbyte.kernels.linear.codebook import Numbers, numbers_of_weights

Addresses = tuple[int, int, int, int, int]
ALIGNMENT = 16  # bytes: x, bias and the result always have it (eager.py), and of W no kernel asks for more
FIRST_WITH_BF16 = 80  # of the GPUs, by what they are compiled for, to have tensor cores for bf16
# With batch_invariant so many rows go at a time: no kernel refuses as few, so that all of them take the same one.
INVARIANT_ROWS = 256


@dataclass(frozen=True)
class Problem:
    """x [M, K] @ W.T + bias, but for M.

    dtype: of x, the bias and the result. n, k: the sides of W. format, block_size: of W. scale: the dtype of its
    scales, uint8 where they are nested. nested: how many of them share an entry of the nested ones, or 0. bias:
    whether there is one. align_packed, align_scale: the largest power of two, up to 16, that divides the address.
    """

    dtype: torch.dtype
    n: int
    k: int
    format: str
    block_size: int
    scale: torch.dtype
    nested: int = 0
    bias: bool = False
    align_packed: int = ALIGNMENT
    align_scale: int = ALIGNMENT

    @property
    def low_first(self) -> bool:
        """True if the first weight of a byte is in its low half."""
        return FORMATS[self.format].low_first

    @property
    def has_known_scales(self) -> bool:
        """True if scales are what all kernels decode: floats, or nested bytes. Exponents, some of them do."""
        return (self.scale is torch.uint8) == (self.nested > 0)

    @property
    def has_exponents(self) -> bool:
        """True if scales are exponents of two."""
        return FORMATS[self.format].scale_encoding == E8M0

    @property
    def numbers(self) -> Numbers:
        """How weights are computed that are what dequantize gives, or "looked_up"."""
        return numbers_of_weights(self.format, self.dtype, self.scale)

    @property
    def has_usual_nesting(self) -> bool:
        """True if nested scales, where there are any, are nested as bitsandbytes does it."""
        return self.nested in (0, NESTED_BLOCK_SIZE)

    @property
    def has_decodable_scales(self) -> bool:
        """True if scales are of one of the kinds that device/scale.cuh decodes."""
        return self.has_exponents or (self.has_known_scales and self.has_usual_nesting)

    @property
    def numel(self) -> int:
        """Weights in W."""
        return self.n * self.k

    def has_spans(self, span: int, m: int) -> bool:
        """True if each `span` weights of a row lie in one block, and such spans, and m rows of x, can be counted in 32
        bits."""
        fits = self.k % span == 0 and self.block_size % span == 0 and self.n * (self.k // span) < 1 << 32
        return fits and self.k >= 1 and 1 <= m < 1 << 31 and 1 <= self.n < 1 << 31

    @property
    def scale_megabytes(self) -> float:
        """Of the scales, without what nested ones share."""
        return self.numel // self.block_size * self.scale.itemsize / 1e6

    @property
    def megabytes(self) -> float:
        """Of W: nibbles and scales."""
        return self.numel / 2e6 + self.scale_megabytes

    def x_megabytes(self, m: int) -> float:
        """Of x [m, K]."""
        return m * self.k * self.dtype.itemsize / 1e6

    def result_megabytes(self, m: int) -> float:
        """Of y [m, N]."""
        return m * self.n * self.dtype.itemsize / 1e6


def problem_of(x: Tensor, q: QuantizedWeight, bias: Tensor | None) -> Problem:
    n, k = q.shape
    return Problem(
        x.dtype, n, k, q.format, q.block_size, q.scale.dtype, q.nested.block_size if q.nested else 0, bias is not None,
        _alignment(q.packed), _alignment(q.scale),
    )  # fmt: skip


def _alignment(tensor: Tensor) -> int:
    address = tensor.data_ptr() | ALIGNMENT
    return address & -address


def addresses(q: QuantizedWeight) -> Addresses:
    """Of packed, scale and the nested code, absmax and offset, in the order in which all kernels take them; without
    nesting the last three are not read."""
    code, absmax, offset, _ = q.nested or (q.scale, q.scale, q.scale, 0)
    return q.packed.data_ptr(), q.scale.data_ptr(), code.data_ptr(), absmax.data_ptr(), offset.data_ptr()


def key_of(x: Tensor, q: QuantizedWeight, bias: Tensor | None, batch_invariant: bool) -> Hashable:
    """By which the products with a weight are known: where its numbers are, what they mean, and what x and bias are."""
    return (
        *addresses(q), q.nested.block_size if q.nested else 0, *q.shape, q.format, q.block_size, q.scale.dtype,
        x.dtype, x.get_device(), bias is None, not batch_invariant,
    )  # fmt: skip
