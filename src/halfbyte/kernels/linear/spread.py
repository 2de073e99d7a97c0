"""How pairs of a token and an expert are spread over experts, if each is as likely for every pair, and how long
products with whole tiles of them take."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import NamedTuple

from halfbyte.kernels.common.device import DeviceProperties
from halfbyte.kernels.linear.laid_out import UNIT_K, span_of
from halfbyte.kernels.linear.problem import Problem
from halfbyte.kernels.linear.tune import h200
from halfbyte.kernels.linear.tune.h200 import GroupedTimes

SPREAD = 6  # standard deviations: an expert's pairs are never more than so many away from the mean


class Tile(NamedTuple):
    """Of so many pairs by rows of W, and what it takes. columns: ascending, up to so many pairs a tile leaves those
    beyond out."""

    tile_m: int
    rows: int
    times: GroupedTimes
    columns: tuple[int, ...] = ()


def wanted(pairs: int, experts: int) -> float:
    """How many experts have pairs."""
    return experts * -math.expm1(pairs * math.log1p(-1 / experts)) if experts > 1 else 1


def most_tiles(pairs: int, experts: int, tile_m: int) -> int:
    """The most tiles of tile_m pairs of one expert that there can be: a full one, or the last of its expert."""
    return pairs // tile_m + min(experts, pairs)


def usual_tiles(pairs: int, experts: int, tile_m: int, beyond: int = 0) -> float:
    """About how many tiles have more pairs than `beyond`, of each expert one for every time that it has so many more
    than another tile_m."""
    if experts == 1:
        return max(0, -(-(pairs - beyond) // tile_m))
    mean = pairs / experts
    deviation = math.sqrt(mean * (1 - 1 / experts))
    sure = max(0, math.floor((mean - SPREAD * deviation - beyond) / tile_m))  # tiles that each expert has
    first = wanted(pairs, experts) if sure == beyond == 0 else experts * sure
    more = range(max(beyond == 0, sure), math.ceil((mean + SPREAD * deviation) / tile_m) + 1)
    # Standard deviations beyond the mean, twice.
    halves = ((2 * (tile * tile_m + beyond - mean) + 1) / deviation for tile in more)
    usual = first + experts * sum(math.erfc(away / math.sqrt(8)) / 2 for away in halves)
    return usual if beyond else max(pairs / tile_m, usual)


def microseconds(
    pairs: int, experts: int, tile: Tile, problem: Problem, properties: DeviceProperties, back: bool = False
) -> float:
    """The estimated time of a product of sorted pairs with a stack, in such tiles, each a CTA's from end to end, of
    which those with few pairs come last. The rows of the problem are those of all experts. back: the product is with
    the transposes."""
    o, rates, times, common = problem, properties.rates, tile.times, h200.GROUPED_COMMON[back]
    n, k = (o.k, o.n // experts) if back else (o.n // experts, o.k)
    row_tiles, units = -(-n // tile.rows), -(-k // UNIT_K)

    def turns(beyond: int) -> int:
        """Of a multiprocessor, with tiles of more pairs than so many."""
        return -(-math.ceil(usual_tiles(pairs, experts, tile.tile_m, beyond) * row_tiles) // properties.sms)

    every = turns(0)
    # Full tiles, and what is saved by those that leave columns out; these come last.
    full = every - common.saved * sum(
        (more - fewer) / tile.tile_m * (every - turns(fewer)) for fewer, more in pairwise((*tile.columns, tile.tile_m))
    )
    busy = (units * full * times.unit + every * times.tile) / rates.clock
    reading = o.megabytes * wanted(pairs, experts) / experts / (common.bandwidth * rates.bandwidth)
    laying = common.laying * pairs * k / 1e6 / rates.bandwidth
    return h200.GEMM_START + laying + (common.of_32 if span_of(o) == 32 else 1) * max(busy, reading)
