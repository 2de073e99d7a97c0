"""x @ W.T for more than a few rows of x on a CPU with AVX2 or AVX-512, in fp32; products.py is for fewer.

x [T, K], W packed two weights a byte, one scale for every `block_size` weights -> sums in fp32.

A strip is 16 rows of W, or 32 with AVX-512, each of which is a lane of two registers. Its weights are decoded once, for
a part of K at a time, and stay in the first cache while all rows of x meet them in tiles of six or four rows, whose
sums stay in registers: a number of x that all lanes have is multiplied by two registers of weights. To decode, as many
rows of packed bytes as lanes are transposed, 32 bits at a time, and a permutation looks a weight of each row up; in
each half of the codebook with AVX2, where the fourth bit says which of the two it is. Times their scales they are the
dequantized fp32 weights, to the bit.

x is put into the order in which tiles read it. Each output is summed along K in chains, these part by part, in an order
that depends neither on the other rows of x nor on the threads. It is another order than that of fewer rows.

Bytes moved: as products.py. Flops: 2 N K for each row.
"""

# numba finds out the types of kernels by itself, and llvmlite has none for what it builds.
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

from functools import cache
from typing import Any

import llvmlite.ir as ir
import numpy as np
from numba import njit
from numba.core import cgutils, types
from numba.core.registry import cpu_target
from numba.extending import intrinsic
from torch import Tensor

from halfbyte.formats.spec import Format
from halfbyte.kernels.common.addresses import in_lines
from halfbyte.kernels.common.floats import from_bits
from halfbyte.kernels.common.llvm import (
    F32,
    I32,
    I64,
    call,
    concatenate,
    constant,
    has_feature,
    load,
    part,
    prefetch,
    splat,
    store,
)
from halfbyte.kernels.common.products import (
    GRAIN,
    WEIGHTS,
    added_to,
    array_of,
    begins_of,
    grain_of,
    rows_before,
    tiles_of,
)
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

HAS_512_BITS = has_feature(cpu_target.target_context, "avx512f")
# Lanes of a register, rows of W in a strip, and how many weights of each row are decoded at a time: 16 KB of them.
LANES = 16 if HAS_512_BITS else 8
ROWS, PART = 2 * LANES, 2048 // LANES

# Rows of x of a group up to which products.py is the faster: with 512 bits it looks sixteen weights up at once.
MOST_FEW = 32 if HAS_512_BITS else 4

# Weights in a chain of multiply-adds. With more, sums are less exact than those of torch's fp32 product.
CHAIN = 64

NIBBLES, WORDS = 8, 4  # in 32 bits; and of these in a step

A_NUMBER = np.empty(0, np.float32)

SECOND = 2  # cache, which the bytes of W come to a part ahead


@cache
def is_for_this_cpu() -> bool:
    return all(has_feature(cpu_target.target_context, name) for name in ("avx2", "fma"))


def supports(k: int) -> bool:
    return k > 0 and k % WEIGHTS == 0 and is_for_this_cpu()


def multiply(
    x: Tensor, source: Any, weight: tuple[Any, ...], format: Format, matrices: Any, first: Any, bias: Tensor | None,
    target: Any, out: Tensor,
) -> None:  # fmt: skip
    """out[target[i]] = x[source[i]] @ W.T + bias, as `multiply` and `finish` of products.py have it, of x [T, K],
    contiguous. bias: a row for each matrix of the stack, or None."""
    k, n = x.shape[1], out.shape[1]
    padded = padded_begins(first)
    arranged = in_lines(padded[-1] * k, A_NUMBER)
    parallel(_arrange, len(source), max(1, GRAIN // k), array_of(x), source, first, padded, arranged)
    begins = begins_of(padded, lambda rows: cost_of(rows) * tiles_of(n, ROWS))
    total = int(begins[-1])
    grain = grain_of(total, n * k * len(source))
    arguments = matrices, first, padded, begins, *weight, format.low_first, arranged, int(np.diff(padded).max()), k
    arguments = *arguments, added_to(bias, out), target, array_of(out)
    parallel(_multiply, total, grain, *arguments, region=_multiply_together)


@njit(nogil=True, cache=True, fastmath=False, error_model="numpy")
def _arrange(begin, end, x, source, firsts, padded, out):
    """x of results `begin` to before `end` as tiles read it: part by part of K, tile by tile, number by number, in each
    all rows of the tile."""
    k = x.shape[1]
    group = 0
    for place in range(begin, end):
        while firsts[group + 1] <= place:
            group += 1
        rows, begin_of, end_of = padded[group + 1] - padded[group], firsts[group], firsts[group + 1]
        columns, column, begins, missing = place_in_tiles(place, begin_of, end_of, rows)
        row = x[source[place]]
        for first in range(0, k, PART):
            count = min(PART, k - first)
            to = padded[group] * k + first * rows + begins * count + column
            for number in range(count):
                out[to + number * columns] = from_bits(row[first + number])
                for beyond in range(missing):
                    out[to + number * columns + 1 + beyond] = 0


@njit(nogil=True, cache=True, fastmath=False, error_model="numpy")
def _multiply(
    begin, end, matrices, firsts, padded, begins, packed, flat, codes, code, absmax, offset, nested_log2, log2,
    codebook, low_first, x, most, k, bias, target, out,
):  # fmt: skip
    """The strips of W that begin from `begin` to before `end`. Scales are `flat` or, if that is empty, the five after
    it."""
    n, units = out.shape[1], k // WEIGHTS
    scales = np.empty(ROWS * units, np.float32)
    across, sums, weights = in_lines(ROWS * units, x), in_lines(ROWS * most, x), in_lines(ROWS * PART, x)
    for group in range(len(matrices)):
        origin, rows = matrices[group] * n, padded[group + 1] - padded[group]
        cost, wide = cost_of(rows), wide_rows(rows)
        low = origin + rows_before(begin - begins[group], cost, ROWS)
        high = origin + min(rows_before(end - begins[group], cost, ROWS), n)
        for top in range(low, high, ROWS):
            last = origin + n
            decode_scales(scales, top, ROWS, last, k, WEIGHTS, log2, flat, codes, code, absmax, offset, nested_log2)
            put_across(ROWS, units, scales, across)
            sums[: rows * ROWS] = 0
            for first in range(0, k, PART):
                count = min(PART, k - first)
                # The next part of the strip, or the first one of the next strip.
                ahead = PART // 2 if first + PART < k else ROWS * k // 2 - first // 2
                _decode(packed, top, last - 1, k, first, count, ahead, low_first, codebook, across, weights)
                own = padded[group] * k + first * rows
                for column in range(0, wide, COLUMNS):
                    _tile(COLUMNS, weights, x, own + column * count, sums, column, count)
                for column in range(wide, rows, FEWER):
                    _tile(FEWER, weights, x, own + column * count, sums, column, count)
            left, targets = top - origin, target[firsts[group] : firsts[group + 1]]
            finish(ROWS, min(ROWS, n - left), sums, np.float32(1), bias, matrices[group], targets, left, out)


@njit(nogil=True, cache=True, fastmath=False, error_model="numpy")
def _multiply_together(pieces, size, *arguments):
    return region(_multiply, pieces, size, arguments)


def _transposed(builder, rows):
    """As many vectors of four words as lanes -> four of so many: those of all first words, of all second ones, ..."""
    fours = range(0, LANES, WORDS)

    def exchanged(first, second, places):
        """Of every four words of two vectors those at these places, of which the second's begin at four."""
        lanes = [four + place % WORDS + place // WORDS * LANES for four in fours for place in places]
        return builder.shuffle_vector(first, second, ir.Constant(ir.VectorType(I32, LANES), lanes))

    wide = []
    for begin in range(WORDS):
        parts = rows[begin::WORDS]
        while len(parts) > 1:
            parts = [concatenate(builder, *parts[one : one + 2]) for one in range(0, len(parts), 2)]
        wide += parts
    found = []
    for places in ((0, 4, 1, 5), (2, 6, 3, 7)):
        first, second = (exchanged(wide[begin], wide[begin + 1], places) for begin in (0, 2))
        found += [exchanged(first, second, halves) for halves in ((0, 1, 4, 5), (2, 3, 6, 7))]
    return found


def _looked_up(builder, numbers, index):
    """numbers[index & 15], of the sixteen numbers of a codebook."""
    if HAS_512_BITS:
        return call(builder, "llvm.x86.avx512.permvar.sf.512", numbers.type, numbers, index)
    tables = [part(builder, numbers, begin, LANES) for begin in (0, LANES)]
    small, large = (call(builder, "llvm.x86.avx2.permps", table.type, table, index) for table in tables)
    sign = builder.shl(index, constant(index.type, 28))
    return builder.select(builder.icmp_signed("<", sign, constant(index.type, 0)), large, small)


@intrinsic
def _decode(typing_context, packed, row, last, k, first, count, ahead, low_first, codebook, scales, out):
    """out[i, r] = the weights of row + r, of `count` weights from `first` on; rows beyond the last are the last one
    again. scales: of a step all rows of the strip, of the next one, ... ahead: to what is asked for meanwhile, in
    bytes."""
    at = types.intp
    signature = types.void(packed, at, at, at, at, at, at, low_first, codebook, scales, out)

    def lower(context, builder, signature, arguments):
        packed, row, last, k, first, count, ahead, low_first, codebook, scales, out = (
            context.make_array(kind)(context, builder, value) if isinstance(kind, types.Array) else value
            for kind, value in zip(signature.args, arguments, strict=True)
        )
        numbers = load(builder, codebook.data, F32, 16)
        # Of two neighbouring weights, the first one is in the low half of a byte or in the high one.
        shifts = [builder.select(low_first, I32(4 * one), I32(4 * (one ^ 1))) for one in range(NIBBLES)]
        shifts = [splat(builder, bits, LANES) for bits in shifts]
        row_bytes, first_byte = (builder.lshr(value, I64(1)) for value in (k, first))
        first_step, steps = (builder.udiv(value, I64(WEIGHTS)) for value in (first, count))
        with cgutils.for_range(builder, I64(ROWS // LANES)) as halves:
            half = builder.mul(halves.index, I64(LANES))
            rows = [builder.add(builder.add(row, half), I64(lane)) for lane in range(LANES)]
            rows = [builder.select(builder.icmp_signed("<", r, last), r, last) for r in rows]
            begins = [builder.gep(packed.data, [builder.add(builder.mul(r, row_bytes), first_byte)]) for r in rows]
            with cgutils.for_range(builder, steps) as loop:
                byte = builder.mul(loop.index, I64(WEIGHTS // 2))
                lines = [load(builder, builder.gep(begin, [byte]), I32, WORDS) for begin in begins]
                for begin in begins:
                    prefetch(builder, builder.gep(begin, [builder.add(byte, ahead)]), SECOND)
                of_step = builder.mul(builder.add(first_step, loop.index), I64(ROWS))
                scale = load(builder, builder.gep(scales.data, [builder.add(of_step, half)]), F32, LANES)
                to = builder.add(builder.mul(loop.index, I64(WEIGHTS * ROWS)), half)
                for word, words in enumerate(_transposed(builder, lines)):
                    for nibble in range(NIBBLES):
                        found = _looked_up(builder, numbers, builder.lshr(words, shifts[nibble]))
                        place = builder.add(to, I64((word * NIBBLES + nibble) * ROWS))
                        weights = builder.bitcast(builder.fmul(found, scale), words.type)
                        store(builder, weights, builder.gep(out.data, [place]), I32)
        return context.get_dummy_value()

    return signature, lower


@intrinsic(prefer_literal=True)
def _tile(typing_context, columns, weights, x, from_x, sums, row, count):
    """sums[row, r] of `columns` rows of x, whose part begins at x[from_x], and of all rows of a strip, get the products
    of `count` weights. columns is a literal."""
    at = types.intp
    signature = types.void(columns, weights, x, at, sums, at, at)
    columns = columns.literal_value
    vector = ir.VectorType(F32, LANES)
    every = [(column, half) for column in range(columns) for half in range(0, ROWS, LANES)]

    def lower(context, builder, signature, arguments):
        _, weights, x, from_x, sums, row, count = (
            context.make_array(kind)(context, builder, value) if isinstance(kind, types.Array) else value
            for kind, value in zip(signature.args, arguments, strict=True)
        )
        own_x = builder.gep(x.data, [from_x])
        own_sums = builder.gep(sums.data, [builder.mul(row, I64(ROWS))])
        results = {(c, h): builder.gep(own_sums, [I64(c * ROWS + h)]) for c, h in every}
        zeros = ir.Constant(vector, [0.0] * LANES)
        of_part = {one: cgutils.alloca_once_value(builder, zeros) for one in every}
        of_chain = {one: cgutils.alloca_once(builder, vector) for one in every}
        chains = builder.udiv(builder.add(count, I64(CHAIN - 1)), I64(CHAIN))
        with cgutils.for_range(builder, chains) as chain:
            for one in every:
                builder.store(zeros, of_chain[one])
            first = builder.mul(chain.index, I64(CHAIN))
            rest = builder.sub(count, first)
            length = builder.select(builder.icmp_signed("<", rest, I64(CHAIN)), rest, I64(CHAIN))
            with cgutils.for_range(builder, length) as loop:
                place = builder.add(first, loop.index)
                strip = builder.gep(weights.data, [builder.mul(place, I64(ROWS))])
                w = {half: load(builder, builder.gep(strip, [I64(half)]), F32, LANES) for half in range(0, ROWS, LANES)}
                of_x = builder.gep(own_x, [builder.mul(place, I64(columns))])
                numbers = [builder.load(builder.gep(of_x, [I64(column)])) for column in range(columns)]
                every_x = [splat(builder, number, LANES) for number in numbers]
                for c, h in every:
                    total = builder.load(of_chain[c, h])
                    total = call(builder, f"llvm.fma.v{LANES}f32", vector, w[h], every_x[c], total)
                    builder.store(total, of_chain[c, h])
            for one in every:
                builder.store(builder.fadd(builder.load(of_part[one]), builder.load(of_chain[one])), of_part[one])
        for one in every:
            total = builder.fadd(load(builder, results[one], F32, LANES), builder.load(of_part[one]))
            store(builder, builder.bitcast(total, ir.VectorType(I32, LANES)), results[one], I32)
        return context.get_dummy_value()

    return signature, lower
