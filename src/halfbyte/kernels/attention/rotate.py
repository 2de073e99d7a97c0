"""How `attend` makes a new token's query and key of what the projections leave (fresh.py).

Each program makes what it needs anew, from a few hundred bytes; the first part of a head writes key and value into
their slot of the cache. No program reads that slot: the new token's share of the sums is computed from registers, after
the others', so that what is loaded for it is on its way together with the cache.
Rotation is that of transformers: the first half of a head's rotary numbers turns with the second half.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _other(d, ROTARY: tl.constexpr):
    """The place that each place of a head turns with, or the place itself."""
    turned = tl.where(d < ROTARY // 2, d + ROTARY // 2, d - ROTARY // 2)
    return tl.where(d < ROTARY, turned, d)


@triton.jit
def angles(cos, sin, D: tl.constexpr, ROTARY: tl.constexpr, HALVES: tl.constexpr):
    """Cosine and sine for each place of a head, fp32 [D], the sine with the sign that it has there."""
    d = tl.arange(0, D)
    angle = d
    if HALVES:  # one for both halves
        angle = tl.where(d < ROTARY // 2, d, d - ROTARY // 2)
    c = tl.load(cos + angle, d < ROTARY, 1).to(tl.float32)
    s = tl.load(sin + angle, d < ROTARY, 0).to(tl.float32)
    return c, tl.where(d < ROTARY // 2, -s, s)


@triton.jit
def loaded(at, inside, SIZE: tl.constexpr, D: tl.constexpr, ROTARY: tl.constexpr):
    """The heads that `at` points to, [rows, D], and at each place what it turns with."""
    d = tl.arange(0, D)
    there = inside[:, None] & (d < SIZE)[None, :]
    x = tl.load(at[:, None] + d[None, :], there, 0)
    return x, tl.load(at[:, None] + _other(d, ROTARY)[None, :], there, 0)


@triton.jit
def rotated(
    x, y, c, s, norm,
    SIZE: tl.constexpr, D: tl.constexpr, ROTARY: tl.constexpr, NORM: tl.constexpr, EPSILON: tl.constexpr,
    OFFSET: tl.constexpr,
):  # fmt: skip
    """fp32 [rows, D]: heads x and what they turn with, normed if NORM, and turned by the angles c and s."""
    d = tl.arange(0, D)
    x = x.to(tl.float32)
    y = y.to(tl.float32)
    if NORM:
        factor = tl.rsqrt(tl.sum(x * x, axis=1) / SIZE + EPSILON)[:, None]
        x *= factor * (OFFSET + tl.load(norm + d, d < SIZE, 0).to(tl.float32))[None, :]
        y *= factor * (OFFSET + tl.load(norm + _other(d, ROTARY), d < SIZE, 0).to(tl.float32))[None, :]
    return x * c[None, :] + y * s[None, :]
