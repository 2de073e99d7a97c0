"""Pieces of LLVM that the CPU kernels are written with: vectors, and sixteen-entry look-ups for the CPU at hand.

LLVM never finds a byte shuffle or a permutation by a vector on its own, so kernels that look up are written like this.
"""

# llvmlite has no types for what it builds.
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

import llvmlite.ir as ir
from numba.core import cgutils

I8, I16, I32, I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
F32 = ir.FloatType()


def call(builder, name, result, *arguments):
    """A call of the LLVM intrinsic `name`, which returns `result`."""
    signature = ir.FunctionType(result, [argument.type for argument in arguments])
    return builder.call(cgutils.get_or_insert_function(builder.module, signature, name), arguments)


def has_feature(context, feature):
    return f"+{feature}" in context.codegen().magic_tuple()[2].split(",")


def shuffle(context):
    """What emits table[indices], both of 16 bytes, for this CPU."""
    if has_feature(context, "ssse3"):
        name = "llvm.x86.ssse3.pshuf.b.128"
    elif context.codegen().magic_tuple()[0].startswith(("aarch64", "arm64")):
        name = "llvm.aarch64.neon.tbl1.v16i8"
    else:
        return _one_by_one
    return lambda builder, table, indices: call(builder, name, table.type, table, indices)


def _one_by_one(builder, table, indices):
    result = indices
    for lane in range(16):
        index = builder.extract_element(indices, I32(lane))
        result = builder.insert_element(result, builder.extract_element(table, index), I32(lane))
    return result


def interleave(builder, first, second):
    """Vectors abcd and efgh -> aebf and cgdh."""
    count = first.type.count
    order = [lane for pair in zip(range(count), range(count, 2 * count), strict=True) for lane in pair]
    masks = [ir.Constant(ir.VectorType(I32, count), half) for half in (order[:count], order[count:])]
    return [builder.shuffle_vector(first, second, mask) for mask in masks]


def join(builder, parts):
    """The low, ..., high bytes of 16 little-endian words -> the words, as vectors of 16 bytes."""
    if len(parts) == 1:
        return parts
    low, high = join(builder, parts[: len(parts) // 2]), join(builder, parts[len(parts) // 2 :])
    wide = ir.VectorType(ir.IntType(8 * len(parts) // 2), 32 // len(parts))
    pairs = [(builder.bitcast(a, wide), builder.bitcast(b, wide)) for a, b in zip(low, high, strict=True)]
    return [vector for a, b in pairs for vector in interleave(builder, a, b)]


def constant(vector, value):
    return ir.Constant(vector, [value] * vector.count)


def splat(builder, value, count):
    lane = builder.insert_element(ir.Constant(ir.VectorType(value.type, count), ir.Undefined), value, I32(0))
    return builder.shuffle_vector(lane, lane, constant(ir.VectorType(I32, count), 0))


def shift_right(builder, vector, bits):
    return builder.lshr(vector, constant(vector.type, bits))


def load(builder, pointer, element, count):
    return builder.load(builder.bitcast(pointer, ir.VectorType(element, count).as_pointer()), align=element.width // 8)


def store(builder, vector, pointer, element):
    builder.store(vector, builder.bitcast(pointer, vector.type.as_pointer()), align=element.width // 8)
