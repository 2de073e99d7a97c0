"""Several weights, and matrices of either kind, as operators take them: made of what QuantizedWeight.parts gives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from halfbyte.formats.weight import QuantizedWeight

Matrix = Tensor | QuantizedWeight
DENSE = "dense"  # what stands for a format where the matrix is a tensor

GroupParts = tuple[list[Tensor], list[Tensor], list[Tensor], str, list[int], int, int, int]


def group_parts(weights: Sequence[QuantizedWeight]) -> GroupParts:
    """Weights [N, K] of one kind and one K: packed, scales, three nested tensors a weight or none at all, format, every
    N, K, block size, nested block size."""
    format, block_size, nested_block_size = weights[0].kind
    return (
        [q.packed for q in weights], [q.scale for q in weights],
        [tensor for q in weights for tensor in q.tensors[2:]],
        format, [q.shape[0] for q in weights], weights[0].shape[1], block_size, nested_block_size,
    )  # fmt: skip


def group_of(parts: GroupParts, dtype: torch.dtype) -> list[QuantizedWeight]:
    """The weights of `group_parts`."""
    packed, scale, nested, format, n, k, block_size, nested_block_size = parts
    each = [nested[3 * i : 3 * i + 3] for i in range(len(n))]
    return [
        QuantizedWeight.from_parts(
            (packed[i], scale[i], each[i], format, (n[i], k), block_size, nested_block_size), dtype
        )
        for i in range(len(n))
    ]


def matrix_parts(matrix: Matrix) -> tuple[Any, ...]:
    """The parts of a 4-bit matrix, or a dense one as `packed` of the format DENSE; and the dtype."""
    if isinstance(matrix, QuantizedWeight):
        return (*matrix.parts, matrix.dtype)
    return (matrix, matrix, [], DENSE, matrix.shape, 0, 0, matrix.dtype)


def matrix_of(parts: Sequence[Any]) -> Matrix:
    """The matrix of `matrix_parts`."""
    packed, scale, nested, format, shape, block_size, nested_block_size, dtype = parts
    if format == DENSE:
        return packed  # type: ignore[no-any-return]
    return QuantizedWeight.from_parts((packed, scale, nested, format, shape, block_size, nested_block_size), dtype)
