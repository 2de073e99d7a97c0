"""The planner: which shape of kernel.cu is for a product, for several at once, or for a stack of experts."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import product, takewhile
from operator import itemgetter

from halfbyte.kernels.common.device import DeviceProperties
from halfbyte.kernels.linear import side_by_side, spread
from halfbyte.kernels.linear.laid_out import UNIT_K, GroupPlan, copies_x, span_of
from halfbyte.kernels.linear.problem import Problem
from halfbyte.kernels.linear.sm90_gemm.shape import (
    DECODERS,
    NARROW_STAGES,
    TILES_M,
    W_STAGES,
    GemmPlan,
    decoding,
    is_grouped_valid,
    is_valid,
    quarters,
    tiles_of,
    x_stages,
)
from halfbyte.kernels.linear.sm90_gemm.times import (
    busiest,
    last_of,
    launches,
    narrowest,
    plans,
    room_of,
    start_of,
    tiles_at_once,
    units_of,
    with_lasting,
)
from halfbyte.kernels.linear.spread import most_tiles
from halfbyte.kernels.linear.tune import h200

GemmGroup = GroupPlan[GemmPlan]


@lru_cache(maxsize=4096)  # asked for by a weight, and by each group that it is of
def gemm_plan(m: int, problem: Problem, properties: DeviceProperties, back: bool = False) -> GemmPlan | None:
    """The plan for x [m, K], or None where this kernel is not for it: every CTA has one tile, or CTAs take equal parts
    of all units, or they or clusters equal parts of each tile. back: for x [m, N] and the product x @ W.

    CTAs that take equal parts are far apart along K and read the same x at different times, so a launch takes as many
    rows of x as L2 holds, or half as many; those that have one tile each go along K together. Of plans that are about
    as fast as the fastest, it is the one for which x laid out takes the least memory.
    """
    if m < 1 or properties.ptx != 90:
        return None
    n, k = (problem.k, problem.n) if back else (problem.n, problem.k)
    timed = ((launches(plan, m, problem, properties), plan) for plan in plans(m, problem, properties, back))
    by_time = sorted(timed, key=itemgetter(0))
    valid = (some for some in by_time if is_valid(some[1], m, n, k, span_of(problem), properties))
    if (fastest := next(valid, None)) is None:
        return None
    alike = takewhile(lambda some: some[0] <= h200.GEMM_ALIKE * fastest[0], valid)
    rows_laid_out = lambda some: 0 if copies_x(problem, some[1]) else min(some[1].chunk, m)  # noqa: E731
    time, best = min((fastest, *alike), key=rows_laid_out)
    return replace(best, microseconds=with_lasting(time))


def group_plan(m: int, group: Sequence[Problem], properties: DeviceProperties) -> GemmGroup | None:
    """The plans for x [m, K] and several weights: of one launch, or of launches that follow each other, whichever is
    faster; None where x is not laid out in one way for all."""
    found = (in_one_launch(m, group, properties), one_after_another(m, group, properties))
    return min(filter(None, found), key=lambda plan: plan.microseconds, default=None)


def in_one_launch(m: int, group: Sequence[Problem], properties: DeviceProperties) -> GemmGroup | None:
    """Of weights that are alike: CTAs are dealt out to them."""
    if not side_by_side.are_alike(group) or m < 1 or properties.ptx != 90:
        return None
    every, rates, found = side_by_side.merged(group), properties.rates, []
    depth, reading = -(-every.k // UNIT_K), every.megabytes / (h200.GEMM_BANDWIDTH * rates.bandwidth)
    for tile_m, in_order in product(narrowest(m, tiles_of(every)), (False, True)):
        shape = GemmPlan(tile_m, 2, W_STAGES, x_stages(tile_m, every), 1, 1, tile_m, in_order=in_order)
        shape = decoding(shape, every)
        unit, x_tiles = units_of(shape)[tile_m], -(-m // tile_m)
        chunk = tiles_at_once(x_tiles, every.k, tile_m, room_of(in_order))
        last = last_of(x_tiles, chunk)
        row_tiles = [-(-o.n // 128) for o in group]
        dealt = side_by_side.deal([rows * depth * last for rows in row_tiles], properties.sms)
        choices = {dealt}
        if sum(row_tiles) * chunk <= properties.sms and chunk == last:
            choices.add(tuple(rows * chunk for rows in row_tiles))
        for workers in choices:
            each = zip(row_tiles, workers, strict=True)
            busy = max(busiest(rows * chunk, depth, ctas, tile_m, unit, h200.GEMM_APART) for rows, ctas in each)
            one = start_of(shape, chunk * tile_m, every) + math.hypot(busy / rates.clock, reading)
            time, rows = -(-x_tiles // chunk) * one, chunk * tile_m
            plans = tuple(replace(shape, workers=ctas, chunk=rows, microseconds=time) for ctas in workers)
            found.append((time, plans))
    valid = (
        GemmGroup(plans, time, is_one_launch=True)
        for time, plans in sorted(found, key=itemgetter(0))
        if all(is_valid(p, m, o.n, o.k, span_of(o), properties) for p, o in zip(plans, group, strict=True))
    )
    return next(valid, None)


def paired_plan(m: int, group: Sequence[Problem], activation: str, properties: DeviceProperties) -> GemmGroup | None:
    """The plan for gate and up in one launch, as for one weight with the rows of both, if they are alike."""
    if m < 1 or properties.ptx != 90 or not side_by_side.are_a_pair(group):
        return None
    found = gemm_plan(m, side_by_side.merged(group), properties)
    pair = found and replace(found, activation=activation, paired=True)
    if pair is None or not is_valid(pair, m, group[0].n, group[0].k, span_of(group[0]), properties):
        return None
    return GemmGroup((pair, pair), pair.microseconds, is_one_launch=True)


def one_after_another(m: int, group: Sequence[Problem], properties: DeviceProperties) -> GemmGroup | None:
    """Each weight as alone, but that x is laid out once."""
    plans = tuple(found for problem in group if (found := gemm_plan(m, problem, properties)) is not None)
    ways = {(o.k, o.dtype, span_of(o), p.tile_m, p.chunk, p.in_order) for o, p in zip(group, plans, strict=False)}
    if len(plans) < len(group) or len(ways) > 1:
        return None
    saved = 0 if plans[0].in_order else (len(plans) - 1) * len(range(0, m, plans[0].chunk)) * h200.GEMM_LAYING_OUT
    return GemmGroup(plans, sum(found.microseconds for found in plans) - saved)


def grouped_plans(
    pairs: int, experts: int, tile_m: int, problem: Problem, properties: DeviceProperties, back: bool
) -> Iterator[GemmPlan]:
    """The plans for pairs of a token and an expert, in tiles of so many, with a stack; none where this kernel is not
    for them. The rows of the problem are those of all experts. back: for rows [N] and the product with the
    transposes."""
    if pairs == 0 or properties.ptx != 90:
        return
    n, k = (problem.k, problem.n // experts) if back else (problem.n // experts, problem.k)
    if back and problem.numbers == "looked_up" and (times := h200.GROUPED_BACK_DECODERS_TIMES.get(tile_m)) is not None:
        most, (decoders, of_w, of_x) = most_tiles(pairs, experts, tile_m) * tile_m, DECODERS[tile_m]
        tile = spread.Tile(tile_m, 128, times, quarters(tile_m))
        time = spread.microseconds(pairs, experts, tile, problem, properties, back)
        made = GemmPlan(tile_m, 2, of_w, of_x, properties.sms, 1, most, time, back, decoders=decoders)
        if is_grouped_valid(made, experts, n, k, span_of(problem), properties):
            yield made
    times = (h200.GROUPED_BACK_TIMES if back else h200.GROUPED_TIMES).get(tile_m)
    if times is None:
        return
    most, stages = most_tiles(pairs, experts, tile_m) * tile_m, NARROW_STAGES if tile_m < TILES_M[0] else W_STAGES
    usual = GemmPlan(tile_m, 2, stages, x_stages(tile_m, problem), properties.sms, 1, most, back=back)
    unlike = units_of(decoding(usual, problem))[tile_m] / units_of(usual)[tile_m]  # of how they are decoded
    tile = spread.Tile(tile_m, 128, times._replace(unit=times.unit * unlike), quarters(tile_m))
    time = spread.microseconds(pairs, experts, tile, problem, properties, back)
    shape = decoding(replace(usual, microseconds=time), problem)
    for some in range(stages, 1, -1):
        plan = replace(shape, w_stages=some)
        if is_grouped_valid(plan, experts, n, k, span_of(problem), properties):
            yield plan
            break
