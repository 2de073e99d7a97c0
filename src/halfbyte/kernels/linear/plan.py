"""Which way a product is computed where no CUDA kernel is for it: a pure function of sizes and device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from halfbyte.kernels.common.fused_rows import most_fused_rows
from halfbyte.kernels.linear import triton_plan


@dataclass(frozen=True)
class LinearPlan:
    """kernel: "fused" reads the 4-bit bytes; "dense" makes the dense weight first, on a CPU a panel of rows at a
    time, and leaves the product to torch; "tiles" does that for a fixed number of rows of x at a time, so that no row
    knows how many there are."""

    kernel: Literal["fused", "dense", "tiles"]


def plan(
    m: int, n: int, k: int, dtype: torch.dtype, device_type: str, batch_invariant: bool, cpu_capability: str = ""
) -> LinearPlan:
    """The plan for x [m, k] of `dtype` and W [n, k] on a kind of device: "cpu", "hip" for AMD GPUs, or another word for
    all that have no fused kernel here.

    cpu_capability: as `cpu_capability` of common/device.py names it.
    """
    if device_type == "hip" and triton_plan.supports(n, k):
        return LinearPlan("fused" if batch_invariant or m <= triton_plan.MOST_ROWS else "dense")
    if device_type != "cpu":
        return LinearPlan("tiles" if batch_invariant else "dense")
    return LinearPlan("fused" if batch_invariant or m <= most_fused_rows(n, k, dtype, cpu_capability) else "dense")
