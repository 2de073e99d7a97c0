"""Which shape of kernel.cu is for a product of many rows: its constants, what it needs, and the planner."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import torch

from halfbyte.kernels.common.device import DeviceProperties
from halfbyte.kernels.linear.constants import MMA_FLOPS
from halfbyte.kernels.linear.problem import Problem
from halfbyte.kernels.linear.spread import most_tiles, usual_tiles, wanted
from halfbyte.kernels.linear.tune import h200

DTYPES = (torch.float16, torch.bfloat16)
WARP_W, DEPTH = 64, 64  # numbers that a warp produces of a row of y; that a stage sums
CODE_BYTES = 1024  # of shared memory: the code of nested scales
RESERVED_BYTES = 1024  # of shared memory, which the system takes from each CTA
# Of experts: tiles, and tiles' pairs, that shared memory has (turns.cuh); and the fewest units of a tile.
TILES_KEPT, ROWS_KEPT, FEWEST_UNITS = 8, 4, 2


@dataclass(frozen=True)
class ManyPlan:
    """The constants of kernel.cu, by the names of its Config, `ctas`, and the estimate."""

    back: bool  # dy @ W instead of x @ W.T
    w_warps: int  # side by side along what is produced: rows of W, on the way back its columns
    m_warps: int  # along rows of x
    columns: int  # groups of eight rows of x that a warp multiplies
    stages: int  # on their way
    resident_ctas: int  # that share a multiprocessor
    ctas: int  # that share the work
    grouped_tiles: int = 0  # of experts: the most tiles of pairs that there can be
    microseconds: float = field(default=math.inf, compare=False)

    @property
    def direct(self) -> int:
        """The most parts of a tile that its first CTA adds up one by one; of more, others add some up first."""
        return 8

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.w_warps, self.m_warps, self.columns

    @property
    def threads(self) -> int:
        return 32 * self.w_warps * self.m_warps

    @property
    def tile_w(self) -> int:
        """Numbers of a row of y that a tile produces."""
        return WARP_W * self.w_warps

    @property
    def tile_m(self) -> int:
        """Rows of x in a tile."""
        return 8 * self.columns * self.m_warps

    def x_tiles(self, m: int) -> int:
        """Tiles along the rows of x."""
        return -(-m // self.tile_m)

    def sizes(self, m: int, problem: Problem) -> tuple[int, int, int]:
        """Tiles along a row of y and along x's rows, and units of a tile."""
        produced, summed = (problem.k, problem.n) if self.back else (problem.n, problem.k)
        units = max(-(-summed // DEPTH), FEWEST_UNITS if self.grouped_tiles else 1)
        return -(-produced // self.tile_w), self.x_tiles(m), units

    def tiles(self, m: int, problem: Problem) -> int:
        return math.prod(self.sizes(m, problem)[:2])

    def partial_sums(self, m: int, problem: Problem) -> int:
        """That CTAs leave for others; 0 where no two share a tile."""
        return self.ctas * self.tile_w * self.tile_m if self.tiles(m, problem) % self.ctas else 0

    def shared_bytes(self, problem: Problem) -> int:
        """Dynamic shared memory. work.cuh lays it out, and does not compile where this sum is another than its own."""
        stage = DEPTH * (2 * self.tile_m + self.tile_w // 2)
        turns = 20 * TILES_KEPT + 4 * ROWS_KEPT * self.tile_m if self.grouped_tiles else 0
        return (CODE_BYTES if problem.nested else 0) + self.stages * stage + 2 * DEPTH * 2 * self.tile_w + turns


def is_valid(plan: ManyPlan, m: int, problem: Problem, properties: DeviceProperties) -> bool:
    """True if kernel.cu computes the right thing under `plan`, and fits: planner, tuner and tests go by this."""
    o, resident = problem, plan.resident_ctas
    units = math.prod(plan.sizes(m, o))
    return (
        properties.ptx >= 80
        and o.dtype in DTYPES
        and o.has_spans(32, m)
        and resident <= h200.MANY_SHAPES.get(plan.shape, 0)  # or registers do not hold the sums
        and 3 <= plan.stages <= (3 if plan.grouped_tiles else 4)
        and 1 <= plan.ctas <= min(units, properties.sms * resident)
        and units * plan.ctas < 1 << 32
        and resident * (plan.shared_bytes(o) + RESERVED_BYTES) <= properties.shared_memory + RESERVED_BYTES
    )


def many_plan(m: int, problem: Problem, properties: DeviceProperties, back: bool) -> ManyPlan | None:
    """The plan for x [m, K], or with `back` [m, N], or None where this kernel is not for it: that with the least
    estimated time."""
    if m < 1 or properties.ptx < 80:
        return None
    found: list[ManyPlan] = []
    for shape, most in h200.MANY_SHAPES.items():
        for resident in range(most, 0, -1):
            each = (_plan(shape, resident, whole, m, problem, properties, back) for whole in (False, True))
            plans = [plan for plan in each if plan is not None]
            found += plans
            if plans:
                break
    return min(found, key=lambda plan: plan.microseconds, default=None)


def _plan(
    shape: tuple[int, int, int],
    resident: int,
    whole: bool,
    m: int,
    problem: Problem,
    properties: DeviceProperties,
    back: bool,
) -> ManyPlan | None:
    """A shape of tune/h200.py with as many stages as there is room for, and the estimate; None where it does not fit.

    whole: no two CTAs share a tile, else they share all the work equally.
    """
    one = ManyPlan(back, *shape, 3, resident, 1)
    most, tiles = properties.sms * resident, one.tiles(m, problem)
    ctas = min(most, math.prod(one.sizes(m, problem)))
    if whole:
        ctas = next(count for count in range(min(most, tiles), 0, -1) if tiles % count == 0)
    for stages in range(h200.MANY_STAGES, 2, -1):
        plan = replace(one, ctas=ctas, stages=stages)
        if is_valid(plan, m, problem, properties):
            return replace(plan, microseconds=_microseconds(plan, m, problem, properties))
    return None


def _microseconds(plan: ManyPlan, m: int, problem: Problem, properties: DeviceProperties) -> float:
    """The estimated time: of the busiest multiprocessor's stages, measured or at the rate of the GPU's tensor cores,
    and of partial sums."""
    units, tiles = math.prod(plan.sizes(m, problem)), plan.tiles(m, problem)
    in_turn = -(-plan.ctas // properties.sms)
    stages = -(-units // plan.ctas) * in_turn
    alone, together = h200.MANY_STAGE[plan.shape, is_arithmetic(problem)]
    measured = (together if in_turn > 1 else alone) / properties.rates.clock
    flops = MMA_FLOPS * 4 * 4 * plan.columns * plan.w_warps * plan.m_warps
    tensor = flops / (h200.SM80_MMA_SHARE * properties.teraflops * 1e6 / properties.sms)
    sums = plan.ctas * plan.tile_w * plan.tile_m / 1e6 if tiles % plan.ctas else 0
    reading = problem.megabytes / (h200.MOST_BANDWIDTH * properties.rates.bandwidth)
    busy = stages * max(measured, tensor)
    return h200.MANY_START + max(busy, reading) + h200.MANY_SUMS / properties.rates.bandwidth * sums


def grouped_plan(
    pairs: int, experts: int, tile_m: int, problem: Problem, properties: DeviceProperties, back: bool
) -> ManyPlan | None:
    """The plan for up to so many sorted pairs and a stack, in tiles of tile_m, or None where this kernel is not for it.
    The rows of the problem are those of all experts."""
    o = problem
    if pairs < 1 or properties.ptx < 80 or o.n % experts:
        return None
    one, found = replace(o, n=o.n // experts), []
    for shape, most in h200.MANY_SHAPES.items():
        for resident in range(most, 0, -1):
            whole = ManyPlan(back, *shape, 3, resident, 1, most_tiles(pairs, experts, tile_m))
            if whole.tile_m != tile_m or not is_valid(whole, tile_m, o, properties):
                continue
            row_tiles, _, depth = whole.sizes(1, one)
            ctas = min(properties.sms * resident, row_tiles * whole.grouped_tiles)
            tiles = math.ceil(usual_tiles(pairs, experts, tile_m) * row_tiles)
            alone, together = h200.MANY_STAGE[shape, is_arithmetic(o)]
            in_turn = min(resident, -(-tiles // properties.sms))
            turns = -(-tiles // (properties.sms * in_turn)) * in_turn
            stage = h200.MANY_GROUPED * (together if in_turn > 1 else alone) / properties.rates.clock
            busy = turns * (depth * stage + h200.MANY_TILE)
            reading = o.megabytes * wanted(pairs, experts) / experts
            least = reading / (h200.MOST_BANDWIDTH * properties.rates.bandwidth)
            found.append(replace(whole, ctas=ctas, microseconds=h200.MANY_START + max(busy, least)))
            break
    return min(found, key=lambda plan: plan.microseconds, default=None)


def is_arithmetic(problem: Problem) -> bool:
    """True if weights are integers whose scales are of the type of x."""
    return problem.numbers == "integers"
