"""What kernels of strips have in common: how x is cut into tiles, and what becomes of a strip's sums.

A strip is some rows of W, each of which is a lane of two registers. All rows of x of a group meet it, in tiles of six
or four.
"""

# numba finds out the types of kernels by itself.
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit
from numba.extending import register_jitable

from halfbyte.kernels.common.floats import from_bits, to_bits

# Rows of x in a tile, of all tiles but the last one or two of a group. With two registers of sums for each, and two of
# W, that is what sixteen registers hold; or thirty-two, where sums of a block and of all blocks are kept apart.
COLUMNS, FEWER = 6, 4


def padded_begins(first: Any) -> Any:
    """Where the rows of each group begin, and the last one ends, if each has as many as its tiles. first: as
    products.py has it."""
    return np.array([0, *(max(FEWER, rows + rows % 2) for rows in np.diff(first).tolist())]).cumsum()


@register_jitable
def wide_rows(padded):
    """How many of so many rows are in tiles of COLUMNS; the others are in tiles of FEWER."""
    return padded - FEWER * (-padded % COLUMNS // 2)


@register_jitable
def cost_of(padded):
    """Of a strip with so many rows of x: to decode it takes as long as some six of them."""
    return 6 + padded


@register_jitable
def place_in_tiles(place, first, last, padded):
    """Of a row of a group: the rows of its tile, its number among them, the number of the tile's first in the group,
    and how many rows of the tile come behind it that there are not."""
    inside, wide = place - first, wide_rows(padded)
    columns = COLUMNS if inside < wide else FEWER
    column = (inside if inside < wide else inside - wide) % columns
    return columns, column, inside - column, columns - column - 1 if place == last - 1 else 0


@register_jitable
def put_across(rows, units, scales, across):
    """Scales row by row -> of a unit all rows, of the next one, ..."""
    for unit in range(units):
        for row in range(rows):
            across[unit * rows + row] = scales[row * units + unit]


@njit(inline="always")
def finish(strip, lanes, sums, inverse, bias, matrix, target, left, out):
    """Write what a strip of so many rows of W, of which there are `lanes`, makes of the rows of a group, plus the bias,
    rounded once."""
    for row in range(len(target)):
        own, to = row * strip, target[row]
        if bias.size:
            for lane in range(lanes):
                total = sums[own + lane] * inverse + from_bits(bias[matrix, left + lane])
                out[to, left + lane] = to_bits(total, out)
        else:
            for lane in range(lanes):
                out[to, left + lane] = to_bits(sums[own + lane] * inverse, out)
