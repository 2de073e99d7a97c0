"""Which shape of kernel.cu is for a gradient: its constants, what it needs, and the planner that picks among them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import torch

from halfbyte.kernels.common.device import DeviceProperties
from halfbyte.kernels.linear.constants import MMA_FLOPS
from halfbyte.kernels.linear.problem import Problem
from halfbyte.kernels.linear.tune import h200

DTYPES = (torch.float16, torch.bfloat16)
WARPS, TILE_K, UNIT_N = 4, 128, 64  # columns of W in a tile; rows of W in a unit, which is a stage
CODE_BYTES = 1024  # of shared memory: the code of nested scales
RESERVED_BYTES = 1024  # of shared memory, which the system takes from each CTA


@dataclass(frozen=True)
class BackPlan:
    """The constants of kernel.cu, by the names of its Config, `ctas`, and the estimate."""

    columns: int  # groups of eight rows of dy
    stages: int  # on their way
    resident_ctas: int  # that share a multiprocessor
    ctas: int  # that share the work
    microseconds: float = field(default=math.inf, compare=False)

    @property
    def direct(self) -> int:
        """The most parts of a tile that its first CTA adds up one by one; of more, others add some up first."""
        return 8

    @property
    def threads(self) -> int:
        return 32 * WARPS

    @property
    def tile_m(self) -> int:
        """Rows of dy in a tile."""
        return 8 * self.columns

    def x_tiles(self, m: int) -> int:
        """Tiles of dy [m, N]."""
        return -(-m // self.tile_m)

    def sizes(self, m: int, problem: Problem) -> tuple[int, int, int]:
        """Tiles along W's columns and along dy's rows, and units of a tile."""
        return -(-problem.k // TILE_K), self.x_tiles(m), -(-problem.n // UNIT_N)

    def partial_sums(self, m: int, problem: Problem) -> int:
        """That CTAs leave for others; 0 where no two share a tile."""
        row_tiles, column_tiles, _ = self.sizes(m, problem)
        return self.ctas * TILE_K * self.tile_m if row_tiles * column_tiles % self.ctas else 0

    def shared_bytes(self, problem: Problem) -> int:
        """Dynamic shared memory. kernel.cu lays it out, and does not compile where this sum is another than its own."""
        stage = UNIT_N * (TILE_K // 2 + 2 * self.tile_m)
        return (CODE_BYTES if problem.nested else 0) + self.stages * stage


def is_valid(plan: BackPlan, m: int, problem: Problem, properties: DeviceProperties) -> bool:
    """True if kernel.cu computes the right thing under `plan`, and fits: planner, tuner and tests go by this."""
    o, resident = problem, plan.resident_ctas
    units = math.prod(plan.sizes(m, o))
    return (
        properties.ptx >= 80
        and o.dtype in DTYPES
        and o.has_spans(32, m)
        and plan.columns in h200.SM80_BACK_SHAPES
        and resident <= h200.SM80_BACK_SHAPES[plan.columns]  # or registers do not hold the sums
        and 3 <= plan.stages <= 8
        and 1 <= plan.ctas <= min(units, properties.sms * resident)
        and units * plan.ctas < 1 << 32
        and resident * (plan.shared_bytes(o) + RESERVED_BYTES) <= properties.shared_memory + RESERVED_BYTES
    )


def back_plan(m: int, problem: Problem, properties: DeviceProperties) -> BackPlan | None:
    """The plan for dy [m, N] @ W, or None where this kernel is not for it: that whose busiest multiprocessor has the
    fewest cycles."""
    if m < 1 or properties.ptx < 80:
        return None
    found = []
    for columns, most in h200.SM80_BACK_SHAPES.items():
        for resident in range(most, 0, -1):
            one = BackPlan(columns, h200.SM80_BACK_STAGES, resident, 1)
            plan = replace(one, ctas=min(math.prod(one.sizes(m, problem)), properties.sms * resident))
            if is_valid(plan, m, problem, properties):
                found.append((_cycles(plan, m, problem, properties), plan))
                break
    if not found:
        return None
    cycles, plan = min(found, key=lambda pair: pair[0])
    reading = problem.megabytes / (h200.SM80_BANDWIDTH * properties.rates.bandwidth)
    busy = h200.SM80_CYCLE / properties.rates.clock * cycles
    return replace(plan, microseconds=h200.SM80_BACK_START + math.hypot(reading, busy))


def _cycles(plan: BackPlan, m: int, problem: Problem, properties: DeviceProperties) -> float:
    """Of the busiest multiprocessor: for each warp and 32 rows of W its look-ups, then its MMAs, at no more than the
    rate of the GPU's tensor cores; and for each part of a tile and row of dy, adding up."""
    row_tiles, column_tiles, depth = plan.sizes(m, problem)
    in_a_cycle = properties.teraflops * 1e6 / (properties.sms * properties.clock)  # flops of a multiprocessor
    column = max(h200.SM80_BACK_COLUMN, 4 * MMA_FLOPS / (h200.SM80_MMA_SHARE * in_a_cycle))
    step = h200.SM80_BACK_LOOK_UPS + column * plan.columns
    units = -(-row_tiles * column_tiles * depth // plan.ctas) * -(-plan.ctas // properties.sms)
    parts = plan.ctas / (row_tiles * column_tiles) if row_tiles * column_tiles % plan.ctas else 0
    return units * (UNIT_N // 32) * WARPS * step + h200.SM80_BACK_PART * parts * plan.tile_m
