"""A new token's own query, key and value, as a layer's projections leave them: normed, rotated and put into the cache
by the launch that attends to them.

Each program makes what it needs of them anew, from a few hundred bytes; the first part of a head writes the key and the
value into their slot of the cache. No program reads that slot: the new token's share of the sums is computed from
registers. Rotation is that of transformers: the first half of a head's rotary numbers turns with the second half.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor


class HeadNorm(NamedTuple):
    """An RMS norm of each head: x -> x * (offset + weight) / sqrt(mean(x²) + epsilon). weight: [size]."""

    weight: Tensor
    epsilon: float
    offset: float


class Fresh(NamedTuple):
    """keys, values: [texts, heads that share keys, 1, size], not rotated. cos, sin: [texts or 1, 1, rotary size]. slot:
    int64 without dimensions, the place in the cache. query_norm, key_norm: of heads, before rotation, or None.

    All but slot in the dtype of the query, on its device, their last dimension contiguous.
    """

    keys: Tensor
    values: Tensor
    cos: Tensor
    sin: Tensor
    slot: Tensor
    query_norm: HeadNorm | None = None
    key_norm: HeadNorm | None = None


def supports(fresh: Fresh, query: Tensor, keys: Tensor, values: Tensor) -> bool:
    """Whether `attend` is for them beside a query and a cache that it supports."""
    texts, _, new, size = query.shape
    norms = [norm.weight for norm in (fresh.query_norm, fresh.key_norm) if norm is not None]
    tensors = (fresh.keys, fresh.values, fresh.cos, fresh.sin, *norms)
    return (
        new == 1
        and fresh.keys.shape == (texts, keys.shape[1], 1, size)
        and fresh.values.shape == (texts, keys.shape[1], 1, values.shape[3])
        and fresh.cos.shape == fresh.sin.shape
        and fresh.cos.shape[:2] in ((texts, 1), (1, 1))
        and 0 < fresh.cos.shape[2] <= size
        and fresh.cos.shape[2] % 2 == 0
        and fresh.cos.stride() == fresh.sin.stride()
        and all(weight.shape == (size,) for weight in norms)
        and all(tensor.dtype is query.dtype and tensor.device == query.device for tensor in tensors)
        and all(tensor.stride(-1) == 1 for tensor in tensors)
        and fresh.slot.dim() == 0
        and fresh.slot.device == query.device
    )


@triton.jit
def rotated(
    at, inside, cos, sin, norm,
    SIZE: tl.constexpr, D: tl.constexpr, ROTARY: tl.constexpr, NORM: tl.constexpr, EPSILON: tl.constexpr,
    OFFSET: tl.constexpr,
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
    c = tl.load(cos + d, turns, 1).to(tl.float32)
    s = tl.load(sin + d, turns, 0).to(tl.float32)
    return x * c[None, :] + tl.where(first[None, :], -y, y) * s[None, :]
