"""A shape of kernel.cu: its constants, and what it needs."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from halfbyte.kernels.common.device import MOST_CLUSTER, DeviceProperties
from halfbyte.kernels.linear.codebook import Numbers
from halfbyte.kernels.linear.laid_out import (
    MOST_SHARES,
    STEP_K,
    UNIT_K,
    WarpgroupTiles,
    can_be_numbered,
    scale_loads,
    span_of,
)
from halfbyte.kernels.linear.problem import ALIGNMENT, Problem
from halfbyte.kernels.linear.tune import h200

REGISTERS = {2: (40, 232)}  # of producer and consumer threads; by warpgroups
WIDE_REGISTERS = (24, 240)  # the same of wide tiles
SCATTERED_REGISTERS = (56, 224)  # the same where scales come one by one, or a producer reads about experts
GROUPED_BACK_REGISTERS = (72, 216)  # where it does both
DECODING_REGISTERS = {1: (120, 192), 2: (112, 144)}  # where producers decode; by their warpgroups
USUAL_TILES_M = (96, 128, 160, 192, 224, 256)
WIDE_TILES_M = (320, 384)  # registers hold their sums and the operands of one step
TWO_STEPS_M = 192  # up to which they hold those of four steps
TILES_M = (*USUAL_TILES_M, *WIDE_TILES_M)
BACK_TILES_M = (32, 64, *USUAL_TILES_M)  # there is no other kernel for few rows
TABLE_BYTES = 256 * 256
MOST_STAGES = 8  # that there are barriers for
DIRECT = 8  # parts of a tile, at most, that its first CTA adds up one by one
# On the way back, where producers decode: their warpgroups, units of W on their way, and stages of a turn's x and
# operands; by tile_m. Beside two warpgroups of them, no thread has the registers for wider tiles.
DECODERS = {
    32: (2, 4, 8), 64: (2, 3, 7), 96: (2, 3, 6), 128: (2, 4, 5), 160: (2, 5, 4), 192: (2, 4, 4), 256: (1, 2, 4)
}  # fmt: skip
W_STAGES, NARROW_STAGES = 3, 6  # the second where fewer rows of x than linear's leave room


@dataclass(frozen=True)
class GemmPlan(WarpgroupTiles):
    """The constants of kernel.cu, by the names of its Config, `workers`, and the estimate."""

    tile_m: int  # rows of x
    warpgroups: int  # that multiply, 64 rows of W each
    w_stages: int  # units of W on their way
    x_stages: int  # steps of x on their way
    workers: int  # CTAs that share the work, or clusters, twins or mates
    cluster: int  # CTAs that share a part of one tile, and add up among themselves; 1: sums meet in memory
    chunk: int  # rows of x a launch, a multiple of tile_m
    microseconds: float = field(default=0.0, compare=False)

    back: bool = False  # the result is x @ W: its N is W's K, and the other way round
    numbers: Numbers = "looked_up"  # or how weights are computed
    lane_spans: bool = False  # in every unit each lane of a quad has a span of its own
    shares: int = 1  # CTAs of a tile that have equal parts of it, and all add up some; 1: it is one of them that does
    in_order: bool = False  # x keeps the order of K, and is copied as it is
    twins: int = 1  # CTAs of a pair, which copy x to each other; 1: each copies its own
    mates: int = 1  # CTAs of a pair, which decode for each other, on the way back; 1: each for itself
    decoders: int = 0  # warpgroups that bring all and decode, on the way back; 0: those that multiply decode

    activation: str = ""  # what gates, of a pair
    paired: bool = False  # gate and up in one launch, whose tiles have rows of both

    resident: int = field(default=0, init=False)
    norm: bool = field(default=False, init=False)
    lays_units: bool = field(default=True, init=False)

    def sides(self, problem: Problem) -> tuple[int, int]:
        """Of a row of x, and of a row of the result."""
        return (problem.n, problem.k) if self.back else (problem.k, problem.n)

    @property
    def ctas(self) -> int:
        return self.workers * self.cluster * self.twins * self.mates

    def shared_bytes(self, span: int) -> int:
        """Dynamic shared memory. kernel.cu lays it out, and does not compile where this sum is another than its own."""
        scale = 0 if self.decoders else 2 if self.back and self.computes else 4
        unit = 64 * self.warpgroups * (UNIT_K // 2 + UNIT_K // span * scale) // self.mates
        operands = 64 * self.warpgroups * STEP_K * 2 * (self.x_stages if self.decoders else UNIT_K // STEP_K)
        table = operands if self.mates > 1 or self.decoders else 0 if self.computes else TABLE_BYTES
        return table + 2048 + 1024 * self.paired + self.w_stages * unit + self.x_stages * self.tile_m * STEP_K * 2

    @property
    def threads(self) -> int:
        return 128 * (self.warpgroups + max(1, self.decoders))

    @property
    def copied_rows(self) -> int:
        return STEP_K if self.mates > 1 else UNIT_K

    @property
    def permutes(self) -> bool:
        """Of a lane's two rows of W one is looked up in registers: where it has one span, whose products with the scale
        it keeps, or where x leaves little of shared memory's time. In wide tiles it takes too long."""
        if self.back or self.computes or self.tile_m in WIDE_TILES_M:
            return False
        return self.lane_spans or self.tile_m >= h200.GEMM_PERMUTES_M

    @property
    def turn_k(self) -> int:
        """Of K, what is decoded and multiplied at a time, as the next is decoded while one is multiplied: two steps
        where registers hold their operands, and where two steps more of x are on their way. Wide tiles by half steps;
        what is looked up by the order of x takes longer so than a step at a time, the other warpgroup multiplying."""
        if self.mates > 1 or self.decoders:
            return STEP_K
        if self.tile_m in WIDE_TILES_M:
            return STEP_K // 2 if self.computes or not self.in_order else STEP_K
        return 2 * STEP_K if self.tile_m <= TWO_STEPS_M and self.x_stages >= 6 else STEP_K

    @property
    def computes(self) -> bool:
        """Weights are computed; there is no table."""
        return self.numbers != "looked_up"


def decoding(plan: GemmPlan, problem: Problem) -> GemmPlan:
    """The same for weights of this kind: how they are decoded, and, unless x keeps its order, in which one it is laid
    out for that."""
    numbers, lane_spans = how_decoded(problem, plan.back, plan.in_order)
    return replace(plan, numbers=numbers, lane_spans=lane_spans)


def how_decoded(problem: Problem, back: bool, in_order: bool) -> tuple[Numbers, bool]:
    """How weights of this kind are decoded, and whether each lane of a quad has a span of its own."""
    numbers = problem.numbers
    return numbers, numbers == "looked_up" and span_of(problem) == STEP_K and not back and not in_order


def tiles_of(problem: Problem, back: bool = False) -> list[int]:
    """Rows of x in a tile, of those that come into question: wide ones only where scales come by words, as their
    producer has few registers."""
    if back:
        return list(BACK_TILES_M)
    return [*USUAL_TILES_M, *(WIDE_TILES_M if loads_words(problem) else ())]


def loads_words(problem: Problem) -> bool:
    """Whether a lane loads the scales of a row, and what nested ones come from, without many registers."""
    loads = scale_loads(problem)
    return loads != "one" and not (loads == "across" and problem.nested)


def x_stages(tile_m: int, problem: Problem, mates: int = 1) -> int:
    """As many as there is room for: more without a table, and where mates share W."""
    widest = 4 if mates > 1 else 3 if problem.numbers == "looked_up" else 5
    return min(MOST_STAGES, widest * 256 // tile_m)


def is_valid(plan: GemmPlan, m: int, n: int, k: int, span: int, properties: DeviceProperties) -> bool:
    """True if kernel.cu computes the right thing under `plan`, and fits: planner, tuner and tests go by this."""
    if plan.chunk < 1 or plan.chunk % plan.x_rows:
        return False
    last = (m - 1) % plan.chunk + 1  # rows of the last launch
    row_tiles, depth = plan.row_tiles(n), -(-k // UNIT_K)
    units = row_tiles * depth
    return (
        _fits(plan, span, properties)
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
        and (plan.mates == 1 or k * 2 % ALIGNMENT == 0)  # they copy x as it is
        and n < 1 << 31
    )


def _fits(plan: GemmPlan, span: int, properties: DeviceProperties) -> bool:
    """There is a kernel of these tiles, and a CTA has room for its stages."""
    return (
        properties.ptx == 90
        and plan.tile_m in (BACK_TILES_M if plan.back else TILES_M)
        and (plan.tile_m not in WIDE_TILES_M or plan.cluster == 1)
        and (plan.twins == 1 or (plan.twins == 2 and plan.cluster == plan.shares == 1))
        and (plan.mates == 1 or _can_mate(plan))
        and (plan.decoders == 0 or _can_decode(plan))
        and plan.warpgroups in REGISTERS
        and 2 <= plan.w_stages <= MOST_STAGES
        and 2 <= plan.x_stages <= MOST_STAGES
        and plan.shared_bytes(span) <= properties.shared_memory
    )


def _can_mate(plan: GemmPlan) -> bool:
    """CTAs decode for each other on the way back, in pairs and in no other clusters."""
    return plan.mates == 2 and plan.cluster == plan.twins == 1 and plan.back


def _can_decode(plan: GemmPlan) -> bool:
    """Producers decode on the way back, in no cluster."""
    known = plan.tile_m in DECODERS and plan.decoders == DECODERS[plan.tile_m][0]
    return known and plan.back and plan.cluster == plan.twins == plan.mates == 1 and plan.warpgroups == 2


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


def is_grouped_valid(plan: GemmPlan, experts: int, n: int, k: int, span: int, properties: DeviceProperties) -> bool:
    """True if kernel.cu computes the right thing under `plan` with a stack of experts [N, K], or [K, N] on the way
    back; `chunk` is the most rows of x, all its tiles together."""
    return _fits(plan, span, properties) and plan.cluster == plan.mates == 1 and can_be_numbered(plan, experts, n, k)


def quarters(tile_m: int) -> tuple[int, int, int]:
    """Of experts, by how many columns a tile with few pairs is multiplied: a quarter, half or three quarters of all,
    rounded up to what an instruction has."""
    step = 16 if tile_m <= 160 else 32
    quarter, half, most = (-(-(tile_m * number // 4) // step) * step for number in (1, 2, 3))
    return quarter, half, most
