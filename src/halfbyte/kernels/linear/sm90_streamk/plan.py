"""The planner: which shape of kernel.cu is for a product, for several at once, or for a stack of experts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache

from halfbyte.kernels.common.device import DeviceProperties
from halfbyte.kernels.linear import side_by_side, spread
from halfbyte.kernels.linear.fusion import Fusion
from halfbyte.kernels.linear.laid_out import UNIT_K, GroupPlan, span_of
from halfbyte.kernels.linear.problem import INVARIANT_ROWS, Problem
from halfbyte.kernels.linear.sm90_streamk.shape import MOST_BESIDE, StreamKPlan, is_grouped_valid, is_valid
from halfbyte.kernels.linear.sm90_streamk.times import (
    Kind,
    estimate,
    laying_out,
    microseconds_of,
    tiles_m,
    time_of_shares,
    with_x,
    without_x,
)
from halfbyte.kernels.linear.spread import most_tiles
from halfbyte.kernels.linear.tune import h200

StreamKGroup = GroupPlan[StreamKPlan]


@lru_cache(maxsize=4096)  # asked for by a weight, and by each group that it is of
def streamk_plan(m: int, problem: Problem, properties: DeviceProperties, batch_invariant: bool) -> StreamKPlan | None:
    """The plan for x [m, K], or None where this kernel is not for it.

    A CTA keeps all of x that it needs, where there is room for that. Or x is laid out ahead, and either every SM takes
    an equal part of all units, or every tile is cut into the same number of parts. With batch_invariant a row's sums
    are made in one order, whatever m is.
    """
    if m < 1 or properties.ptx != 90:
        return None
    if batch_invariant:
        return _invariant_plan(m, problem, properties)
    found = _fastest(m, (problem.n,), problem, properties)
    return found[0] if found else None


def group_plan(m: int, group: Sequence[Problem], properties: DeviceProperties) -> StreamKGroup | None:
    """The plans for x [m, K] and several weights: of one launch, or of launches that follow each other, whichever is
    faster; None where x is not laid out in one way for all."""
    found = (in_one_launch(m, group, properties), one_after_another(m, group, properties))
    return min(filter(None, found), key=lambda plan: plan.microseconds, default=None)


def in_one_launch(m: int, group: Sequence[Problem], properties: DeviceProperties) -> StreamKGroup | None:
    """Of weights that are alike: CTAs are dealt out to them, in equal parts of the units or so that every CTA's are of
    one tile, whose x it may keep."""
    if not side_by_side.are_alike(group) or m < 1 or properties.ptx != 90:
        return None
    plans = _fastest(m, [o.n for o in group], side_by_side.merged(group), properties)
    return StreamKGroup(tuple(plans), plans[0].microseconds, is_one_launch=True) if plans else None


def one_after_another(m: int, group: Sequence[Problem], properties: DeviceProperties) -> StreamKGroup | None:
    """Each weight in a launch of its own, in tiles for which x is laid out once."""
    if m < 1 or properties.ptx != 90 or len({(o.k, o.dtype, span_of(o)) for o in group}) > 1:
        return None
    found = []
    for tile_m in tiles_m(m, max(o.n for o in group), properties.sms):
        plans = tuple(plan for o in group for plan in _estimated(without_x, tile_m, m, (o.n,), o, properties))
        if len(plans) == len(group):
            saved = (len(plans) - 1) * laying_out(tile_m, m, group[0])
            found.append(StreamKGroup(plans, sum(plan.microseconds for plan in plans) - saved))
    return min(found, key=lambda plan: plan.microseconds, default=None)


def fused_plan(m: int, group: Sequence[Problem], fusion: Fusion, properties: DeviceProperties) -> StreamKGroup | None:
    """The plans for one weight whose product is added to something, or for a gated pair, or None where this kernel does
    not support them. The second of a pair combines with what the first has left, or one launch has both."""
    if fusion.norm is not None:
        return normed_plan(m, group, fusion, properties)
    plans = [found for problem in group if (found := streamk_plan(m, problem, properties, False)) is not None]
    if len(plans) < len(group) or len(group) != (2 if fusion.activation else 1):
        return None
    if len({(found.tile_m, found.resident > 0) for found in plans}) > 1:
        return None
    last = replace(plans[-1], activation=fusion.activation, residual=fusion.residual is not None)
    saved = 0.0 if last.resident else (len(plans) - 1) * laying_out(last.tile_m, m, group[0])
    apart = StreamKGroup((*plans[:-1], last), sum(found.microseconds for found in plans) - saved)
    pair = _pair(m, group, fusion, properties) if fusion.activation else None
    return apart if pair is None or apart.microseconds <= pair.microseconds else pair


def normed_plan(m: int, group: Sequence[Problem], fusion: Fusion, properties: DeviceProperties) -> StreamKGroup | None:
    """The plans for x that is normed as it is laid out and one weight, several in one launch, or gate and up."""
    if fusion.residual is not None:
        return None
    if fusion.activation:
        return _pair(m, group, fusion, properties, (without_x,))
    if m < 1 or properties.ptx != 90 or (len(group) > 1 and not side_by_side.are_alike(group)):
        return None
    found = _fastest(m, [o.n for o in group], side_by_side.merged(group), properties, (without_x,))
    plans = tuple(map(_normed, found))
    return StreamKGroup(plans, plans[0].microseconds, is_one_launch=len(plans) > 1) if plans else None


def _normed(plan: StreamKPlan) -> StreamKPlan:
    """The norm makes `lay_out` take so long that `multiply` had better begin beside it, with fewer registers."""
    return replace(plan, norm=True, beside=not plan.resident and plan.tile_m <= MOST_BESIDE)


def _pair(
    m: int, group: Sequence[Problem], fusion: Fusion, properties: DeviceProperties, kinds: tuple[Kind, ...] = ()
) -> StreamKGroup | None:
    """The plan for gate and up in one launch, as for one weight with the rows of both, if they are alike."""
    if m < 1 or properties.ptx != 90 or not side_by_side.are_a_pair(group):
        return None
    both = side_by_side.merged(group)
    found = _fastest(m, [both.n], both, properties, kinds)
    pair = found[0] if found else None
    pair = pair and replace(pair, activation=fusion.activation, paired=True)
    pair = _normed(pair) if pair and fusion.norm is not None else pair
    if pair is None or not is_valid(pair, m, group[0].n, group[0].k, span_of(group[0]), properties):
        return None
    return StreamKGroup((pair, pair), pair.microseconds, is_one_launch=True)


def handed_over(gates: StreamKGroup, down: StreamKPlan, problem: Problem) -> StreamKGroup | None:
    """The plan for gate and up that lays their result out for down's product, or None where that takes rows. problem:
    of down."""
    if not gates.is_one_launch or not gates.plans[0].paired or down.resident or problem.k % UNIT_K:
        return None
    plans = (replace(plan, next_tile_m=down.tile_m, next_span=span_of(problem)) for plan in gates.plans)
    return replace(gates, plans=tuple(plans))


def grouped_plans(
    pairs: int, experts: int, tile_m: int, problem: Problem, properties: DeviceProperties, back: bool
) -> Iterator[StreamKPlan]:
    """The plans for pairs of a token and an expert, in tiles of so many, with a stack; none where this kernel is not
    for them, as on the way back. The rows of the problem are those of all experts."""
    if back or pairs == 0 or properties.ptx != 90:
        return
    most = most_tiles(pairs, experts, tile_m) * tile_m
    for (other, warpgroups), times in h200.GROUPED_STREAMK.items():
        if other != tile_m:
            continue
        tile = spread.Tile(tile_m, 64 * warpgroups, times)
        time = spread.microseconds(pairs, experts, tile, problem, properties)
        for stages in range(h200.GROUPED_STAGES[tile_m, warpgroups], 1, -1):
            plan = StreamKPlan(tile_m, warpgroups, stages, properties.sms, chunk=most, microseconds=time)
            if is_grouped_valid(plan, experts, problem.n // experts, problem.k, span_of(problem), properties):
                yield plan
                break


def _invariant_plan(m: int, problem: Problem, properties: DeviceProperties) -> StreamKPlan | None:
    """The plan of which only tile_m and the number of tiles depend on m: how a tile is cut along K and in which order
    its parts are added up does not, nor does whether there is a plan."""
    n, k, span = problem.n, problem.k, span_of(problem)
    warpgroups, depth = h200.INVARIANT_WARPGROUPS, -(-k // UNIT_K)
    row_tiles = -(-n // (64 * warpgroups))
    costs = h200.INVARIANT_UNIT, h200.INVARIANT_CUT, h200.INVARIANT_PART
    every_share = range(1, max(1, min(depth, properties.sms // row_tiles)) + 1)
    shares = min(every_share, key=lambda shares: time_of_shares(shares, row_tiles, depth, *costs, properties.sms))
    kinds = {width: kind for (width, groups), kind in h200.STREAMK_TILES.items() if groups == warpgroups}

    def plan(m: int) -> StreamKPlan:
        """In the tiles that take the least time, all of them together."""
        tile_m = min(kinds, key=lambda width: -(-m // width) * kinds[width][1])
        ctas = row_tiles * -(-m // tile_m) * shares
        return StreamKPlan(tile_m, warpgroups, kinds[tile_m][0], ctas, invariant=True)

    every = (*kinds, max(m, INVARIANT_ROWS))
    if not all(is_valid(plan(rows), rows, n, k, span, properties) for rows in every):
        return None
    found = plan(m)
    return replace(found, microseconds=estimate(found, m, problem, properties))


def _fastest(
    m: int,
    sides: Sequence[int],
    problem: Problem,
    properties: DeviceProperties,
    kinds: tuple[Kind, ...] = (),
) -> list[StreamKPlan]:
    """The plans with the lowest estimate, which is that of all, of weights of so many rows in one launch; none where
    there is none. `problem` has all of their rows. kinds: where x is, wherever it may be if there are none."""
    found = (
        _estimated(candidates, tile_m, m, sides, problem, properties)
        for candidates in kinds or (with_x, without_x)
        for tile_m in tiles_m(m, problem.n, properties.sms)
    )
    return min(filter(None, found), key=lambda plans: plans[0].microseconds, default=[])


def _estimated(
    candidates: Kind,
    tile_m: int,
    m: int,
    sides: Sequence[int],
    problem: Problem,
    properties: DeviceProperties,
) -> list[StreamKPlan]:
    """The same of one kind, in tiles of so many rows of x."""
    k, span = problem.k, span_of(problem)
    for one in sorted(candidates(tile_m, m, sides, k, properties)):
        shape = StreamKPlan(tile_m, one.warpgroups, -one.fewer_stages, 1, one.resident, one.cluster, one.shares)
        plans = [replace(shape, ctas=some) for some in one.ctas]
        if all(is_valid(plan, m, n, k, span, properties) for plan, n in zip(plans, sides, strict=True)):
            time = microseconds_of(one.busy, plans[0], m, problem, properties)
            return [replace(plan, microseconds=time) for plan in plans]
    return []
