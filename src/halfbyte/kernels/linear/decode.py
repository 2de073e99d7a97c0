"""The CUDA product for a few rows of x: which shape of decode.cu, and how it is launched."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from halfbyte.formats.weight import QuantizedWeight
from halfbyte.kernels.common.device import DeviceFacts, facts_of
from halfbyte.kernels.common.driver import Arguments, Launch, kernels, prepared
from halfbyte.kernels.common.nvrtc import Variant, read_sources
from halfbyte.kernels.linear.codebook import FACTORS, UNIT_AND_CODEBOOK
from halfbyte.kernels.linear.operands import Addresses, Operands, operands_of
from halfbyte.kernels.linear.ready import Product, run

BLOCK = 64  # weights that share a scale
ROWS = 16  # rows of W in a tile
MOST_ROWS = 32  # of x
MOST_CLUSTER = 8  # CTAs, everywhere clusters exist
SUMS, SLOTS = 2, 4


@dataclass(frozen=True)
class DecodePlan:
    """The constants of decode.cu. columns: groups of eight rows of x. warps: that multiply. slice: blocks of K a warp.
    stages: tiles on their way. cluster: CTAs that share K. whole: the scales of a tile are copied in one piece."""

    columns: int
    warps: int
    slice: int
    stages: int
    cluster: int
    whole: bool = False

    @property
    def blocks(self) -> int:
        """Blocks of K that a CTA covers."""
        return self.warps * self.slice

    def tiles(self, m: int) -> int:
        """Tiles of x [m, K] that launches are made for: they are the same for any m."""
        return 0

    def shared_bytes(self, nested: bool) -> int:
        """Dynamic shared memory. decode.cu lays it out, and does not compile where this sum is another than its own."""
        scale_bytes = 1 if nested else 4
        fixed = 256 * 256 + 1024 + 256 + SUMS * self.warps * 8 * self.columns * 80
        stage = ROWS * (self.blocks * 32 + 32 + self.blocks * scale_bytes + 16)
        return fixed + SLOTS * (self.cluster - 1) * self.columns * 512 + self.stages * stage


def is_valid(plan: DecodePlan, n: int, k: int, nested: bool, facts: DeviceFacts) -> bool:
    """True if decode.cu computes the right thing under `plan`, and fits: planner, tuner and tests go by this."""
    blocks, scale_bytes = k // BLOCK, 1 if nested else 4
    return (
        facts.ptx >= 90
        and k % BLOCK == 0
        and _can_copy_scales(plan, blocks, scale_bytes)
        and n % 4 == 0
        and n > 0
        and plan.slice % 4 == 0
        and 1 <= plan.warps <= 16
        and 1 <= plan.cluster <= MOST_CLUSTER
        and plan.blocks * (plan.cluster - 1) < blocks <= plan.blocks * plan.cluster
        and 2 <= plan.stages <= 8
        and plan.shared_bytes(nested) <= facts.shared_memory
    )


def _can_copy_scales(plan: DecodePlan, blocks: int, scale_bytes: int) -> bool:
    """Bulk copies take multiples of 16 bytes at multiples of 16: of each row, or of four rows at least."""
    if plan.whole:
        return plan.cluster == 1 and blocks * scale_bytes % 4 == 0
    return blocks * scale_bytes % 16 == 0 and plan.blocks * scale_bytes % 16 == 0


def decode_plan(m: int, n: int, k: int, nested: bool, facts: DeviceFacts) -> DecodePlan | None:
    """The plan for x [m, k] and W [n, k] in blocks of 64, or None where this kernel is not for them.

    A warp holds as much of K as its registers take beside x; then the fewest steps of the busiest CTA win, with what a
    tile, a neighbour and a missing warp were seen to cost on an H200 (docs/notebook.md).
    """
    if not 1 <= m <= MOST_ROWS:
        return None
    columns, width, most_warps = (1, 8, 16) if m <= 8 else (2, 4, 16) if m <= 16 else (4, 4, 8)
    tiles = -(-n // ROWS)

    def cost(plan: DecodePlan) -> float:
        turns = -(-tiles // max(1, facts.sms // plan.cluster))
        return turns * (plan.blocks * (1 + 0.05 * (most_warps - plan.warps)) + 8) + 8 * plan.cluster - plan.stages

    whole = k // BLOCK * (1 if nested else 4) % 16 != 0
    plans = (
        DecodePlan(columns, warps, width, stages, cluster, whole)
        for cluster in range(1, MOST_CLUSTER + 1)
        for warps in range(1, most_warps + 1)
        for stages in (2, 3, 4)
    )
    return min((plan for plan in plans if is_valid(plan, n, k, nested, facts)), key=cost, default=None)


def find_plan(m: int, operands: Operands, facts: DeviceFacts, batch_invariant: bool) -> DecodePlan | None:
    """The plan for x [m, K], or None where this kernel is not for such operands.

    It is for NF4 and FP4 in blocks of 64, x of 16 bits and up to 32 rows, shapes that `is_valid` describes. With
    batch_invariant it takes any number of rows, eight at a time: a row's sums are then always made in the same order.
    """
    o = operands
    if (o.format, o.dtype) not in FACTORS or o.low_first or o.block_size != BLOCK or not o.has_usual_nesting:
        return None
    if min(o.align_packed, o.align_scale, o.align_x, o.align_bias) < 16:
        return None
    return decode_plan(min(m, 8) if batch_invariant else m, o.n, o.k, o.nested > 0, facts)


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
    o, index, step = operands, device.index, 8 * plan.columns
    row, out_row = o.k * o.dtype.itemsize, o.n * o.dtype.itemsize
    compiled = variant(o, plan, facts_of(index))
    launch = prepared(("decode", index, o.n, compiled), lambda: _launch(index, o, plan, compiled))
    arguments = Arguments(LAYOUT, weight, (o.n, o.k, *UNIT_AND_CODEBOOK[o.format, o.dtype]))

    def multiply(stream: int, x: int, bias: int, out: int, m: int) -> None:
        for first in range(0, m, step):
            arguments.set(x + first * row, bias, out + first * out_row, min(step, m - first))
            launch(stream, arguments.parameters)

    return multiply


LAYOUT = ("5Q", "3QI", "2If64s")  # decode.cu's Arguments: x, bias, out and m change


def _launch(index: int, o: Operands, plan: DecodePlan, compiled: Variant) -> Launch:
    """One compiled shape of decode.cu with its grid."""
    threads, shared = 32 * (plan.warps + 2), plan.shared_bytes(o.nested > 0)
    (function,) = kernels(index, compiled, (("decode", shared),))
    launch = Launch(function, (1, plan.cluster), threads, shared, cluster=plan.cluster, overlaps=True)
    launch.set_grid(min(launch.most_clusters(), -(-o.n // ROWS)), plan.cluster)
    return launch


def variant(operands: Operands, plan: DecodePlan, facts: DeviceFacts) -> Variant:
    """What is compiled for such operands."""
    constants = macros(operands.dtype, operands.nested > 0, operands.bias, plan)
    return Variant.of(source(), facts.capability, constants)


def macros(dtype: torch.dtype, nested: bool, bias: bool, plan: DecodePlan) -> dict[str, int]:
    """What decode.cu is compiled with."""
    return {
        "COLUMNS": plan.columns, "WARPS": plan.warps, "SLICE": plan.slice, "STAGES": plan.stages,
        "CLUSTER": plan.cluster, "WHOLE": int(plan.whole), "NESTED": int(nested), "FP16": int(dtype == torch.float16),
        "BIAS": int(bias), "SHARED_BYTES": plan.shared_bytes(nested),
    }  # fmt: skip


@cache
def source() -> str:
    folder = Path(__file__).parent
    return read_sources(folder / "barriers.cuh", folder / "decode.cu")
