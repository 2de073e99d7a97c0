"""Which way a product is computed where no CUDA kernel is for it: a pure function of sizes and device.

On a CPU the fused kernel decodes every weight again for each four rows of x, and multiplies in fp32. Making the dense
weight costs as much for one row of x as for a thousand, and then torch may have faster instructions for its dtype.
Measured on 384×384 to 14336×4096 (docs/kernels/linear.md).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

# The most rows of x that the fused kernel is the faster way for. With AVX-512 it outruns torch's fp16 and fp32 products
# at any number of rows that was tried (1024), and loses to AVX512-BF16 in the end.
MOST_FUSED_ROWS = {
    "AVX512": {torch.bfloat16: 56, torch.float16: 1024, torch.float32: 1024},
    "AVX2": {torch.bfloat16: 32, torch.float16: 32, torch.float32: 32},
}
OTHERWISE = 8
# A bf16 weight of so many numbers is still in the cache when torch multiplies, and pays from fewer rows on.
CACHED, MOST_FUSED_ROWS_CACHED = 1 << 22, 16


@dataclass(frozen=True)
class LinearPlan:
    """kernel: "fused" reads the 4-bit bytes; "dense" makes the dense weight first and leaves the product to torch;
    "tiles" does that for a fixed number of rows at a time, so that no row knows how many there are."""

    kernel: Literal["fused", "dense", "tiles"]


def plan(
    m: int, n: int, k: int, dtype: torch.dtype, device_type: str, batch_invariant: bool, cpu_capability: str = ""
) -> LinearPlan:
    """The plan for x [m, k] of `dtype` and W [n, k] on a kind of device.

    cpu_capability: as torch names what its CPU code uses.
    """
    if device_type != "cpu":
        return LinearPlan("tiles" if batch_invariant else "dense")
    most = MOST_FUSED_ROWS.get(cpu_capability, {}).get(dtype, OTHERWISE)
    if dtype == torch.bfloat16 and n * k <= CACHED:
        most = min(most, MOST_FUSED_ROWS_CACHED)
    # Rows that are no whole number of steps are decoded a weight at a time.
    return LinearPlan("fused" if batch_invariant or (k % 32 == 0 and m <= most) else "dense")
