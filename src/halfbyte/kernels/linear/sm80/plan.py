"""Which shape of kernel.cu is for a product: its constants, what it needs, and the planner that picks among them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import torch

from halfbyte.kernels.common.device import DeviceProperties
from halfbyte.kernels.linear import codebook
from halfbyte.kernels.linear.constants import MMA_FLOPS
from halfbyte.kernels.linear.problem import Problem
from halfbyte.kernels.linear.tune import h200

DTYPES = (torch.float16, torch.bfloat16)
TABLE_BYTES, CODE_BYTES = 256 * 128, 1024  # of shared memory: byte to weights, and the code of nested scales
MEETING_BYTES = 2048  # of shared memory, where warps that share rows add up; for each warp along N
RESERVED_BYTES = 1024  # of shared memory, which the system takes from each CTA
SPANS = (128, 64, 32)  # weights that are summed before they are scaled
UNIT_SPANS = 4  # of a warp
FOLDED_COLUMNS = 4
REGISTERS = 65536  # of a multiprocessor


@dataclass(frozen=True)
class Sm80Plan:
    """The constants of kernel.cu, by the names of its Config, `ctas`, and the estimate."""

    row_groups: int  # of 16 rows of W that a warp multiplies
    columns: int  # groups of eight rows of x
    n_warps: int  # warps side by side along W's rows
    k_warps: int  # warps that share rows
    tile_k: int  # numbers of K in a stage
    span: int  # weights of a row that are summed before they are scaled
    stages: int  # on their way
    resident_ctas: int  # that share a multiprocessor
    ctas: int  # that share the work
    invariant: bool = False  # the sums of a row of x are made in one order whatever its tile's width is: invariant.py
    microseconds: float = field(default=math.inf, compare=False)

    @property
    def direct(self) -> int:
        """The most parts of a tile that its first CTA adds up one by one; of more, others add some up first."""
        return 8

    @property
    def rows(self) -> int:
        """Rows of W in a tile."""
        return 16 * self.row_groups * self.n_warps

    @property
    def tile_m(self) -> int:
        """Rows of x in a tile."""
        return 8 * self.columns

    @property
    def decoding_columns(self) -> int:
        """By which it is chosen how W is decoded; with `invariant` in one way for all widths, the widest tile's."""
        return max(h200.SM80_COLUMNS) if self.invariant else self.columns

    @property
    def warps(self) -> int:
        return self.n_warps * self.k_warps

    @property
    def unit_k(self) -> int:
        """Numbers of K of a unit of work."""
        return UNIT_SPANS * self.span * self.k_warps

    @property
    def stage_bytes(self) -> int:
        return self.tile_k * (self.rows // 2 + 2 * self.tile_m)

    def x_tiles(self, m: int) -> int:
        """Tiles of x [m, K]."""
        return -(-m // self.tile_m)

    def sizes(self, m: int, n: int, k: int) -> tuple[int, int, int]:
        """Tiles along W's rows and along x's, and units of a tile."""
        return -(-n // self.rows), self.x_tiles(m), -(-k // self.unit_k)

    def tiles(self, m: int, problem: Problem) -> int:
        return math.prod(self.sizes(m, problem.n, problem.k)[:2])

    def partial_sums(self, m: int, problem: Problem) -> int:
        """That CTAs leave for others; 0 where no two share a tile."""
        return self.ctas * self.rows * self.tile_m if self.tiles(m, problem) % self.ctas else 0

    def shared_bytes(self, problem: Problem) -> int:
        """Dynamic shared memory. work.cuh lays it out, and does not compile where this sum is another than its own."""
        tables = (0 if has_integers(problem) else TABLE_BYTES) + (CODE_BYTES if problem.nested else 0)
        meeting = self.n_warps * MEETING_BYTES if self.k_warps > 1 else 0
        return tables + self.stages * self.stage_bytes + meeting


def has_integers(problem: Problem) -> bool:
    """True if weights are the integers from -8 to 7, times their scale: such need no table."""
    return codebook.has_integers(problem.format, problem.dtype)


def folds(problem: Problem, columns: int) -> bool:
    """True if scales multiply the weights, not the sums of a span: integers whose scales are of the type of x become
    what dequantize gives, and from so many columns on that takes fewer instructions."""
    return columns >= FOLDED_COLUMNS and problem.numbers == "integers"


def is_crossed(problem: Problem, columns: int) -> bool:
    """True if a register of W takes nibbles that are four apart, span.cuh: x is then put into that order, which takes
    an instruction for two of its numbers, and in bf16 as many of W take one more."""
    return has_integers(problem) and columns <= (2 if problem.dtype is torch.float16 else 1)


def span_of(problem: Problem, row_groups: int, columns: int, own: int) -> int:
    """The longest span that always lies within one block, of at most the `own` numbers of a stage that a warp takes.

    A span's weights are held at once, unless scales are folded into them.
    """
    most = SPANS[1] if row_groups * columns >= 16 and not folds(problem, columns) else SPANS[0]
    most = min(most, own)
    return next(s for s in SPANS if s == SPANS[-1] or (s <= most and (problem.k | problem.block_size) % s == 0))


def is_valid(plan: Sm80Plan, m: int, problem: Problem, properties: DeviceProperties) -> bool:
    """True if kernel.cu computes the right thing under `plan`, and fits: planner, tuner and tests go by this."""
    o = problem
    row_tiles, column_tiles, depth = plan.sizes(m, o.n, o.k)
    units = row_tiles * column_tiles * depth
    own = plan.tile_k // plan.span // plan.k_warps  # spans of a stage, that a warp takes
    threads, resident = 32 * plan.warps, plan.resident_ctas
    return (
        properties.ptx >= 80
        and o.dtype in DTYPES
        and plan.span in SPANS
        and plan.tile_k in (64, 128, 256)
        and o.has_spans(plan.span, m)
        and own in (1, 2, 4)
        and own * plan.span * plan.k_warps == plan.tile_k
        and plan.row_groups in (1, 2, 4)
        and plan.columns in h200.SM80_COLUMNS
        and plan.n_warps in (2, 4, 8)
        and plan.span <= span_of(o, plan.row_groups, plan.columns, plan.span)  # or registers do not hold its weights
        and threads // (plan.tile_k // 32) % 16 == 0  # a thread's rows of W have one place among 16, work.cuh
        and 3 <= plan.stages <= 8
        and 1 <= plan.ctas <= units
        # Equal parts of each tile, or as many as run at once.
        and (plan.ctas % (row_tiles * column_tiles) == 0 if plan.invariant else plan.ctas <= properties.sms * resident)
        and units * plan.ctas < 1 << 32
        and plan.rows * o.k < 1 << 32
        and plan.tile_m * o.k < 1 << 31
        and resident * threads * _registers(plan, o) <= REGISTERS
        and resident * (plan.shared_bytes(o) + RESERVED_BYTES) <= properties.shared_memory + RESERVED_BYTES
    )


def _registers(plan: Sm80Plan, problem: Problem) -> int:
    """Of a thread, at least: its sums, the decoded weights of a span, or of two words of it, the numbers of x of a
    group, and all else."""
    if folds(problem, plan.decoding_columns):
        return 4 * plan.row_groups * plan.columns + plan.row_groups * (8 + plan.span // 16) + 8 + 48
    return 4 * plan.row_groups * plan.columns + plan.row_groups * plan.span // 4 + plan.span // 8 + 56


def sm80_plan(m: int, problem: Problem, properties: DeviceProperties) -> Sm80Plan | None:
    """The plan for x [m, K], or None where this kernel is not for it: that with the least estimated time, of a small
    shape only where no other fits."""
    if m < 1 or properties.ptx < 80 or problem.k % 32:
        return None
    columns = columns_of(m)
    for shapes in (h200.SM80_SHAPES[columns], h200.SM80_SMALL_SHAPES.get(columns, ())):
        plans = [
            plan for shape in shapes if (plan := plan_of_shape(columns, shape, m, problem, properties)) is not None
        ]
        if plans:
            return min(plans, key=lambda plan: plan.microseconds)
    return None


def columns_of(m: int) -> int:
    """Groups of eight rows of x in a tile, for x [m, K]."""
    return next((columns for columns in h200.SM80_COLUMNS if 8 * columns >= m), max(h200.SM80_COLUMNS))


def every_shape(columns: int) -> tuple[tuple[int, ...], ...]:
    """Of tune/h200.py, for so many groups of eight rows of x."""
    return *h200.SM80_SHAPES[columns], *h200.SM80_SMALL_SHAPES.get(columns, ())


def plan_of_shape(
    columns: int, shape: tuple[int, ...], m: int, problem: Problem, properties: DeviceProperties
) -> Sm80Plan | None:
    """A shape of tune/h200.py as a plan."""
    row_groups, n_warps, k_warps, tile_k, resident = shape
    span = span_of(problem, row_groups, columns, tile_k // k_warps)
    whole = Sm80Plan(row_groups, columns, n_warps, k_warps, tile_k, span, 0, resident, 1)
    # All CTAs that there is room for, but none that takes no part.
    ctas = min(math.prod(whole.sizes(m, problem.n, problem.k)), properties.sms * resident)
    return with_stages(replace(whole, ctas=ctas), m, problem, properties)


def with_stages(shape: Sm80Plan, m: int, problem: Problem, properties: DeviceProperties) -> Sm80Plan | None:
    """The shape with as many stages as there is room for, and the estimate; None where it is not for this product."""
    for stages in range(h200.SM80_STAGES, 2, -1):
        plan = replace(shape, stages=stages)
        if is_valid(plan, m, problem, properties):
            return replace(plan, microseconds=estimate(plan, m, problem, properties))
    return None


def estimate(plan: Sm80Plan, m: int, problem: Problem, properties: DeviceProperties) -> float:
    """The estimated time: of what must be read, and of the busiest multiprocessor's stages. Tensor cores of GeForce
    cards take four times as long as those of an A100.

    A multiprocessor takes as long for a stage as its busiest part, or as a CTA's warps wait for one another, which
    other CTAs on it make use of. Where more CTAs come to it than it has room for, the others begin later.
    """
    row_tiles, column_tiles, depth = plan.sizes(m, problem.n, problem.k)
    groups, columns, span, looks_up = plan.row_groups, plan.columns, plan.span, not has_integers(problem)
    folded, crossed = folds(problem, plan.decoding_columns), is_crossed(problem, plan.decoding_columns)
    # Of a warp's span: pairs of weights that a lane decodes, MMAs, instructions, and cycles of shared memory, which
    # gives 128 bytes in each.
    pairs, products = groups * span // 4, groups * columns * span // 16
    pair = h200.SM80_LOOK_UP if looks_up else h200.SM80_CROSSED if crossed else h200.SM80_ARITHMETIC
    scaling = pairs if folded else 4 * groups * columns
    instructions = pair * pairs + scaling + columns * span // 32 * (5 if crossed else 1) + 2 * groups + products
    loads = columns * span // 8 + groups * span // 16 + (pairs if looks_up else 0)
    # Of a CTA's stage.
    spans = plan.tile_k // span // plan.k_warps
    copies = plan.tile_k * (plan.rows // 32 + plan.tile_m // 8) / (32 * plan.warps)
    of_warp = spans * instructions + 3 * copies + h200.SM80_STAGE
    in_a_cycle = properties.teraflops * 1e6 / (properties.sms * properties.clock)  # flops of a multiprocessor
    tensor = max(h200.SM80_MMA, MMA_FLOPS / (h200.SM80_MMA_SHARE * in_a_cycle)) * products
    busiest = plan.warps * max(h200.SM80_ISSUE * of_warp, spans * loads, spans * tensor)
    in_turn = -(-plan.ctas // properties.sms)
    together = min(in_turn, plan.resident_ctas)
    alone = h200.SM80_LATENCY + h200.SM80_SERIAL * of_warp
    cycles = math.pow(busiest**h200.SM80_OVERLAP + (alone / together) ** h200.SM80_OVERLAP, 1 / h200.SM80_OVERLAP)
    stages = -(-row_tiles * column_tiles * depth // plan.ctas) * plan.unit_k // plan.tile_k
    later = h200.SM80_LATER * (in_turn - together) / together
    busy = h200.SM80_CYCLE / properties.rates.clock * (in_turn * stages * cycles + later)
    parts = plan.ctas / (row_tiles * column_tiles)
    fix_up = h200.SM80_FIX_UP + h200.SM80_PART * parts if row_tiles * column_tiles % plan.ctas else 0
    bandwidth = h200.SM80_BANDWIDTH * properties.rates.bandwidth
    reading = problem.megabytes / bandwidth
    least = problem.megabytes / (h200.MOST_BANDWIDTH * properties.rates.bandwidth)
    stores = h200.SM80_STORES * properties.rates.bandwidth
    # With `invariant` partial sums may be many: they are written, read and cleared, four bytes each.
    sums = 3 * 4 * plan.partial_sums(m, problem) / 1e6 / stores if plan.invariant else 0
    result = problem.result_megabytes(m) / stores
    return h200.SM80_START + max(math.hypot(reading, busy), least) + fix_up + sums + result
