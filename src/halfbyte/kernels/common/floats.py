"""fp16, bf16 and fp32 in CPU kernels, which know them as integers: numba has no type for two of the three.

The integer type says which one is meant: uint16 is bf16, int16 fp16, uint32 fp32. Conversions are integer arithmetic,
of one value or of a vector of them, since not every CPU has the instructions.
Source: Fabian Giesen's public-domain float_to_half_fast3_rtne and half_to_float_fast5.
"""

# numba finds out the types of kernels by itself, and llvmlite has none for what it builds.
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

import torch
from numba.core import types
from numba.extending import intrinsic

from halfbyte.kernels.common.llvm import F32, I16, I32, constant, of, shift_right

BITS = {torch.bfloat16: torch.uint16, torch.float16: torch.int16, torch.float32: torch.uint32}
# The same as empty arrays, by which addresses.py tells what lies there.
LIKE = {dtype: torch.empty(0, dtype=bits, device="cpu").numpy() for dtype, bits in BITS.items()}


@intrinsic
def from_bits(typing_context, bits):
    """The fp32 value of an fp16, bf16 or fp32, which may be a number already."""
    widen = WIDEN[bits]
    return types.float32(bits), lambda context, builder, signature, arguments: widen(builder, arguments[0])


@intrinsic
def to_bits(typing_context, value, array):
    """fp32 `value` as an element of `array`, rounded to nearest even."""
    narrow = ROUND[array.dtype]
    return array.dtype(value, array), lambda context, builder, signature, arguments: narrow(builder, arguments[0])


def _from_bf16(builder, bits):
    wide = builder.zext(bits, of(I32, bits.type))
    return builder.bitcast(builder.shl(wide, constant(wide.type, 16)), of(F32, bits.type))


def _from_fp16(builder, bits):
    wide = builder.zext(bits, of(I32, bits.type))
    sign = builder.shl(builder.and_(wide, constant(wide.type, 0x8000)), constant(wide.type, 16))
    bits = builder.shl(builder.and_(wide, constant(wide.type, 0x7FFF)), constant(wide.type, 13))
    bias = constant(bits.type, 0x38000000)  # from exponent bias 15 to 127
    normal = builder.add(bits, bias)
    # A subnormal gets an exponent, and what that adds to it is taken away again: the subtraction normalizes.
    one_more = builder.bitcast(builder.add(normal, constant(bits.type, 0x00800000)), of(F32, bits.type))
    subnormal = builder.bitcast(builder.fsub(one_more, constant(one_more.type, 2.0**-14)), bits.type)
    is_special = builder.icmp_unsigned(">=", bits, constant(bits.type, 0x0F800000))
    is_subnormal = builder.icmp_unsigned("<", bits, constant(bits.type, 0x00800000))
    result = builder.select(is_special, builder.add(normal, bias), builder.select(is_subnormal, subnormal, normal))
    return builder.bitcast(builder.or_(result, sign), of(F32, bits.type))


def _from_fp32(builder, bits):
    return builder.bitcast(bits, of(F32, bits.type))


def _round_to_bf16(builder, x):
    bits = builder.bitcast(x, of(I32, x.type))
    odd = builder.and_(shift_right(builder, bits, 16), constant(bits.type, 1))
    rounded = shift_right(builder, builder.add(bits, builder.add(odd, constant(bits.type, 0x7FFF))), 16)
    rounded = builder.select(builder.fcmp_unordered("uno", x, x), constant(bits.type, 0x7FC0), rounded)
    return builder.trunc(rounded, of(I16, x.type))


def _round_to_fp16(builder, x):
    bits = builder.bitcast(x, of(I32, x.type))
    sign = builder.and_(shift_right(builder, bits, 16), constant(bits.type, 0x8000))
    bits = builder.and_(bits, constant(bits.type, 0x7FFFFFFF))

    odd = builder.and_(shift_right(builder, bits, 13), constant(bits.type, 1))
    # From exponent bias 127 to 15, and just under half of the last place that is kept.
    normal = builder.add(builder.add(bits, odd), constant(bits.type, 0xC8000FFF))
    normal = shift_right(builder, normal, 13)
    # Adding 0.5 puts the last place of an fp16 subnormal at the last place of an fp32: the addition rounds.
    subnormal = builder.fadd(builder.bitcast(bits, x.type), constant(x.type, 0.5))
    subnormal = builder.sub(builder.bitcast(subnormal, bits.type), constant(bits.type, 0x3F000000))

    def at_least(limit, yes, no):
        return builder.select(builder.icmp_unsigned(">=", bits, constant(bits.type, limit)), yes, no)

    rounded = at_least(0x38800000, normal, subnormal)  # 2**-14
    rounded = at_least(0x47800000, constant(bits.type, 0x7C00), rounded)  # 2**16
    rounded = at_least(0x7F800001, constant(bits.type, 0x7E00), rounded)  # NaN
    return builder.trunc(builder.or_(rounded, sign), of(I16, x.type))


def _round_to_fp32(builder, x):
    return builder.bitcast(x, of(I32, x.type))


WIDEN = {
    types.uint16: _from_bf16,
    types.int16: _from_fp16,
    types.uint32: _from_fp32,
    types.float32: lambda builder, number: number,
}
ROUND = {types.uint16: _round_to_bf16, types.int16: _round_to_fp16, types.uint32: _round_to_fp32}
