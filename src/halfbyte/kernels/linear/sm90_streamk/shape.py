"""A shape of kernel.cu: its constants, and what it needs."""

from __future__ import annotations

from dataclasses import dataclass, field

from halfbyte.kernels.common.device import MOST_CLUSTER, DeviceProperties
from halfbyte.kernels.linear.laid_out import MOST_SHARES, UNIT_K, WarpgroupTiles, can_be_numbered
from halfbyte.kernels.linear.tune import h200

TILES_M = (8, 16, 24, 32, 48, 64, 80, 96, 112, 128)
# Registers of a thread at the start, of a producer and of a consumer, by warpgroups: all that there are, or as many as
# leave room for a CTA of `lay_out` beside one of `multiply`, which else begins when those are done.
REGISTERS = {2: (168, 120, 192), 3: (128, 80, 144), 4: (96, 96, 96)}
FEWER_REGISTERS = {2: (152, 96, 176), 3: (112, 64, 128), 4: (88, 88, 88)}
WIDEST_REGISTERS = (168, 56, 224)  # where sums take more than the producer leaves else
MOST_BESIDE = 64  # rows of x that fewer registers hold sums of
MOST_WITH_SCALES = 112  # beside whose tiles shared memory has room for scales


@dataclass(frozen=True)
class StreamKPlan(WarpgroupTiles):
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
    beside: bool = False  # registers are left for what lays x out
    next_tile_m: int = 0  # a pair's result is laid out for the next product, in tiles of so many rows; 0: it is rows
    next_span: int = 0  # and in spans of so many weights
    chunk: int = 0  # of experts: the most rows of x, all tiles together
    microseconds: float = field(default=0.0, compare=False)

    back: bool = field(default=False, init=False)
    in_order: bool = field(default=False, init=False)
    lays_units: bool = field(default=False, init=False)
    twins: int = field(default=1, init=False)
    mates: int = field(default=1, init=False)

    @property
    def direct(self) -> int:
        """The most parts of a tile that its first CTA adds up one by one; of more, others add some up first. The CTA of
        a narrow tile loads several parts at once, so another's help pays later."""
        return h200.INVARIANT_DIRECT if self.invariant else 6 + max(1, 32 // self.tile_m)

    @property
    def scales_in_table(self) -> bool:
        """Scales are between the rows of the table, as nothing else has room for them; for two warpgroups there is."""
        return self.tile_m > MOST_WITH_SCALES

    @property
    def registers(self) -> tuple[int, int, int]:
        """Of a thread: at the start, and then of a producer and of a consumer."""
        if self.scales_in_table:
            return WIDEST_REGISTERS
        return (FEWER_REGISTERS if self.beside else REGISTERS)[self.warpgroups]

    @property
    def workers(self) -> int:
        """That share the units."""
        return self.ctas

    def shared_bytes(self, span: int) -> int:
        """Dynamic shared memory. kernel.cu lays it out, and does not compile where this sum is another than its own."""
        scales = 0 if self.scales_in_table else UNIT_K // span * 4
        stage = 64 * self.warpgroups * (UNIT_K // 2 + scales)
        x = (self.resident or self.stages) * self.tile_m * UNIT_K * 2
        return 256 * 256 + 1024 + self.stages * stage + x


def is_valid(plan: StreamKPlan, m: int, n: int, k: int, span: int, properties: DeviceProperties) -> bool:
    """True if kernel.cu computes the right thing under `plan`, and fits: planner, tuner and tests go by this."""
    tiles, depth = -(-n // plan.rows) * plan.x_tiles(m), -(-k // UNIT_K)
    units = tiles * depth
    return (
        properties.ptx == 90
        and plan.tile_m in TILES_M
        and plan.warpgroups in REGISTERS
        and (plan.warpgroups == 2 or not plan.scales_in_table)
        and 2 <= plan.stages <= 8
        and 1 <= plan.ctas <= units
        and units * plan.ctas < 1 << 32
        and m * k < 1 << 31
        and n < 1 << 31
        and not (plan.norm and plan.resident)
        and (plan.next_tile_m == 0 or (plan.paired and n % UNIT_K == 0))
        and not (plan.beside and (plan.resident or plan.tile_m > MOST_BESIDE))
        and (plan.resident == 0 or (plan.ctas % tiles == 0 and plan.resident >= -(-depth * tiles // plan.ctas)))
        and (plan.cluster == 1 or (plan.ctas == tiles * plan.cluster and _can_reduce_in_cluster(plan)))
        and (plan.shares == 1 or (plan.ctas == tiles * plan.shares and _can_share_out(plan, properties)))
        and plan.shared_bytes(span) <= properties.shared_memory
    )


def _can_share_out(plan: StreamKPlan, properties: DeviceProperties) -> bool:
    """All CTAs run at once, and the order of sums may follow from their number."""
    return 1 < plan.shares <= MOST_SHARES and plan.ctas <= properties.sms and plan.cluster == 1 and not plan.invariant


def _can_reduce_in_cluster(plan: StreamKPlan) -> bool:
    """CTAs exist in clusters of so many everywhere, and sums take no more room than the stages of W."""
    groups = -(-(plan.tile_m // 8) // plan.cluster) * plan.cluster  # of columns; each CTA has room for as many
    return (
        plan.resident > 0
        and 1 < plan.cluster <= MOST_CLUSTER
        and groups * plan.warpgroups * 2048 <= plan.stages * plan.warpgroups * 32 * UNIT_K
    )


def is_grouped_valid(plan: StreamKPlan, experts: int, n: int, k: int, span: int, properties: DeviceProperties) -> bool:
    """True if kernel.cu computes the right thing under `plan` with a stack of experts [N, K]."""
    return (
        properties.ptx == 90
        and plan.tile_m in TILES_M
        and plan.warpgroups in REGISTERS
        and (plan.warpgroups == 2 or not plan.scales_in_table)
        and 2 <= plan.stages <= 8
        and plan.resident == 0
        and plan.cluster == 1
        and can_be_numbered(plan, experts, n, k)
        and plan.shared_bytes(span) <= properties.shared_memory
    )
