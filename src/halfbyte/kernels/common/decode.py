"""4-bit weights into numbers on the CPU: what every kernel that reads packed bytes there is built on.

Within a scale block there are but sixteen values. They are multiplied and rounded once, kept in registers as tables of
bytes, and looked up sixteen at a time by the byte shuffle that every x86-64 (pshufb) and Arm (tbl) has: no arithmetic
is left for the weights themselves. The shuffle is the reason for writing LLVM by hand; LLVM never finds it on its own.
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
    constant,
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
        look_up = shuffle(context)
        width = words.type.element.width // 8
        tables = [builder.trunc(shift_right(builder, words, 8 * i), ir.VectorType(I8, 16)) for i in range(width)]

        source = builder.gep(pointer(0, packed), [byte])
        target = builder.gep(pointer(6, out), [weight])
        with cgutils.for_range(builder, steps) as loop:
            octets = load(builder, builder.gep(source, [builder.mul(loop.index, I64(BYTES))]), I8, BYTES)
            high = shift_right(builder, octets, 4)
            low = builder.and_(octets, constant(octets.type, 15))
            nibbles = interleave(builder, builder.select(low_first, low, high), builder.select(low_first, high, low))
            here = builder.mul(loop.index, I64(WEIGHTS))
            for half in nibbles:
                parts = [look_up(builder, table, half) for table in tables]
                for values in join(builder, parts):
                    store(builder, values, builder.gep(target, [here]), words.type.element)
                    here = builder.add(here, I64(16 * 8 // words.type.element.width))
        return context.get_dummy_value()

    return signature, lower
