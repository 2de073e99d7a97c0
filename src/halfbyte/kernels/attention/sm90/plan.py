"""How attention of new tokens is cut into CTAs of kernel.cu: in a static cache the estimated time decides, in pages
what a text's length is worth."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from typing import NamedTuple

from halfbyte.kernels.common.device import HOPPER, MOST_CLUSTER, DeviceProperties

PAGES_SIZES = (64, 128)  # of a head, of a cache in pages
BLOCK = 16  # tokens that a warp takes at once
HALVES = {256: 3}  # of blocks of each warp, keys or values, that are on their way to shared memory
TOKEN_WARPS, CLUSTERS = (8, 4, 2), (1, 2, 4, MOST_CLUSTER, 16)
IN_MEMORY = (2, 4, 8, 16, 32)  # CTAs that meet there
MOST_THREADS, MOST_ROWS, MOST_NEW = 512, 64, 8
# Of more than 16 rows several warps read each block. In long caches they fall out of step, and the block comes several
# times. Caches with more tokens are Triton's, and those with more of all heads where there are more than 32 rows.
SHARED_ROWS, MOST_TOKENS = 16, {64: 4096, 128: 8192}
MANY_ROWS, MOST_OF_ALL_HEADS = 32, {64: 1 << 20, 128: 1 << 16}
USUAL_TOKENS = 2048  # of a text in pages, for which the cluster of a head is chosen
ENOUGH_TURNS, HELPERS = 16, 4 / 5  # see ClusterPlan, and how many there are for a place of a CTA, as share.cuh wants it
# Of a thread, by the size of a head and columns, at most. Of other heads no registers hold the sums and two blocks.
REGISTERS = {(64, 1): 128, (64, 2): 176, (128, 1): 256, (128, 2): 256, (256, 1): 256}
OF_A_MULTIPROCESSOR = 65536


class Times(NamedTuple):
    """µs: a launch; a block, while nothing else is waited for; each part that is added up, a warp's or in memory a
    CTA's; each CTA of a cluster; a meeting of a cluster, and one in memory. MB a µs from memory; and how a block's two
    times add up: the exponent of their norm."""

    start: float
    alone: float
    part: float
    cta: float
    meeting: float
    in_memory: float
    memory: float
    overlap: float


# By the size of a head. benchmarks/attention_plans.py prints them, which fits them to its record.
TIMES = {
    64: Times(1.4206, 1.0891, 0.022, 0.107, 0.579, 1.8534, 7.2556, 1.0128),
    128: Times(0.9936, 1.6433, 0.0498, 0.1597, 0.7091, 1.5875, 5.8486, 2.0854),
    256: Times(2.1053, 1.9244, 0.0287, 0.1112, 2.3401, 2.9763, 5.059, 1.8893),
}


@dataclass(frozen=True)
class ClusterPlan:
    """columns: groups of eight rows of queries that a warp has. token_warps: warps of a CTA that share rows. ctas: that
    share a head of keys of a text. in_memory: these meet there, and are no cluster.

    Of texts in pages, helpers: CTAs of the launch that help long texts, a multiple of `ctas`; turns: of each warp, with
    a block of tokens in each, that are not too many; at_once: CTAs that the GPU has room for."""

    columns: int
    token_warps: int
    ctas: int
    in_memory: bool = False
    helpers: int = 0
    turns: int = 1
    at_once: int = 1

    @property
    def cluster(self) -> int:
        """CTAs of a cluster."""
        return 1 if self.in_memory else self.ctas

    def resident(self, rows: int, size: int) -> int:
        """CTAs that the registers of a multiprocessor suffice for."""
        return OF_A_MULTIPROCESSOR // (REGISTERS[size, self.columns] * self.threads(rows))

    def row_tiles(self, rows: int) -> int:
        return -(-rows // (8 * self.columns))

    def threads(self, rows: int) -> int:
        return 32 * self.row_tiles(rows) * self.token_warps

    def shared_bytes(self, rows: int, size: int, new: int) -> int:
        """new: tokens that are put into the cache. work.cuh lays it out, and does not compile where this sum is another
        than its own."""
        pairs, statistics = size // 8 * self.columns, 64 * self.columns
        meeting = self.token_warps * (256 * pairs + statistics)
        of_tile = 4 * new * size + max(meeting, self.token_warps * HALVES.get(size, 0) * 2 * BLOCK * size)
        if self.cluster > 1:
            of_tile += self.cluster * (256 * -(-pairs // self.cluster) + statistics)
        return self.row_tiles(rows) * of_tile + (16 if self.cluster > 1 else 0)  # and a barrier

    def sums(self, heads: int, rows: int, size: int) -> int:
        """Numbers that CTAs leave in memory, as in_memory.cuh lays them out, a multiple of four. heads: of keys, of all
        texts."""
        parts = heads * self.ctas + self.helpers if self.helpers or self.in_memory else 0
        return -(-parts * rows * (size + 2) // 4) * 4


@lru_cache(1 << 14)
def cluster_plan(properties: DeviceProperties, heads: int, tokens: int, size: int, rows: int) -> ClusterPlan | None:
    """heads: of keys, of all texts. tokens: of the cache, as long as it can be. size: of a head. rows: heads that share
    keys, times new tokens. None where this kernel is not for them."""
    if properties.ptx < HOPPER or (size, columns_of(rows)) not in REGISTERS or not 0 < rows <= MOST_ROWS:
        return None
    if rows > SHARED_ROWS and tokens > MOST_TOKENS[size]:
        return None
    if rows > MANY_ROWS and heads * tokens > MOST_OF_ALL_HEADS[size]:
        return None
    plans = every_plan(properties, size, rows)
    estimates = ((microseconds(plan, properties, heads, tokens, size, rows), plan) for plan in plans)
    return min(estimates, key=lambda one: one[0])[1]


@lru_cache(1 << 14)
def pages_plan(properties: DeviceProperties, heads: int, tokens: int, size: int, rows: int) -> ClusterPlan | None:
    """Likewise, of a cache in pages, in which every text may have any number of tokens, up to `tokens`."""
    if properties.ptx < HOPPER or size not in PAGES_SIZES or not 0 < rows <= MOST_ROWS:
        return None
    usual = min(tokens, USUAL_TOKENS)
    plans = every_plan(properties, size, rows, in_memory=())
    first = min(plans, key=lambda plan: microseconds(plan, properties, heads, usual, size, rows))
    if tokens <= BLOCK * first.token_warps * first.ctas * ENOUGH_TURNS:
        return first  # no text is too long for it
    at_once = first.resident(rows, size) * properties.sms
    helpers = math.ceil(HELPERS * at_once / first.ctas) * first.ctas
    return replace(first, helpers=helpers, turns=ENOUGH_TURNS, at_once=at_once)


def columns_of(rows: int) -> int:
    return 1 if rows <= 8 else 2


def every_plan(
    properties: DeviceProperties, size: int, rows: int, in_memory: tuple[int, ...] = IN_MEMORY
) -> Iterator[ClusterPlan]:
    # More than eight CTAs are a cluster only where that is known to be allowed.
    widest = max(CLUSTERS) if properties.capability == HOPPER else MOST_CLUSTER
    ways = [(ctas, True) for ctas in in_memory] + [(ctas, False) for ctas in CLUSTERS if ctas <= widest]
    for warps, way in product(TOKEN_WARPS, ways):
        plan = ClusterPlan(columns_of(rows), warps, *way)
        fits = plan.shared_bytes(rows, size, min(rows, MOST_NEW)) <= properties.shared_memory
        if fits and plan.threads(rows) <= MOST_THREADS:
            yield plan


def microseconds(
    plan: ClusterPlan, properties: DeviceProperties, heads: int, tokens: int, size: int, rows: int
) -> float:
    """The estimated time. CTAs of as many heads as fit come in rounds, and a warp's blocks one after the other. While
    one warp waits, others read, as far as memory allows."""
    resident, times = plan.resident(rows, size), TIMES[size]
    at_once = properties.clusters(plan.cluster, resident, max(CLUSTERS)) * plan.cluster // plan.ctas
    if at_once == 0:
        return math.inf
    warps, megabytes = min(heads, at_once) * plan.ctas * plan.token_warps, 4e-6 * BLOCK * size
    reading = warps * megabytes / (times.memory * properties.rates.bandwidth)
    block = math.pow(math.pow(times.alone, times.overlap) + math.pow(reading, times.overlap), 1 / times.overlap)
    blocks, meeting = -(-tokens // (BLOCK * plan.ctas * plan.token_warps)), times.part * plan.token_warps
    if plan.in_memory:
        meeting += times.in_memory + times.part * plan.ctas
    elif plan.ctas > 1:
        meeting += times.meeting + times.cta * plan.ctas
    return times.start + -(-heads // at_once) * (blocks * block + meeting)
