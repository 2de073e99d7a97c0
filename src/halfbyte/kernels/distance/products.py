"""L2 distances from several queries on a GPU, and their nearest rows: tensor cores, and (c - q)^2 where they blur.

query [P, D], candidates [V, D]. |c - q|^2 = |c|^2 + |q|^2 - 2 c.q takes one pass over the candidates for all queries of
a tile. The products are of the stored numbers (fp16 and bf16 in tensor cores, fp32 as three tf32 products each), sums
are fp32, and both squares come from the very tiles that are multiplied.

Where c is near q, digits cancel: an error of the sums, a few 2^-24 of |c|^2 + |q|^2, is all that may be left. Distances
whose square is below CANCELLED of that sum are therefore computed again as the sum of (c - q)^2.

Nearest: for each GROUP of candidates only the least lower and upper bound of their squares is written. At least k rows
are within the k-th least upper bound, so groups that begin beyond it are out; the rest, hardly more than k, are summed
again as (c - q)^2, as they are for one query.

Bytes: the candidates once, for every 64 queries from L2. Flops: 2 an element and query.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from halfbyte.kernels.common.device import DeviceProperties, properties_of
from halfbyte.kernels.common.launch import launch
from halfbyte.kernels.distance import plan as plans
from halfbyte.kernels.distance.keys import EMPTY, key_of, leading, merged
from halfbyte.kernels.distance.select import select
from halfbyte.kernels.distance.sums import sum_of_squares

CANCELLED = tl.constexpr(1.0 / 16)
SCANNED = 128  # bounds that one of them looks at together


@triton.jit
def _squares(
    query, candidates, n_queries, n_rows, n_dims, q_stride, c_stride, q_tiles,
    ROWS: tl.constexpr, QUERIES: tl.constexpr, DIMS: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """What a program begins with: its rows [ROWS] and queries [QUERIES], which may lie beyond the last, and of them
    |c|^2 + |q|^2 - 2 c.q and |c|^2 + |q|^2, fp32 [ROWS, QUERIES]."""
    program = tl.program_id(0)
    row = program // q_tiles * ROWS + tl.arange(0, ROWS)
    column = program % q_tiles * QUERIES + tl.arange(0, QUERIES)
    dtype: tl.constexpr = candidates.dtype.element_ty if PRECISION == "stored" else tl.float32
    precision: tl.constexpr = "ieee" if PRECISION == "stored" else PRECISION
    product = tl.zeros((ROWS, QUERIES), tl.float32)
    c_square = tl.zeros((ROWS, DIMS), tl.float32)
    q_square = tl.zeros((DIMS, QUERIES), tl.float32)
    c_line = candidates + tl.minimum(row, n_rows - 1).to(tl.int64)[:, None] * c_stride
    q_line = query + tl.minimum(column, n_queries - 1).to(tl.int64)[None, :] * q_stride
    for start in range(0, n_dims, DIMS):
        d = start + tl.arange(0, DIMS)
        if EVEN:
            c = tl.load(c_line + d[None, :])
            q = tl.load(q_line + d[:, None])
        else:
            c = tl.load(c_line + d[None, :], mask=(d < n_dims)[None, :], other=0)
            q = tl.load(q_line + d[:, None], mask=(d < n_dims)[:, None], other=0)
        part = tl.dot(c.to(dtype), q.to(dtype), input_precision=precision)
        # Tensor cores cut off what they add up, and lose the more the longer they do; this addition rounds. As a sum,
        # the compiler would make it one long product again.
        product = tl.fma(part, tl.full((ROWS, QUERIES), 1.0, tl.float32), product)
        c_wide, q_wide = c.to(tl.float32), q.to(tl.float32)
        c_square += c_wide * c_wide
        q_square += q_wide * q_wide
    # fp64 from here on: what rounding is left is that of the sums above, and the root's.
    c_sum = tl.sum(c_square.to(tl.float64), axis=1)
    q_sum = tl.sum(q_square.to(tl.float64), axis=0)
    total = c_sum[:, None] + q_sum[None, :]
    return row, column, (total - 2 * product.to(tl.float64)).to(tl.float32), total.to(tl.float32)


@triton.jit
def distances_kernel(
    query, candidates, out, n_queries, n_rows, n_dims, q_stride, c_stride, o_stride, q_tiles,
    ROWS: tl.constexpr, QUERIES: tl.constexpr, DIMS: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    row, column, square, total = _squares(
        query, candidates, n_queries, n_rows, n_dims, q_stride, c_stride, q_tiles, ROWS, QUERIES, DIMS, EVEN, PRECISION
    )
    wanted = (row < n_rows)[:, None] & (column < n_queries)[None, :]
    blurred = (wanted & ~(square > total * CANCELLED)).to(tl.int32)  # NaN, of infinite squares, too
    if tl.max(blurred) > 0:
        inside = tl.minimum(row, n_rows - 1)
        for j in range(QUERIES):
            this = (tl.arange(0, QUERIES) == j)[None, :]
            if tl.max(tl.where(this, blurred, 0)) > 0:
                q = tl.minimum(tl.program_id(0) % q_tiles * QUERIES + j, n_queries - 1).to(tl.int64)
                exact = sum_of_squares(query + q * q_stride, candidates, inside, n_dims, c_stride, ROWS, DIMS, EVEN)
                square = tl.where(this & (blurred > 0), exact[:, None], square)
    at = column.to(tl.int64)[None, :] * o_stride + row[:, None]
    tl.store(out + at, tl.sqrt_rn(square), mask=wanted)


@triton.jit
def bounds_kernel(
    query, candidates, lower, upper, n_queries, n_rows, n_dims, n_groups, q_stride, c_stride, q_tiles, error,
    ROWS: tl.constexpr, QUERIES: tl.constexpr, DIMS: tl.constexpr, GROUP: tl.constexpr, EVEN: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """lower, upper: fp32 [P, n_groups], the least bounds of the squares of each GROUP. error: of |c|^2 + |q|^2, in
    units of 2^-30."""
    row, column, square, total = _squares(
        query, candidates, n_queries, n_rows, n_dims, q_stride, c_stride, q_tiles, ROWS, QUERIES, DIMS, EVEN, PRECISION
    )
    slack = total * (error.to(tl.float32) * 9.313225746154785e-10)
    known = slack < float("inf")  # neither infinite nor NaN
    low = tl.where(known, square - slack, -float("inf"))
    high = tl.where(known, square + slack, float("inf"))
    real = (row < n_rows)[:, None]
    low, high = tl.where(real, low, float("inf")), tl.where(real, high, float("inf"))
    low = tl.min(low.reshape(ROWS // GROUP, GROUP, QUERIES), axis=1)
    high = tl.min(high.reshape(ROWS // GROUP, GROUP, QUERIES), axis=1)
    group = tl.program_id(0) // q_tiles * (ROWS // GROUP) + tl.arange(0, ROWS // GROUP)
    at = column.to(tl.int64)[None, :] * n_groups + group[:, None]
    wanted = (group < n_groups)[:, None] & (column < n_queries)[None, :]
    tl.store(lower + at, low, mask=wanted)
    tl.store(upper + at, high, mask=wanted)


@triton.jit
def examine_kernel(
    query, candidates, lower, limits, lists, n_rows, n_dims, n_groups, n_lists, list_groups, q_stride, c_stride,
    DIMS: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, KEEP: tl.constexpr, SCANNED: tl.constexpr,
    EVEN: tl.constexpr,
):  # fmt: skip
    """int64 lists [P, n_lists, K]: the best of the groups whose lower bound is within the query's limit. KEEP: keys
    that are kept meanwhile, K and GROUP at least."""
    program = tl.program_id(0)
    q = (program // n_lists).to(tl.int64)
    first = program % n_lists * list_groups
    last = tl.minimum(first + list_groups, n_groups)
    limit = tl.load(limits + q)
    best = tl.full((KEEP,), EMPTY, tl.int64)
    for start in range(first, last, SCANNED):
        group = start + tl.arange(0, SCANNED)
        low = tl.load(lower + q * n_groups + group, mask=group < last, other=float("inf"))
        left = ((low <= limit) & (group < last)).to(tl.int32)
        for _ in range(tl.sum(left, axis=0)):
            chosen = tl.min(tl.where(left > 0, group, 0x7FFFFFFF), axis=0)
            left = tl.where(group == chosen, 0, left)
            row = chosen * GROUP + tl.arange(0, GROUP)
            inside = tl.minimum(row, n_rows - 1)
            total = sum_of_squares(query + q * q_stride, candidates, inside, n_dims, c_stride, GROUP, DIMS, EVEN)
            some = leading(tl.where(row < n_rows, key_of(tl.sqrt_rn(total), row), EMPTY), GROUP)
            if KEEP > GROUP:
                some = tl.where((tl.arange(0, KEEP // GROUP) == 0)[:, None], some[None, :], EMPTY).reshape(KEEP)
            best = merged(best, some, KEEP)
    best = leading(best, K) if K < KEEP else best
    tl.store(lists + (q * n_lists + program % n_lists) * K + tl.arange(0, K), best)


def distances(query: Tensor, candidates: Tensor, out: Tensor) -> None:
    """Write every distance into `out`, fp32 [P, V], of query [P, D] and candidates [V, D], all with rows of stride 1,
    on the current device."""
    p, v = out.shape
    d = candidates.shape[1]
    tile, constants = _tile(query, candidates)
    q_tiles = triton.cdiv(p, tile.queries)

    def configure(properties: DeviceProperties) -> tuple[int, dict[str, Any]]:
        return triton.cdiv(v, tile.rows) * q_tiles, constants

    arguments = (query, candidates, out, p, v, d, query.stride(0), candidates.stride(0), out.stride(0), q_tiles)
    launch(distances_kernel, out.get_device(), arguments, (query.dtype, candidates.dtype), configure)


def nearest(query: Tensor, candidates: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k least distances, fp32 [P, k], ascending, and their rows, int64 [P, k]."""
    lower, upper = _bounds(query, candidates)
    groups = lower.shape[1]
    if k <= groups:
        limits = torch.topk(upper, k, dim=1, largest=False, sorted=False).values.amax(dim=1)
    else:
        limits = upper.new_full((len(query),), float("inf"))
    return _examine(query, candidates, lower, limits, k)


def _bounds(query: Tensor, candidates: Tensor) -> tuple[Tensor, Tensor]:
    p, v, d = len(query), *candidates.shape
    tile, constants = _tile(query, candidates)
    if constants["PRECISION"] == "tf32x3":
        constants |= {"PRECISION": "tf32", "DIMS": 32, "EVEN": d % 32 == 0}  # a wider bound for a third of the products
    groups, q_tiles = triton.cdiv(v, plans.GROUP), triton.cdiv(p, tile.queries)
    lower, upper = query.new_empty((2, p, groups), dtype=torch.float32)

    def configure(properties: DeviceProperties) -> tuple[int, dict[str, Any]]:
        return triton.cdiv(v, tile.rows) * q_tiles, constants | {"GROUP": plans.GROUP}

    strides = query.stride(0), candidates.stride(0)
    arguments = (query, candidates, lower, upper, p, v, d, groups, *strides, q_tiles, _error(d, constants))
    launch(bounds_kernel, lower.get_device(), arguments, (query.dtype, candidates.dtype), configure)
    return lower, upper


def _error(d: int, constants: dict[str, Any]) -> int:
    """What |c|^2 + |q|^2 - 2 c.q may be off by, in units of 2^-30 of |c|^2 + |q|^2.

    Tensor cores cut off, by up to 2^-23 of the sum so far, at every 16 elements, or every 8 of tf32, whose numbers
    have lost up to 2^-10 themselves. For the squares and the last steps there is 2^-18.
    """
    return (8 * d if constants["PRECISION"] == "stored" else 16 * d + (1 << 21)) + (1 << 12)


def _examine(query: Tensor, candidates: Tensor, lower: Tensor, limits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    p, v, d = len(query), *candidates.shape
    groups, keep = lower.shape[1], triton.next_power_of_2(k)
    tile = plans.direct(d, candidates.itemsize)
    programs = plans.examiners(properties_of(candidates.get_device()))
    list_groups = max(triton.cdiv(groups, max(1, programs // p)), triton.cdiv(keep, plans.GROUP))
    n_lists = triton.cdiv(groups, list_groups)
    lists = query.new_empty((p, n_lists, keep), dtype=torch.int64)
    most = max(keep, plans.GROUP)

    def configure(properties: DeviceProperties) -> tuple[int, dict[str, Any]]:
        constants = {"DIMS": tile.dims, "GROUP": plans.GROUP, "K": keep, "KEEP": most, "SCANNED": SCANNED}
        return p * n_lists, constants | {"EVEN": d % tile.dims == 0, "num_warps": tile.warps}

    strides = query.stride(0), candidates.stride(0)
    arguments = (query, candidates, lower, limits, lists, v, d, groups, n_lists, list_groups, *strides)
    launch(examine_kernel, lists.get_device(), arguments, (p, keep, query.dtype, candidates.dtype), configure)
    return select(lists.view(p, n_lists * keep), k)


def _tile(query: Tensor, candidates: Tensor) -> tuple[plans.ProductsPlan, dict[str, Any]]:
    properties = properties_of(candidates.get_device())
    # Triton's interpreter has no products of bf16.
    stored = properties.kind != "host" and query.dtype == candidates.dtype != torch.float32
    precision = "stored" if stored else "tf32x3" if properties.ptx >= 80 else "ieee"
    tile = plans.products(len(query), 2 if stored else 4, properties)
    constants = {
        "ROWS": tile.rows, "QUERIES": tile.queries, "DIMS": tile.dims, "EVEN": candidates.shape[1] % tile.dims == 0,
        "PRECISION": precision, "num_warps": tile.warps, "num_stages": tile.stages,
    }  # fmt: skip
    return tile, constants
