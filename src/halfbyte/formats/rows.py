"""Rows of a 4-bit weight, without a copy of its bytes."""

from __future__ import annotations

from collections.abc import Iterator
from math import gcd

from halfbyte.formats.weight import QuantizedWeight, part_of


def row_chunks(q: QuantizedWeight, numel: int) -> Iterator[tuple[int, QuantizedWeight]]:
    """(first row, those rows) of q [N, K], pieces of about `numel` weights: whole scale blocks, nested ones too."""
    n, k = q.shape
    step = 1 if q.spec.along_k else _whole_rows(q, k)
    rows = max(1, numel // max(1, step * k)) * step
    for first in range(0, n, rows):
        yield first, q if rows >= n else part_of(q, first, min(first + rows, n))


def _whole_rows(q: QuantizedWeight, k: int) -> int:
    """The fewest rows that end where a scale block, a nested one and a byte end."""
    unit = q.block_size * (q.nested.block_size if q.nested else 1)
    return unit // gcd(unit, k) if k else 1
