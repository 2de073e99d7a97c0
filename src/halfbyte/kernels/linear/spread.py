"""How pairs of a token and an expert are spread over experts, if each is as likely for every pair, and how long
products with whole tiles of them take."""

from __future__ import annotations

import math

from halfbyte.kernels.common.device import DeviceProperties
from halfbyte.kernels.linear.laid_out import UNIT_K, span_of
from halfbyte.kernels.linear.problem import Problem
from halfbyte.kernels.linear.tune import h200
from halfbyte.kernels.linear.tune.h200 import GroupedTimes

SPREAD = 6  # standard deviations: an expert's pairs are never more than so many away from the mean


def wanted(pairs: int, experts: int) -> float:
    """How many experts have pairs."""
    return experts * -math.expm1(pairs * math.log1p(-1 / experts)) if experts > 1 else 1


def most_tiles(pairs: int, experts: int, tile_m: int) -> int:
    """The most tiles of tile_m pairs of one expert that there can be: a full one, or the last of its expert."""
    return pairs // tile_m + min(experts, pairs)


def usual_tiles(pairs: int, experts: int, tile_m: int) -> float:
    """About how many tiles there are: of each expert one for every time that it has more than another tile_m pairs."""
    if experts == 1:
        return -(-pairs // tile_m)
    mean = pairs / experts
    deviation = math.sqrt(mean * (1 - 1 / experts))
    sure = max(0, math.floor((mean - SPREAD * deviation) / tile_m))  # tiles that each expert fills
    first = wanted(pairs, experts) if sure == 0 else experts * sure
    more = range(max(1, sure), math.ceil((mean + SPREAD * deviation) / tile_m) + 1)
    halves = ((2 * (tile * tile_m - mean) + 1) / deviation for tile in more)  # of standard deviations beyond the mean
    return max(pairs / tile_m, first + experts * sum(math.erfc(away / math.sqrt(8)) / 2 for away in halves))


def microseconds(
    pairs: int, experts: int, tile_m: int, rows: int, times: GroupedTimes, problem: Problem,
    properties: DeviceProperties, back: bool = False,
) -> float:  # fmt: skip
    """The estimated time of a product of sorted pairs with a stack, in tiles of so many by so many rows of W, each a
    CTA's from end to end. The rows of the problem are those of all experts. back: the product is with the transposes.
    """
    o, rates = problem, properties.rates
    n, k = (o.k, o.n // experts) if back else (o.n // experts, o.k)
    tiles = math.ceil(usual_tiles(pairs, experts, tile_m) * -(-n // rows))
    busy = -(-tiles // properties.sms) * (-(-k // UNIT_K) * times.unit + times.tile) / rates.clock
    reading = o.megabytes * wanted(pairs, experts) / experts / (h200.GROUPED_BANDWIDTH * rates.bandwidth)
    times_that = h200.GROUPED_NARROW.get(tile_m, 1) * h200.GROUPED_SPANS[span_of(o)]
    laying = h200.GROUPED_LAYING * pairs * k / 1e6 / rates.bandwidth
    return h200.GEMM_START + laying + times_that * max(busy, reading)
