"""Products and sums for Triton kernels that must come out as bitsandbytes' do, and powers of two from a byte.

Its CUDA library is built with flush-to-zero arithmetic, and nothing here may be fused into a multiply-add. PTX says so
outright; elsewhere (AMD, Triton's interpreter) kernels are launched with `enable_fp_fusion=False` and plain operators.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def multiply(a, b, FLUSH: tl.constexpr):
    """a * b; with FLUSH, subnormal operands and results count as zero (NVIDIA only)."""
    if FLUSH:
        return tl.inline_asm_elementwise(
            "mul.ftz.f32 $0, $1, $2;", "=f,f,f", [a, b], dtype=tl.float32, is_pure=True, pack=1
        )
    return a * b


@triton.jit
def add(a, b, PTX: tl.constexpr):
    """a + b, rounded on its own even where `a` is a product. PTX: the target is NVIDIA's."""
    if PTX:
        return tl.inline_asm_elementwise(
            "add.rn.f32 $0, $1, $2;", "=f,f,f", [a, b], dtype=tl.float32, is_pure=True, pack=1
        )
    return a + b


@triton.jit
def power_of_two(exponent):
    """2 ** (e - 127) in fp32 of an int32 e from 0 to 254, and NaN of 255."""
    bits = tl.maximum(exponent << 23, 0x00400000)  # 2 ** -127 is subnormal
    return tl.where(exponent == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)
