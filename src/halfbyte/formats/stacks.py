"""Stacks of experts whose tensors begin with the experts' side, put together expert by expert.

A stack [E, N, K] is held as packed [E, N, K / 2] ([E, N, K / 8] for words) and scale [E, N, K / block], so that an
expert is one entry of both, which devices can share out. Where a blockwise format's blocks reach from one row into the
next, both are [E, ...] with an expert's bytes and scales in one row. Nested scales are written out: experts that were
quantized one by one have an offset each.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod

import torch
from torch import Tensor

from halfbyte.formats.spec import FORMATS, PER_WORD, Format
from halfbyte.formats.weight import QuantizedWeight


def shapes(spec: Format, shape: tuple[int, ...], block_size: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shapes of a stack's packed tensor and of its scales. Raises ValueError unless experts are whole blocks."""
    count, n, k = shape
    spec.check_shape(shape, block_size)
    if spec.along_k or k % block_size == 0:
        return (count, n, k // (PER_WORD if spec.words else 2)), (count, n, k // block_size)
    if n * k % block_size:
        raise ValueError(
            f"experts of shape [{n}, {k}] are not whole blocks of {block_size}; take a {spec.size_name} that divides "
            f"{n * k}"
        )
    return (count, n * k // 2), (count, n * k // block_size)


def plain_scale(q: QuantizedWeight) -> Tensor:
    """The scales as dequantizing uses them: nested ones written out, with a rounded multiply, then a rounded add."""
    if q.nested is None:
        return q.scale
    scale = q.scale.view(-1)
    group = q.nested.absmax.view(-1).repeat_interleave(q.nested.block_size)[: scale.numel()]
    return q.nested.code[scale.long()] * group + q.nested.offset.view(-1)


def as_stack(q: QuantizedWeight) -> QuantizedWeight:
    """A weight [E, N, K] whose tensors have the shapes above; the packed bytes are shared. Raises ValueError."""
    if len(q.shape) != 3:
        raise ValueError(f"the weight has shape {list(q.shape)}; a stack of experts [E, N, K] is accepted")
    packed, scale = shapes(q.spec, q.shape, q.block_size)
    return replace(q, packed=q.packed.view(packed), scale=plain_scale(q).view(scale), nested=None)


class StackWriter:
    """A stack [E, N, K] that is filled piece by piece; its memory is allocated with the first one."""

    def __init__(self, shape: tuple[int, int, int]) -> None:
        self.shape = shape
        self.stack: QuantizedWeight | None = None
        self.written = 0

    def write(self, expert: int, row: int, q: QuantizedWeight) -> None:
        """Put q [n, K] where rows `row` to before `row + n` of an expert are.

        Raises ValueError where it has another K, format or block size than the pieces before, or no whole blocks.
        """
        count, n, k = self.shape
        if len(q.shape) != 2 or q.shape[1] != k or row + q.shape[0] > n or not 0 <= expert < count:
            raise ValueError(f"{list(q.shape)} at row {row} of expert {expert} does not fit a stack {list(self.shape)}")
        scale = plain_scale(q)
        if self.stack is None:
            packed_shape, scale_shape = shapes(q.spec, self.shape, q.block_size)
            packed = torch.empty(packed_shape, dtype=q.packed.dtype, device=q.device)
            scales = torch.empty(scale_shape, dtype=scale.dtype, device=q.device)
            self.stack = QuantizedWeight(q.format, packed, scales, self.shape, q.dtype, q.block_size)
        stack = self.stack
        if (q.format, q.block_size, scale.dtype) != (stack.format, stack.block_size, stack.scale.dtype):
            raise ValueError(
                f"experts differ: one is {q.format}, {q.spec.size_name} {q.block_size} and scales in {scale.dtype}, "
                f"another {stack.format} with {stack.block_size} and {stack.scale.dtype}; a stack has one kind"
            )
        if row * k % q.block_size or prod(q.shape) % q.block_size:
            raise ValueError(
                f"{list(q.shape)} at row {row} is not whole blocks of {q.block_size}, and cannot be joined to others"
            )
        for whole, piece in ((stack.packed, q.packed), (stack.scale, scale)):
            rows, share = whole.view(count, -1), whole.numel() // count
            begin = row * share // n
            rows[expert, begin : begin + piece.numel()].copy_(piece.reshape(-1))
        self.written += q.numel

    def weight(self) -> QuantizedWeight:
        """The stack. Raises ValueError where parts of it were not written."""
        if self.stack is None or self.written != prod(self.shape):
            raise ValueError(
                f"only {self.written} of {prod(self.shape)} weights of a stack {list(self.shape)} are there"
            )
        return self.stack


def block_size_of(packed: Tensor, scale: Tensor, format: str) -> int:
    """How many weights share a scale in a stack of which only the tensors are known. Raises ValueError."""
    weights = packed.numel() * (PER_WORD if FORMATS[format].words else 2)
    if scale.numel() == 0 or weights % scale.numel():
        raise ValueError(f"packed {list(packed.shape)} and scales {list(scale.shape)} are no stack of {format} experts")
    return weights // scale.numel()
