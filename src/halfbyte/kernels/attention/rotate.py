"""How `attend` makes a new token's query and key of what the projections leave (fresh.py).

Each program makes what it needs anew, from a few hundred bytes; the first part of a head writes key and value into
their slot of the cache. No program reads that slot: the new token's share of the sums is computed from registers.
Rotation is that of transformers: the first half of a head's rotary numbers turns with the second half.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rotated(
    at, inside, cos, sin, norm,
    SIZE: tl.constexpr, D: tl.constexpr, ROTARY: tl.constexpr, NORM: tl.constexpr, EPSILON: tl.constexpr,
    OFFSET: tl.constexpr, HALVES: tl.constexpr,
):  # fmt: skip
    """fp32 [rows, D]: the heads that `at` points to, [rows], normed if NORM, and turned by cos and sin."""
    d = tl.arange(0, D)
    turns = d < ROTARY
    first = d < ROTARY // 2
    other = tl.where(turns, tl.where(first, d + ROTARY // 2, d - ROTARY // 2), d)
    there = inside[:, None] & (d < SIZE)[None, :]
    x = tl.load(at[:, None] + d[None, :], there, 0).to(tl.float32)
    y = tl.load(at[:, None] + other[None, :], there, 0).to(tl.float32)
    if NORM:
        factor = tl.rsqrt(tl.sum(x * x, axis=1) / SIZE + EPSILON)[:, None]
        x *= factor * (OFFSET + tl.load(norm + d, d < SIZE, 0).to(tl.float32))[None, :]
        y *= factor * (OFFSET + tl.load(norm + other, d < SIZE, 0).to(tl.float32))[None, :]
    angle = d
    if HALVES:  # one for both halves
        angle = tl.where(first, d, d - ROTARY // 2)
    c = tl.load(cos + angle, turns, 1).to(tl.float32)
    s = tl.load(sin + angle, turns, 0).to(tl.float32)
    return x * c[None, :] + tl.where(first[None, :], -y, y) * s[None, :]
