"""How linear's Triton kernels cut a product into tiles: a pure function of sizes, dtype and device.

There are three ways to go through W, and the weight and the rows of x decide:

"sum"      one row of x and rows of whole scale blocks: multiply-adds in fp32, a thread takes 16 bytes at a time
"product"  several rows of x and rows of whole scale blocks: matrix cores, the scale is applied to each block's sums
"any"      blocks that reach from one row into the next, or bytes that do: matrix cores, one weight at a time

All figures here were reasoned, not measured: no AMD GPU has run these kernels yet.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from halfbyte.kernels.common.device import DeviceProperties

# Up to so many rows of x a kernel that reads the 4-bit bytes is taken to be faster than the dense weight. A tile of x
# holds as many, so W is read and decoded once: half a byte a weight, where the dense way moves 4.5 (half read, two
# written, two read). A weight then costs 128 flops. An MI300X reads 10 T weights a second at most, which is 1300
# TFLOP/s, just what its matrix cores have; an RX 7900 XTX reads 1.9 T, and at 64 rows multiplies half as many.
MOST_ROWS = 64
INVARIANT_ROWS = 32  # of a tile, however many rows x has
NARROW_ROWS, NARROW_SPAN = 32, 32  # of tiles where registers are short
SPAN = 128  # weights of a row that a tile has at most
CHUNK = 32  # weights that a thread of "sum" decodes at a time, 16 bytes; no scale block is smaller
CHUNKS = 256  # of a step of "sum": one or two for each of a program's threads
MOST_COLUMNS = 64  # rows of W that a program of "sum" has
# Programs that a multiprocessor shall have, each of up to four warps. K is cut only where that at least doubles them,
# because the second kernel, which adds up, costs more than a few idle multiprocessors.
SUM_PROGRAMS, PRODUCT_PROGRAMS = 4, 2
LEAST_K = 256  # weights of a row that a part of K has at least


@dataclass(frozen=True)
class TilePlan:
    """way: see above. rows: of x a program takes. columns: rows of W, which are columns of y. span: weights of K a
    step. steps: of a part of K. parts: of K; several write partial sums, which a second kernel adds up in order. warps:
    of a program."""

    way: Literal["sum", "product", "any"]
    rows: int
    columns: int
    span: int
    steps: int
    parts: int
    warps: int


def supports(n: int, k: int) -> bool:
    """Whether rows and columns of W can be counted in 32 bits; all of its weights are counted in 64."""
    return max(n, k) < 2**31 - 2**16


def is_valid(plan: TilePlan, m: int, k: int, block_size: int) -> bool:
    """True if the kernels compute the right thing under `plan`, for any N: what planner and tests go by."""
    sides = (plan.rows, plan.columns, plan.span, plan.warps)
    if any(side < 1 or side & (side - 1) for side in sides) or plan.warps > 16 or plan.parts < 1:
        return False
    all_steps = -(-k // plan.span)
    # No part is empty but that of a K of 0, and together they have every step.
    if not (plan.parts - 1) * plan.steps < max(all_steps, 1) or plan.parts * plan.steps < all_steps:
        return False
    if plan.way == "any":
        return plan.rows >= 16 and plan.columns >= 16 and plan.span >= 16
    if k % block_size:
        return False
    if plan.way == "sum":
        return plan.rows == 1 and m <= 1 and plan.span % CHUNK == 0
    return plan.rows >= 16 and plan.columns >= 16 and plan.span >= 16 and block_size % plan.span == 0


def plan(
    m: int, n: int, k: int, dtype: torch.dtype, block_size: int, properties: DeviceProperties, batch_invariant: bool
) -> TilePlan:
    """The plan for x [m, k] of `dtype` and W [n, k] with a scale for every `block_size` weights of the flattened W.

    With batch_invariant it does not depend on m.
    """
    m, n = max(m, 1), max(n, 1)
    way: Literal["sum", "product", "any"] = "product" if k % block_size == 0 else "any"
    if batch_invariant:
        m = INVARIANT_ROWS
    elif m == 1 and way == "product":
        return _sum(n, k, properties)
    # One weight at a time takes registers for addresses, and fp32 on GPUs without matrix cores for it for operands.
    is_narrow = way == "any" or dtype == torch.float32
    rows = 16
    while rows < min(m, NARROW_ROWS if is_narrow else MOST_ROWS):
        rows *= 2
    row_tiles = -(-m // rows)
    columns = 32 if is_narrow or row_tiles * -(-n // 64) < properties.sms else 64
    span = NARROW_SPAN if is_narrow else min(block_size, SPAN)
    # Partial sums are written and read, four bytes each. They shall be a quarter of the bytes of W at most.
    most_parts = min(k // LEAST_K, k // (64 * min(m, rows)))
    wanted = PRODUCT_PROGRAMS * properties.sms // (row_tiles * -(-n // columns))
    steps, parts = _cut(-(-k // span), min(wanted, most_parts))
    warps = 4 if is_narrow else min(4, rows * columns // 256)
    return TilePlan(way, rows, columns, span, steps, parts, warps)


def _sum(n: int, k: int, properties: DeviceProperties) -> TilePlan:
    """More rows of W a program read x less often, fewer make more programs."""
    programs = SUM_PROGRAMS * properties.sms
    columns = next((columns for columns in (16, 8) if -(-n // columns) >= programs), 4)
    while columns < MOST_COLUMNS and CHUNK * CHUNKS // columns >= 2 * k:  # or threads had nothing to do
        columns *= 2
    span = CHUNK * CHUNKS // columns
    wanted = programs // -(-n // columns)
    steps, parts = _cut(-(-k // span), min(wanted, k // LEAST_K))
    return TilePlan("sum", 1, columns, span, steps, parts, 4)


def _cut(all_steps: int, parts: int) -> tuple[int, int]:
    """Steps of a part, and parts, close to so many: no part is empty."""
    steps = -(-all_steps // max(1, parts))
    return steps, max(1, -(-all_steps // max(1, steps)))
