"""The shapes that come into question for a product, and the estimated times of their busiest CTAs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from halfbyte.kernels.common.device import DeviceProperties
from halfbyte.kernels.linear import side_by_side
from halfbyte.kernels.linear.laid_out import MOST_SHARES, UNIT_K
from halfbyte.kernels.linear.problem import Problem
from halfbyte.kernels.linear.sm90_streamk.shape import REGISTERS, StreamKPlan
from halfbyte.kernels.linear.tune import h200


def tiles_m(m: int, n: int, sms: int) -> tuple[int, ...]:
    """Rows of x a tile that come into question, none more than they need to be: those of the fewest tiles, or of one
    tile more; of any number of tiles, as long as each has a multiprocessor."""
    widths = sorted({width for width, _ in h200.STREAMK_TILES}, reverse=True)
    narrowest = {-(-m // width): width for width in widths}  # by the number of tiles
    row_tiles = -(-n // (64 * min(REGISTERS)))
    most = max(min(narrowest) + (m > h200.STREAMK_ONE_TILE), sms // row_tiles)
    return tuple(width for count, width in narrowest.items() if count <= most)


class Candidate(NamedTuple):
    """The plans of weights in one launch, those with the least time of the busiest CTA first; of as short ones, those
    with the most stages."""

    busy: float
    fewer_stages: int  # minus the stages
    warpgroups: int
    ctas: tuple[int, ...]
    resident: int = 0
    cluster: int = 1
    shares: int = 1


Kind = Callable[[int, int, Sequence[int], int, DeviceProperties], list[Candidate]]


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
    return microseconds_of(busy, plan, m, o, properties)


def microseconds_of(busy: float, plan: StreamKPlan, m: int, problem: Problem, properties: DeviceProperties) -> float:
    """The estimated time, of the busiest CTA's time and of what must be read and written."""
    times, rates = h200.STREAMK_TIMES[plan.tile_m, plan.resident > 0], properties.rates
    reading = problem.megabytes / (times.bandwidth * rates.bandwidth)
    most = max(math.hypot(reading, busy / rates.clock), problem.megabytes / (h200.MOST_BANDWIDTH * rates.bandwidth))
    scales = times.scales * problem.scale_megabytes * plan.x_tiles(m)
    numbers = times.x * problem.x_megabytes(m) + times.result * problem.result_megabytes(m)
    return times.start + most + scales + numbers


def laying_out(tile_m: int, m: int, problem: Problem) -> float:
    """µs that a product saves whose x is laid out already."""
    return h200.STREAMK_LAYING_OUT + h200.STREAMK_TIMES[tile_m, False].x * problem.x_megabytes(m)


def without_x(tile_m: int, m: int, sides: Sequence[int], k: int, properties: DeviceProperties) -> list[Candidate]:
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
            found.append(Candidate(time, -stages, warpgroups, ctas, shares=equal_shares(shares)))
        dealt = side_by_side.deal([some * depth for some in tiles], properties.sms)
        each = zip(tiles, dealt, strict=True)
        time = max(_busy_of_run(tile_m, warpgroups, k, some, ctas) for some, ctas in each)
        found.append(Candidate(time, -stages, warpgroups, dealt))
    return found


def _busy_of_shares(tile_m: int, warpgroups: int, k: int, tiles: int, shares: int, sms: int) -> float:
    """µs of the busiest SM where every tile is cut into so many parts."""
    unit, part = h200.STREAMK_TILES[tile_m, warpgroups][1], h200.STREAMK_PART[tile_m] * warpgroups
    return time_of_shares(shares, tiles, -(-k // UNIT_K), unit, h200.STREAMK_CUT[tile_m], part, sms)


def time_of_shares(shares: int, tiles: int, depth: int, unit: float, cut: float, part: float, sms: int) -> float:
    """The same of any tiles: µs of a unit, of a cut, and of each part of a tile that is cut."""
    return -(-tiles * shares // sms) * (-(-depth // shares) * unit + (cut + part * shares if shares > 1 else 0))


def _busy_of_run(tile_m: int, warpgroups: int, k: int, tiles: int, ctas: int) -> float:
    """µs of the busiest CTA where the units of all tiles are dealt out in equal runs."""
    unit, part = h200.STREAMK_TILES[tile_m, warpgroups][1], h200.STREAMK_PART[tile_m] * warpgroups
    units = tiles * -(-k // UNIT_K)
    return -(-units // ctas) * unit + h200.STREAMK_RUN[tile_m] + (ctas / tiles + 1) * part


def with_x(tile_m: int, m: int, sides: Sequence[int], k: int, properties: DeviceProperties) -> list[Candidate]:
    """Where every CTA keeps its x, a part of one tile; none where nothing is to be gained. Where all clusters of a
    tile's CTAs run at once, they add up among themselves."""
    depth, found = -(-k // UNIT_K), []
    for warpgroups in h200.RESIDENT_UNIT if tile_m in h200.RESIDENT_TILE_M else ():
        each = [-(-n // (64 * warpgroups)) * -(-m // tile_m) for n in sides]
        tiles = sum(each)
        for shares in range(1, min(depth, properties.sms // tiles) + 1):
            resident, cluster = -(-depth // shares), shares if tiles <= properties.clusters(shares) else 1
            time = _busy_with_x(tile_m, warpgroups, k, resident, shares, cluster)
            kept = tuple(some * shares for some in each), resident, cluster, equal_shares(shares, cluster)
            for stages in range(min(h200.RESIDENT_STAGES, max(resident, 2)), h200.RESIDENT_MOST_STAGES + 1):
                found.append(Candidate(time, -stages, warpgroups, *kept))
    return found


def _busy_with_x(tile_m: int, warpgroups: int, k: int, resident: int, shares: int, cluster: int) -> float:
    """µs of a CTA that keeps its x, of so many units."""
    unit = h200.RESIDENT_UNIT[warpgroups] * h200.RESIDENT_TILE_M[tile_m]
    fix_up = h200.FIX_UP + h200.FIX_UP_PART * warpgroups * shares if shares > 1 else 0.0
    adding = fix_up if cluster == 1 else h200.CLUSTER_REDUCE + h200.CLUSTER_PART * shares
    return resident * unit + warpgroups * h200.RESIDENT_WARPGROUP + adding


def equal_shares(shares: int, cluster: int = 1) -> int:
    """`shares` of the plan by which tiles are cut into so many parts."""
    return shares if cluster == 1 and shares <= MOST_SHARES else 1
