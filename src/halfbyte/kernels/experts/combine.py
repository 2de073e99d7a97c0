"""The weighted sum of what each token's experts give.

Bytes: a row for each pair of a token and an expert, and y. Each token adds up in the order of its experts, in
fp32, and is rounded once, be it that or the sum with a residual.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from halfbyte.kernels.common.device import DeviceProperties
from halfbyte.kernels.common.launch import launch
from halfbyte.kernels.common.overlap import SINCE, let_the_next_begin, wait_for_the_one_ahead
from halfbyte.kernels.linear.fusion import Residual

BLOCK = 512  # numbers of a token that one program adds up
# From so many tokens on a program has more of them and fewer warps. Nothing begins ahead of its turn then: it would
# only take room from what is at work.
MANY, WIDE_BLOCK = 1024, 1024


@triton.jit
def combine_kernel(
    rows, ids, weights, residual, out, columns, blocks, experts,
    K: tl.constexpr, SORTED: tl.constexpr, RESIDUAL: tl.constexpr, FACTOR: tl.constexpr, BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Program i: block i % blocks of token i // blocks. SORTED: ids are numbers of rows, of which `experts` exist.
    RESIDUAL: FACTOR times the sum is added to it."""
    token = (tl.program_id(0) // blocks).to(tl.int64)
    column = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    if OVERLAPS:
        wait_for_the_one_ahead()
        let_the_next_begin()
    total = tl.zeros((BLOCK,), tl.float32)
    for turn in tl.static_range(K):
        pair = token * K + turn
        number = tl.load(ids + pair).to(tl.int64)
        known = (number >= 0) & (number < experts)
        weight = tl.load(weights + pair).to(tl.float32)
        if SORTED:
            value = tl.load(rows + number * columns + column, inside & known, 0)
        else:  # a pair's row is there, whatever is in it: so the load need not wait for the id
            value = tl.where(known, tl.load(rows + pair * columns + column, inside, 0), 0)
        total += value.to(tl.float32) * tl.where(known, weight, 0)
    at = token * columns + column
    if RESIDUAL:
        total = tl.load(residual + at, inside, 0).to(tl.float32) + FACTOR * total
    tl.store(out + at, total, inside)


def combine(
    rows: Tensor, ids: Tensor, weights: Tensor, out: Tensor, experts: int, residual: Residual | None = None
) -> None:
    """out[t] = the sum over j of weights[t, j] * rows[t * k + j], without those whose ids[t, j] is none of the experts;
    with a residual, that and its factor times the sum.

    rows [T * k, H] of any float type, ids and weights [T, k], and out and what is added to [T, H], contiguous, on the
    current device.
    """
    _combine(rows, ids, weights, out, experts, False, residual)


def combine_sorted(
    rows: Tensor, places: Tensor, weights: Tensor, out: Tensor, residual: Residual | None = None
) -> None:
    """The same of rows that are sorted: that of pair t * k + j is rows[places[t * k + j]], or none where that is -1."""
    _combine(rows, places, weights, out, len(rows), True, residual)


def _combine(
    rows: Tensor, ids: Tensor, weights: Tensor, out: Tensor, experts: int, is_sorted: bool, residual: Residual | None
) -> None:
    (tokens, k), columns = weights.shape, out.shape[1]
    block, warps = (WIDE_BLOCK, 2) if tokens >= MANY else (BLOCK, 4)
    blocks = -(-columns // block)

    def configure(properties: DeviceProperties) -> tuple[int, dict[str, Any]]:
        constants = {"K": k, "SORTED": is_sorted, "RESIDUAL": residual is not None, "FACTOR": factor, "BLOCK": block}
        constants |= {"OVERLAPS": properties.ptx >= SINCE and tokens < MANY}
        return tokens * blocks, constants | {"num_warps": warps}

    added, factor = (out, 1.0) if residual is None else residual
    key = (rows.dtype, out.dtype, ids.dtype, weights.dtype, tokens, k, is_sorted, residual is None, factor)
    arguments = (rows, ids, weights, added, out, columns, blocks, experts)
    launch(combine_kernel, out.get_device(), arguments, key, configure)
