"""L2 distances from one query on a GPU, and the nearest rows without writing the distances.

query [P, D], candidates [V, D], each fp16, bf16 or fp32 -> fp32. A program owns a few candidates, walks along D with
everything of them in registers, and sums (c - q)^2 in fp32. Bytes: the candidates once; the query comes from cache.
Flops: 3 an element. Bound by memory.

Nearest: a program keeps what it found as 64-bit keys, a distance over a row, whose order is the order wanted: near
first, lower row first, NaN last (keys.py). It writes the best K; a second kernel merges the lists. More than a few
queries share tensor cores (products.py).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from halfbyte.kernels.common.device import DeviceFacts, facts_of
from halfbyte.kernels.common.launch import launch
from halfbyte.kernels.common.overlap import SINCE, let_the_next_begin
from halfbyte.kernels.distance import plan as plans
from halfbyte.kernels.distance import products
from halfbyte.kernels.distance.keys import EMPTY, key_of, leading
from halfbyte.kernels.distance.merge import merge
from halfbyte.kernels.distance.sums import sum_of_squares

# Queries that take the candidates one after the other; more share tensor cores. They do so sooner in 16 bits.
FEW, FEW_WIDE = 1, 4


@triton.jit
def distances_kernel(
    query, candidates, out, n_queries, n_rows, n_dims, q_stride, c_stride, o_stride,
    ROWS: tl.constexpr, DIMS: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Queries are the faster side of the grid, so that programs next to each other read the same candidates."""
    program = tl.program_id(0)
    q = (program % n_queries).to(tl.int64)
    row = program // n_queries * ROWS + tl.arange(0, ROWS)
    inside = tl.minimum(row, n_rows - 1)
    total = sum_of_squares(query + q * q_stride, candidates, inside, n_dims, c_stride, ROWS, DIMS, EVEN)
    tl.store(out + q * o_stride + row, tl.sqrt_rn(total), mask=row < n_rows)


@triton.jit
def lists_kernel(
    query, candidates, lists, n_queries, n_rows, n_dims, n_lists, q_stride, c_stride,
    ROWS: tl.constexpr, DIMS: tl.constexpr, STEPS: tl.constexpr, K: tl.constexpr, EVEN: tl.constexpr,
    FOLLOWED: tl.constexpr,
):  # fmt: skip
    """int64 [P, n_lists, K]: the best keys of every ROWS * STEPS candidates."""
    if FOLLOWED:
        let_the_next_begin()
    program = tl.program_id(0)
    q = (program % n_queries).to(tl.int64)
    piece = program // n_queries
    keys = tl.full((STEPS, ROWS), EMPTY, tl.int64)
    for step in range(STEPS):
        row = (piece * STEPS + step) * ROWS + tl.arange(0, ROWS)
        inside = tl.minimum(row, n_rows - 1)
        total = sum_of_squares(query + q * q_stride, candidates, inside, n_dims, c_stride, ROWS, DIMS, EVEN)
        key = tl.where(row < n_rows, key_of(tl.sqrt_rn(total), row), EMPTY)
        keys = tl.where(tl.arange(0, STEPS)[:, None] == step, key[None, :], keys)
    best = leading(keys.reshape(STEPS * ROWS), K)
    tl.store(lists + (q * n_lists + piece) * K + tl.arange(0, K), best)


def distances(query: Tensor, candidates: Tensor, out: Tensor) -> None:
    """Write every distance into `out`, fp32 [P, V], of query [P, D] and candidates [V, D], all with rows of stride 1,
    on the current device."""
    p, v = out.shape
    d = candidates.shape[1]
    if p == 0 or v == 0:
        return
    if shares_products(query, candidates):
        products.distances(query, candidates, out)
        return

    def configure(facts: DeviceFacts) -> tuple[int, dict[str, Any]]:
        tile = plans.direct(d, candidates.itemsize)
        constants = {"ROWS": tile.rows, "DIMS": tile.dims, "EVEN": d % tile.dims == 0}
        return triton.cdiv(v, tile.rows) * p, constants | {"num_warps": tile.warps}

    arguments = (query, candidates, out, p, v, d, query.stride(0), candidates.stride(0), out.stride(0))
    launch(distances_kernel, out.get_device(), arguments, (query.dtype, candidates.dtype), configure)


def nearest(query: Tensor, candidates: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k least distances, fp32 [P, k], ascending, and their rows, int64 [P, k]."""
    p, v, d = len(query), *candidates.shape
    if shares_products(query, candidates):
        return products.nearest(query, candidates, k)
    keep = triton.next_power_of_2(k)
    tile = plans.lists(v, d, candidates.itemsize, keep)
    pieces = triton.cdiv(v, tile.rows * tile.steps)
    lists = query.new_empty((p, pieces, keep), dtype=torch.int64)
    if p:

        def configure(facts: DeviceFacts) -> tuple[int, dict[str, Any]]:
            constants = {"ROWS": tile.rows, "DIMS": tile.dims, "STEPS": tile.steps, "K": keep}
            constants |= {"EVEN": d % tile.dims == 0, "FOLLOWED": facts.ptx >= SINCE}
            return p * pieces, constants | {"num_warps": tile.warps}

        arguments = (query, candidates, lists, p, v, d, pieces, query.stride(0), candidates.stride(0))
        launch(lists_kernel, lists.get_device(), arguments, (keep, query.dtype, candidates.dtype), configure)
    return merge(lists, tile.rows * tile.steps, k)


def shares_products(query: Tensor, candidates: Tensor) -> bool:
    """Whether so many queries go through tensor cores together."""
    facts = facts_of(candidates.get_device())
    wide = query.dtype != candidates.dtype or query.dtype == torch.float32
    return len(query) > (FEW_WIDE if wide else FEW) and (facts.kind != "cuda" or facts.capability >= plans.PRODUCTS)
