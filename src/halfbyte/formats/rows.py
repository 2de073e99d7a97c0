"""Rows of a 4-bit weight, without a copy of its bytes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import gcd

import torch

from halfbyte.formats.weight import QuantizedWeight


def row_chunks(q: QuantizedWeight, numel: int) -> Iterator[tuple[int, QuantizedWeight]]:
    """(first row, those rows) of q [N, K], pieces of about `numel` weights: whole scale blocks, nested ones too."""
    n, k = q.shape
    step = 1 if q.spec.along_k else _whole_rows(q, k)
    rows = max(1, numel // max(1, step * k)) * step
    for first in range(0, n, rows):
        yield first, q if rows >= n else _rows(q, first, min(first + rows, n))


def _whole_rows(q: QuantizedWeight, k: int) -> int:
    """The fewest rows that end where a scale block, a nested one and a byte end."""
    unit = q.block_size * (q.nested.block_size if q.nested else 1)
    return unit // gcd(unit, k) if k else 1


def _rows(q: QuantizedWeight, first: int, last: int) -> QuantizedWeight:
    shape = (last - first, q.shape[1])
    k = q.shape[1]
    if q.spec.along_k:
        packed = q.packed.view(torch.uint8).view(-1)[first * k // 2 : last * k // 2]
        packed = packed.view(q.packed.dtype).view(q.spec.packed_shape(shape))
        return replace(q, packed=packed, scale=q.scale[first:last], shape=shape)
    begin, end = first * k, last * k
    blocks = slice(begin // q.block_size, -(-end // q.block_size))
    nested = q.nested
    if nested is not None:
        absmax = nested.absmax[blocks.start // nested.block_size : -(-blocks.stop // nested.block_size)]
        nested = nested._replace(absmax=absmax)
    return replace(
        q, packed=q.packed.reshape(-1, 1)[begin // 2 : -(-end // 2)], scale=q.scale.view(-1)[blocks], shape=shape,
        nested=nested,
    )  # fmt: skip
