"""The product on CUDA cores, for all that kernels on tensor cores do not take: which shape of exact.cu, and its launch.

Every x and every 4-bit W of two dimensions has a plan. Weights are the fp32 numbers that `dequantize` rounds, sums are
fp32, and the plan has no say in their order: a row of x gives the same bits under every plan, whatever its neighbours.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from halfbyte.formats import blockwise, grouped
from halfbyte.formats.weight import QuantizedWeight
from halfbyte.kernels.common.device import DeviceFacts, facts_of
from halfbyte.kernels.common.driver import Launch, load, prepared
from halfbyte.kernels.common.nvrtc import cubin

WARPS = 4  # a CTA
WARPS_WANTED = 8  # a multiprocessor, before a warp takes more than one row of W
PIECE = 16  # weights a lane takes at a time
MOST_TILES = 65535  # along a grid's y; with more, a warp makes several
TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2, torch.uint8: 3}  # as exact.cu numbers them
LAYOUT = "12Q2I"  # its Arguments


@dataclass(frozen=True)
class ExactPlan:
    """The constants of exact.cu. rows: of x that a warp multiplies at once. columns: of y, which are rows of W, a warp.
    whole: lanes load 16 weights and 8 numbers of x at once, which asks for alignment; else one by one."""

    rows: int
    columns: int
    whole: bool


def is_valid(plan: ExactPlan, k: int, aligned: bool) -> bool:
    """True if exact.cu computes the right thing under `plan`: planner, tuner and tests go by this."""
    return plan.rows in (1, 2, 4, 8) and plan.columns in (1, 2, 4) and (not plan.whole or (aligned and k % PIECE == 0))


def exact_plan(m: int, n: int, k: int, aligned: bool, facts: DeviceFacts) -> ExactPlan:
    """The plan for x [m, k] and W [n, k]. aligned: W's bytes begin at a multiple of 8, and x at one of 16.

    A warp takes as many rows of W as leave every multiprocessor enough warps: each saves loads of x.
    """
    whole = aligned and k % PIECE == 0
    rows = 1 << min(max(m - 1, 0).bit_length(), 3)
    tiles = -(-m // rows)
    columns = 4 if whole else 2  # loads one by one take registers of their own
    while columns > 1 and -(-n // columns) * tiles < facts.sms * WARPS_WANTED:
        columns //= 2
    return ExactPlan(rows, columns, whole)


@lru_cache(1024)
def _plan(m: int, n: int, k: int, aligned: bool, index: int) -> ExactPlan:
    return exact_plan(m, n, k, aligned, facts_of(index))


def plan_for(x: Tensor, q: QuantizedWeight, bias: Tensor | None) -> ExactPlan:
    """The plan with which `linear` computes x @ W.T + bias; there is one for every x [M, K] and W [N, K]."""
    aligned = not (q.packed.data_ptr() % 8 or x.data_ptr() % 16)
    return _plan(len(x), *q.shape, aligned, x.get_device())


def linear(x: Tensor, q: QuantizedWeight, bias: Tensor | None, out: Tensor, plan: ExactPlan) -> None:
    """out = x @ W.T + bias, each sum rounded once.

    x [M, K], bias [N] or None and out [M, N] of one dtype, contiguous, on the current device; the plan is from
    `plan_for`, for these very tensors.
    """
    (m, k), n, index = x.shape, out.shape[1], x.get_device()
    if m == 0 or n == 0:
        return
    if k == 0:
        out.copy_(out.new_zeros(n) if bias is None else bias)
        return
    low_first = q.format == grouped.NAME
    key = ("exact", index, x.dtype, q.scale.dtype, low_first, plan)
    launch = prepared(key, lambda: _launch(index, x.dtype, q.scale.dtype, low_first, plan))
    launch.set_grid(-(-n // (WARPS * plan.columns)), min(-(-m // plan.rows), MOST_TILES))
    code, absmax, offset, nested_size = q.nested or (q.scale, q.scale, q.scale, 1)  # only read where nested
    codebook = grouped.codebook_tensor(x.device) if low_first else blockwise.codebook_tensor(q.format, x.device)
    launch(
        torch._C._cuda_getCurrentRawStream(index),
        q.packed.data_ptr(), q.scale.data_ptr(), code.data_ptr(), absmax.data_ptr(), offset.data_ptr(),
        codebook.data_ptr(), x.data_ptr(), 0 if bias is None else bias.data_ptr(), out.data_ptr(),
        m, n, k, q.block_size.bit_length() - 1, nested_size.bit_length() - 1,
    )  # fmt: skip


def _launch(index: int, dtype: torch.dtype, scale: torch.dtype, low_first: bool, plan: ExactPlan) -> Launch:
    code = cubin(source(), facts_of(index).capability, macros(dtype, scale, low_first, plan))
    return Launch(load(code, {"exact": 0})[0], LAYOUT, (1, 1), 32 * WARPS)


def macros(dtype: torch.dtype, scale: torch.dtype, low_first: bool, plan: ExactPlan) -> dict[str, int]:
    """What exact.cu is compiled with, for dtypes of x and of q.scale. low_first: the first weight of a byte is in its
    low half, as int4 has it."""
    return {
        "X": TYPES[dtype], "SCALE": TYPES[scale], "LOW_FIRST": int(low_first), "WHOLE": int(plan.whole),
        "ROWS": plan.rows, "COLUMNS": plan.columns, "WARPS": WARPS,
    }  # fmt: skip


def source() -> str:
    return Path(__file__).with_suffix(".cu").read_text(encoding="utf-8")
