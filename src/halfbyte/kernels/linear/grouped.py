"""Products of many pairs of a token and an expert with a stack of experts, or with their transposes, with
Config::grouped. On Hopper by a kernel for which x is laid out: sm90_streamk has the narrow tiles, sm90_gemm the wide
ones and the way back. What these do not support, and other GPUs from sm_80 on, have sm80_gemm."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import chain
from typing import NamedTuple

import torch

from halfbyte.kernels.common.device import HOPPER, DeviceProperties
from halfbyte.kernels.common.driver import Arguments
from halfbyte.kernels.common.nvrtc import Constant, Variant
from halfbyte.kernels.common.tensor_map import tensor_map
from halfbyte.kernels.linear import laid_out
from halfbyte.kernels.linear.kernel import GroupedProduct
from halfbyte.kernels.linear.laid_out import COPIED_LAYOUT, LAYOUT, SWIZZLED, UNIT_K, span_of
from halfbyte.kernels.linear.problem import Addresses, Problem
from halfbyte.kernels.linear.sm80_gemm import launch as many
from halfbyte.kernels.linear.sm80_gemm.plan import ManyPlan
from halfbyte.kernels.linear.sm80_gemm.plan import grouped_plan as many_grouped_plan
from halfbyte.kernels.linear.sm90_gemm import launch as gemm
from halfbyte.kernels.linear.sm90_gemm import plan as wide
from halfbyte.kernels.linear.sm90_gemm.shape import (
    BACK_TILES_M,
    GROUPED_BACK_REGISTERS,
    SCATTERED_REGISTERS,
    GemmPlan,
)
from halfbyte.kernels.linear.sm90_streamk import launch as streamk
from halfbyte.kernels.linear.sm90_streamk import plan as narrow
from halfbyte.kernels.linear.sm90_streamk.shape import TILES_M, StreamKPlan
from halfbyte.kernels.linear.tune import h200

Plan = StreamKPlan | GemmPlan | ManyPlan
EVERY_TILE_M = tuple(sorted({*TILES_M, *BACK_TILES_M}))
INTERLEAVED = "swiglu_oai"  # the activation whose gate and up rows are neighbours


class Grouping(NamedTuple):
    """experts: of the stack. activation: of gate and up rows, of which only what it gives is stored. orders: in the
    order in which the next product reads its x, whose weights share scales as these do. ordered: x is so. wide: results
    are fp32, not of x's dtype. scatters: a result goes to its pair's row; else rows stay sorted by expert."""

    experts: int
    activation: str = ""
    orders: bool = False
    ordered: bool = False
    wide: bool = False
    scatters: bool = False


def supports(problem: Problem) -> bool:
    """True for stacks of what the kernels of Hopper support as one weight, and of scales that are exponents, which they
    decode to fp32 like all others."""
    return laid_out.supports(replace(problem, scale=torch.float32) if problem.has_exponents else problem)


def plan(
    pairs: int, experts: int, problems: Sequence[Problem], properties: DeviceProperties, back: bool = False
) -> tuple[Plan, ...] | None:
    """The plans for up to so many pairs and stacks, one after the other, that have tiles in common; None where no
    kernel supports them. The rows of each problem are those of all experts. back: of gradients, and for the products
    with the transposes."""
    if properties.capability == HOPPER and all(map(supports, problems)):
        tiles_m, each = list(EVERY_TILE_M), _narrow_or_wide
    else:
        tiles_m, each = sorted({8 * m_warps * columns for _, m_warps, columns in h200.MANY_SHAPES}), _many
    found = []
    for tile_m in tiles_m:
        plans = [each(pairs, experts, tile_m, problem, properties, back) for problem in problems]
        if all(plans):
            found.append(tuple(one for one in plans if one is not None))
    return min(found, key=lambda plans: sum(one.microseconds for one in plans), default=None)


def _narrow_or_wide(
    pairs: int, experts: int, tile_m: int, problem: Problem, properties: DeviceProperties, back: bool
) -> Plan | None:
    given = pairs, experts, tile_m, problem, properties, back
    every: chain[Plan] = chain(narrow.grouped_plans(*given), wide.grouped_plans(*given))
    return min(every, key=lambda one: one.microseconds, default=None)


def _many(
    pairs: int, experts: int, tile_m: int, problem: Problem, properties: DeviceProperties, back: bool
) -> Plan | None:
    return many_grouped_plan(pairs, experts, tile_m, problem, properties, back) if many.supports(problem) else None


def names(plans: Sequence[Plan]) -> str:
    """Of the kernels that may multiply where these do, for people."""
    if any(isinstance(plan, ManyPlan) for plan in plans):
        return many.NAME
    return f"{streamk.NAME} and {gemm.NAME}"


def clears(plans: Sequence[Plan]) -> bool:
    """True if products that scatter write zeros for pairs without an expert: where x is laid out."""
    return not any(isinstance(plan, ManyPlan) for plan in plans)


def sorted_microseconds(pairs: int, plans: Sequence[Plan]) -> float:
    """The estimated time of sorting pairs, and of the products with stacks."""
    return h200.SORT_START + h200.SORT_PAIRS * pairs / 1000 + sum(one.microseconds for one in plans)


def as_planned(grouping: Grouping, plans: Sequence[Plan]) -> Grouping:
    """The same, without an order of results under plans that are not all of the wide kernel: the narrow one has no
    thread that does nothing but copy W, and took a quarter longer where W came in so many pieces."""
    keeps = all(isinstance(plan, GemmPlan) for plan in plans)
    return grouping if keeps else grouping._replace(orders=False, ordered=False)


def bind(device: torch.device, problem: Problem, weight: Addresses, grouping: Grouping, plan: Plan) -> GroupedProduct:
    """The products of pairs with the experts of a stack on the current device; or, under a plan for the way back, with
    their transposes."""
    if isinstance(plan, ManyPlan):
        return many.bind_grouped(device, problem, weight, grouping, plan)
    o, index, side = problem, device.index, problem.n // grouping.experts
    n, k = (o.k, side) if plan.back else (side, o.k)
    tiles, units = plan.x_tiles(plan.chunk), -(-k // UNIT_K)
    compiled = _laid_out_variant(o, grouping, plan)
    key = index, (tiles, units), plan, compiled
    lay_out, multiply = laid_out.launches.get(
        key, lambda: laid_out.make_launches(index, (tiles, units), plan, compiled)
    )
    packed, *scales = weight
    unit, codebook = kernel_of(plan).codebook(o)
    fixed = weight_map(packed, o, grouping, plan), *scales
    after = n, k, -(-n // plan.rows), tiles, units, plan.workers, 0, unit, 1.0, 0.0, 0.0, codebook
    if grouping.ordered:
        arguments, row = Arguments(COPIED_LAYOUT, (), after), 2 * k

        def copy(stream: int, x: int, routes: int, bias: int, out: int, rows: int, per_row: int) -> None:
            map_of_x = tensor_map(x, (row, rows), (row,), (SWIZZLED, plan.tile_m))
            arguments.set(map_of_x, *fixed, x, bias, out, 0, 0, 0, routes, 0, per_row)
            multiply(stream, arguments.parameters)

        return copy
    arguments, room = Arguments(LAYOUT, fixed, after), tiles * units * plan.tile_m * UNIT_K * 2

    def run(stream: int, x: int, routes: int, bias: int, out: int, rows: int, per_row: int) -> None:
        place = torch.empty(room, dtype=torch.uint8, device=device)
        arguments.set(x, bias, out, place.data_ptr(), 0, 0, routes, rows * max(per_row, 1), per_row)
        lay_out(stream, arguments.parameters)
        multiply(stream, arguments.parameters)

    return run


def weight_map(packed: int, o: Problem, grouping: Grouping, plan: StreamKPlan | GemmPlan) -> bytes:
    """Of the stack. A copy brings rows of one expert, or columns of them on the way back: what is beyond its last row
    is zeros, not the next one's. Where gate and up are halves, it brings rows of both in turn. If results are ordered,
    it brings the gates and ups of eight (device/tile_rows.cuh)."""
    n, row, rows, order = o.n // grouping.experts, o.k // 2, plan.rows, span_of(o) // 4
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    if grouping.orders and has_halves(grouping):
        sizes, box = (row, 2, order, n // 2 // order, grouping.experts), (2, 2, 4, 1)
        strides = n // 2 * row, row, order * row, n * row
    elif grouping.orders:
        sizes, box = (row, 2 * order, n // 2 // order, grouping.experts), (4, 4, 1)
        strides = row, 2 * order * row, n * row
    elif has_halves(grouping):
        sizes, strides, box = (row, 2, n // 2, grouping.experts), (n // 2 * row, row, n * row), (2, rows // 2, 1)
    else:
        sizes, strides, box = (row, n, grouping.experts), (row, n * row), (rows, 1)
    return tensor_map(packed, sizes, strides, (rows // 2, plan.copied_rows, 1) if plan.back else (UNIT_K // 2, *box))


def has_halves(grouping: Grouping) -> bool:
    """True if an expert's gate rows come before its up rows."""
    return grouping.activation not in ("", INTERLEAVED)


def kernel_of(plan: StreamKPlan | GemmPlan) -> laid_out.LaidOutKernel:
    return gemm if isinstance(plan, GemmPlan) else streamk


def variant(problem: Problem, grouping: Grouping, plan: Plan, properties: DeviceProperties) -> Variant:
    """What is compiled."""
    if isinstance(plan, ManyPlan):
        return many.grouped_variant(problem, grouping, plan, properties)
    return _laid_out_variant(problem, grouping, plan)


@lru_cache(1 << 12)  # asked for by each layer
def _laid_out_variant(problem: Problem, grouping: Grouping, plan: StreamKPlan | GemmPlan) -> Variant:
    return Variant.of(kernel_of(plan).source(), "90a", constants(problem, grouping, plan))


def constants(problem: Problem, grouping: Grouping, plan: StreamKPlan | GemmPlan) -> dict[str, Constant]:
    """kernel.cu's Config."""
    of_experts: dict[str, Constant] = {
        "grouped": True, "activation": f"Activation::{grouping.activation or 'none'}", "wide": grouping.wide,
        "scatters": grouping.scatters, "orders": grouping.orders, "copies_x": grouping.ordered,
    }  # fmt: skip
    if isinstance(plan, StreamKPlan):
        return streamk.constants(problem, plan) | of_experts
    plan = replace(plan, lane_spans=plan.lane_spans and not grouping.ordered)
    of_all = gemm.constants(problem, plan) | of_experts
    if plan.decoders:
        return of_all
    producer, consumer = GROUPED_BACK_REGISTERS if plan.back else SCATTERED_REGISTERS
    return of_all | {"producer_registers": producer, "consumer_registers": consumer}
