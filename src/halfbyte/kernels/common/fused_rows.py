"""From how many rows of x on a CPU multiplies with a dense weight, and in which dtype: measured once, for `linear` and
for experts.

The fused kernel decodes every weight again for each four rows of x, and multiplies in fp32 (products.py); or it decodes
it once for all, and multiplies in fp32 (float_strips.py) or bf16 numbers in pairs (strip_products.py). Making the dense
weight costs as much for one row of x as for a thousand, and then torch may have faster instructions for its dtype.
Measured on 384×384 to 14336×4096 (docs/kernels/linear.md).
"""

from __future__ import annotations

from functools import cache
from importlib import import_module

import torch

# The most rows of x that the fused kernel is the faster way for. On AMD's Zen 5 it outruns torch's fp16 and fp32
# products at any number of rows that was tried (1024), and loses to AVX512-BF16 in the end. CPUs with AMX are Intel's,
# on which torch's fp16 and fp32 products are faster, too. With AVX2, or AVX-512 without BF16, it outruns all of torch's
# at any number on a Zen 4 whose libraries were told to use no more; torch's may be better on Intel's, hence limits.
MOST_FUSED_ROWS = {
    "AMX": {torch.bfloat16: 16, torch.float16: 36, torch.float32: 48},
    "AVX512-BF16": {torch.bfloat16: 56, torch.float16: 1024, torch.float32: 1024},
    "AVX512": {torch.bfloat16: 1024, torch.float16: 1024, torch.float32: 1024},
    "AVX2": {torch.bfloat16: 512, torch.float16: 512, torch.float32: 512},
}
OTHERWISE = 8
# A bf16 weight of so many numbers is still in the cache when torch multiplies, and pays from fewer rows on.
CACHED, MOST_FUSED_ROWS_CACHED = 1 << 22, 16
# The same of rows that are multiplied in pairs. Measured on AMD's Zen 4.
MOST_PAIRED_ROWS, MOST_PAIRED_ROWS_CACHED = {"AVX512-BF16": 192}, 96

# What torch multiplies with plain loops, or has no instructions for, where it has a library for fp32.
IN_FP32 = {
    "AVX512-BF16": {torch.float16},
    "AVX512": {torch.float16, torch.bfloat16},
    "AVX2": {torch.float16, torch.bfloat16},
}


def dense_dtype(dtype: torch.dtype, cpu_capability: str) -> torch.dtype:
    """The dtype in which a dense weight is multiplied with x of `dtype`; results are rounded once, to that of x."""
    return torch.float32 if dtype in IN_FP32.get(cpu_capability, ()) else dtype


def most_fused_rows(n: int, k: int, dtype: torch.dtype, cpu_capability: str) -> int:
    """The most rows of `dtype` for which the fused kernel is to multiply with W [n, k]; 0 where it is slow for any.

    cpu_capability: as `cpu_capability` of device.py names it.
    """
    if k % 32:  # rows that are no whole number of steps would be decoded a weight at a time
        return 0
    most, cached = MOST_FUSED_ROWS.get(cpu_capability, {}).get(dtype, OTHERWISE), MOST_FUSED_ROWS_CACHED
    if dtype == torch.bfloat16 and cpu_capability in MOST_PAIRED_ROWS and _come_in_pairs(k):
        most, cached = MOST_PAIRED_ROWS[cpu_capability], MOST_PAIRED_ROWS_CACHED
    in_bf16 = dense_dtype(dtype, cpu_capability) == torch.bfloat16
    return min(most, cached) if in_bf16 and n * k <= CACHED else most


@cache
def _come_in_pairs(k: int) -> bool:
    """Whether there is a kernel for pairs of so many numbers. Asked on CPUs alone, where numba is there."""
    pairs = import_module("halfbyte.kernels.common.paired_products")
    return bool(pairs.LLVM_HAS_IT and k % pairs.WEIGHTS == 0)
