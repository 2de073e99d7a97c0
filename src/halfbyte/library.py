"""The operators `torch.ops.halfbyte`: what tracing and autograd see. Other eager calls never come through them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from halfbyte.formats.nested import NESTED_BLOCK_SIZE
from halfbyte.formats.weight import NestedScale, QuantizedWeight
from halfbyte.ops import _dequantize, _empty_quantized, _linear, _linear_group, _quantize
from halfbyte.search import Matrix, _distances, _nearest, _token_ranks

WEIGHT = (
    "Tensor packed, Tensor scale, Tensor[] nested, str format, SymInt[] shape, int block_size, int nested_block_size"
)
Parts = tuple[Tensor, Tensor, Sequence[Tensor], str, Sequence[int], int, int]


def weight_of(parts: Parts, dtype: torch.dtype) -> QuantizedWeight:
    """The weight that operators take in parts."""
    packed, scale, nested, format, shape, block_size, nested_block_size = parts
    nested_scale = NestedScale(nested[0], nested[1], nested[2], nested_block_size) if nested else None
    return QuantizedWeight(format, packed, scale, tuple(shape), dtype, block_size, nested_scale)


def _quantize_op(weight: Tensor, format: str, block_size: int, nested: bool) -> list[Tensor]:
    parts = _quantize(weight, format, block_size, nested)
    if nested:
        parts[2] = parts[2].clone()  # an operator may not return the same tensor twice
    return parts


def _quantize_fake(weight: Tensor, format: str, block_size: int, nested: bool) -> list[Tensor]:
    packed, scale = _empty_quantized(weight, format, block_size)
    if not nested:
        return [packed, scale]
    absmax = scale.new_empty((-(-scale.numel() // NESTED_BLOCK_SIZE),))
    return [
        packed,
        scale.new_empty(scale.shape, dtype=torch.uint8),
        scale.new_empty((256,)),
        absmax,
        scale.new_empty(()),
    ]


def _dequantize_op(*arguments: Any) -> Tensor:
    *parts, dtype = arguments
    q = weight_of(tuple(parts), dtype)
    out = q.packed.new_empty(q.shape, dtype=dtype)
    _dequantize(q, out)
    return out


def _dequantize_fake(packed: Tensor, *arguments: Any) -> Tensor:
    *_, shape, _, _, dtype = arguments
    return packed.new_empty(shape, dtype=dtype)


def _linear_op(x: Tensor, *arguments: Any) -> Tensor:
    *parts, bias, batch_invariant = arguments
    return _linear(x, weight_of(tuple(parts), x.dtype), bias, batch_invariant)


def _linear_fake(x: Tensor, *arguments: Any) -> Tensor:
    shape = arguments[4]
    return x.new_empty((*x.shape[:-1], shape[0]))


def _linear_group_op(
    x: Tensor,
    packed: Sequence[Tensor],
    scale: Sequence[Tensor],
    nested: Sequence[Tensor],
    format: str,
    n: Sequence[int],
    k: int,
    block_size: int,
    nested_block_size: int,
    biases: Sequence[Tensor | None],
) -> list[Tensor]:
    each = [nested[3 * i : 3 * i + 3] for i in range(len(n))]
    weights = [
        weight_of((packed[i], scale[i], each[i], format, (n[i], k), block_size, nested_block_size), x.dtype)
        for i in range(len(n))
    ]
    return _linear_group(x, weights, biases)


def _linear_group_fake(x: Tensor, *arguments: Any) -> list[Tensor]:
    return [x.new_empty((*x.shape[:-1], n)) for n in arguments[4]]


def _matrix_of(parts: Sequence[Any]) -> Matrix:
    """A dense tensor, or the weight of its parts."""
    *weight, dtype = parts
    return parts[0] if parts[3] == "dense" else weight_of(tuple(weight), dtype)


def _distances_op(query: Tensor, *parts: Any) -> Tensor:
    return _distances(query, _matrix_of(parts))


def _distances_fake(query: Tensor, *parts: Any) -> Tensor:
    return query.new_empty((*query.shape[:-1], parts[4][0]), dtype=torch.float32)


def _nearest_op(query: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    *parts, k = arguments
    return _nearest(query, _matrix_of(parts), k)


def _nearest_fake(query: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    shape = (*query.shape[:-1], arguments[-1])
    return query.new_empty(shape, dtype=torch.float32), query.new_empty(shape, dtype=torch.int64)


def _token_ranks_op(hidden: Tensor, *arguments: Any) -> Tensor:
    *parts, tokens = arguments
    return _token_ranks(hidden, _matrix_of(parts), tokens)


def _token_ranks_fake(hidden: Tensor, *arguments: Any) -> Tensor:
    return arguments[-1].new_empty(hidden.shape[:1], dtype=torch.int64)  # type: ignore[no-any-return]


MATRIX = f"{WEIGHT}, ScalarType dtype"
# `nested`: three of each weight, one weight after the other, or none at all.
WEIGHTS = (
    "Tensor[] packed, Tensor[] scale, Tensor[] nested, str format, SymInt[] n, SymInt k, int block_size, "
    "int nested_block_size"
)

OPERATORS: tuple[tuple[str, Callable[..., Any], Callable[..., Any]], ...] = (
    ("quantize(Tensor weight, str format, int block_size, bool nested) -> Tensor[]", _quantize_op, _quantize_fake),
    (f"dequantize({WEIGHT}, ScalarType dtype) -> Tensor", _dequantize_op, _dequantize_fake),
    (f"linear(Tensor x, {WEIGHT}, Tensor? bias, bool batch_invariant) -> Tensor", _linear_op, _linear_fake),
    (f"linear_group(Tensor x, {WEIGHTS}, Tensor?[] biases) -> Tensor[]", _linear_group_op, _linear_group_fake),
    (f"distances(Tensor query, {MATRIX}) -> Tensor", _distances_op, _distances_fake),
    (f"nearest(Tensor query, {MATRIX}, int k) -> (Tensor, Tensor)", _nearest_op, _nearest_fake),
    (f"token_ranks(Tensor hidden, {MATRIX}, Tensor tokens) -> Tensor", _token_ranks_op, _token_ranks_fake),
)

_library = torch.library.Library("halfbyte", "DEF")
for _schema, _real, _fake in OPERATORS:
    _name = _library.define(_schema)
    _library.impl(_name, _real, "CompositeExplicitAutograd")
    torch.library.register_fake(f"halfbyte::{_name}", _fake, lib=_library)
