"""Pieces of LLVM that the CPU kernels are written with: vectors, and sixteen-entry look-ups for the CPU at hand.

LLVM never finds a byte shuffle or a permutation by a vector on its own, so kernels that look up are written like this.
"""

# llvmlite has no types for what it builds.
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

import llvmlite.ir as ir
from numba.core import cgutils


class _BFloat(ir.Type):  # type: ignore[misc]
    def _to_string(self):
        return "bfloat"

    def __eq__(self, other):
        return isinstance(other, _BFloat)

    def __hash__(self):
        return hash(_BFloat)


I1, I8, I16, I32, I64 = (ir.IntType(bits) for bits in (1, 8, 16, 32, 64))
F32, BF16 = ir.FloatType(), _BFloat()


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


# The bytes of four words, all first ones, then all second ones: where a load into sixteen lanes and a shift put them.
LOOK_UP_ORDER = [4 * word + byte for byte in range(4) for word in range(4)]


def look_up(context):
    """What emits (table[octets >> 4], table[octets & 15]) of 16 floats and 16 bytes, these in LOOK_UP_ORDER."""
    if has_feature(context, "avx512f"):
        return _look_up_in_512_bits
    if has_feature(context, "avx2"):
        return _look_up_in_256_bits
    find = shuffle(context)

    def emit(builder, table, octets):
        words = builder.bitcast(table, ir.VectorType(I32, 16))
        tables = [builder.trunc(shift_right(builder, words, 8 * byte), octets.type) for byte in range(4)]
        octets = builder.shuffle_vector(octets, octets, ir.Constant(ir.VectorType(I32, 16), LOOK_UP_ORDER))
        halves = shift_right(builder, octets, 4), builder.and_(octets, constant(octets.type, 15))
        return [_joined(builder, [find(builder, table, half) for table in tables]) for half in halves]

    return emit


def _spread(builder, octets):
    """Words with the octets, in LOOK_UP_ORDER, as their low bytes; what is above them is left there."""
    words = builder.bitcast(octets, ir.VectorType(I32, 4))
    words = builder.shuffle_vector(words, words, ir.Constant(ir.VectorType(I32, 16), [0, 1, 2, 3] * 4))
    return builder.lshr(words, ir.Constant(words.type, [8 * (lane // 4) for lane in range(16)]))


def _look_up_in_512_bits(builder, table, octets):
    """One permutation, which looks at the four low bits of each index and at no others."""
    low = _spread(builder, octets)
    high = shift_right(builder, low, 4)
    return [call(builder, "llvm.x86.avx512.permvar.sf.512", table.type, table, half) for half in (high, low)]


def _look_up_in_256_bits(builder, table, octets):
    """A permutation of each half of the table, by the three low bits, and the choice of one by the fourth."""
    low = _spread(builder, octets)
    tables = [part(builder, table, begin, 8) for begin in (0, 8)]
    found = []
    for half in (shift_right(builder, low, 4), low):
        eights = []
        for begin in (0, 8):
            index = part(builder, half, begin, 8)
            small, large = (call(builder, "llvm.x86.avx2.permps", t.type, t, index) for t in tables)
            sign = builder.shl(index, constant(index.type, 28))
            is_large = builder.icmp_signed("<", sign, constant(index.type, 0))
            eights.append(builder.select(is_large, large, small))
        found.append(concatenate(builder, *eights))
    return found


def _joined(builder, parts):
    """The low, ..., high bytes of 16 floats -> the floats, as one vector."""
    fours = [builder.bitcast(four, ir.VectorType(F32, 4)) for four in join(builder, parts)]
    return concatenate(builder, concatenate(builder, *fours[:2]), concatenate(builder, *fours[2:]))


def part(builder, vector, begin, count):
    """vector[begin : begin + count]."""
    lanes = ir.Constant(ir.VectorType(I32, count), list(range(begin, begin + count)))
    return builder.shuffle_vector(vector, vector, lanes)


def concatenate(builder, first, second):
    lanes = ir.Constant(ir.VectorType(I32, 2 * first.type.count), list(range(2 * first.type.count)))
    return builder.shuffle_vector(first, second, lanes)


def add_up(builder, vector):
    """The sum of the lanes, halves added to halves."""
    while vector.type.count > 1:
        half = vector.type.count // 2
        vector = builder.fadd(part(builder, vector, 0, half), part(builder, vector, half, half))
    return builder.extract_element(vector, I32(0))


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


def transpose(builder, rows):
    """Sixteen vectors of sixteen words -> those of all first words, of all second ones, ..., by 64 instructions.

    Vectors whose numbers differ in one binary digit exchange halves: first words, then pairs of them, by instructions
    that work within each four words, and then fours by such as move them."""
    fours, eights = range(0, 16, 4), range(0, 32, 8)
    single = [four + lane for four in fours for lane in (0, 16, 1, 17)]
    paired = [four + lane for four in fours for lane in (0, 1, 16, 17)]
    whole = [eight + lane for eight in eights for lane in range(4)]
    found = _exchanged(builder, rows, 1, single, 2)
    for distance, lanes, further in ((2, paired, 2), (4, whole, 4), (8, whole, 4)):
        found = _exchanged(builder, found, distance, lanes, further)
    # Of every four, the second and the third have changed places.
    return [found[four + place] for four in fours for place in (0, 2, 1, 3)]


def _exchanged(builder, vectors, distance, lanes, further):
    """Every two vectors so far apart -> the one that takes these of their 32 lanes, and the one with those `further`
    on."""
    found = list(vectors)
    for first in range(len(vectors)):
        if not first & distance:
            two = vectors[first], vectors[first + distance]
            for place, by in ((first, 0), (first + distance, further)):
                mask = ir.Constant(ir.VectorType(I32, len(lanes)), [lane + by for lane in lanes])
                found[place] = builder.shuffle_vector(*two, mask)
    return found


def constant(kind, value):
    """`value`, in every lane where `kind` is a vector."""
    return ir.Constant(kind, [value] * kind.count if isinstance(kind, ir.VectorType) else value)


def of(element, kind):
    """`element`, or a vector of as many of them as `kind` has lanes."""
    return ir.VectorType(element, kind.count) if isinstance(kind, ir.VectorType) else element


def splat(builder, value, count):
    lane = builder.insert_element(ir.Constant(ir.VectorType(value.type, count), ir.Undefined), value, I32(0))
    return builder.shuffle_vector(lane, lane, constant(ir.VectorType(I32, count), 0))


def shift_right(builder, vector, bits):
    return builder.lshr(vector, constant(vector.type, bits))


def load(builder, pointer, element, count):
    align = 4 if element is F32 else element.width // 8
    return builder.load(builder.bitcast(pointer, ir.VectorType(element, count).as_pointer()), align=align)


def store(builder, vector, pointer, element):
    builder.store(vector, builder.bitcast(pointer, vector.type.as_pointer()), align=element.width // 8)


def prefetch(builder, pointer, keep=3):
    """Ask for the cache line at `pointer`, which may lie anywhere. keep: 3 for the first cache, 2 for the second."""
    read, keep, data = I32(0), I32(keep), I32(1)
    call(builder, "llvm.prefetch.p0", ir.VoidType(), pointer, read, keep, data)
