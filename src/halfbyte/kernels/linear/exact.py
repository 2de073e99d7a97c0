"""The product on CUDA cores, for all that kernels on tensor cores do not take: which shape of exact.cu, and its launch.

Every x and every 4-bit W of two dimensions has a plan. Weights are the fp32 numbers that `dequantize` rounds, sums are
fp32, and the plan has no say in their order: a row of x gives the same bits under every plan, whatever its neighbours.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from halfbyte.formats.spec import FORMATS, codebook_tensor
from halfbyte.formats.weight import QuantizedWeight
from halfbyte.kernels.common.device import DeviceFacts, facts_of
from halfbyte.kernels.common.driver import Arguments, Launch, kernels, prepared
from halfbyte.kernels.common.nvrtc import Variant
from halfbyte.kernels.linear.operands import Addresses, Operands, operands_of
from halfbyte.kernels.linear.ready import Product, run

WARPS = 4  # a CTA
WARPS_WANTED = 8  # a multiprocessor, before a warp takes more than one row of W
PIECE = 16  # weights a lane takes at a time
MOST_TILES = 65535  # along a grid's y; with more, a warp makes several
TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2, torch.uint8: 3}  # as exact.cu numbers them
LAYOUT = ("6Q", "4Q", "2Q2I")  # its Arguments: x, bias, out and m change


@dataclass(frozen=True)
class ExactPlan:
    """The constants of exact.cu. rows: of x that a warp multiplies at once. columns: of y, which are rows of W, a warp.
    whole: lanes load 16 weights and 8 numbers of x at once, which asks for alignment; else one by one."""

    rows: int
    columns: int
    whole: bool

    def tiles(self, m: int) -> int:
        """Tiles of x [m, K] that launches are made for: they are the same for any m."""
        return 0


def is_valid(plan: ExactPlan, k: int, aligned: bool) -> bool:
    """True if exact.cu computes the right thing under `plan`: planner, tuner and tests go by this."""
    return plan.rows in (1, 2, 4, 8) and plan.columns in (1, 2, 4) and (not plan.whole or (aligned and k % PIECE == 0))


def exact_plan(m: int, n: int, k: int, aligned: bool, facts: DeviceFacts) -> ExactPlan:
    """The plan for x [m, k] and W [n, k]. aligned: W's bytes begin at a multiple of 8, and x at one of 16.

    A warp takes as many rows of W as leave every multiprocessor enough warps: each saves loads of x.
    """
    whole = aligned and k % PIECE == 0
    rows = 1 << min(max(m - 1, 0).bit_length(), 3)
    tiles = max(1, -(-m // rows))
    columns = 4 if whole else 2  # loads one by one take registers of their own
    while columns > 1 and -(-n // columns) * tiles < facts.sms * WARPS_WANTED:
        columns //= 2
    return ExactPlan(rows, columns, whole)


def find_plan(m: int, operands: Operands, facts: DeviceFacts, batch_invariant: bool = False) -> ExactPlan:
    """The plan for x [m, K]; there is one for all operands, and batch_invariant makes no difference to any."""
    aligned = operands.align_packed >= 8 and operands.align_x >= 16
    return exact_plan(m, operands.n, operands.k, aligned, facts)


def plan_for(x: Tensor, q: QuantizedWeight, bias: Tensor | None) -> ExactPlan:
    """The plan for these very tensors."""
    return find_plan(len(x), operands_of(x, q, bias), facts_of(x.get_device()))


def linear(x: Tensor, q: QuantizedWeight, bias: Tensor | None, out: Tensor, plan: ExactPlan) -> None:
    """out = x @ W.T + bias, each sum rounded once.

    x [M, K], bias [N] or None and out [M, N] of one dtype, contiguous, on the current device; the plan is from
    `plan_for`, for these very tensors.
    """
    (m, k), n = x.shape, out.shape[1]
    if m == 0 or n == 0:
        return
    if k == 0:
        out.copy_(out.new_zeros(n) if bias is None else bias)
        return
    run(product, x, q, bias, out, plan)


def product(device: torch.device, m: int, operands: Operands, weight: Addresses, plan: ExactPlan) -> Product:
    """The product with a weight on the current device, of any number of rows."""
    o, index = operands, device.index
    compiled = variant(o, plan, facts_of(index))
    launch = prepared(("exact", index, compiled), lambda: _launch(index, compiled))
    codebook = codebook_tensor(FORMATS[o.format], device)
    shifts = o.block_size.bit_length() - 1, max(o.nested, 1).bit_length() - 1
    arguments = Arguments(LAYOUT, (*weight, codebook.data_ptr()), (o.n, o.k, *shifts))
    across = -(-o.n // (WARPS * plan.columns))

    def multiply(stream: int, x: int, bias: int, out: int, m: int) -> None:
        arguments.set(x, bias, out, m)
        launch.set_grid(across, min(-(-m // plan.rows), MOST_TILES))
        launch(stream, arguments.parameters)

    return multiply


def _launch(index: int, compiled: Variant) -> Launch:
    (function,) = kernels(index, compiled, (("exact", 0),))
    return Launch(function, (1, 1), 32 * WARPS)


def variant(operands: Operands, plan: ExactPlan, facts: DeviceFacts) -> Variant:
    """What is compiled for such operands."""
    constants = macros(operands.dtype, operands.scale, operands.low_first, plan)
    return Variant.of(source(), facts.capability, constants)


def macros(dtype: torch.dtype, scale: torch.dtype, low_first: bool, plan: ExactPlan) -> dict[str, int]:
    """What exact.cu is compiled with, for dtypes of x and of q.scale. low_first: the first weight of a byte is in its
    low half, as int4 has it."""
    return {
        "X": TYPES[dtype], "SCALE": TYPES[scale], "LOW_FIRST": int(low_first), "WHOLE": int(plan.whole),
        "ROWS": plan.rows, "COLUMNS": plan.columns, "WARPS": WARPS,
    }  # fmt: skip


@cache
def source() -> str:
    return Path(__file__).with_suffix(".cu").read_text(encoding="utf-8")
