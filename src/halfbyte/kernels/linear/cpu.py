"""x @ W.T on the CPU, straight from the 4-bit bytes, through numba.

x [M, K], W packed two weights a byte, one scale for every `block_size` weights -> [M, N], summed in fp32, rounded once.

A weight becomes a number in one instruction: the sixteen values of a block, codebook * scale, fill a vector register,
and a permutation of that register by sixteen nibbles looks sixteen weights up (`look_up` in common/llvm.py). They are
the dequantized fp32 weights to the bit. What is left is one multiply-add for each row of x.

A tile is four rows of W times one to four rows of x, in registers; x is put into the order in which the nibbles of a
byte come out. Each output is summed in sixteen lanes, in chains of multiply-adds along K that are added one by one; at
last the lanes are added in pairs. That order depends neither on M, nor on a row's place, nor on the threads, which
share the rows of W: the same bits, always.

Bytes moved: the packed weights and their scales, once, while the rows of x fit into the cache. Flops: 2 M N K.
"""

# numba finds out the types of kernels by itself, and llvmlite has none for what it builds.
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

import llvmlite.ir as ir
import numpy as np
import torch
from numba import njit
from numba.core import cgutils, types
from numba.extending import intrinsic
from torch import Tensor

from halfbyte.formats.spec import Format, codebook_tensor
from halfbyte.formats.weight import NestedScale
from halfbyte.kernels.common.floats import BITS, from_bits, to_bits
from halfbyte.kernels.common.llvm import F32, I8, I64, LOOK_UP_ORDER, add_up, call, load, look_up, prefetch, splat
from halfbyte.kernels.common.scales import scale_arguments
from halfbyte.kernels.common.threads import parallel

# A step takes so many packed bytes of a row, which are so many weights. The smallest block is one step.
BYTES, WEIGHTS, LANES = 16, 32, 16

# Rows of W in a tile, and how many tiles ahead its bytes are asked for.
ROWS, AHEAD = 4, 2

# Scales in a chain. One chain for all of K = 4096 has 1.1 times the error of MKL's fp32 product, and these have half.
CHAIN = 8

# Fewer multiply-adds than this are not worth waking a thread for.
GRAIN = 2**20

# Where in a step the 32 weights of its 16 bytes lie, in the order in which `look_up` finds them: those of all high
# nibbles, then of all low ones, bytes taken as it takes them.
HIGH_FIRST = np.array([2 * byte + low for low in (0, 1) for byte in LOOK_UP_ORDER])
LOW_FIRST = HIGH_FIRST ^ 1


def linear(
    x: Tensor,
    packed: Tensor,
    scale: Tensor,
    nested: NestedScale | None,
    format: Format,
    block_size: int,
    bias: Tensor | None,
    out: Tensor,
) -> None:
    """Write x [M, K] @ W.T + bias into `out` [M, N]; blocks run over the flattened W, so rows may start anywhere."""
    (m, k), n = x.shape, out.shape[1]
    if out.numel() == 0:
        return
    steps = -(-k // WEIGHTS)
    whole = k == steps * WEIGHTS
    order = (LOW_FIRST if format.low_first else HIGH_FIRST) if whole else np.arange(WEIGHTS)
    # One scale for two steps where that is so everywhere, else one a step.
    unit = 2 * WEIGHTS if k % (2 * WEIGHTS) == 0 and block_size >= 2 * WEIGHTS else WEIGHTS
    wide, y = np.empty((m, steps * WEIGHTS), np.float32), np.empty((m, n), np.float32)
    bits = BITS[x.dtype]
    added = x.new_empty(0) if bias is None else bias
    *scales, nested_size = scale_arguments(scale, nested, format)
    octets, codebook = packed.view(torch.uint8).reshape(-1).numpy(), codebook_tensor(format, x.device).numpy()
    numbers = octets, *scales, _log2(nested_size), _log2(block_size), unit, codebook, wide, k, y
    parallel(_widen, m, max(1, GRAIN // max(k, 1)), x.view(bits).numpy(), order, wide)
    parallel(_linear_tiles if whole else _linear_rows, n, max(ROWS, GRAIN // (m * max(k, 1))), *numbers)
    parallel(_finish, m, max(1, GRAIN // n), y, added.view(bits).numpy(), out.view(bits).numpy())


def _log2(power: int) -> int:
    return power.bit_length() - 1


@njit(nogil=True, cache=True, fastmath=False, error_model="numpy")
def _widen(begin, end, x, order, out):
    """Rows of x to fp32, each step in `order`, and zeros at their end."""
    for row in range(begin, end):
        for first in range(0, out.shape[1], WEIGHTS):
            for lane in range(WEIGHTS):
                place = first + order[lane]
                out[row, first + lane] = from_bits(x[row, place]) if place < x.shape[1] else np.float32(0)


@njit(nogil=True, cache=True, fastmath=False, error_model="numpy")
def _finish(begin, end, y, bias, out):
    """Rows of fp32 y plus the bias, if there is one, rounded once."""
    for row in range(begin, end):
        for column in range(y.shape[1]):
            value = y[row, column] + from_bits(bias[column]) if bias.size else y[row, column]
            out[row, column] = to_bits(value, out)


@njit(nogil=True, cache=True, fastmath=False, error_model="numpy")
def _linear_tiles(begin, end, packed, flat, codes, code, absmax, offset, nested_log2, log2, unit, codebook, x, k, out):
    """Rows `begin` to `end` of W, K a multiple of a step. Scales are `flat` or, if that is empty, the five after it."""
    units = k // unit
    scales = np.empty(ROWS * units, np.float32)
    for row in range(begin, end, ROWS):
        for r in range(ROWS):  # a tile's rows beyond the last are the last one again
            first = min(row + r, end - 1) * k
            for u in range(units):
                block = (first + u * unit) >> log2
                scales[r * units + u] = _scale(block, flat, codes, code, absmax, offset, nested_log2)
        column = 0
        while column < len(x):
            rest = len(x) - column
            if unit == WEIGHTS:
                column += _tile_of_any(1, rest, packed, row, end - 1, scales, units, codebook, x, column, out)
            else:
                column += _tile_of_any(2, rest, packed, row, end - 1, scales, units, codebook, x, column, out)


@njit(inline="always")
def _scale(block, flat, codes, code, absmax, offset, nested_log2):
    block = np.uint64(block)  # an unsigned index is not looked at for being negative
    # The multiplication and the addition are rounded one by one: numba fuses nothing without fastmath.
    return flat[block] if flat.size else code[codes[block]] * absmax[block >> np.uint64(nested_log2)] + offset


@njit(inline="always")
def _tile_of_any(steps, rest, packed, row, last, scales, units, codebook, x, column, out):
    """A tile of as many rows of x as there are, four at most; returns their number."""
    if rest >= 4:
        _tile(4, steps, packed, row, last, scales, units, codebook, x, column, out)
        return 4
    if rest == 3:
        _tile(3, steps, packed, row, last, scales, units, codebook, x, column, out)
        return 3
    if rest == 2:
        _tile(2, steps, packed, row, last, scales, units, codebook, x, column, out)
        return 2
    _tile(1, steps, packed, row, last, scales, units, codebook, x, column, out)
    return 1


@intrinsic(prefer_literal=True)
def _tile(typing_context, columns, steps, packed, row, last, scales, units, codebook, x, column, out):
    """out[column:][:columns, row:][:, :ROWS], of `units` scales a row with `steps` steps each; both are literals."""
    at = types.intp
    signature = types.void(columns, steps, packed, at, at, scales, at, codebook, x, at, out)
    columns, steps = columns.literal_value, steps.literal_value
    vector = ir.VectorType(F32, LANES)

    def lower(context, builder, signature, arguments):
        _, _, packed, row, last, scales, units, codebook, x, column, out = (
            context.make_array(kind)(context, builder, value) if isinstance(kind, types.Array) else value
            for kind, value in zip(signature.args, arguments, strict=True)
        )
        k, n = builder.extract_value(x.shape, 1), builder.extract_value(out.shape, 1)
        rows = [builder.add(row, I64(r)) for r in range(ROWS)]
        rows = [builder.select(builder.icmp_signed("<", r, last), r, last) for r in rows]
        places = [builder.add(column, I64(c)) for c in range(columns)]
        weights_of = [builder.gep(packed.data, [builder.lshr(builder.mul(r, k), I64(1))]) for r in rows]
        scales_of = [builder.gep(scales.data, [builder.mul(units, I64(r))]) for r in range(ROWS)]
        x_of = [builder.gep(x.data, [builder.mul(place, k)]) for place in places]

        values, find = load(builder, codebook.data, F32, LANES), look_up(context)
        zero = ir.Constant(vector, [0.0] * LANES)
        totals, sums = ([[cgutils.alloca_once_value(builder, zero) for _ in places] for _ in rows] for _ in range(2))
        chains = builder.udiv(builder.add(units, I64(CHAIN - 1)), I64(CHAIN))
        with cgutils.for_range(builder, chains) as chain:
            first = builder.mul(chain.index, I64(CHAIN))
            rest = builder.sub(units, first)
            rest = builder.select(builder.icmp_signed("<", rest, I64(CHAIN)), rest, I64(CHAIN))
            with cgutils.for_range(builder, rest) as loop:
                unit = builder.add(first, loop.index)
                here = [splat(builder, builder.load(builder.gep(scale, [unit])), LANES) for scale in scales_of]
                tables = [builder.fmul(values, scale) for scale in here]
                ahead = builder.add(builder.mul(unit, I64(steps * BYTES)), builder.mul(k, I64(ROWS * AHEAD // 2)))
                for data in weights_of:
                    prefetch(builder, builder.gep(data, [ahead]))
                for step in range(steps):
                    index = builder.add(builder.mul(unit, I64(steps)), I64(step))
                    byte, weight = builder.mul(index, I64(BYTES)), builder.mul(index, I64(WEIGHTS))
                    halves = [weight, builder.add(weight, I64(LANES))]
                    xs = [[load(builder, builder.gep(data, [half]), F32, LANES) for half in halves] for data in x_of]
                    for r in range(ROWS):
                        octets = load(builder, builder.gep(weights_of[r], [byte]), I8, BYTES)
                        for half, weights in enumerate(find(builder, tables[r], octets)):
                            for c in range(columns):
                                total = builder.load(sums[r][c])
                                total = call(builder, "llvm.fmuladd.v16f32", vector, weights, xs[c][half], total)
                                builder.store(total, sums[r][c])
            for r in range(ROWS):
                for c in range(columns):
                    total = builder.fadd(builder.load(totals[r][c]), builder.load(sums[r][c]))
                    builder.store(total, totals[r][c])
                    builder.store(zero, sums[r][c])
        for r in range(ROWS):
            for c in range(columns):
                total = add_up(builder, builder.load(totals[r][c]))
                builder.store(total, builder.gep(out.data, [builder.add(builder.mul(places[c], n), rows[r])]))
        return context.get_dummy_value()

    return signature, lower


@njit(nogil=True, cache=True, fastmath=False, error_model="numpy")
def _linear_rows(begin, end, packed, flat, codes, code, absmax, offset, nested_log2, log2, unit, codebook, x, k, out):
    """The same for any K, where a row may start in the middle of a byte: a weight at a time. x is padded with zeros."""
    weights = np.zeros(x.shape[1], np.float32)
    for row in range(begin, end):
        for place in range(k):
            index = row * k + place
            octet = np.int64(packed[index >> 1])
            nibble = octet & 15 if index & 1 else octet >> 4
            weights[place] = codebook[nibble] * _scale(index >> log2, flat, codes, code, absmax, offset, nested_log2)
        for column in range(len(x)):
            sums = np.zeros(LANES, np.float64)
            for first in range(0, x.shape[1], LANES):
                for lane in range(LANES):
                    sums[lane] += np.float64(weights[first + lane]) * x[column, first + lane]
            for half in (8, 4, 2, 1):
                for lane in range(half):
                    sums[lane] += sums[half + lane]
            out[column, row] = sums[0]
