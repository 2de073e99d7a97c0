"""Which shape of kernel.cu is for a product: its constants, what it needs, and the planner that picks among them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from itertools import islice, product, takewhile
from operator import itemgetter

from halfbyte.kernels.common.device import MOST_CLUSTER, DeviceProperties
from halfbyte.kernels.linear import side_by_side, spread
from halfbyte.kernels.linear.codebook import Numbers
from halfbyte.kernels.linear.laid_out import MOST_SHARES, UNIT_K, GroupPlan, can_be_numbered, copies_x, span_of
from halfbyte.kernels.linear.problem import Problem
from halfbyte.kernels.linear.spread import most_tiles
from halfbyte.kernels.linear.tune import h200

STEP_K = 64  # of K, what x comes in
REGISTERS = {2: (40, 232)}  # of producer and consumer threads; by warpgroups
SCATTERED_REGISTERS = (56, 224)  # the same where scales come one by one, or a producer reads about experts
GROUPED_BACK_REGISTERS = (72, 216)  # where it does both
TILES_M = (96, 128, 160, 192, 224, 256)
BACK_TILES_M = (32, 64, *TILES_M)  # there is no other kernel for few rows
TABLE_BYTES = 256 * 256
MOST_STAGES = 8  # that there are barriers for
DIRECT = 8
W_STAGES, NARROW_STAGES = 3, 6  # the second where fewer rows of x than linear's leave room


@dataclass(frozen=True)
class GemmPlan:
    """The constants of kernel.cu, by the names of its Config, `workers`, and the estimate."""

    tile_m: int  # rows of x
    warpgroups: int  # that multiply, 64 rows of W each
    w_stages: int  # units of W on their way
    x_stages: int  # steps of x on their way
    workers: int  # CTAs that share the work, or clusters
    cluster: int  # CTAs that share a part of one tile, and add up among themselves; 1: sums meet in memory
    chunk: int  # rows of x a launch, a multiple of tile_m
    microseconds: float = field(default=0.0, compare=False)

    back: bool = False  # the result is x @ W: its N is W's K, and the other way round
    numbers: Numbers = "looked_up"  # or how weights are computed
    lane_spans: bool = False  # in every unit each lane of a quad has a span of its own
    shares: int = 1  # CTAs of a tile that have equal parts of it, and all add up some; 1: it is one of them that does
    in_order: bool = False  # x keeps the order of K, and is copied as it is

    activation: str = ""  # what gates, of a pair
    paired: bool = False  # gate and up in one launch, whose tiles have rows of both

    resident: int = field(default=0, init=False)
    norm: bool = field(default=False, init=False)
    lays_units: bool = field(default=True, init=False)

    def sides(self, problem: Problem) -> tuple[int, int]:
        """Of a row of x, and of a row of the result."""
        return (problem.n, problem.k) if self.back else (problem.k, problem.n)

    @property
    def rows(self) -> int:
        """Rows of W in a tile; of each weight of a pair."""
        return 64 * self.warpgroups // (2 if self.paired else 1)

    @property
    def sums(self) -> int:
        """Of a tile."""
        return 64 * self.warpgroups * self.tile_m

    @property
    def ctas(self) -> int:
        return self.workers * self.cluster

    def shared_bytes(self, span: int) -> int:
        """Dynamic shared memory. kernel.cu lays it out, and does not compile where this sum is another than its own."""
        unit = 64 * self.warpgroups * (UNIT_K // 2 + UNIT_K // span * 4)
        table = 0 if self.computes else TABLE_BYTES
        return table + 2048 + 1024 * self.paired + self.w_stages * unit + self.x_stages * self.tile_m * STEP_K * 2

    def x_tiles(self, m: int) -> int:
        """Tiles of x [m, K]."""
        return -(-m // self.tile_m)

    @property
    def permutes(self) -> bool:
        """Of a lane's two rows of W one is looked up in registers: where it has one span, whose products with the scale
        it keeps, or where x leaves little of shared memory's time."""
        wide = not self.back and not self.computes and self.tile_m >= h200.GEMM_PERMUTES_M
        return self.lane_spans or wide

    @property
    def computes(self) -> bool:
        """Weights are computed; there is no table."""
        return self.numbers != "looked_up"

    @property
    def threads(self) -> int:
        return 128 * (self.warpgroups + 1)


GemmGroup = GroupPlan[GemmPlan]


def is_valid(plan: GemmPlan, m: int, n: int, k: int, span: int, properties: DeviceProperties) -> bool:
    """True if kernel.cu computes the right thing under `plan`, and fits: planner, tuner and tests go by this."""
    if plan.chunk < 1 or plan.chunk % plan.tile_m:
        return False
    last = (m - 1) % plan.chunk + 1  # rows of the last launch
    row_tiles, depth = -(-n // plan.rows), -(-k // UNIT_K)
    units = row_tiles * depth
    return (
        properties.ptx == 90
        and plan.tile_m in (BACK_TILES_M if plan.back else TILES_M)
        and plan.warpgroups in REGISTERS
        and 2 <= plan.w_stages <= MOST_STAGES
        and 2 <= plan.x_stages <= MOST_STAGES
        and (
            plan.cluster == 1 or (m <= plan.chunk and _can_reduce_in_cluster(plan, row_tiles * plan.x_tiles(m), depth))
        )
        and (
            plan.shares == 1
            or (m <= plan.chunk and _can_share_out(plan, row_tiles * plan.x_tiles(m), depth, properties))
        )
        and 1 <= plan.workers <= units * plan.x_tiles(last)
        and units * plan.x_tiles(min(m, plan.chunk)) * plan.workers < 1 << 32
        and min(m, plan.chunk) * k < 1 << 31
        and n < 1 << 31
        and plan.shared_bytes(span) <= properties.shared_memory
    )


def _can_reduce_in_cluster(plan: GemmPlan, tiles: int, depth: int) -> bool:
    """Every cluster has a part of one tile, every CTA a part of that, and sums take no more room than W and x."""
    groups = -(-(plan.tile_m // 8) // plan.cluster) * plan.cluster  # of columns; each CTA has room for as many
    stages = plan.w_stages * plan.warpgroups * 32 * UNIT_K + plan.x_stages * plan.tile_m * STEP_K * 2
    return (
        1 < plan.cluster <= MOST_CLUSTER
        and plan.workers % tiles == 0
        and depth * tiles // plan.workers >= plan.cluster
        and groups * plan.warpgroups * 2048 <= stages
    )


def _can_share_out(plan: GemmPlan, tiles: int, depth: int, properties: DeviceProperties) -> bool:
    """Every CTA has an equal part of one tile, and all run at once."""
    most = min(MOST_SHARES, depth)
    return plan.cluster == 1 < plan.shares <= most and plan.workers == tiles * plan.shares <= properties.sms


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
    timed = ((_launches(plan, m, problem, properties), plan) for plan in plans(m, problem, properties, back))
    by_time = sorted(timed, key=itemgetter(0))
    valid = (some for some in by_time if is_valid(some[1], m, n, k, span_of(problem), properties))
    if (fastest := next(valid, None)) is None:
        return None
    alike = takewhile(lambda some: some[0] <= h200.GEMM_ALIKE * fastest[0], valid)
    rows_laid_out = lambda some: 0 if copies_x(problem, some[1]) else min(some[1].chunk, m)  # noqa: E731
    time, best = min((fastest, *alike), key=rows_laid_out)
    return replace(best, microseconds=_with_lasting(time))


def plans(m: int, problem: Problem, properties: DeviceProperties, back: bool) -> Iterator[GemmPlan]:
    """What comes into question, some of which may not be valid."""
    n, k = (problem.k, problem.n) if back else (problem.n, problem.k)
    for tile_m in _narrowest(m, BACK_TILES_M if back else TILES_M):
        stages = W_STAGES, x_stages(tile_m, problem)
        for in_order in (False,) if back else (False, True):
            numbers, spans = _decoding(problem, back, in_order)
            kind = partial(GemmPlan, back=back, numbers=numbers, lane_spans=spans, in_order=in_order)
            for workers, cluster, shares, chunk in _ways(m, n, k, tile_m, properties, back, in_order):
                yield kind(tile_m, 2, *stages, workers, cluster, chunk * tile_m, shares=shares)


def _narrowest(m: int, tiles_m: Sequence[int]) -> Iterable[int]:
    """Of tiles of which as many cover x, those with the fewest rows."""
    return {-(-m // tile_m): tile_m for tile_m in reversed(tiles_m)}.values()


def decoding(plan: GemmPlan, problem: Problem) -> GemmPlan:
    """The same for weights of this kind: how they are decoded, and, unless x keeps its order, in which one it is laid
    out for that."""
    numbers, lane_spans = _decoding(problem, plan.back, plan.in_order)
    return replace(plan, numbers=numbers, lane_spans=lane_spans)


def _decoding(problem: Problem, back: bool, in_order: bool) -> tuple[Numbers, bool]:
    numbers = problem.numbers
    return numbers, numbers == "looked_up" and span_of(problem) == STEP_K and not back and not in_order


def _ways(
    m: int, n: int, k: int, tile_m: int, properties: DeviceProperties, back: bool, in_order: bool
) -> Iterator[tuple[int, int, int, int]]:
    """Workers, CTAs of a cluster, equal shares of a tile, and tiles of x a launch."""
    x_tiles, row_tiles, depth = -(-m // tile_m), -(-n // 128), -(-k // UNIT_K)
    chunk = _tiles_at_once(x_tiles, k, tile_m, back, in_order)
    for of_launch in (chunk,) if back or in_order else {chunk, -(-chunk // 2)}:
        # The last launch may have fewer tiles than the others, and every CTA has work in each.
        fewest = row_tiles * depth * (x_tiles - (-(-x_tiles // of_launch) - 1) * of_launch)
        yield min(properties.sms, fewest), 1, 1, of_launch
    at_once = min(x_tiles, properties.sms // row_tiles)
    if not (back or in_order):
        at_once = min(at_once, max(1, h200.GEMM_ROOM // (2 * k * tile_m)))
    if at_once:
        yield row_tiles * at_once, 1, 1, at_once
    if chunk < x_tiles:
        return
    cluster, tiles = h200.GEMM_CLUSTER, row_tiles * x_tiles
    for shares in range(1, min(properties.clusters(cluster) // tiles, depth // cluster) + 1):
        yield tiles * shares, cluster, 1, x_tiles  # every CTA has a unit
    for shares in range(3, min(properties.sms // tiles, depth, MOST_SHARES) + 1):
        if -(-depth // shares) < -(-depth // (shares - 1)):
            yield tiles * shares, 1, shares, x_tiles


def _tiles_at_once(x_tiles: int, k: int, tile_m: int, back: bool, in_order: bool) -> int:
    """Tiles of x a launch, as equal as can be, that stay in L2."""
    room = h200.BACK_X_BYTES if back else h200.IN_ORDER_X_BYTES if in_order else h200.GEMM_X_BYTES
    most = max(1, room // (2 * k * tile_m))
    return -(-x_tiles // -(-x_tiles // most))


def estimate(plan: GemmPlan, m: int, problem: Problem, properties: DeviceProperties) -> float:
    """The estimated time of any plan for x [m, K], in µs."""
    return _with_lasting(_launches(plan, m, problem, properties))


def _with_lasting(time: float) -> float:
    """Of launches that the GPU may be long at, and come to its limit of power."""
    (begin, end), more = h200.GEMM_LASTING
    return time * (1 + more * min(max(time - begin, 0) / (end - begin), 1))


def _launches(plan: GemmPlan, m: int, problem: Problem, properties: DeviceProperties) -> float:
    x_tiles, chunk = plan.x_tiles(m), plan.chunk // plan.tile_m
    others = (x_tiles - 1) // chunk  # launches ahead of the last one
    of_last = _launch(plan, x_tiles - others * chunk, problem, properties)
    return others * _launch(plan, chunk, problem, properties) + of_last if others else of_last


def _launch(plan: GemmPlan, x_tiles: int, problem: Problem, properties: DeviceProperties) -> float:
    """The same of a launch with so many tiles of x."""
    k, n = plan.sides(problem)
    tiles, depth, unit = -(-n // 128) * x_tiles, -(-k // UNIT_K), _units(plan)[plan.tile_m]
    if plan.shares > 1:
        _, whole = _ends(plan.tile_m)
        time = math.ceil(depth / plan.shares) * unit + whole / plan.shares
        time += h200.GEMM_SHARE * plan.shares + h200.GEMM_SHARED * plan.tile_m / 256 * (1 - 1 / plan.shares)
    elif plan.cluster == 1:
        time = _busiest(tiles, depth, plan.workers, plan.tile_m, unit)
    else:
        (part, whole), shares = _ends(plan.tile_m), plan.workers // tiles
        time = (
            math.ceil(math.ceil(depth / shares) / plan.cluster) * unit
            + (whole + part * shares * (shares > 1)) / plan.cluster
        )
        time += h200.GEMM_CLUSTER_START + h200.GEMM_REDUCE * plan.tile_m / 256
    reading = problem.megabytes / (h200.GEMM_BANDWIDTH * properties.rates.bandwidth)
    return _start(plan, plan.tile_m * x_tiles, problem) + math.hypot(time / properties.rates.clock, reading)


def _start(plan: GemmPlan, rows: int, problem: Problem) -> float:
    """µs of a launch besides, with so many rows of x laid out or copied."""
    if copies_x(problem, plan):
        return h200.BACK_COPIED_START if plan.back else h200.GEMM_COPIED_START
    return h200.GEMM_START + h200.GEMM_LAYING * rows * plan.sides(problem)[0] / 1e6


def _units(plan: GemmPlan) -> dict[int, float]:
    """µs of a unit, by tile_m."""
    if plan.back:
        return h200.BACK_COMPUTED_UNIT if plan.computes else h200.BACK_UNIT
    if plan.in_order:
        return h200.IN_ORDER_COMPUTED_UNIT if plan.computes else h200.IN_ORDER_UNIT
    return h200.GEMM_COMPUTED_UNIT if plan.computes else h200.GEMM_UNIT


def _ends(tile_m: int) -> tuple[float, float]:
    """µs of a part of a tile, and of a tile besides."""
    return h200.GEMM_PART * tile_m / 256, h200.GEMM_TILE * tile_m / 256


def _busiest(tiles: int, depth: int, workers: int, tile_m: int, unit: float) -> float:
    """µs of the busiest of so many CTAs that share tiles."""
    part, whole = _ends(tile_m)
    if workers == tiles:
        return depth * unit + whole
    parts = min(1 + workers / tiles, DIRECT)
    return -(-tiles * depth // workers) * unit * h200.GEMM_APART + parts * part + whole * tiles / workers


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
    for tile_m, in_order in product(_narrowest(m, TILES_M), (False, True)):
        shape = GemmPlan(tile_m, 2, W_STAGES, x_stages(tile_m, every), 1, 1, tile_m, in_order=in_order)
        shape = decoding(shape, every)
        unit, x_tiles = _units(shape)[tile_m], -(-m // tile_m)
        chunk = _tiles_at_once(x_tiles, every.k, tile_m, False, in_order)
        last = x_tiles - (-(-x_tiles // chunk) - 1) * chunk  # tiles of the last launch
        row_tiles = [-(-o.n // 128) for o in group]
        dealt = side_by_side.deal([rows * depth * last for rows in row_tiles], properties.sms)
        choices = {dealt}
        if sum(row_tiles) * chunk <= properties.sms and chunk == last:
            choices.add(tuple(rows * chunk for rows in row_tiles))
        for workers in choices:
            each = zip(row_tiles, workers, strict=True)
            busy = max(_busiest(rows * chunk, depth, ctas, tile_m, unit) for rows, ctas in each)
            one = _start(shape, chunk * tile_m, every) + math.hypot(busy / rates.clock, reading)
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


def x_stages(tile_m: int, problem: Problem) -> int:
    """As many as there is room for: more without a table."""
    return min(MOST_STAGES, (3 if problem.numbers == "looked_up" else 5) * 256 // tile_m)


def is_grouped_valid(plan: GemmPlan, experts: int, n: int, k: int, span: int, properties: DeviceProperties) -> bool:
    """True if kernel.cu computes the right thing under `plan` with a stack of experts [N, K], or [K, N] on the way
    back; `chunk` is the most rows of x, all its tiles together."""
    return (
        properties.ptx == 90
        and plan.tile_m in (BACK_TILES_M if plan.back else TILES_M)
        and plan.warpgroups in REGISTERS
        and 2 <= plan.w_stages <= MOST_STAGES
        and 2 <= plan.x_stages <= MOST_STAGES
        and plan.cluster == 1
        and can_be_numbered(plan, experts, n, k)
        and plan.shared_bytes(span) <= properties.shared_memory
    )


def grouped_plans(
    pairs: int, experts: int, tile_m: int, problem: Problem, properties: DeviceProperties, back: bool
) -> Iterator[GemmPlan]:
    """The plan for pairs of a token and an expert, in tiles of so many, with a stack; none where this kernel is not for
    them. The rows of the problem are those of all experts. back: for rows [N] and the product with the transposes."""
    times = (h200.GROUPED_BACK_TIMES if back else h200.GROUPED_TIMES).get(tile_m)
    if times is None or pairs == 0 or properties.ptx != 90:
        return
    n, k = (problem.k, problem.n // experts) if back else (problem.n // experts, problem.k)
    most, stages = most_tiles(pairs, experts, tile_m) * tile_m, NARROW_STAGES if tile_m < TILES_M[0] else W_STAGES
    usual = GemmPlan(tile_m, 2, stages, x_stages(tile_m, problem), properties.sms, 1, most, back=back)
    unlike = _units(decoding(usual, problem))[tile_m] / _units(usual)[tile_m]  # of how they are decoded
    tile = spread.Tile(tile_m, 128, times._replace(unit=times.unit * unlike), narrow_m(tile_m))
    time = spread.microseconds(pairs, experts, tile, problem, properties, back)
    shape = decoding(replace(usual, microseconds=time), problem)
    shapes = (replace(shape, w_stages=some) for some in range(stages, 1, -1))
    valid = (plan for plan in shapes if is_grouped_valid(plan, experts, n, k, span_of(problem), properties))
    yield from islice(valid, 1)


def narrow_m(tile_m: int) -> int:
    """Pairs up to which a tile leaves the other columns out, as kernel.cu's NARROW_M."""
    return 16 if tile_m < 64 else -(-tile_m // 64) * 32
