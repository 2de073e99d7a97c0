"""The CUDA product of a few rows of x with one weight, or several: which shape of decode.cu, and how it is launched."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from halfbyte.formats.weight import QuantizedWeight
from halfbyte.kernels.common.device import DeviceFacts, facts_of
from halfbyte.kernels.common.driver import Arguments, Launch, kernels, prepared
from halfbyte.kernels.common.nvrtc import Variant, read_sources
from halfbyte.kernels.linear.codebook import FACTORS, UNIT_AND_CODEBOOK
from halfbyte.kernels.linear.operands import Addresses, Operands, operands_of
from halfbyte.kernels.linear.ready import GroupProduct, Product, run

BLOCK = 64  # weights that are summed up before they are scaled
ROWS = 16  # rows of W in a tile
MOST_ROWS = 32  # of x
MOST_CLUSTER = 8  # CTAs, everywhere clusters exist
MOST_PARTS = 3  # weights of one launch: q, k and v
MOST_STAGES = 8  # that there are barriers for
MOST_WARPS = 20  # of a CTA: five on each quarter of a multiprocessor, with 96 registers
SLOTS = 4
ROOMY = 195 << 10  # bytes of shared memory that leave 60 KB of L1; the next step leaves 28


class Scales(NamedTuple):
    """Of a weight. dtype: uint8 where they are nested. block_size: weights that share one."""

    dtype: torch.dtype
    block_size: int = BLOCK

    @property
    def nested(self) -> bool:
        return self.dtype is torch.uint8

    @property
    def blocks(self) -> int:
        """Blocks of 64 weights that share one."""
        return self.block_size // BLOCK

    def bytes_of(self, blocks: int) -> int:
        """Of so many blocks of 64 weights, the first of which is the first of those that share a scale."""
        return -(-blocks // self.blocks) * self.dtype.itemsize


@dataclass(frozen=True)
class DecodePlan:
    """The constants of decode.cu. columns: groups of eight rows of x. warps: of a team, that multiply. slice: blocks of
    K a warp. stages: of a team, tiles or steps of tiles on their way. cluster: CTAs that share K. whole: scales of a
    tile are copied in one piece. offset: those of a row with what lies around them. parts: weights of one launch.
    steps: that a tile is fetched in. teams: of a CTA, each with tiles of its own. registers: of a multiplying thread,
    at the expense of others, or 0 for as many as those have. sums: buffers of a team for what its warps have."""

    columns: int
    warps: int
    slice: int
    stages: int
    cluster: int
    whole: bool = False
    offset: bool = False
    parts: int = 1
    steps: int = 1
    teams: int = 1
    registers: int = 0
    sums: int = 2

    @property
    def threads(self) -> int:
        """Of a CTA. Registers are handed over by four warps at a time, so two more are there where any are."""
        return 32 * (self.teams * (self.warps + 2) + (2 if self.registers else 0))

    @property
    def blocks(self) -> int:
        """Blocks of K that a CTA covers."""
        return self.warps * self.slice

    def tiles(self, m: int) -> int:
        """Tiles of x [m, K] that launches are made for: they are the same for any m."""
        return 0

    def shared_bytes(self, scales: Scales) -> int:
        """Dynamic shared memory. decode.cu lays it out, and does not compile where this sum is another than its own."""
        stage, scale_row = self.blocks // self.steps * 32 + 32, scales.bytes_of(self.blocks)
        scale_row = -(-scale_row // 16) * 16 + 32 if self.offset else scale_row + 16
        tiles = ROWS * (self.stages * stage + -(-self.stages // self.steps) * scale_row)
        sums = self.sums * self.warps * 8 * self.columns * 80 + SLOTS * (self.cluster - 1) * self.columns * 512
        return 256 * 256 + 1024 * self.parts + self.teams * (256 + sums + tiles)


def is_valid(plan: DecodePlan, n: int, k: int, scales: Scales, facts: DeviceFacts) -> bool:
    """True if decode.cu computes the right thing under `plan`, and fits: planner, tuner and tests go by this."""
    blocks = k // BLOCK
    return (
        facts.ptx >= 90
        and scales.block_size % BLOCK == 0
        and k % scales.block_size == 0
        and _can_copy_scales(plan, blocks, scales)
        and n % 4 == 0
        and 0 < n * k < 1 << 38  # blocks are counted in 32 bits
        and plan.slice % (4 * plan.steps) == 0
        and 1 <= plan.warps <= 16
        and plan.teams >= 1
        and plan.teams * (plan.warps + 2) <= MOST_WARPS
        and (plan.teams == 1 or plan.cluster == 1)
        and 1 <= plan.cluster <= MOST_CLUSTER
        and plan.blocks * (plan.cluster - 1) < blocks <= plan.blocks * plan.cluster
        and 2 <= plan.stages <= MOST_STAGES
        and 1 <= plan.sums <= 2
        and (plan.registers == 0 or (facts.ptx == 90 and _can_hand_over_registers(plan)))
        and plan.shared_bytes(scales) <= facts.shared_memory
    )


def _can_hand_over_registers(plan: DecodePlan) -> bool:
    """Four warps at a time, to multiples of 8; a warp waits for ever for what the CTA does not have."""
    has = (1 << 16) // plan.threads // 8 * 8 * plan.threads
    asked = 32 * (plan.warps * plan.registers + 4 * 32)
    return plan.teams == 1 and plan.warps % 4 == plan.registers % 8 == 0 and asked <= has


def _can_copy_scales(plan: DecodePlan, blocks: int, scales: Scales) -> bool:
    """Bulk copies take multiples of 16 bytes at multiples of 16: of each row, or of four rows at least. CTAs that share
    K share no scale."""
    of_row, of_cta = scales.bytes_of(blocks), scales.bytes_of(plan.blocks)
    if plan.cluster > 1 and plan.blocks % scales.blocks:
        return False
    if plan.whole or plan.offset:
        return of_row % 4 == 0 and not (plan.whole and (plan.offset or plan.cluster > 1))
    return of_row % 16 == of_cta % 16 == 0


def decode_plan(m: int, n: int, k: int, scales: Scales, facts: DeviceFacts, parts: int = 1) -> DecodePlan | None:
    """The plan for x [m, k] and W [n, k], or None where this kernel is not for them. parts: the weights
    that W is, none of which shares a tile with another.

    A warp holds as much of K as its registers take beside x; then the fewest steps of the busiest CTA win, with what a
    tile, a neighbour and a missing warp were seen to cost on an H200 (docs/notebook.md).
    """
    if not 1 <= m <= MOST_ROWS:
        return None
    columns, width, most_warps = (1, 8, 16) if m <= 8 else (2, 4, 16) if m <= 16 else (4, 4, 8)
    tiles = -(-n // ROWS)

    def cost(plan: DecodePlan) -> float:
        turns = -(-tiles // max(1, facts.sms // plan.cluster))
        busy = turns * (plan.blocks * (1 + 0.05 * (most_warps - plan.warps)) + 8)
        neighbours = 8 * plan.cluster + (32 if plan.cluster > 1 else 0)
        return busy + neighbours - plan.stages / plan.steps - 0.1 * plan.sums

    unaligned = scales.bytes_of(k // BLOCK) % 16 != 0
    shapes = (
        DecodePlan(columns, warps, width, 4, cluster, unaligned and cluster == 1, unaligned and cluster > 1, parts)
        for cluster in range(1, MOST_CLUSTER + 1)
        for warps in range(1, most_warps + 1)
    )
    plans = (plan for shape in shapes for plan in _refined(shape, m, tiles / facts.sms, scales, facts))
    return min((plan for plan in plans if is_valid(plan, n, k, scales, facts)), key=cost, default=None)


def _refined(plan: DecodePlan, m: int, turns: float, scales: Scales, facts: DeviceFacts) -> list[DecodePlan]:
    """The plan, or what is ahead of it, with every number of stages that makes sense. turns: tiles of a multiprocessor.

    Two stages of large tiles leave memory waiting for the slowest warp, hence steps. Few warps do not keep up with
    memory, hence teams, whose beginning takes longer. Sixteen would like more registers than eighteen can have each; so
    would those that hold 32 rows of x. Many rows of x for many warps come through an L1 that has what shared memory
    leaves: what takes less of it begins earlier. Measured on an H200 (docs/notebook.md).
    """
    if plan.warps == 16 and plan.cluster == 1 and facts.ptx == 90:
        plan = replace(plan, registers=104)
    if plan.columns == 4 and plan.warps == 8 and plan.cluster <= 2 and facts.ptx == 90:
        plan = replace(plan, registers=232)
    if plan.columns == 1 and plan.warps > 10:
        plan = replace(plan, stages=MOST_STAGES, steps=2)
    elif plan.columns == plan.cluster == 1 and plan.warps == 4 and turns >= 5:
        plan = replace(plan, teams=2)
    elif plan.columns == plan.cluster == 1 and 4 < plan.warps <= 8 and turns >= 10:
        plan = replace(plan, stages=MOST_STAGES, steps=2, teams=2)
    elif plan.columns == 2 and turns <= 2:
        plan = replace(plan, stages=2)
    if plan.columns == plan.teams == 1 and 4 < plan.warps <= 8 and turns > 4 and not scales.nested:
        plan = replace(plan, sums=1)
    crowded = {1: m > 4 and plan.warps > 10, 2: plan.warps >= 8 and scales.nested, 4: plan.warps == 8}[plan.columns]
    sums = (1, 2) if crowded and scales.nested and plan.columns < 4 else (plan.sums,)
    plans = [replace(plan, stages=stages, sums=count) for stages in range(2, plan.stages + 1) for count in sums]
    roomy = [one for one in plans if one.stages > one.steps and one.shared_bytes(scales) <= ROOMY] if crowded else []
    return roomy or [one for one in plans if one.sums == plan.sums]


def find_plan(m: int, operands: Operands, facts: DeviceFacts, batch_invariant: bool) -> DecodePlan | None:
    """The plan for x [m, K], or None where this kernel is not for such operands.

    It is for every format in blocks of 64 or multiples, x of 16 bits and up to 32 rows, shapes that `is_valid`
    describes. With batch_invariant it takes any number of rows, eight at a time: a row's sums are then always made in
    the same order.
    """
    o = operands
    if not _takes(o):
        return None
    return decode_plan(8 if batch_invariant else m, o.n, o.k, scales_of(o), facts)


def find_group_plan(m: int, group: Sequence[Operands], facts: DeviceFacts) -> DecodePlan | None:
    """The plan for x [m, K] and several weights in one launch, or None where this kernel is not for them."""
    first = group[0]
    if not 1 < len(group) <= MOST_PARTS or not all(map(_takes, group)):
        return None
    alike = {(o.k, o.format, o.nested, scales_of(o)) for o in group}
    if len(alike) > 1 or any(o.n % 4 or o.n == 0 for o in group):
        return None
    return decode_plan(m, ROWS * sum(map(_tiles, group)), first.k, scales_of(first), facts, len(group))


def _takes(o: Operands) -> bool:
    if (o.format, o.dtype) not in FACTORS or o.block_size % BLOCK or not o.has_usual_nesting:
        return False
    return min(o.align_packed, o.align_scale, o.align_x, o.align_bias) >= 16


def scales_of(operands: Operands) -> Scales:
    return Scales(torch.uint8 if operands.nested else operands.scale, operands.block_size)


def _tiles(operands: Operands) -> int:
    return -(-operands.n // ROWS)


def plan_for(x: Tensor, q: QuantizedWeight, bias: Tensor | None, batch_invariant: bool) -> DecodePlan | None:
    """The plan for these very tensors."""
    return find_plan(len(x), operands_of(x, q, bias), facts_of(x.get_device()), batch_invariant)


def linear(x: Tensor, q: QuantizedWeight, bias: Tensor | None, out: Tensor, plan: DecodePlan) -> None:
    """out = x @ W.T + bias, as many rows at a time as `plan` takes.

    x [M, K] and out [M, N], contiguous, aligned to 16 bytes, on the current device; the plan is from `plan_for`.
    """
    run(product, x, q, bias, out, plan)


def product(device: torch.device, m: int, operands: Operands, weight: Addresses, plan: DecodePlan) -> Product:
    """The product with a weight on the current device, of any number of rows."""
    launch, arguments = _prepare(device.index, (operands,), (weight,), plan)
    step = 8 * plan.columns
    row, out_row = operands.k * operands.dtype.itemsize, operands.n * operands.dtype.itemsize

    def multiply(stream: int, x: int, bias: int, out: int, m: int) -> None:
        for first in range(0, m, step):
            arguments.set(x + first * row, bias, out + first * out_row, min(step, m - first))
            launch(stream, arguments.parameters)

    return multiply


def group_product(
    device: torch.device, m: int, group: Sequence[Operands], weights: Sequence[Addresses], plan: DecodePlan
) -> GroupProduct:
    """The products of m rows of x, no more than the plan's, with several weights on the current device."""
    launch, arguments = _prepare(device.index, group, weights, plan)

    def multiply(stream: int, x: int, results: Iterable[int]) -> None:
        arguments.set(x, *results, m)
        launch(stream, arguments.parameters)

    return multiply


def _prepare(
    index: int, group: Sequence[Operands], weights: Sequence[Addresses], plan: DecodePlan
) -> tuple[Launch, Arguments]:
    """One compiled shape of decode.cu with its grid, and its arguments."""
    o, parts, tiles = operands_of_group(group), len(group), [_tiles(o) for o in group]
    compiled = variant(o, plan, facts_of(index))
    launch = prepared(("decode", index, sum(tiles), compiled), lambda: _launch(index, o, sum(tiles), plan, compiled))
    firsts = [sum(tiles[:part]) for part in range(parts)]
    sizes = (*(o.n for o in group), *firsts, sum(tiles), o.k)
    return launch, Arguments(layout(parts), tuple(chain(*weights)), (*sizes, *UNIT_AND_CODEBOOK[o.format, o.dtype]))


def layout(parts: int) -> tuple[str, str, str]:
    """decode.cu's Arguments: x, then bias and out for each weight, and m change."""
    return f"{5 * parts}Q", f"{1 + 2 * parts}QI", f"{2 * parts + 2}If64s"


def operands_of_group(group: Sequence[Operands]) -> Operands:
    """What is compiled for one is compiled for all, but for the bias: there is none, or room for each."""
    return replace(group[0], bias=any(o.bias for o in group))


def _launch(index: int, o: Operands, tiles: int, plan: DecodePlan, compiled: Variant) -> Launch:
    shared = plan.shared_bytes(scales_of(o))
    (function,) = kernels(index, compiled, (("decode", shared),))
    launch = Launch(function, (1, plan.cluster), plan.threads, shared, cluster=plan.cluster, overlaps=True)
    launch.set_grid(min(launch.most_clusters(), -(-tiles // plan.teams)), plan.cluster)
    return launch


def variant(operands: Operands, plan: DecodePlan, facts: DeviceFacts) -> Variant:
    """What is compiled for such operands."""
    constants = macros(operands.dtype, scales_of(operands), operands.low_first, operands.bias, plan)
    return Variant.of(source(), target(plan, facts), constants)


def target(plan: DecodePlan, facts: DeviceFacts) -> int | str:
    """What is compiled for: no later GPU than Hopper where registers are handed over."""
    return "90a" if plan.registers else facts.capability


def macros(dtype: torch.dtype, scales: Scales, low_first: bool, bias: bool, plan: DecodePlan) -> dict[str, int]:
    """What decode.cu is compiled with."""
    return {
        "COLUMNS": plan.columns, "WARPS": plan.warps, "SLICE": plan.slice, "STAGES": plan.stages,
        "STEPS": plan.steps, "SUMS": plan.sums, "TEAMS": plan.teams, "CLUSTER": plan.cluster, "WHOLE": int(plan.whole),
        "OFFSET": int(plan.offset), "PARTS": plan.parts, "NESTED": int(scales.nested),
        "SCALE_BYTES": scales.dtype.itemsize, "SCALE_FP16": int(scales.dtype == torch.float16),
        "SHARED_BY": scales.blocks, "LOW_FIRST": int(low_first), "FP16": int(dtype == torch.float16),
        "BIAS": int(bias), "REGISTERS": plan.registers, "SHARED_BYTES": plan.shared_bytes(scales),
    }  # fmt: skip


@cache
def source() -> str:
    folder = Path(__file__).parent
    names = ("barriers.cuh", "decode_work.cuh", "decode.cu")
    return read_sources(*(folder / name for name in names))
