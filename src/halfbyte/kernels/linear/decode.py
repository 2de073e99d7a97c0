"""The CUDA product of a few rows of x with one weight, or several: which shape of decode.cu, and how it is launched."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from halfbyte.formats.weight import QuantizedWeight
from halfbyte.kernels.common.device import DeviceFacts, facts_of
from halfbyte.kernels.common.driver import Arguments, Launch, kernels, prepared
from halfbyte.kernels.common.nvrtc import Variant, read_sources
from halfbyte.kernels.common.tensor_map import tensor_map
from halfbyte.kernels.linear.codebook import FACTORS, UNIT_AND_CODEBOOK
from halfbyte.kernels.linear.operands import Addresses, Operands, operands_of
from halfbyte.kernels.linear.ready import GroupProduct, Product, run

BLOCK = 64  # weights that are summed up before they are scaled
ROWS = 16  # rows of W in a tile
MOST_ROWS = 64  # of x
MOST_CLUSTER = 8  # CTAs, everywhere clusters exist
MOST_PARTS = 3  # weights of one launch: q, k and v
MOST_STAGES = 8  # that there are barriers for
MOST_OF_A_PAIR = {1: 5, 2: 6, 4: 0}  # columns to the warps of two CTAs that share a multiprocessor
RESERVED = 1024  # bytes of shared memory that the system takes for each CTA


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
    """The constants of decode.cu. columns: groups of eight rows of x. warps: that multiply. slice: blocks of K a warp.
    stages: tiles or steps of tiles on their way. cluster: CTAs that share K. whole: scales of a tile are copied in one
    piece. offset: those of a row with what lies around them. parts: weights of one launch. steps: that a tile is
    fetched in. registers: of a multiplying thread, at the expense of others, or 0 for as many as those have. sums:
    buffers for what warps have. first: stages that are asked for before the first is there. together: blocks of K that
    are summed up before they are scaled, which share a scale. resident: CTAs that share a multiprocessor. reducers:
    warps that add up. batches: CTAs side by side, for rows of x."""

    columns: int
    warps: int
    slice: int
    stages: int
    cluster: int
    whole: bool = False
    offset: bool = False
    parts: int = 1
    steps: int = 1
    registers: int = 0
    sums: int = 1
    first: int = 1
    together: int = 1
    resident: int = 1
    reducers: int = 1
    batches: int = 1

    @property
    def threads(self) -> int:
        """Of a CTA: a warp that feeds, one or two that add up. Registers are handed over by four warps at a time."""
        return 32 * (self.warps + (4 if self.registers else 1 + self.reducers))

    @property
    def blocks(self) -> int:
        """Blocks of K that a CTA covers."""
        return self.warps * self.slice

    def tiles(self, m: int) -> int:
        """Tiles of x [m, K] that launches are made for: they are the same for any m."""
        return 0

    def shared_bytes(self, scales: Scales) -> int:
        """Dynamic shared memory. decode.cu lays it out, and does not compile where this sum is another than its own."""
        stage, tiles = ROWS * self.blocks // self.steps * 32, -(-self.stages // self.steps)
        slots = 2 if self.cluster > 4 else 4
        sums = self.sums * self.warps * 8 * self.columns * 80 + slots * (self.cluster - 1) * self.columns * 512
        ahead = -(-(1024 * self.parts + 256 + sums) // 1024) * 1024  # of the stages, which begin at a multiple of that
        scaling = tiles * (ROWS * self.scale_row(scales) + 128 * scales.nested) + self.blocks // self.together * 80
        return 256 * 256 + ahead + self.stages * stage + scaling

    def scale_row(self, scales: Scales) -> int:
        """Bytes of shared memory for the scales of a row."""
        count = scales.bytes_of(self.blocks)
        if self.whole or self.offset:
            return count if self.whole else -(-count // 16) * 16 + 32
        chunk = scale_chunk(self, scales)
        return -(-count // chunk) * chunk


def scale_chunk(plan: DecodePlan, scales: Scales) -> int:
    """Bytes of a row's scales that one copy brings: a power of two."""
    count = scales.bytes_of(plan.blocks)
    return next((chunk for chunk in (16, 32, 64) if count <= chunk), 128)


def weight_chunk(k: int) -> int:
    """Bytes of a row of W that are beside each other in shared memory: a power of two that K is a multiple of."""
    return math.gcd(k // 2, 128)


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
        and plan.slice in (4, 8)
        and plan.slice % (4 * plan.steps) == plan.slice % (2 * plan.together) == 0
        and scales.blocks % plan.together == 0
        and 1 <= plan.warps <= 16
        and 1 <= plan.cluster <= MOST_CLUSTER
        and plan.blocks * (plan.cluster - 1) < blocks <= plan.blocks * plan.cluster
        and 2 <= plan.stages <= MOST_STAGES
        and 1 <= plan.sums <= 2
        and plan.first >= 1
        and 1 <= plan.reducers <= 2
        and plan.columns % plan.reducers == 0
        and (plan.registers == 0 or (facts.ptx == 90 and _can_hand_over_registers(plan)))
        and plan.resident * (plan.shared_bytes(scales) + RESERVED) <= facts.shared_memory + RESERVED
    )


def _can_hand_over_registers(plan: DecodePlan) -> bool:
    """Four warps at a time, to multiples of 8; a warp waits for ever for what the CTA does not have."""
    has = (1 << 16) // plan.threads // 8 * 8 * plan.threads
    asked = 32 * (plan.warps * plan.registers + 4 * 32)
    return plan.warps % 4 == plan.registers % 8 == 0 and asked <= has


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

    A warp holds as much of K as its registers take beside x; then the least work of the busiest CTA wins, with what a
    tile, a neighbour and a missing warp were seen to cost on an H200 (docs/notebook.md).
    """
    if not 1 <= m <= MOST_ROWS:
        return None
    columns, width, most_warps = (1, 8, 16) if m <= 8 else (2, 4, 16) if m <= 16 else (4, 4, 8)
    batches = -(-m // (8 * columns))
    tiles = -(-n // ROWS) * batches

    def cost(plan: DecodePlan) -> float:
        turns = -(-tiles // max(1, facts.sms // plan.cluster))
        busy = turns * (plan.blocks * (1 + 0.05 * (most_warps - plan.warps)) + 8)
        return busy + 8 * plan.cluster + (32 if plan.cluster > 1 else 0)

    unaligned = scales.bytes_of(k // BLOCK) % 16 != 0
    alike = DecodePlan(columns, 1, width, stages=2, cluster=1, parts=parts, batches=batches)
    shapes = (
        replace(alike, warps=warps, cluster=cluster, whole=unaligned and cluster == 1, offset=unaligned and cluster > 1)
        for cluster in range(1, MOST_CLUSTER + 1)
        for warps in range(1, most_warps + 1)
    )
    plans = (_refined(shape, tiles / max(1, facts.sms // shape.cluster), scales, facts) for shape in shapes)
    fitting = (one for plan in plans for one in _smaller(plan) if is_valid(one, n, k, scales, facts))
    return min(fitting, key=cost, default=None)  # the first of equals, which has the most room


def _refined(plan: DecodePlan, turns: float, scales: Scales, facts: DeviceFacts) -> DecodePlan:
    """The plan with what is best for its warps. turns: tiles of a CTA, on average.

    Three halves of a tile on their way are better than more, which come in any order. Sixteen warps would like more
    registers than eighteen can have each, and so would those that hold 32 rows of x; with fewer they spill. With nested
    scales and many warps the second stage is better asked for when the first is there: the codes would wait behind it.
    Few warps leave room for two CTAs. Measured on an H200 (docs/notebook.md).
    """
    full, columns = plan.warps == 16, plan.columns
    if columns == 1:
        halves = turns > 1 or plan.warps > 4
        patient = scales.nested and plan.warps > 11
        plan = replace(plan, steps=2 if halves else 1, stages=3 if halves else 2, first=1 if patient else 2)
    elif columns == 2 and plan.offset:
        plan = replace(plan, stages=3, first=2, sums=2)
    if turns > 1 and plan.warps <= MOST_OF_A_PAIR[columns]:
        plan = replace(plan, resident=2)
    if facts.ptx == 90 and full and (plan.cluster == 1 or columns == 1):
        plan = replace(plan, registers=112)
    elif facts.ptx == 90 and plan.warps == 8 and columns == 4 and plan.cluster <= 2:
        plan = replace(plan, registers=232)
    elif full:
        plan = replace(plan, sums=2)
    if plan.warps > 4 and plan.warps != 6:  # fewer wait for sums that take longer; six were slower all the same
        plan = replace(plan, together=min(scales.blocks, plan.slice // 2))
    if columns > 1 and plan.resident == 1 and _has_room_for_a_warp(plan):
        plan = replace(plan, reducers=2)
    return plan


def _has_room_for_a_warp(plan: DecodePlan) -> bool:
    """True if one more takes no registers that the others need: a quarter of all is for every fourth warp."""
    warps = plan.warps + 2
    return plan.registers > 0 or warps % 4 != 0 or (plan.columns == 2 and warps < 16)


def _smaller(plan: DecodePlan) -> Iterable[DecodePlan]:
    """The plan, and what needs less shared memory: for GPUs that have less."""
    for resident in range(plan.resident, 0, -1):
        for stages in range(plan.stages, 1, -1):
            for sums in range(plan.sums, 0, -1):
                yield replace(plan, resident=resident, stages=stages, sums=sums)


def find_plan(m: int, operands: Operands, facts: DeviceFacts, batch_invariant: bool) -> DecodePlan | None:
    """The plan for x [m, K], or None where this kernel is not for such operands.

    It is for every format in blocks of 64 or multiples, x of 16 bits and up to 64 rows, shapes that `is_valid`
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
    plan = decode_plan(m, ROWS * sum(map(_tiles, group)), first.k, scales_of(first), facts, len(group))
    return plan if plan is not None and plan.batches == 1 else None


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
    """The product with a weight on the current device, of any number of rows; with batches, of as many as there is one
    for each at least."""
    launch, arguments = _prepare(device.index, (operands,), (weight,), plan)
    step = 8 * plan.columns * plan.batches
    too_few = step - 8 * plan.columns  # a batch without rows expects nothing of its cluster, and may lose count
    row, out_row = operands.k * operands.dtype.itemsize, operands.n * operands.dtype.itemsize

    def multiply(stream: int, x: int, bias: int, out: int, m: int) -> None:
        if m and (m - 1) % step < too_few:
            raise ValueError(f"got {m} rows of x: this plan is for {too_few + 1} to {step} at a time ({plan})")
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
    described = chain.from_iterable(map(partial(_described, plan), group, weights))
    return launch, Arguments(layout(parts), tuple(described), (*sizes, *UNIT_AND_CODEBOOK[o.format, o.dtype]))


def _described(plan: DecodePlan, o: Operands, weight: Addresses) -> tuple[Any, ...]:
    """decode.cu's Weight."""
    packed, scale, *nested = weight
    chunk, scales, blocks = weight_chunk(o.k), scales_of(o), o.k // BLOCK
    box = (chunk, ROWS, plan.blocks // plan.steps * 32 // chunk)
    weights = tensor_map(packed, (chunk, o.n, o.k // 2 // chunk), (o.k // 2, chunk), box)
    scale_map = b""
    if not plan.whole and not plan.offset:
        row = scales.bytes_of(blocks)
        scale_map = tensor_map(scale, (row, o.n), (row,), (scale_chunk(plan, scales), ROWS))
    return weights, scale_map, scale, *nested


def layout(parts: int) -> tuple[str, str, str]:
    """decode.cu's Arguments: x, then bias and out for each weight, and m change."""
    before, changing, after = parts * "128s128s4Q32x", f"{1 + 2 * parts}QI", f"{2 * parts + 2}If64s"
    return before, changing, after + f"{-struct.calcsize(before + changing + after) % 64}x"


def operands_of_group(group: Sequence[Operands]) -> Operands:
    """What is compiled for one is compiled for all, but for the bias: there is none, or room for each."""
    return replace(group[0], bias=any(o.bias for o in group))


def _launch(index: int, o: Operands, tiles: int, plan: DecodePlan, compiled: Variant) -> Launch:
    shared = plan.shared_bytes(scales_of(o))
    (function,) = kernels(index, compiled, (("decode", shared),))
    launch = Launch(function, (1, plan.cluster), plan.threads, shared, cluster=plan.cluster, overlaps=True)
    most = min(launch.most_clusters(), facts_of(index).sms * plan.resident // plan.cluster)
    launch.set_grid(min(most // plan.batches, tiles), plan.cluster, plan.batches)
    return launch


def variant(operands: Operands, plan: DecodePlan, facts: DeviceFacts) -> Variant:
    """What is compiled for such operands."""
    o = operands
    constants = macros(o.dtype, scales_of(o), o.low_first, o.bias, plan, o.k)
    return Variant.of(source(), target(plan, facts), constants)


def target(plan: DecodePlan, facts: DeviceFacts) -> int | str:
    """What is compiled for: no later GPU than Hopper where registers are handed over."""
    return "90a" if plan.registers else facts.capability


def macros(dtype: torch.dtype, scales: Scales, low_first: bool, bias: bool, plan: DecodePlan, k: int) -> dict[str, int]:
    """What decode.cu is compiled with."""
    return {
        "COLUMNS": plan.columns, "WARPS": plan.warps, "SLICE": plan.slice, "STAGES": plan.stages,
        "STEPS": plan.steps, "SUMS": plan.sums, "CLUSTER": plan.cluster, "WHOLE": int(plan.whole),
        "OFFSET": int(plan.offset), "PADDED": int(plan.blocks * plan.cluster * BLOCK != k),
        "PARTS": plan.parts, "NESTED": int(scales.nested),
        "SCALE_BYTES": scales.dtype.itemsize, "SCALE_FP16": int(scales.dtype == torch.float16),
        "SHARED_BY": scales.blocks, "LOW_FIRST": int(low_first), "FP16": int(dtype == torch.float16),
        "BIAS": int(bias), "CHUNK": weight_chunk(k), "SCALE_CHUNK": scale_chunk(plan, scales), "FIRST": plan.first,
        "TOGETHER": plan.together, "REGISTERS": plan.registers, "RESIDENT": plan.resident,
        "REDUCERS": plan.reducers, "BATCHES": plan.batches,
        "SHARED_BYTES": plan.shared_bytes(scales),
    }  # fmt: skip


@cache
def source() -> str:
    folder = Path(__file__).parent
    names = ("barriers.cuh", "decode_work.cuh", "decode_scales.cuh", "decode.cu")
    return read_sources(*(folder / name for name in names))
