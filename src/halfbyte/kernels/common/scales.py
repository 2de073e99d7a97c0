"""Scales as numba kernels take them: plain, nested or exponents of two, always the same types.

Kernels decode those of a few rows before they multiply. One by one that is a tenth of a product, so scales that lie
side by side are copied, or looked up sixteen at a time, to the same bits.
"""

# numba finds out the types of kernels by itself, and llvmlite has none for what it builds.
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

from typing import Any

import llvmlite.ir as ir
import numpy as np
import torch
from numba import njit
from numba.core import cgutils, types
from numba.extending import intrinsic
from torch import Tensor

from halfbyte.formats.spec import Format, exponents_tensor
from halfbyte.formats.weight import NestedScale
from halfbyte.kernels.common.floats import BITS, WIDEN, from_bits
from halfbyte.kernels.common.llvm import F32, I1, I8, I16, I32, I64, call, constant, has_feature, load, splat, store

ALL = 2**62  # scales: more than any weight has
AT_ONCE = 16


def scale_arguments(scale: Tensor, nested: NestedScale | None, format: Format) -> tuple[Any, ...]:
    """(flat, codes, code, absmax, offset, block size). A scale is flat[i], of which kernels know 16 bits as floats.py
    has them, or, where `flat` is empty, code[codes[i]] * absmax[i // block size] + offset; what is not used is empty, 0
    and 1. Exponents of two are looked up in `code`, and an absmax of 1 for all of them changes none."""
    nothing = np.empty(0, np.float32)
    if format.has_exponents:
        powers, one = exponents_tensor(scale.device).numpy(), np.ones(1, np.float32)
        return nothing, scale.numpy().reshape(-1), powers, one, np.float32(0), ALL
    if nested is None:
        flat = scale if scale.dtype is torch.float32 else scale.view(BITS[scale.dtype])
        return flat.numpy().reshape(-1), np.empty(0, np.uint8), nothing, nothing, np.float32(0), 1
    code, absmax, offset, size = nested
    return nothing, scale.numpy().reshape(-1), code.numpy(), absmax.numpy(), np.float32(offset.item()), size


@njit(inline="always")
def scale_of(block, flat, codes, code, absmax, offset, nested_log2):
    block, nested_log2 = np.uint64(block), np.uint64(nested_log2)  # unsigned: no index is looked at for being negative
    # The multiplication and the addition are rounded one by one: numba fuses nothing without fastmath.
    return from_bits(flat[block]) if flat.size else code[codes[block]] * absmax[block >> nested_log2] + offset


@njit(inline="always")
def decode_scales(
    scales, row, rows, beyond, k, unit, log2, flat, codes, code, absmax, offset, nested_log2
):  # fmt: skip
    """Those of the rows of a tile, one for each `unit` weights. Rows beyond the last are the last one again."""
    units, twice = k // unit, 2 * unit == 1 << log2
    one_by_one = (flat.size == 0) & (1 << nested_log2 < AT_ONCE)
    whole = (unit == 1 << log2 or twice) and k >> log2 << log2 == k  # units have a block, or blocks two of them
    side_by_side = whole and row + rows <= beyond and not one_by_one
    blocks = side_by_side * rows * k >> log2
    at = twice * blocks  # where no other is yet when it is put in its places
    _decode_run(scales, at, row * k >> log2, blocks, flat, codes, code, absmax, offset, nested_log2)
    for i in range(twice * blocks):
        scales[2 * i] = scales[2 * i + 1] = scales[at + i]
    for r in range(rows * side_by_side, rows):
        weight = min(row + r, beyond - 1) * k
        for u in range(units):
            block = (weight + u * unit) >> log2
            scales[r * units + u] = scale_of(block, flat, codes, code, absmax, offset, nested_log2)


# A function of numba's, or a branch around a call, and numba counts references to each array at every call, which all
# threads then write to at once: 100 ns a tile with one thread, and a µs with two.
@intrinsic
def _decode_run(typing_context, scales, place, first, count, flat, codes, code, absmax, offset, nested_log2):
    """scales[place:][:count], those from number `first` on."""
    at = types.intp
    signature = types.void(scales, at, at, at, flat, codes, code, absmax, types.float32, at)

    def lower(context, builder, signature, arguments):
        scales, place, first, count, flat, codes, code, absmax, offset, nested_log2 = (
            context.make_array(kind)(context, builder, value) if isinstance(kind, types.Array) else value
            for kind, value in zip(signature.args, arguments, strict=True)
        )

        def share_of(number):
            return builder.lshr(number, nested_log2)

        def factor_of(number):
            return builder.load(builder.gep(absmax.data, [share_of(number)]))

        results = builder.gep(scales.data, [place])
        are_flat = builder.icmp_signed("!=", flat.nitems, I64(0))
        copied, decoded = builder.select(are_flat, count, I64(0)), builder.select(are_flat, I64(0), count)
        _widen_run(builder, signature.args[4].dtype, results, builder.gep(flat.data, [first]), copied)
        sixteens = builder.udiv(decoded, I64(AT_ONCE))
        lanes = ir.Constant(ir.VectorType(I64, AT_ONCE), list(range(AT_ONCE)))
        with cgutils.for_range(builder, sixteens) as loop:
            to = builder.mul(loop.index, I64(AT_ONCE))
            begin = builder.add(first, to)
            last = builder.add(begin, I64(AT_ONCE - 1))
            # From a lane on they may have the next factor, or all have the same.
            own = builder.sub(builder.shl(share_of(last), nested_log2), begin)
            is_next = builder.icmp_signed(">=", lanes, splat(builder, own, AT_ONCE))
            factor, following = (splat(builder, factor_of(number), AT_ONCE) for number in (begin, last))
            octets = load(builder, builder.gep(codes.data, [begin]), I8, AT_ONCE)
            numbers = _gather(context, builder, code.data, builder.zext(octets, ir.VectorType(I32, AT_ONCE)))
            products = builder.fmul(numbers, builder.select(is_next, following, factor))
            sums = builder.fadd(products, splat(builder, offset, AT_ONCE))
            store(builder, sums, builder.gep(results, [to]), I32)
        with cgutils.for_range(builder, builder.urem(decoded, I64(AT_ONCE))) as loop:
            to = builder.add(builder.mul(sixteens, I64(AT_ONCE)), loop.index)
            number = builder.add(first, to)
            index = builder.zext(builder.load(builder.gep(codes.data, [number])), I64)
            product = builder.fmul(builder.load(builder.gep(code.data, [index])), factor_of(number))
            builder.store(builder.fadd(product, offset), builder.gep(results, [to]))
        return context.get_dummy_value()

    return signature, lower


def _widen_run(builder, kind, results, numbers, count):
    """results[:count], of fp32, from numbers[:count], which a kernel knows as `kind`."""
    if kind == types.float32:
        cgutils.raw_memcpy(builder, results, numbers, count, I64(4))
        return
    widen, sixteens = WIDEN[kind], builder.udiv(count, I64(AT_ONCE))
    with cgutils.for_range(builder, sixteens) as loop:
        at = builder.mul(loop.index, I64(AT_ONCE))
        sixteen = load(builder, builder.gep(numbers, [at]), I16, AT_ONCE)
        store(builder, widen(builder, sixteen), builder.gep(results, [at]), I32)
    with cgutils.for_range(builder, builder.urem(count, I64(AT_ONCE))) as loop:
        at = builder.add(builder.mul(sixteens, I64(AT_ONCE)), loop.index)
        builder.store(widen(builder, builder.load(builder.gep(numbers, [at]))), builder.gep(results, [at]))


def _gather(context, builder, table, indices):
    """table[indices], of sixteen floats."""
    result = ir.Constant(ir.VectorType(F32, AT_ONCE), ir.Undefined)
    if has_feature(context, "avx512f"):
        place, every = builder.bitcast(table, I8.as_pointer()), constant(ir.VectorType(I1, AT_ONCE), 1)
        name = "llvm.x86.avx512.mask.gather.dps.512"
        return call(builder, name, result.type, result, place, indices, every, I32(4))
    for lane in range(AT_ONCE):
        index = builder.extract_element(indices, I32(lane))
        result = builder.insert_element(result, builder.load(builder.gep(table, [index])), I32(lane))
    return result
