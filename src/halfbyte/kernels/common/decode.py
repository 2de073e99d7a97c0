"""4-bit weights into numbers on the CPU: what every kernel that reads packed bytes there is built on.

Within a scale block there are but sixteen values. They are multiplied and rounded once, kept in registers, and looked
up: no arithmetic is left for the weights themselves. With AVX-512 a permutation looks up 32 numbers of 16 bits, or 16
of 32, by the low bits of indices. Other CPUs have tables of bytes, and the byte shuffle of every x86-64 (pshufb) and
Arm (tbl), sixteen at a time. Look-ups are the reason for writing LLVM by hand; LLVM never finds them on its own.
"""

# llvmlite has no types for what it builds.
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

import llvmlite.ir as ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from halfbyte.kernels.common.floats import ROUND
from halfbyte.kernels.common.llvm import (
    I8,
    I32,
    I64,
    call,
    concatenate,
    constant,
    has_feature,
    interleave,
    join,
    load,
    shift_right,
    shuffle,
    splat,
    store,
)

# A step of `decode`: so many packed bytes become twice as many weights. The smallest block is one step.
BYTES, WEIGHTS = 16, 32


@intrinsic
def decode(typing_context, packed, byte, steps, scale, codebook, low_first, out, weight):
    """packed[byte:] -> out[weight:], `steps` times 16 bytes and 32 weights of one scale."""
    signature = types.void(packed, types.intp, types.intp, types.float32, codebook, types.boolean, out, types.intp)

    def lower(context, builder, signature, arguments):
        packed, byte, steps, scale, codebook, low_first, out, weight = arguments

        def pointer(position, array):
            return context.make_array(signature.args[position])(context, builder, array).data

        table = load(builder, pointer(4, codebook), I32, 16)
        scales = splat(builder, builder.bitcast(scale, I32), 16)
        floats = ir.VectorType(ir.FloatType(), 16)
        product = builder.fmul(builder.bitcast(table, floats), builder.bitcast(scales, floats))
        words = ROUND[signature.args[6].dtype](builder, product)
        look_up = (_permuted if has_feature(context, "avx512bw") else _shuffled)(context, builder, words, low_first)
        source = builder.gep(pointer(0, packed), [byte])
        target = builder.gep(pointer(6, out), [weight])
        with cgutils.for_range(builder, steps) as loop:
            octets = load(builder, builder.gep(source, [builder.mul(loop.index, I64(BYTES))]), I8, BYTES)
            here, found = builder.mul(loop.index, I64(WEIGHTS)), look_up(octets)
            for i, values in enumerate(found):
                at = builder.add(here, I64(i * WEIGHTS // len(found)))
                store(builder, values, builder.gep(target, [at]), words.type.element)
        return context.get_dummy_value()

    return signature, lower


def _permuted(context, builder, words, low_first):
    """What looks the 32 weights of 16 bytes up in a table of 16 words: as vectors, in their order."""
    wide = words.type.element.width == 32
    first, second = (builder.select(low_first, I32(a), I32(b)) for a, b in ((0, 4), (4, 0)))
    # Of an index a permutation sees four bits, or five, where the table is there twice: what is above does not matter.
    if wide:
        shifts = [splat(builder, amount, 16) for amount in (first, second)]
    else:
        words = concatenate(builder, words, words)
        shifts = [splat(builder, amount, 16) for amount in (first, builder.sub(I32(16), second))]
    name, kind = f"llvm.x86.avx512.permvar.{'si' if wide else 'hi'}.512", words.type

    def look_up(octets):
        lanes = builder.zext(octets, ir.VectorType(I32, 16))
        even = builder.lshr(lanes, shifts[0])
        if wide:
            odd = builder.lshr(lanes, shifts[1])
            return interleave(builder, *(call(builder, name, kind, words, index) for index in (even, odd)))
        both = builder.or_(even, builder.shl(lanes, shifts[1]))  # a lane's two indices, neighbours
        return [call(builder, name, kind, words, builder.bitcast(both, kind))]

    return look_up


def _shuffled(context, builder, words, low_first):
    """The same by bytes of the table."""
    find = shuffle(context)
    tables = [
        builder.trunc(shift_right(builder, words, 8 * i), ir.VectorType(I8, 16))
        for i in range(words.type.element.width // 8)
    ]

    def look_up(octets):
        high = shift_right(builder, octets, 4)
        low = builder.and_(octets, constant(octets.type, 15))
        nibbles = interleave(builder, builder.select(low_first, low, high), builder.select(low_first, high, low))
        return [
            values for half in nibbles for values in join(builder, [find(builder, table, half) for table in tables])
        ]

    return look_up
