"""The CUDA product for tensor cores from sm_75 on: which shape of tensor.cu, and how it is launched."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from halfbyte.formats.spec import FORMATS
from halfbyte.formats.weight import QuantizedWeight
from halfbyte.kernels.common.device import DeviceFacts, facts_of
from halfbyte.kernels.common.driver import Arguments, Launch, kernels, prepared
from halfbyte.kernels.common.nvrtc import Variant
from halfbyte.kernels.linear.codebook import unit_and_codebook
from halfbyte.kernels.linear.operands import Addresses, Operands, operands_of
from halfbyte.kernels.linear.ready import Product, run

DTYPES = (torch.float16, torch.bfloat16)
SCALES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2, torch.uint8: 3}  # SCALE in tensor.cu, by scale's dtype
TABLE_BYTES = 256 * 32 * 4 + 1024  # of shared memory: byte to weights, and the code of nested scales
RESERVED_BYTES = 1024  # of shared memory, which the system takes from each CTA
AHEAD = 4  # spans of W on their way to a warp
MOST_WARPS = {1: 16, 2: 16, 4: 12, 8: 8}  # on a SM, by columns: beyond them registers do not hold the sums
MOST_SPLITS = 8
# Rows of x that a plan is for where the sums of a row must not depend on how many there are.
INVARIANT_ROWS = 16
LAYOUT = ("5Q", "4QI", "4If64s")  # Arguments in tensor.cu: x, bias, out, partial and m change


@dataclass(frozen=True)
class TensorPlan:
    """The constants of tensor.cu, and `splits`. columns: groups of eight rows of x. row_warps, k_warps: how a CTA's
    warps share a tile. splits: CTAs that share K. resident: CTAs a SM. span: weights of a row at a time. step: the
    MMA's k."""

    columns: int
    row_warps: int
    k_warps: int
    splits: int
    resident: int
    span: int
    step: int = 16

    @property
    def rows(self) -> int:
        """Rows of W in a tile."""
        return 16 * self.row_warps

    def tiles(self, m: int) -> int:
        """Tiles of x [m, K]."""
        return -(-m // (8 * self.columns))

    @property
    def warps(self) -> int:
        return self.row_warps * self.k_warps

    @property
    def sum_bytes(self) -> int:
        """Dynamic shared memory, where the warps' sums meet: for each column 16 rows, padded to 20 floats."""
        return self.warps * 8 * self.columns * 80

    @property
    def shared_bytes(self) -> int:
        return TABLE_BYTES + self.sum_bytes


def is_valid(plan: TensorPlan, n: int, k: int, block_size: int, dtype: torch.dtype, facts: DeviceFacts) -> bool:
    """True if tensor.cu computes the right thing under `plan`, and fits: planner, tuner and tests go by this."""
    return (
        facts.ptx >= 75
        and dtype in DTYPES
        # sm_75 has no bf16 and only half of the step
        and (facts.ptx >= 80 or (plan.step == 8 and dtype == torch.float16))
        and plan.step in (8, 16)
        and plan.span in (32, 64)
        and k % plan.span == 0
        and block_size % plan.span == 0
        and 0 < n < 1 << 31
        and 0 < k < 1 << 26  # a tile of x is indexed with 32 bits
        and n * (k // plan.span) < 1 << 32  # and so are W's spans
        and plan.columns in MOST_WARPS
        and min(plan.row_warps, plan.k_warps, plan.resident) >= 1
        and plan.warps * plan.resident <= MOST_WARPS[plan.columns]
        and 1 <= plan.splits <= MOST_SPLITS
        and plan.splits * plan.k_warps <= k // plan.span  # nobody without work
        and plan.resident * (plan.shared_bytes + RESERVED_BYTES) <= facts.shared_memory + RESERVED_BYTES
    )


def tensor_plan(m: int, n: int, k: int, block_size: int, dtype: torch.dtype, facts: DeviceFacts) -> TensorPlan | None:
    """The plan for x [m, k] of `dtype` and W [n, k], or None where this kernel is not for them.

    As few tiles of x as there can be, as many warps on a SM as fit, and splits only where there are fewer tiles of 16
    rows than SMs. Then the least time of the busiest SM, which is reckoned in cycles and was not measured: of a warp's
    span, what its loads take of the L1 pipe and what x takes of the L2's bandwidth, but never less than a lone warp
    needs; of a turn, what filling the pipeline and adding up take; of a second launch, that.
    """
    if m < 1:
        return None
    span = 64 if k % 64 == 0 and block_size % 64 == 0 else 32
    step = 8 if facts.ptx == 75 else 16

    def cost(plan: TensorPlan) -> float:
        ctas = -(-n // plan.rows) * -(-m // (8 * plan.columns)) * plan.splits
        tiles = -(-ctas // facts.sms)
        turns = -(-tiles // plan.resident)
        spans = -(-(k // plan.span) // (plan.k_warps * plan.splits))
        busy = tiles * plan.warps * (50 + 16 * plan.columns + 3 * min(m, 8 * plan.columns) / plan.row_warps)
        return spans * max(busy, 400 * turns) + 800 * turns + (6000 if plan.splits > 1 else 0)

    enough = next((columns for columns in MOST_WARPS if 8 * columns >= m), max(MOST_WARPS))
    for columns in sorted((columns for columns in MOST_WARPS if columns <= enough), reverse=True):
        most_splits = MOST_SPLITS if -(-n // 16) * -(-m // (8 * columns)) < facts.sms else 1
        most = MOST_WARPS[columns]
        for warps, resident in ((most // 2, 2), (most, 1)):
            plans = (
                TensorPlan(columns, warps // k_warps, k_warps, splits, resident, span, step)
                for k_warps in range(1, warps + 1)
                if warps % k_warps == 0
                for splits in range(1, most_splits + 1)
            )
            valid = (plan for plan in plans if is_valid(plan, n, k, block_size, dtype, facts))
            if (best := min(valid, key=cost, default=None)) is not None:
                return best
    return None


def find_plan(m: int, operands: Operands, facts: DeviceFacts, batch_invariant: bool) -> TensorPlan | None:
    """The plan for x [m, K], or None where this kernel is not for such operands.

    It is for every format, x of 16 bits (on sm_75 fp16), K % 32 == 0, any N and any rows of x; what is many rows, and
    better served by a dense product, is the caller's to say. With batch_invariant the plan is the same for all of them:
    a row's sums are then always made in the same order.
    """
    o = operands
    if o.dtype not in DTYPES or not o.has_usual_nesting or o.align_packed < 8 or o.align_x < 16:
        return None
    return tensor_plan(INVARIANT_ROWS if batch_invariant and m else m, o.n, o.k, o.block_size, o.dtype, facts)


def plan_for(x: Tensor, q: QuantizedWeight, bias: Tensor | None, batch_invariant: bool) -> TensorPlan | None:
    """The plan for these very tensors."""
    return find_plan(len(x), operands_of(x, q, bias), facts_of(x.get_device()), batch_invariant)


def linear(x: Tensor, q: QuantizedWeight, bias: Tensor | None, out: Tensor, plan: TensorPlan) -> None:
    """out = x @ W.T + bias.

    x [M, K], aligned to 16 bytes, and out [M, N], contiguous, on the current device; the plan is from `plan_for`.
    """
    run(product, x, q, bias, out, plan)


def product(device: torch.device, m: int, operands: Operands, weight: Addresses, plan: TensorPlan) -> Product:
    """The product with a weight on the current device, of as many rows as there are tiles of x for m."""
    o, index = operands, device.index
    columns = plan.tiles(m)
    compiled = variant(o, plan, facts_of(index))
    key = ("tensor", index, columns, o.n, plan, compiled)
    launch, combine = prepared(key, lambda: _launches(index, columns, o.n, plan, compiled))
    shift = (o.block_size // plan.span).bit_length() - 1
    constants = unit_and_codebook(o.format, o.dtype)
    arguments = Arguments(LAYOUT, weight, (o.n, o.k, plan.splits, shift, *constants))

    def multiply(stream: int, x: int, bias: int, out: int, m: int) -> None:
        if plan.splits == 1:
            arguments.set(x, bias, out, 0, m)
            launch(stream, arguments.parameters)
            return
        partial = torch.empty(plan.splits * m * o.n, dtype=torch.float32, device=device)
        arguments.set(x, bias, out, partial.data_ptr(), m)
        launch(stream, arguments.parameters)
        combine(stream, arguments.parameters)

    return multiply


def _launches(index: int, columns: int, n: int, plan: TensorPlan, compiled: Variant) -> tuple[Launch, Launch]:
    """The product, and what adds up its partial sums, of as many rows as the tiles of x may hold."""
    product, combine = kernels(index, compiled, (("product", plan.sum_bytes), ("combine", 0)))
    sums = -(-columns * 8 * plan.columns * n // 256)
    return (
        Launch(product, grid(n, columns, plan, facts_of(index).sms), 32 * plan.warps, plan.sum_bytes),
        Launch(combine, (sums, 1), 256),
    )


def variant(operands: Operands, plan: TensorPlan, facts: DeviceFacts) -> Variant:
    """What is compiled for such operands."""
    constants = macros(operands.format, operands.scale, operands.dtype, plan)
    return Variant.of(source(), facts.capability, constants)


def macros(format: str, scale_dtype: torch.dtype, dtype: torch.dtype, plan: TensorPlan) -> dict[str, int]:
    """What tensor.cu is compiled with."""
    return {
        "COLUMNS": plan.columns, "ROW_WARPS": plan.row_warps, "K_WARPS": plan.k_warps, "AHEAD": AHEAD,
        "RESIDENT": plan.resident, "SPAN": plan.span, "STEP": plan.step, "SCALE": SCALES[scale_dtype],
        "LOW_FIRST": int(FORMATS[format].low_first), "FP16": int(dtype == torch.float16),
    }  # fmt: skip


@cache
def source() -> str:
    return Path(__file__).with_suffix(".cu").read_text(encoding="utf-8")


def grid(n: int, columns: int, plan: TensorPlan, sms: int) -> tuple[int, int]:
    """CTAs for `columns` tiles of x: along x these times the splits, along y those that stride over the tiles of W, as
    many as the SMs hold at once."""
    across, tiles = columns * plan.splits, -(-n // plan.rows)
    return across, min(tiles, max(1, sms * plan.resident // across))
