"""Norms and gates of a few rows, in one launch each. Both overlap with the kernel ahead of them.

Bytes: what is read and written, once. They are a few kilobytes for a row, so that a launch is nearly all of the time.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from halfbyte.kernels.common.device import DeviceProperties
from halfbyte.kernels.common.launch import launch
from halfbyte.kernels.common.overlap import SINCE, let_the_next_begin, wait_for_the_one_ahead

MOST_COLUMNS = 1 << 15  # of a row that one program norms
BLOCK = 1024  # numbers that one program gates


@triton.jit
def rms_norm_kernel(
    x, weight, residual, out, columns,
    EPSILON: tl.constexpr, OFFSET: tl.constexpr, RESIDUAL: tl.constexpr, D: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Program i: row i of x [rows, columns]."""
    column = tl.arange(0, D)
    inside = column < columns
    at = tl.program_id(0).to(tl.int64) * columns + column
    if OVERLAPS:
        wait_for_the_one_ahead()
        let_the_next_begin()
    values = tl.load(x + at, inside, 0).to(tl.float32)
    factor = tl.rsqrt(tl.sum(values * values, axis=0) / columns + EPSILON)
    result = values * factor * (OFFSET + tl.load(weight + column, inside, 0).to(tl.float32))
    if RESIDUAL:
        result += tl.load(residual + at, inside, 0).to(tl.float32)
    tl.store(out + at, result, inside)


@triton.jit
def gated_kernel(
    gate, up, out, numbers, columns, gate_row, up_row,
    SILU: tl.constexpr, BLOCK: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Program i: block i of the results. gelu's approximation by tanh is x * sigmoid(2 u), where
    u = sqrt(2 / pi) (x + 0.044715 x³)."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < numbers
    row = at // columns
    column = at % columns
    if OVERLAPS:
        wait_for_the_one_ahead()
        let_the_next_begin()
    x = tl.load(gate + row * gate_row + column, inside, 0).to(tl.float32)
    twice = x
    if not SILU:
        twice = 1.5957691216057308 * (x + 0.044715 * x * x * x)
    multiplied = tl.load(up + row * up_row + column, inside, 0).to(tl.float32)
    tl.store(out + at, x * tl.sigmoid(twice) * multiplied, inside)


def supports(x: Tensor) -> bool:
    """Whether both are for x [..., columns], contiguous: a GPU's, of few enough columns."""
    return 0 < x.shape[-1] <= MOST_COLUMNS and x.numel() > 0


def rms_norm(x: Tensor, weight: Tensor, epsilon: float, offset: float, residual: Tensor | None = None) -> Tensor:
    """As reference.py says, of contiguous tensors on the current device."""
    out, columns = x.new_empty(x.shape), x.shape[-1]
    d = triton.next_power_of_2(columns)

    def configure(properties: DeviceProperties) -> tuple[int, dict[str, Any]]:
        constants = {"EPSILON": epsilon, "OFFSET": offset, "RESIDUAL": residual is not None, "D": d}
        warps = min(16, max(4, d // 512))
        return x.numel() // columns, constants | {"OVERLAPS": properties.ptx >= SINCE, "num_warps": warps}

    arguments = (x, weight, x if residual is None else residual, out, columns)
    key = (x.dtype, weight.dtype, x.numel(), epsilon, offset, residual is None)
    launch(rms_norm_kernel, x.get_device(), arguments, key, configure)
    return out


def gated(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """As reference.py says, of tensors on the current device that are contiguous, or columns of such."""
    out, columns = up.new_empty(up.shape), up.shape[-1]
    rows = gate.reshape(-1, columns), up.reshape(-1, columns)

    def configure(properties: DeviceProperties) -> tuple[int, dict[str, Any]]:
        constants = {"SILU": activation == "silu", "BLOCK": BLOCK, "OVERLAPS": properties.ptx >= SINCE}
        return -(-up.numel() // BLOCK), constants | {"num_warps": 4}

    arguments = (*rows, out, up.numel(), columns, rows[0].stride(0), rows[1].stride(0))
    launch(gated_kernel, up.get_device(), arguments, (up.dtype, activation), configure)
    return out
