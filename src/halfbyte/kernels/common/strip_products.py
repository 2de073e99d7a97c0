"""x @ W.T for many rows of x on a CPU that multiplies bf16 numbers in pairs; paired_products.py is for fewer.

x [T, K] bf16, W packed two weights a byte, one scale for every `block_size` weights -> sums in fp32.

A strip is 32 rows of W, each of which is a lane of two registers. So a pair of weights meets a pair of x that all lanes
have, one instruction (`vdpbf16ps`) adds sixteen rows' products to sixteen sums, and no lanes are ever added up. Sums of
a block of weights are scaled once, sixteen rows by their own scales.

A strip's weights are decoded once, for a part of K at a time, and stay in the first cache while all rows of x meet them
in tiles of six or four rows, whose sums stay in registers. To decode, sixteen rows of packed bytes are transposed, 32
bits at a time; then a permutation of the codebook by the low four bits of each half looks eight weights of each row up,
two at a time (`vpermw`, as paired_products.py has it). Weights 0 and 4 of the eight are a pair then, 1 and 5 the next
one, and x is put into that order, tile by tile.

The codebook is multiplied by a factor, as there. Each output is summed along K, block by block, in an order that
depends neither on the other rows of x nor on the threads. It is another order than that of fewer rows.

Bytes moved: as products.py. Flops: 2 N K for each row.
"""

# numba finds out the types of kernels by itself, and llvmlite has none for what it builds.
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

from typing import Any

import llvmlite.ir as ir
import numpy as np
from numba import njit
from numba.core import cgutils, types
from numba.extending import intrinsic
from torch import Tensor

from halfbyte.formats.spec import Format
from halfbyte.kernels.common.addresses import in_lines
from halfbyte.kernels.common.llvm import (
    BF16,
    F32,
    I16,
    I32,
    I64,
    call,
    load,
    prefetch,
    splat,
    store,
    transpose,
)
from halfbyte.kernels.common.paired_products import WEIGHTS, numbers_of
from halfbyte.kernels.common.products import GRAIN, added_to, array_of, begins_of, grain_of, rows_before, tiles_of
from halfbyte.kernels.common.region import region
from halfbyte.kernels.common.scales import decode_scales
from halfbyte.kernels.common.strips import (
    COLUMNS,
    FEWER,
    cost_of,
    finish,
    padded_begins,
    place_in_tiles,
    put_across,
    wide_rows,
)
from halfbyte.kernels.common.threads import parallel

# Rows of W in a strip, lanes of a register, and how many weights of each row are decoded at a time: 16 KB of them.
ROWS, LANES, PART = 32, 16, 256

# Weights of a row in 32 bits, and pairs of them.
EIGHT, PAIRS = 8, 4

UNROLLED = 4  # pairs

A_PAIR = np.empty(0, np.int32)  # in one word

SECOND = 2  # cache, which the bytes of W come to a part ahead


def multiply(
    x: Tensor, source: Any, weight: tuple[Any, ...], format: Format, factor: float, block_size: int, matrices: Any,
    first: Any, bias: Tensor | None, target: Any, out: Tensor,
) -> None:  # fmt: skip
    """out[target[i]] = x[source[i]] @ W.T + bias, as `multiply` and `finish` of products.py have it, of x [T, K] bf16,
    contiguous. factor: of the codebook. bias: a row for each matrix of the stack, or None."""
    k, n = x.shape[1], out.shape[1]
    padded = padded_begins(first)
    arranged = in_lines(padded[-1] * k // 2, A_PAIR)
    parallel(_arrange, len(source), max(1, GRAIN // k), array_of(x), source, first, padded, arranged)
    begins = begins_of(padded, lambda rows: cost_of(rows) * tiles_of(n, ROWS))
    total = int(begins[-1])
    grain = grain_of(total, n * k * len(source))
    told = *weight[:-1], format.low_first, *numbers_of(format, factor, block_size)
    arguments = matrices, first, padded, begins, *told, arranged, int(np.diff(padded).max()), k
    arguments = *arguments, added_to(bias, out), target, array_of(out)
    parallel(_multiply, total, grain, *arguments, region=_multiply_together)


@njit(nogil=True, cache=True, fastmath=False, error_model="numpy")
def _arrange(begin, end, x, source, firsts, padded, out):
    """x of results `begin` to before `end` as tiles read it: part by part of K, tile by tile, eight by eight numbers,
    their pairs, in each all rows of the tile."""
    k = x.shape[1]
    group = 0
    for place in range(begin, end):
        while firsts[group + 1] <= place:
            group += 1
        rows, first, last = padded[group + 1] - padded[group], firsts[group], firsts[group + 1]
        columns, column, begins, missing = place_in_tiles(place, first, last, rows)
        row = x[source[place]]
        for part in range(0, k, PART):
            count = min(PART, k - part)
            to = (padded[group] * k + part * rows + begins * count) // 2 + column
            for eight in range(count // EIGHT):
                _put_pairs(row, part + eight * EIGHT, out, to + eight * PAIRS * columns, columns)
            for pair in range(count // 2):
                for beyond in range(missing):
                    out[to + pair * columns + 1 + beyond] = 0


@njit(nogil=True, cache=True, fastmath=False, error_model="numpy")
def _multiply(
    begin, end, matrices, firsts, padded, begins, packed, flat, codes, code, absmax, offset, nested_log2, log2,
    low_first, table, inverse, unit, x, most, k, bias, target, out,
):  # fmt: skip
    """The strips of W that begin from `begin` to before `end`. Scales are `flat` or, if that is empty, the five after
    it."""
    n, units = out.shape[1], k // unit
    scales = np.empty(ROWS * units, np.float32)
    across, sums, weights = in_lines(ROWS * units, scales), in_lines(ROWS * most, scales), in_lines(ROWS * PART // 2, x)
    for group in range(len(matrices)):
        origin, rows = matrices[group] * n, padded[group + 1] - padded[group]
        cost, wide = cost_of(rows), wide_rows(rows)
        low = origin + rows_before(begin - begins[group], cost, ROWS)
        high = origin + min(rows_before(end - begins[group], cost, ROWS), n)
        for top in range(low, high, ROWS):
            decode_scales(scales, top, ROWS, origin + n, k, unit, log2, flat, codes, code, absmax, offset, nested_log2)
            put_across(ROWS, units, scales, across)
            sums[: rows * ROWS] = 0
            for part in range(0, k, PART):
                count = min(PART, k - part)
                # The next part of the strip, or the first one of the next strip.
                ahead = PART // 2 if part + PART < k else ROWS * k // 2 - part // 2
                _decode(packed, top, origin + n - 1, k, part, count, ahead, low_first, table, weights)
                at, own = part // unit * ROWS, (padded[group] * k + part * rows) // 2
                for column in range(0, wide, COLUMNS):
                    _tile(COLUMNS, unit, weights, x, own + column * count // 2, across, at, sums, column, count)
                for column in range(wide, rows, FEWER):
                    _tile(FEWER, unit, weights, x, own + column * count // 2, across, at, sums, column, count)
            left, targets = top - origin, target[firsts[group] : firsts[group + 1]]
            if left + ROWS <= n:
                finish(ROWS, ROWS, sums, inverse, bias, matrices[group], targets, left, out)
            else:
                finish(ROWS, n - left, sums, inverse, bias, matrices[group], targets, left, out)


@njit(nogil=True, cache=True, fastmath=False, error_model="numpy")
def _multiply_together(pieces, size, *arguments):
    return region(_multiply, pieces, size, arguments)


@intrinsic
def _put_pairs(typing_context, row, first, out, to, columns):
    """out[to], out[to + columns], ...: pairs of the eight numbers row[first:], each with the one four further on."""
    at = types.intp
    signature = types.void(row, at, out, at, at)
    order = ir.Constant(ir.VectorType(I32, EIGHT), [one + PAIRS * second for one in range(PAIRS) for second in (0, 1)])

    def lower(context, builder, signature, arguments):
        row, first, out, to, columns = (
            context.make_array(kind)(context, builder, value) if isinstance(kind, types.Array) else value
            for kind, value in zip(signature.args, arguments, strict=True)
        )
        eight = load(builder, builder.gep(row.data, [first]), I16, EIGHT)
        pairs = builder.bitcast(builder.shuffle_vector(eight, eight, order), ir.VectorType(I32, PAIRS))
        for pair in range(PAIRS):
            place = builder.add(to, builder.mul(columns, I64(pair)))
            builder.store(builder.extract_element(pairs, I32(pair)), builder.gep(out.data, [place]))
        return context.get_dummy_value()

    return signature, lower


@intrinsic
def _decode(typing_context, packed, row, last, k, first, count, ahead, low_first, table, out):
    """out[pair, r] = the bits of two weights of row + r, of `count` weights from `first` on; rows beyond the last are
    the last one again. ahead: to what is asked for meanwhile, in bytes."""
    at = types.intp
    signature = types.void(packed, at, at, at, at, at, at, low_first, table, out)
    words = ir.VectorType(I16, 2 * LANES)

    def lower(context, builder, signature, arguments):
        packed, row, last, k, first, count, ahead, low_first, table, out = (
            context.make_array(kind)(context, builder, value) if isinstance(kind, types.Array) else value
            for kind, value in zip(signature.args, arguments, strict=True)
        )
        numbers = load(builder, table.data, I16, 2 * LANES)
        # Of two neighbouring weights, the first one is in the low half of a byte or in the high one.
        halves_at = [builder.select(low_first, I16(4 * pair), I16(4 * (pair ^ 1))) for pair in range(PAIRS)]
        shifts = [splat(builder, bits, 2 * LANES) for bits in halves_at]
        row_bytes, first_byte = (builder.lshr(value, I64(1)) for value in (k, first))
        steps = builder.udiv(count, I64(WEIGHTS))
        with cgutils.for_range(builder, I64(ROWS // LANES)) as halves:
            half = builder.mul(halves.index, I64(LANES))
            rows = [builder.add(builder.add(row, half), I64(lane)) for lane in range(LANES)]
            rows = [builder.select(builder.icmp_signed("<", r, last), r, last) for r in rows]
            begins = [builder.gep(packed.data, [builder.add(builder.mul(r, row_bytes), first_byte)]) for r in rows]
            with cgutils.for_range(builder, steps) as loop:
                byte = builder.mul(loop.index, I64(WEIGHTS // 2))
                lines = [load(builder, builder.gep(begin, [byte]), I32, LANES) for begin in begins]
                for begin in begins:
                    prefetch(builder, builder.gep(begin, [builder.add(byte, ahead)]), SECOND)
                first_pair = builder.mul(loop.index, I64(WEIGHTS // 2))
                own = builder.gep(out.data, [builder.add(builder.mul(first_pair, I64(ROWS)), half)])
                for number, eight in enumerate(transpose(builder, lines)):
                    packed_eight = builder.bitcast(eight, words)
                    for pair in range(PAIRS):
                        index = builder.lshr(packed_eight, shifts[pair])
                        found = call(builder, "llvm.x86.avx512.permvar.hi.512", words, numbers, index)
                        place = I64((number * PAIRS + pair) * ROWS)
                        store(builder, builder.bitcast(found, eight.type), builder.gep(own, [place]), I32)
        return context.get_dummy_value()

    return signature, lower


@intrinsic(prefer_literal=True)
def _tile(typing_context, columns, unit, weights, x, from_x, scales, from_scale, sums, row, count):
    """sums[row, r] of `columns` rows of x, whose part begins at x[from_x], and of all rows of a strip, get the products
    of `count` weights. scales: of a unit all rows of the strip, of the next one, ... columns is a literal."""
    at = types.intp
    signature = types.void(columns, at, weights, x, at, scales, at, sums, at, at)
    columns = columns.literal_value
    vector, bf16s = ir.VectorType(F32, LANES), ir.VectorType(BF16, 2 * LANES)
    every = [(column, half) for column in range(columns) for half in range(0, ROWS, LANES)]

    def lower(context, builder, signature, arguments):
        _, unit, weights, x, from_x, scales, from_scale, sums, row, count = (
            context.make_array(kind)(context, builder, value) if isinstance(kind, types.Array) else value
            for kind, value in zip(signature.args, arguments, strict=True)
        )
        own_x, own_scales = builder.gep(x.data, [from_x]), builder.gep(scales.data, [from_scale])
        own_sums = builder.gep(sums.data, [builder.mul(row, I64(ROWS))])
        results = {(c, h): builder.gep(own_sums, [I64(c * ROWS + h)]) for c, h in every}
        totals = {one: cgutils.alloca_once_value(builder, load(builder, results[one], F32, LANES)) for one in every}
        of_unit = {one: cgutils.alloca_once(builder, vector) for one in every}
        pairs = builder.lshr(unit, I64(1))
        with cgutils.for_range(builder, builder.udiv(count, unit)) as units:
            for one in every:
                builder.store(ir.Constant(vector, [0.0] * LANES), of_unit[one])
            first = builder.mul(units.index, pairs)
            with cgutils.for_range(builder, builder.udiv(pairs, I64(UNROLLED))) as loop:
                for step in range(UNROLLED):
                    pair = builder.add(builder.add(first, builder.mul(loop.index, I64(UNROLLED))), I64(step))
                    strip = builder.gep(weights.data, [builder.mul(pair, I64(ROWS))])
                    w = {
                        half: builder.bitcast(load(builder, builder.gep(strip, [I64(half)]), I32, LANES), bf16s)
                        for half in range(0, ROWS, LANES)
                    }
                    pairs_of_x = builder.gep(own_x, [builder.mul(pair, I64(columns))])
                    numbers = [builder.load(builder.gep(pairs_of_x, [I64(column)])) for column in range(columns)]
                    every_x = [builder.bitcast(splat(builder, one, LANES), bf16s) for one in numbers]
                    for c, h in every:
                        total = builder.load(of_unit[c, h])
                        total = call(builder, "llvm.x86.avx512bf16.dpbf16ps.512", vector, total, w[h], every_x[c])
                        builder.store(total, of_unit[c, h])
            own = builder.gep(own_scales, [builder.mul(units.index, I64(ROWS))])
            scale = {half: load(builder, builder.gep(own, [I64(half)]), F32, LANES) for half in range(0, ROWS, LANES)}
            for c, h in every:
                total = builder.load(totals[c, h])
                total = call(builder, "llvm.fmuladd.v16f32", vector, builder.load(of_unit[c, h]), scale[h], total)
                builder.store(total, totals[c, h])
        for one in every:
            store(builder, builder.load(totals[one]), results[one], I32)
        return context.get_dummy_value()

    return signature, lower
