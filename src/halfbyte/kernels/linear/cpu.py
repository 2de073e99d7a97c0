"""x @ W.T on the CPU, straight from the 4-bit bytes, through numba.

x fp32 [M, K] in the order of `_spread`, W packed [N, K / 2] bytes with a scale for every `block_size` weights -> fp32 [M, N].

A weight becomes a number in one instruction: the sixteen values of a block, codebook * scale, are a vector register, and
a permutation of that register by sixteen nibbles looks up sixteen weights (AVX-512: vpermps, which even ignores the other
nibble of the byte; AVX2: two of them and a blend; elsewhere byte shuffles). One multiply-add per row of x is left.

Four rows of W times up to four rows of x are computed at once, in registers. Each output is one chain of multiply-adds
over K, in sixteen lanes, that are then added in pairs: the order does not depend on M, on the row's place, nor on threads.

Bytes moved: the packed weight and its scales, once. Flops: 2 M N K, and N K / 4 for the tables at block size 64.
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
from numba.extending import intrinsic, overload
from torch import Tensor

from halfbyte.formats.weight import NestedScale
from halfbyte.kernels.common.llvm import (
    F32, I8, I32, I64, call, constant, has_feature, join, load, shift_right, shuffle, splat,
)  # fmt: skip
from halfbyte.kernels.common.threads import parallel

BYTES, WEIGHTS = 16, 32
ROWS = 4
GRAIN = 2**20
FLOATS = ir.VectorType(F32, 16)

def linear_blockwise(x, packed, scale, nested, codebook, block_size, out):
    empty = np.empty(0, np.float32)
    if nested is None:
        rest = empty, empty, np.float32(0), 1
    else:
        code, absmax, offset, size = nested
        rest = code.numpy(), absmax.numpy(), np.float32(offset.item()), size
    _linear(x, packed.reshape(-1), (scale.numpy(), *rest), codebook, block_size, False, out)


def _linear(x, packed, scales, codebook, block_size, low_first, out):
    m, k = x.shape
    n = out.shape[1]
    unit = 64 if k % 64 == 0 and block_size % 64 == 0 else 32
    x = _spread(x, low_first)
    y = out if out.dtype == torch.float32 else torch.empty(m, n)
    parallel(_linear_rows, n, max(ROWS, GRAIN // (k * m)), packed.numpy(), *scales, codebook.numpy(), block_size, unit, x.numpy(), y.numpy())
    if y is not out:
        out.copy_(y)

def _spread(x, low_first):
    m, k = x.shape
    pairs = x.float().view(m, k // 32, 16, 2)
    if low_first: pairs = pairs.flip(-1)
    return pairs.transpose(-1, -2).contiguous().view(m, k)


def _scale(scale, code, absmax, offset, absmax_block, block):
    raise NotImplementedError

@overload(_scale, inline="always")
def _(scale, code, absmax, offset, absmax_block, block):
    if scale.dtype == types.uint8:
        return lambda scale, code, absmax, offset, absmax_block, block: code[scale[block]] * absmax[block // absmax_block] + offset
    return lambda scale, code, absmax, offset, absmax_block, block: scale[block]


@njit(nogil=True, cache=False, fastmath=False, error_model="numpy")
def _linear_rows(begin, end, packed, scale, code, absmax, offset, absmax_block, codebook, block_size, unit, x, out):
    m, k = x.shape
    units = k // unit
    scales = np.empty(ROWS * units, np.float32)
    for row in range(begin, end, ROWS):
        for r in range(ROWS):
            first = min(row + r, end - 1) * k
            for u in range(units):
                block = (first + u * unit) // block_size
                scales[r * units + u] = _scale(scale, code, absmax, offset, absmax_block, block)
        column = 0
        while m - column >= 4:
            if unit == 64:
                _tile(4, 2, packed, row, end - 1, scales, units, codebook, x, column, out)
            else:
                _tile(4, 1, packed, row, end - 1, scales, units, codebook, x, column, out)
            column += 4
        while m - column >= 1:
            if unit == 64:
                _tile(1, 2, packed, row, end - 1, scales, units, codebook, x, column, out)
            else:
                _tile(1, 1, packed, row, end - 1, scales, units, codebook, x, column, out)
            column += 1


@intrinsic(prefer_literal=True)
def _tile(typing_context, columns, steps, packed, row, last, scales, units, codebook, x, column, out):
    if not isinstance(columns, types.IntegerLiteral): return None
    c_count, s_count = columns.literal_value, steps.literal_value
    signature = types.void(columns, steps, packed, types.intp, types.intp, scales, types.intp, codebook, x, types.intp, out)

    def lower(context, builder, signature, arguments):
        _, _, packed, row, last, scales, units, codebook, x, column, out = arguments
        def array(position):
            return context.make_array(signature.args[position])(context, builder, arguments[position])
        rows = []
        for r in range(ROWS):
            here = builder.add(row, I64(r))
            rows.append(builder.select(builder.icmp_signed("<", here, last), here, last))
        k = builder.extract_value(array(8).shape, 1)
        n = builder.extract_value(array(10).shape, 1)
        octets = [builder.gep(array(2).data, [builder.mul(here, builder.lshr(k, I64(1)))]) for here in rows]
        scale = [builder.gep(array(5).data, [builder.mul(units, I64(r))]) for r in range(ROWS)]
        xs = [builder.gep(array(8).data, [builder.mul(builder.add(column, I64(c)), k)]) for c in range(c_count)]
        values = load(builder, array(7).data, F32, 16)
        look_up = _look_up(context)
        zero = ir.Constant(FLOATS, [0.0] * 16)
        sums = [[cgutils.alloca_once_value(builder, zero) for _ in range(c_count)] for _ in range(ROWS)]
        with cgutils.for_range(builder, units) as loop:
            tables = [builder.fmul(values, splat(builder, builder.load(builder.gep(s, [loop.index])), 16)) for s in scale]
            for step in range(s_count):
                index = builder.add(builder.mul(loop.index, I64(s_count)), I64(step))
                byte = builder.mul(index, I64(BYTES))
                weight = builder.mul(index, I64(WEIGHTS))
                xv = [[load(builder, builder.gep(p, [builder.add(weight, I64(16 * half))]), F32, 16) for half in range(2)] for p in xs]
                for r in range(ROWS):
                    pair = look_up(builder, tables[r], load(builder, builder.gep(octets[r], [byte]), I8, 16))
                    for c in range(c_count):
                        total = builder.load(sums[r][c])
                        for half in range(2):
                            total = call(builder, "llvm.fmuladd.v16f32", FLOATS, pair[half], xv[c][half], total)
                        builder.store(total, sums[r][c])
        for r in range(ROWS):
            for c in range(c_count):
                place = builder.add(builder.mul(builder.add(column, I64(c)), n), rows[r])
                builder.store(_add_up(builder, builder.load(sums[r][c])), builder.gep(array(10).data, [place]))
        return context.get_dummy_value()

    return signature, lower

def _add_up(builder, v):
    count = 16
    while count > 1:
        count //= 2
        lo = builder.shuffle_vector(v, v, ir.Constant(ir.VectorType(I32, count), list(range(count))))
        hi = builder.shuffle_vector(v, v, ir.Constant(ir.VectorType(I32, count), list(range(count, 2*count))))
        v = builder.fadd(lo, hi)
    return builder.extract_element(v, I32(0))

def _look_up(context):
    if has_feature(context, "avx512f"):
        def emit(builder, table, octets):
            words = builder.zext(octets, ir.VectorType(I32, 16))
            return [call(builder, "llvm.x86.avx512.permvar.sf.512", FLOATS, table, i) for i in (shift_right(builder, words, 4), words)]
        return emit
