"""Which shape of kernel.cu is for a product: its constants, what it needs, and the planner that picks among them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import NamedTuple

from halfbyte.kernels.common.device import MOST_CLUSTER, DeviceProperties
from halfbyte.kernels.linear import side_by_side, spread
from halfbyte.kernels.linear.fusion import Fusion
from halfbyte.kernels.linear.laid_out import UNIT_K, GroupPlan, can_be_numbered, span_of
from halfbyte.kernels.linear.problem import INVARIANT_ROWS, Problem
from halfbyte.kernels.linear.spread import most_tiles
from halfbyte.kernels.linear.tune import h200

MOST_SHARES = 16  # of a tile: a thread has what they leave in registers
TILES_M = (8, 16, 24, 32, 48, 64, 80, 96, 112)
REGISTERS = {2: (120, 192), 3: (80, 144), 4: (96, 96)}  # of producer and consumer threads; by warpgroups


@dataclass(frozen=True)
class StreamKPlan:
    """The constants of kernel.cu, by the names of its Config, `ctas`, and the estimate."""

    tile_m: int  # rows of x
    warpgroups: int  # that multiply, 64 rows of W each
    stages: int  # units on their way
    ctas: int  # that share the work
    resident: int = 0  # units of x that a CTA keeps, which are all that it multiplies; 0: x is laid out ahead
    cluster: int = 1  # CTAs of a tile that add up among themselves, which are all of it; 1: sums meet in memory
    shares: int = 1  # CTAs of a tile that have equal parts of it, and all add up some; 1: it is one of them that does
    invariant: bool = False  # the sums of a row are made in the same order whatever tile_m is
    activation: str = ""  # what the result of another weight gates this one's by
    paired: bool = False  # by the same launch, whose tiles have rows of both
    residual: bool = False  # the result is added to something
    norm: bool = False  # x is normed as it is laid out
    chunk: int = 0  # of experts: the most rows of x, all tiles together
    microseconds: float = field(default=0.0, compare=False)

    back: bool = field(default=False, init=False)

    @property
    def direct(self) -> int:
        """The most parts of a tile that its first CTA adds up one by one; of more, others add some up first. The CTA of
        a narrow tile loads several parts at once, so another's help pays later."""
        return h200.INVARIANT_DIRECT if self.invariant else 6 + max(1, 32 // self.tile_m)

    @property
    def rows(self) -> int:
        """Rows of W in a tile; of each weight of a pair."""
        return 64 * self.warpgroups // (2 if self.paired else 1)

    @property
    def sums(self) -> int:
        """Of a tile."""
        return 64 * self.warpgroups * self.tile_m

    @property
    def workers(self) -> int:
        """That share the units."""
        return self.ctas

    def shared_bytes(self, span: int) -> int:
        """Dynamic shared memory. kernel.cu lays it out, and does not compile where this sum is another than its own."""
        stage = 64 * self.warpgroups * (UNIT_K // 2 + UNIT_K // span * 4)
        x = (self.resident or self.stages) * self.tile_m * UNIT_K * 2
        return 256 * 256 + 1024 + self.stages * stage + x

    def x_tiles(self, m: int) -> int:
        """Tiles of x [m, K]."""
        return -(-m // self.tile_m)

    @property
    def threads(self) -> int:
        return 128 * (self.warpgroups + 1)


StreamKGroup = GroupPlan[StreamKPlan]


def is_valid(plan: StreamKPlan, m: int, n: int, k: int, span: int, properties: DeviceProperties) -> bool:
    """True if kernel.cu computes the right thing under `plan`, and fits: planner, tuner and tests go by this."""
    tiles, depth = -(-n // plan.rows) * plan.x_tiles(m), -(-k // UNIT_K)
    units = tiles * depth
    return (
        properties.ptx == 90
        and plan.tile_m in TILES_M
        and plan.warpgroups in REGISTERS
        and 2 <= plan.stages <= 8
        and 1 <= plan.ctas <= units
        and units * plan.ctas < 1 << 32
        and m * k < 1 << 31
        and n < 1 << 31
        and not (plan.norm and plan.resident)
        and (plan.resident == 0 or (plan.ctas % tiles == 0 and plan.resident >= -(-depth * tiles // plan.ctas)))
        and (plan.cluster == 1 or (plan.ctas == tiles * plan.cluster and _can_reduce_in_cluster(plan)))
        and (plan.shares == 1 or (plan.ctas == tiles * plan.shares and plan.cluster == 1 and not plan.invariant))
        and plan.shared_bytes(span) <= properties.shared_memory
    )


def _can_reduce_in_cluster(plan: StreamKPlan) -> bool:
    """CTAs exist in clusters of so many everywhere, and sums take no more room than the stages of W."""
    groups = -(-(plan.tile_m // 8) // plan.cluster) * plan.cluster  # of columns; each CTA has room for as many
    return (
        plan.resident > 0
        and 1 < plan.cluster <= MOST_CLUSTER
        and groups * plan.warpgroups * 2048 <= plan.stages * plan.warpgroups * 32 * UNIT_K
    )


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
        plans = tuple(plan for o in group for plan in _estimated(_without_x, tile_m, m, (o.n,), o, properties))
        if len(plans) == len(group):
            saved = (len(plans) - 1) * h200.STREAMK_LAYING_OUT
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
    saved = 0.0 if last.resident else (len(plans) - 1) * h200.STREAMK_LAYING_OUT
    apart = StreamKGroup((*plans[:-1], last), sum(found.microseconds for found in plans) - saved)
    pair = _pair(m, group, fusion, properties) if fusion.activation else None
    return apart if pair is None or apart.microseconds <= pair.microseconds else pair


def normed_plan(m: int, group: Sequence[Problem], fusion: Fusion, properties: DeviceProperties) -> StreamKGroup | None:
    """The plans for x that is normed as it is laid out and one weight, several in one launch, or gate and up."""
    if fusion.residual is not None:
        return None
    if fusion.activation:
        return _pair(m, group, fusion, properties, (_without_x,))
    if m < 1 or properties.ptx != 90 or (len(group) > 1 and not side_by_side.are_alike(group)):
        return None
    found = _fastest(m, [o.n for o in group], side_by_side.merged(group), properties, (_without_x,))
    plans = tuple(replace(plan, norm=True) for plan in found)
    return StreamKGroup(plans, plans[0].microseconds, is_one_launch=len(plans) > 1) if plans else None


def _pair(
    m: int, group: Sequence[Problem], fusion: Fusion, properties: DeviceProperties, kinds: tuple[_Kind, ...] = ()
) -> StreamKGroup | None:
    """The plan for gate and up in one launch, as for one weight with the rows of both, if they are alike."""
    if m < 1 or properties.ptx != 90 or not side_by_side.are_a_pair(group):
        return None
    both = side_by_side.merged(group)
    found = _fastest(m, [both.n], both, properties, kinds)
    pair = found[0] if found else None
    pair = pair and replace(pair, activation=fusion.activation, paired=True, norm=fusion.norm is not None)
    if pair is None or not is_valid(pair, m, group[0].n, group[0].k, span_of(group[0]), properties):
        return None
    return StreamKGroup((pair, pair), pair.microseconds, is_one_launch=True)


def equal_shares(shares: int, cluster: int = 1) -> int:
    """`shares` of the plan by which tiles are cut into so many parts."""
    return shares if cluster == 1 and shares <= MOST_SHARES else 1


def is_grouped_valid(plan: StreamKPlan, experts: int, n: int, k: int, span: int, properties: DeviceProperties) -> bool:
    """True if kernel.cu computes the right thing under `plan` with a stack of experts [N, K]."""
    return (
        properties.ptx == 90
        and plan.tile_m in TILES_M
        and plan.warpgroups in REGISTERS
        and 2 <= plan.stages <= 8
        and plan.resident == 0
        and plan.cluster == 1
        and can_be_numbered(plan, experts, n, k)
        and plan.shared_bytes(span) <= properties.shared_memory
    )


def grouped_plan(
    pairs: int, experts: int, tile_m: int, problem: Problem, properties: DeviceProperties, back: bool
) -> StreamKPlan | None:
    """The plan for pairs of a token and an expert, in tiles of so many, with a stack; None where this kernel is not for
    them, as on the way back. The rows of the problem are those of all experts."""
    if back or pairs == 0 or properties.ptx != 90:
        return None
    most, found = most_tiles(pairs, experts, tile_m) * tile_m, []
    for (other, warpgroups), (stages, times) in h200.GROUPED_STREAMK.items():
        if other != tile_m:
            continue
        time = spread.microseconds(pairs, experts, tile_m, 64 * warpgroups, times, problem, properties)
        for some in range(stages, 1, -1):
            plan = StreamKPlan(tile_m, warpgroups, some, properties.sms, chunk=most, microseconds=time)
            if is_grouped_valid(plan, experts, problem.n // experts, problem.k, span_of(problem), properties):
                found.append(plan)
                break
    return min(found, key=lambda plan: plan.microseconds, default=None)


def tiles_m(m: int, n: int, sms: int) -> tuple[int, ...]:
    """Rows of x a tile that come into question, none more than they need to be: those of the fewest tiles, or of one
    tile more; of any number of tiles, as long as each has a multiprocessor."""
    narrowest = {-(-m // width): width for width in reversed(TILES_M)}  # by the number of tiles
    row_tiles = -(-n // (64 * min(REGISTERS)))
    most = max(min(narrowest) + (m > h200.STREAMK_ONE_TILE), sms // row_tiles)
    return tuple(width for count, width in narrowest.items() if count <= most)


class _Candidate(NamedTuple):
    """The plans of weights in one launch, those with the least time of the busiest CTA first; of as short ones, those
    with the most stages."""

    busy: float
    fewer_stages: int  # minus the stages
    warpgroups: int
    ctas: tuple[int, ...]
    resident: int = 0
    cluster: int = 1
    shares: int = 1


_Kind = Callable[[int, int, Sequence[int], int, DeviceProperties], list[_Candidate]]


def _fastest(
    m: int,
    sides: Sequence[int],
    problem: Problem,
    properties: DeviceProperties,
    kinds: tuple[_Kind, ...] = (),
) -> list[StreamKPlan]:
    """The plans with the lowest estimate, which is that of all, of weights of so many rows in one launch; none where
    there is none. `problem` has all of their rows. kinds: where x is, wherever it may be if there are none."""
    found = (
        _estimated(candidates, tile_m, m, sides, problem, properties)
        for candidates in kinds or (_with_x, _without_x)
        for tile_m in tiles_m(m, problem.n, properties.sms)
    )
    return min(filter(None, found), key=lambda plans: plans[0].microseconds, default=[])


def _estimated(
    candidates: _Kind,
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
            time = _microseconds(one.busy, plans[0], m, problem, properties)
            return [replace(plan, microseconds=time) for plan in plans]
    return []


def estimate(plan: StreamKPlan, m: int, problem: Problem, properties: DeviceProperties) -> float:
    """The estimated time of any plan for x [m, K], in µs."""
    o, tiles = problem, -(-problem.n // plan.rows) * plan.x_tiles(m)
    shares, rest = divmod(plan.ctas, tiles)
    if plan.resident:
        busy = _busy_with_x(plan.tile_m, plan.warpgroups, o.k, plan.resident, shares, plan.cluster)
    elif rest == 0:
        busy = _busy_of_shares(plan.tile_m, plan.warpgroups, o.k, tiles, shares, properties.sms)
    else:
        busy = _busy_of_run(plan.tile_m, plan.warpgroups, o.k, tiles, plan.ctas)
    return _microseconds(busy, plan, m, o, properties)


def _microseconds(busy: float, plan: StreamKPlan, m: int, problem: Problem, properties: DeviceProperties) -> float:
    """The estimated time, of the busiest CTA's time and of what must be read and written."""
    times, rates = h200.STREAMK_TIMES[plan.tile_m, plan.resident > 0], properties.rates
    reading = problem.megabytes / (times.bandwidth * rates.bandwidth)
    most = max(math.hypot(reading, busy / rates.clock), problem.megabytes / (h200.MOST_BANDWIDTH * rates.bandwidth))
    scales = times.scales * problem.scale_megabytes * plan.x_tiles(m)
    return times.start + most + scales + times.result * problem.result_megabytes(m)


def _without_x(tile_m: int, m: int, sides: Sequence[int], k: int, properties: DeviceProperties) -> list[_Candidate]:
    """Where x is laid out ahead."""
    depth, x_tiles = -(-k // UNIT_K), -(-m // tile_m)
    found = []
    for (other, warpgroups), (stages, _) in h200.STREAMK_TILES.items():
        if other != tile_m:
            continue
        tiles = [-(-n // (64 * warpgroups)) * x_tiles for n in sides]
        every = sum(tiles)
        for shares in range(1, min(depth, properties.sms // every) + 1):
            time = _busy_of_shares(tile_m, warpgroups, k, every, shares, properties.sms)
            ctas = tuple(some * shares for some in tiles)
            found.append(_Candidate(time, -stages, warpgroups, ctas, shares=equal_shares(shares)))
        dealt = side_by_side.deal([some * depth for some in tiles], properties.sms)
        each = zip(tiles, dealt, strict=True)
        time = max(_busy_of_run(tile_m, warpgroups, k, some, ctas) for some, ctas in each)
        found.append(_Candidate(time, -stages, warpgroups, dealt))
    return found


def _busy_of_shares(tile_m: int, warpgroups: int, k: int, tiles: int, shares: int, sms: int) -> float:
    """µs of the busiest SM where every tile is cut into so many parts."""
    unit, part = h200.STREAMK_TILES[tile_m, warpgroups][1], h200.STREAMK_PART[tile_m] * warpgroups
    return _time_of_shares(shares, tiles, -(-k // UNIT_K), unit, h200.STREAMK_CUT[tile_m], part, sms)


def _time_of_shares(shares: int, tiles: int, depth: int, unit: float, cut: float, part: float, sms: int) -> float:
    return -(-tiles * shares // sms) * (-(-depth // shares) * unit + (cut + part * shares if shares > 1 else 0))


def _busy_of_run(tile_m: int, warpgroups: int, k: int, tiles: int, ctas: int) -> float:
    """µs of the busiest CTA where the units of all tiles are dealt out in equal runs."""
    part, units = h200.STREAMK_PART[tile_m] * warpgroups, tiles * -(-k // UNIT_K)
    return (
        -(-units // ctas) * h200.STREAMK_TILES[tile_m, warpgroups][1]
        + h200.STREAMK_RUN[tile_m]
        + (ctas / tiles + 1) * part
    )


def _invariant_plan(m: int, problem: Problem, properties: DeviceProperties) -> StreamKPlan | None:
    """The plan of which only tile_m and the number of tiles depend on m: how a tile is cut along K and in which order
    its parts are added up does not, nor does whether there is a plan."""
    n, k, span = problem.n, problem.k, span_of(problem)
    warpgroups, depth = h200.INVARIANT_WARPGROUPS, -(-k // UNIT_K)
    row_tiles = -(-n // (64 * warpgroups))
    costs = h200.INVARIANT_UNIT, h200.INVARIANT_CUT, h200.INVARIANT_PART
    every_share = range(1, max(1, min(depth, properties.sms // row_tiles)) + 1)
    shares = min(every_share, key=lambda shares: _time_of_shares(shares, row_tiles, depth, *costs, properties.sms))
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


def _with_x(tile_m: int, m: int, sides: Sequence[int], k: int, properties: DeviceProperties) -> list[_Candidate]:
    """Where every CTA keeps its x, a part of one tile; none where nothing is to be gained. Where all clusters of a
    tile's CTAs run at once, they add up among themselves."""
    depth, found = -(-k // UNIT_K), []
    for warpgroups in h200.RESIDENT_UNIT if tile_m in h200.RESIDENT_TILE_M else ():
        each = [-(-n // (64 * warpgroups)) * -(-m // tile_m) for n in sides]
        tiles = sum(each)
        for shares in range(1, min(depth, properties.sms // tiles) + 1):
            resident, cluster = -(-depth // shares), shares if tiles <= properties.clusters(shares) else 1
            time, ctas = (
                _busy_with_x(tile_m, warpgroups, k, resident, shares, cluster),
                [some * shares for some in each],
            )
            for stages in range(min(h200.RESIDENT_STAGES, max(resident, 2)), h200.RESIDENT_MOST_STAGES + 1):
                found.append(
                    _Candidate(time, -stages, warpgroups, tuple(ctas), resident, cluster, equal_shares(shares, cluster))
                )
    return found


def _busy_with_x(tile_m: int, warpgroups: int, k: int, resident: int, shares: int, cluster: int) -> float:
    """µs of a CTA that keeps its x, of so many units."""
    unit = h200.RESIDENT_UNIT[warpgroups] * h200.RESIDENT_TILE_M[tile_m]
    fix_up = h200.FIX_UP + h200.FIX_UP_PART * warpgroups * shares if shares > 1 else 0.0
    adding = fix_up if cluster == 1 else h200.CLUSTER_REDUCE + h200.CLUSTER_PART * shares
    return resident * unit + warpgroups * h200.RESIDENT_WARPGROUP + adding
