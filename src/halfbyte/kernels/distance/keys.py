"""Distances and rows in one number, whose order is the order wanted.

A key is the complement of (bits of the distance) << 32 | row, so the largest key is the nearest, the lower row of equal
ones, and NaN comes last. Distances are not negative: their bits are in their order.
"""

from __future__ import annotations

import triton
import triton.language as tl

EMPTY = tl.constexpr(-(2**63))  # behind every key


@triton.jit
def key_of(distance, row):
    bits = distance.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    return ~((bits.to(tl.int64) << 32) | row.to(tl.int64))


@triton.jit
def leading(keys, K: tl.constexpr):
    """The K largest of keys [n], in descending order; n and K are powers of two."""
    return tl.max(keys.reshape(1, keys.shape[0]), axis=1) if K == 1 else tl.topk(keys, K)


@triton.jit
def merged(best, some, K: tl.constexpr):
    """The K largest of two lists of K, or of pairs of lists, all in descending order along the last axis."""
    return tl.bitonic_merge(tl.maximum(best, tl.flip(some, len(some.shape) - 1)), descending=True)
