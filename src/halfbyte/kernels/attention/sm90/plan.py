"""How attention of new tokens is cut into clusters of kernel.cu: the estimated time decides."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import product

from halfbyte.kernels.common.device import HOPPER, MOST_CLUSTER, DeviceProperties

SIZES = (64, 128)  # of a head; of 256, sums and two blocks are more than registers hold
BLOCK = 16  # tokens that a warp takes at once
TOKEN_WARPS, CLUSTERS = (8, 4, 2), (1, 2, 4, MOST_CLUSTER, 16)
MOST_THREADS, MOST_ROWS = 512, 64
# Of more than 16 rows several warps read each block. In long caches they fall out of step, and the block comes several
# times. Caches with more tokens are Triton's, and those with more of all heads where there are more than 32 rows.
SHARED_ROWS, MOST_TOKENS = 16, {64: 4096, 128: 8192}
MANY_ROWS, MOST_OF_ALL_HEADS = 32, {64: 1 << 20, 128: 1 << 16}
REGISTERS = {(64, 1): 128, (64, 2): 176, (128, 1): 248, (128, 2): 248}  # of a thread, by size and columns, at most
OF_A_MULTIPROCESSOR = 65536

# µs: a launch; a block, while nothing else is waited for; each part that is added up; a cluster's meetings, and each
# tile of rows of a wide one. MB a µs: from memory, and of a multiprocessor; and how a block's three times add up: the
# exponent of their norm. Fitted by 500 times of 46 caches on an H100, for an H200's rates.
START, ALONE, PART, MEETING, WIDE = 2.474, 0.771, 0.0452, 0.6783, 0.7261
MEMORY, MULTIPROCESSOR, OVERLAP = 6.731, 0.1122, 1.3661


@dataclass(frozen=True)
class ClusterPlan:
    """columns: groups of eight rows of queries that a warp has. token_warps: warps of a CTA that share rows. cluster:
    CTAs that share a head of keys of a text."""

    columns: int
    token_warps: int
    cluster: int

    def row_tiles(self, rows: int) -> int:
        return -(-rows // (8 * self.columns))

    def threads(self, rows: int) -> int:
        return 32 * self.row_tiles(rows) * self.token_warps

    def shared_bytes(self, rows: int, size: int, new: int) -> int:
        """new: tokens that are put into the cache. work.cuh lays it out, and does not compile where this sum is another
        than its own."""
        slots = -(-size // 8 * self.columns // self.cluster)
        of_tile = 4 * new * size + self.cluster * self.token_warps * (256 * slots + 64 * self.columns)
        return self.row_tiles(rows) * of_tile


@lru_cache(1 << 14)
def cluster_plan(properties: DeviceProperties, heads: int, tokens: int, size: int, rows: int) -> ClusterPlan | None:
    """heads: of keys, of all texts. tokens: of the cache, as long as it can be. size: of a head. rows: heads that share
    keys, times new tokens. None where this kernel is not for them."""
    if properties.ptx < HOPPER or size not in SIZES or not 0 < rows <= MOST_ROWS:
        return None
    if rows > SHARED_ROWS and tokens > MOST_TOKENS[size]:
        return None
    if rows > MANY_ROWS and heads * tokens > MOST_OF_ALL_HEADS[size]:
        return None
    estimates = (
        (_microseconds(plan, properties, heads, tokens, size, rows), plan) for plan in _plans(properties, rows)
    )
    return min(estimates, key=lambda one: one[0])[1]


def _plans(properties: DeviceProperties, rows: int) -> Iterator[ClusterPlan]:
    # More than eight CTAs are a cluster only where that is known to be allowed.
    widest = max(CLUSTERS) if properties.capability == HOPPER else MOST_CLUSTER
    for warps, cluster in product(TOKEN_WARPS, CLUSTERS):
        plan = ClusterPlan(1 if rows <= 8 else 2, warps, cluster)
        if cluster <= widest and plan.threads(rows) <= MOST_THREADS:
            yield plan


def _microseconds(
    plan: ClusterPlan, properties: DeviceProperties, heads: int, tokens: int, size: int, rows: int
) -> float:
    """Clusters come in rounds, and a warp's blocks one after the other. While one warp waits, others work, as far as
    they do not wait for the same."""
    threads, rates = plan.threads(rows), properties.rates
    resident = OF_A_MULTIPROCESSOR // (REGISTERS[size, plan.columns] * threads)
    at_once = properties.clusters(plan.cluster, resident, max(CLUSTERS))
    if at_once == 0:
        return math.inf
    ctas = min(heads, at_once) * plan.cluster
    busiest = -(-ctas // properties.sms) * threads // 32  # warps of a multiprocessor
    megabytes = 4e-6 * BLOCK * size
    times = (
        ALONE,
        ctas * plan.token_warps * megabytes / (MEMORY * rates.bandwidth),
        busiest * megabytes / (MULTIPROCESSOR * rates.clock),
    )
    block = math.pow(sum(math.pow(time, OVERLAP) for time in times), 1 / OVERLAP)
    parts = plan.cluster * plan.token_warps
    blocks = -(-tokens // (BLOCK * parts))
    meeting = (MEETING if plan.cluster > 1 else 0) + (WIDE * plan.row_tiles(rows) if plan.cluster > MOST_CLUSTER else 0)
    return START + -(-heads // at_once) * (blocks * block + PART * parts + meeting)
