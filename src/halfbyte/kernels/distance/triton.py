"""L2 distances from one query on a GPU, and the nearest rows.

query [P, D], candidates [V, D], each fp16, bf16 or fp32 -> fp32. A program owns a few candidates, walks along D with
everything of them in registers, and sums (c - q)^2 in fp32. Bytes: the candidates once; the query comes from cache.
Flops: 3 an element. Bound by memory.

Nearest: the distances are picked from (select.py) as soon as they are written, 4 bytes of them for thousands of a
candidate's. Lists kept in registers by the programs that sum took longer: their ends sort while memory waits. More than
a few queries share tensor cores (products.py).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from halfbyte.kernels.common.device import DeviceProperties, properties_of
from halfbyte.kernels.common.launch import launch
from halfbyte.kernels.common.overlap import SINCE, let_the_next_begin
from halfbyte.kernels.distance import plan as plans
from halfbyte.kernels.distance import products
from halfbyte.kernels.distance.select import select
from halfbyte.kernels.distance.sums import sum_of_squares

# Queries that take the candidates one after the other; more share tensor cores. They do so sooner in 16 bits.
FEW, FEW_WIDE = 1, 4


@triton.jit
def distances_kernel(
    query, candidates, out, n_queries, n_rows, n_dims, q_stride, c_stride, o_stride,
    ROWS: tl.constexpr, DIMS: tl.constexpr, EVEN: tl.constexpr, FOLLOWED: tl.constexpr,
):  # fmt: skip
    """Queries are the faster side of the grid, so that programs next to each other read the same candidates."""
    if FOLLOWED:
        let_the_next_begin()
    program = tl.program_id(0)
    q = (program % n_queries).to(tl.int64)
    row = program // n_queries * ROWS + tl.arange(0, ROWS)
    inside = tl.minimum(row, n_rows - 1)
    total = sum_of_squares(query + q * q_stride, candidates, inside, n_dims, c_stride, ROWS, DIMS, EVEN)
    tl.store(out + q * o_stride + row, tl.sqrt_rn(total), mask=row < n_rows)


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

    def configure(properties: DeviceProperties) -> tuple[int, dict[str, Any]]:
        tile = plans.direct(d, candidates.itemsize)
        constants = {"ROWS": tile.rows, "DIMS": tile.dims, "EVEN": d % tile.dims == 0}
        constants |= {"FOLLOWED": properties.ptx >= SINCE, "num_warps": tile.warps}
        return triton.cdiv(v, tile.rows) * p, constants

    arguments = (query, candidates, out, p, v, d, query.stride(0), candidates.stride(0), out.stride(0))
    launch(distances_kernel, out.get_device(), arguments, (query.dtype, candidates.dtype), configure)


def nearest(query: Tensor, candidates: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k least distances, fp32 [P, k], ascending, and their rows, int64 [P, k]."""
    if shares_products(query, candidates):
        return products.nearest(query, candidates, k)
    p, v = len(query), len(candidates)
    away = query.new_empty((p, v), dtype=torch.float32)
    distances(query, candidates, away)
    return select(away, k)


def shares_products(query: Tensor, candidates: Tensor) -> bool:
    """Whether so many queries go through tensor cores together."""
    properties = properties_of(candidates.get_device())
    wide = query.dtype != candidates.dtype or query.dtype == torch.float32
    return len(query) > (FEW_WIDE if wide else FEW) and (
        properties.kind != "cuda" or properties.capability >= plans.PRODUCTS
    )
