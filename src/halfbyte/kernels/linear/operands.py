"""What the choice of a CUDA kernel and its machine code depend on, of x, W and bias, besides how many rows x has."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from halfbyte.formats.nested import NESTED_BLOCK_SIZE
from halfbyte.formats.spec import FORMATS
from halfbyte.formats.weight import QuantizedWeight

Addresses = tuple[int, int, int, int, int]
ALIGNED = 16  # bytes; what memory of its own always is, and all that any kernel asks for
# With batch_invariant so many rows go at a time: no kernel refuses as few, so that all of them take the same one.
INVARIANT_ROWS = 256


@dataclass(frozen=True)
class Operands:
    """dtype: of x. n, k: the sides of W. format, block_size: of W. scale: the dtype of its scales. nested: how many of
    them share an entry of the nested ones, or 0. bias: whether there is one.

    align_..: the largest power of two, up to 16, that divides the address. It is 16 without a bias.
    """

    dtype: torch.dtype
    n: int
    k: int
    format: str
    block_size: int
    scale: torch.dtype
    nested: int = 0
    bias: bool = False
    align_packed: int = ALIGNED
    align_scale: int = ALIGNED
    align_x: int = ALIGNED
    align_bias: int = ALIGNED

    @property
    def low_first(self) -> bool:
        """True if the first weight of a byte is in its low half."""
        return FORMATS[self.format].low_first

    @property
    def has_usual_nesting(self) -> bool:
        """True if nested scales, where there are any, are nested as bitsandbytes does it."""
        return self.nested in (0, NESTED_BLOCK_SIZE)


def operands_of(x: Tensor, q: QuantizedWeight, bias: Tensor | None) -> Operands:
    n, k = q.shape
    return Operands(
        x.dtype, n, k, q.format, q.block_size, q.scale.dtype, q.nested.block_size if q.nested else 0, bias is not None,
        _alignment(q.packed), _alignment(q.scale), _alignment(x), ALIGNED if bias is None else _alignment(bias),
    )  # fmt: skip


def _alignment(tensor: Tensor) -> int:
    address = tensor.data_ptr() | ALIGNED
    return address & -address


def addresses(q: QuantizedWeight) -> Addresses:
    """Of packed, scale and the nested code, absmax and offset, in the order in which all kernels take them; without
    nesting the last three are not read."""
    code, absmax, offset = q.nested[:3] if q.nested else (q.scale, q.scale, q.scale)
    return q.packed.data_ptr(), q.scale.data_ptr(), code.data_ptr(), absmax.data_ptr(), offset.data_ptr()
