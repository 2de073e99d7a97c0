"""Scales of a tile's rows on a CPU: those side by side are decoded sixteen at a time, to the bits of one by one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numba import njit

from halfbyte.kernels.common.scales import ALL, decode_scales

BEYOND, ROWS = 11, 4


@njit
def decoded(row: Any, k: Any, unit: Any, log2: Any, parts: Any, nested_log2: Any) -> Any:
    flat, codes, code, absmax, offset = parts
    scales = np.full(ROWS * (k // unit) + 16, np.float32(-1))
    decode_scales(scales, row, ROWS, BEYOND, k, unit, log2, flat, codes, code, absmax, offset, nested_log2)
    return scales


@pytest.mark.parametrize("nested", [8, 16, 32, 256, ALL, 0])
@pytest.mark.parametrize(
    ("k", "block", "unit"),
    [(896, 64, 64), (64, 64, 64), (1056, 32, 32), (96, 64, 32), (512, 128, 64), (1024, 512, 64), (192, 128, 64)],
)
def test_decode_scales(k: int, block: int, unit: int, nested: int) -> None:
    rng = np.random.default_rng(0)
    blocks, one = -(-BEYOND * k // block), np.float32(1)
    nothing, no_codes = np.empty(0, np.float32), np.empty(0, np.uint8)
    code, codes = rng.standard_normal(256).astype(np.float32), rng.integers(0, 256, blocks).astype(np.uint8)
    absmax, offset = rng.random(-(-blocks // max(nested, 1)), np.float32) + one, np.float32(0.37)
    if nested:
        parts = nothing, codes, code, absmax, offset
        right = code[codes] * absmax[np.arange(blocks) // nested] + offset
    else:
        right = rng.random(blocks, np.float32)
        parts = right, no_codes, nothing, nothing, np.float32(0)
    for row in (0, 4, 7, 8, 10):
        found = decoded(row, k, unit, block.bit_length() - 1, parts, max(nested, 1).bit_length() - 1)
        rows = np.minimum(row + np.arange(ROWS), BEYOND - 1)
        places = (rows[:, None] * k + np.arange(k // unit) * unit) // block
        assert np.array_equal(found[: places.size], right[places].ravel())
        assert (found[places.size :] == -1).all()
