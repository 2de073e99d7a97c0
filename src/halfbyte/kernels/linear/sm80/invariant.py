"""Plans that make the sums of a row of x in one order, whatever other rows are beside it and however many.

What decides the order in which the products of a row of x with a row of W are added up, and so the bits of the result:

    decoding   which numbers of K an MMA takes, and whether its operands have their scales (plan.decoding_columns)
    span       the numbers of K that MMAs add up, one after the other, before a scale multiplies their sum
    k_warps    warps that share the spans of a stage; they add up at a tile's end, in their order. own_k: the numbers of
               K of a stage that each takes
    shares     CTAs that share a tile, each an equal part of K; the first adds the others' sums to its own, in order

An Order holds these. It follows from the weight and the GPU alone, and plans for all numbers of rows have the same one.
They may differ in all else: how wide a tile is and how many rows of W it has, how deep the ring is, how many CTAs share
a multiprocessor. A column of mma.m16n8k16 is a row of x, and its sums are those of no other column; neither do they
depend on its place, which the instruction set does not say, and the tests on GPUs check. With one warp along K spans
come in their order whatever a stage holds, so own_k is left open there.

Since every tile is cut into equal parts, there may be more CTAs than run at once. A CTA waits for those of higher
numbers only, which have started before it (work.cuh).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from halfbyte.kernels.common.device import DeviceProperties
from halfbyte.kernels.linear.problem import INVARIANT_ROWS, Problem
from halfbyte.kernels.linear.sm80.plan import SPANS, Sm80Plan, every_shape, with_stages
from halfbyte.kernels.linear.tune import h200


class Order(NamedTuple):
    span: int
    k_warps: int
    own_k: int  # 0 where it makes no difference
    shares: int


def order_of(plan: Sm80Plan, m: int, problem: Problem) -> Order:
    """That of an invariant plan."""
    own_k = plan.tile_k // plan.k_warps if plan.k_warps > 1 else 0
    return Order(plan.span, plan.k_warps, own_k, plan.ctas // plan.tiles(m, problem))


def invariant_plan(m: int, problem: Problem, properties: DeviceProperties) -> Sm80Plan | None:
    """The plan for x [m, K], or None where this kernel is not for the weight: of those with the weight's order, that
    with the least estimated time. Up to INVARIANT_ROWS there is one for all numbers of rows, or for none."""
    if m < 1 or properties.ptx < 80 or problem.k % 32:
        return None
    order = _order(problem, properties)
    return None if order is None else _fastest(order, m, problem, properties)


@lru_cache(1 << 10)
def _order(problem: Problem, properties: DeviceProperties) -> Order | None:
    """That with the least product of the times for few rows of x, some and many, which dispatch.py takes at once. A
    shape that does for the most rows does for fewer."""
    best, found = math.inf, None
    for order in _orders(problem):
        most = _fastest(order, INVARIANT_ROWS, problem, properties)
        if most is None or most.partial_sums(INVARIANT_ROWS, problem) > h200.SM80_INVARIANT_SUMS:
            continue
        plans = (_fastest(order, m, problem, properties) for m in h200.SM80_INVARIANT_ROWS)
        time = math.prod(plan.microseconds for plan in plans if plan is not None)
        if time < best:
            best, found = time, order
    return found


def _orders(problem: Problem) -> Iterator[Order]:
    """All that shapes have; with spans of 32 only where K or blocks leave no other."""
    spans = [span for span in SPANS if (problem.k | problem.block_size) % span == 0 and span > SPANS[-1]] or SPANS[-1:]
    shapes = [shape for columns in h200.SM80_COLUMNS for shape in every_shape(columns)]
    for k_warps, own_k in sorted({(k, tile_k // k if k > 1 else 0) for _, _, k, tile_k, _ in shapes}):
        for span in spans:
            for shares in range(1, h200.SM80_SHARES + 1):
                yield Order(span, k_warps, own_k, shares)


def _fastest(order: Order, m: int, problem: Problem, properties: DeviceProperties) -> Sm80Plan | None:
    """Of all widths and their shapes that have this order."""
    plans = (with_stages(shape, m, problem, properties) for shape in shapes_of(order, m, problem))
    return min((plan for plan in plans if plan is not None), key=lambda plan: plan.microseconds, default=None)


def shapes_of(order: Order, m: int, problem: Problem) -> Iterator[Sm80Plan]:
    """Of all widths, those that have this order; without stages."""
    for columns in h200.SM80_COLUMNS:
        for row_groups, n_warps, k_warps, tile_k, resident in every_shape(columns):
            if k_warps == order.k_warps and order.own_k in (0, tile_k // k_warps):
                one = Sm80Plan(row_groups, columns, n_warps, k_warps, tile_k, order.span, 0, resident, 1, True)
                yield replace(one, ctas=order.shares * one.tiles(m, problem))
