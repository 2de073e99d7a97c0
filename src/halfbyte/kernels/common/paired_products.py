"""x @ W.T on a CPU that multiplies bf16 numbers in pairs, as `products.py` has it for all others.

x [T, K] bf16, W packed two weights a byte, one scale for every `block_size` weights -> sums in fp32.

Sixteen bits of W, four weights, are one lane of a register, and a permutation of the codebook by them looks 32 weights
up (`vpermw`, which looks at five bits of an index: the codebook is there twice, so the fifth does not matter). Shifts
bring the other three weights of each lane to where it looks. So 128 weights take four permutations and three shifts,
and four instructions of 32 multiply-adds (`vdpbf16ps`) for each row of x; x is put into the order in which they come
out. Sums of 128 weights are scaled in fp32, those of each block by its own scale: two neighbouring lanes of W are one
of the sums, so a sum has eight neighbouring weights, which share a scale.

With eight rows of x and more, a part of K stays in the first cache while 64 rows of W are multiplied with it; what they
have then waits in memory for the next part. x is laid out tile by tile, so that a tile reads what lies side by side.

The codebook is multiplied by a factor that makes its rounding to bf16 harmless (linear/codebook.py), and results by one
over that factor. Each output is summed in sixteen lanes, along K; at last the lanes are added in pairs. That order
depends neither on how many rows a group has, nor on a row's place, nor on the threads: the same bits, always.

Bytes moved: as products.py. Flops: 2 N K for each row.
"""

# numba finds out the types of kernels by itself, and llvmlite has none for what it builds.
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import llvmlite.binding
import llvmlite.ir as ir
import numpy as np
import torch
from numba import njit
from numba.core import cgutils, types
from numba.core.registry import cpu_target
from numba.extending import intrinsic, register_jitable
from torch import Tensor

from halfbyte.formats.spec import Format
from halfbyte.kernels.common.addresses import array_at, in_lines
from halfbyte.kernels.common.llvm import BF16, F32, I16, I64, add_up, call, has_feature, load, prefetch, shift_right
from halfbyte.kernels.common.products import (
    GRAIN,
    Call,
    alone,
    array_of,
    begins_of,
    grain_of,
    in_one_call,
    rows_before,
    tiles_of,
    together,
)
from halfbyte.kernels.common.region import region
from halfbyte.kernels.common.scales import decode_scales
from halfbyte.kernels.common.threads import parallel

# A step takes so many packed bytes of a row of W, which are so many weights.
BYTES, WEIGHTS, LANES, WORDS = 64, 128, 16, 32

# Rows of W and the most of x in a tile, and how many tiles ahead the bytes of W are asked for. They come to the second
# cache: the first has too few requests on their way for a thread to read at the speed of memory.
ROWS, COLUMNS, AHEAD, SECOND = 2, 8, 6, 2

# With so many rows of x, their part of so many steps stays in the first cache while so many rows of W meet it.
HELD, PANEL = 8, 64

# From this version on LLVM has the instruction with this signature; that of numba 0.61 is older.
LLVM_HAS_IT = llvmlite.binding.llvm_version_info[0] >= 16


@cache
def is_for_this_cpu() -> bool:
    return bool(LLVM_HAS_IT and has_feature(cpu_target.target_context, "avx512bf16"))


def supports(dtype: torch.dtype, k: int) -> bool:
    return dtype is torch.bfloat16 and k > 0 and k % WEIGHTS == 0 and is_for_this_cpu()


@cache
def table_of(codebook: tuple[float, ...], factor: float) -> Any:
    """What is looked up in: bits of the codebook times the factor in bf16, twice."""
    values = (torch.tensor(codebook, dtype=torch.float64, device="cpu") * factor).to(torch.bfloat16)
    return values.repeat(2).view(torch.int16).numpy()


@cache
def order_of(low_first: bool) -> Any:
    """In which order the four weights of a lane come out: of every lane one, then of every lane the next one, ..."""
    return np.array((0, 1, 2, 3) if low_first else (1, 0, 3, 2))


def multiply(
    x: Tensor, source: Any, weight: tuple[Any, ...], format: Format, factor: float, block_size: int, n: int,
    matrices: Any, first: Any,
) -> Any:  # fmt: skip
    """As `multiply` of products.py, of x [T, K] bf16, contiguous. factor: of the codebook."""
    k = x.shape[1]
    bits = array_of(x)
    ordered, y = in_lines(len(source) * k, bits), np.empty((len(source), n), np.float32)
    parallel(_reorder, len(source), max(1, GRAIN // k), bits, source, first, order_of(format.low_first), ordered)
    begins = begins_of(first, lambda rows: _cost(rows) * tiles_of(n, ROWS))
    total = int(begins[-1])
    grain = grain_of(total, n * k * len(source))
    arguments = matrices, first, begins, *weight[:-1], *numbers_of(format, factor, block_size), ordered, k, y
    parallel(_multiply, total, grain, *arguments, region=_multiply_together)
    return y


def bind(weight: Callable[[], tuple[Any, ...]], format: Format, factor: float, block_size: int, n: int, k: int) -> Call:
    """As `bind` of products.py, of x in bf16. factor: of the codebook."""
    order, numbers = order_of(format.low_first), numbers_of(format, factor, block_size)
    tiles = lambda m: _cost(m) * tiles_of(n, ROWS)  # noqa: E731
    return in_one_call(_alone, _together, tiles, n, k, torch.bfloat16, lambda: (order, *weight()[:-1], *numbers))


def numbers_of(format: Format, factor: float, block_size: int) -> tuple[Any, ...]:
    """What kernels are told of a weight in place of its codebook: the table, its inverse factor, weights a scale."""
    return table_of(format.codebook, factor), np.float32(1 / factor), 64 if block_size >= 64 else 32


@njit(nogil=True, cache=True, fastmath=False, error_model="numpy")
def _reorder(begin, end, x, source, firsts, order, out):
    """x of results `begin` to before `end` as tiles read it: step by step, in each the tile's rows, in `order`."""
    k = x.shape[1]
    group = 0
    for place in range(begin, end):
        while firsts[group + 1] <= place:
            group += 1
        top, rest = firsts[group], firsts[group + 1] - firsts[group]
        columns = COLUMNS
        while place >= top + rest // columns * columns:
            top += rest // columns * columns
            rest %= columns
            columns //= 2
        inside = (place - top) % columns
        to = (place - inside) * k + inside * WEIGHTS
        row = x[source[place]]
        for first in range(0, k, WEIGHTS):
            for part in range(len(order)):
                own = to + first * columns + part * WORDS
                for word in range(WORDS):
                    out[own + word] = row[first + len(order) * word + order[part]]


@njit(nogil=True, cache=True, fastmath=False, error_model="numpy")
def _multiply(
    begin, end, matrices, firsts, begins, packed, flat, codes, code, absmax, offset, nested_log2, log2, table, inverse,
    unit, x, k, out,
):  # fmt: skip
    """The tiles of W that begin from `begin` to before `end`. Scales are `flat` or, if that is empty, the five after
    it."""
    n, steps = out.shape[1], k // WEIGHTS
    units = k // unit
    scales = np.empty(PANEL * units, np.float32)
    sums = in_lines(PANEL * COLUMNS * LANES, scales)
    given = packed, scales, units, table, inverse, x, out, sums
    for group in range(len(matrices)):
        first, last, origin = firsts[group], firsts[group + 1], matrices[group] * n
        cost = _cost(last - first)
        low = origin + rows_before(begin - begins[group], cost, ROWS)
        high = origin + min(rows_before(end - begins[group], cost, ROWS), n)
        panel = PANEL if last - first >= COLUMNS else ROWS
        for top in range(low, high, panel):
            bottom, column = min(top + panel, high), first
            rows = tiles_of(bottom - top, ROWS) * ROWS
            decode_scales(scales, top, rows, origin + n, k, unit, log2, flat, codes, code, absmax, offset, nested_log2)
            while last - column >= COLUMNS:
                for step in range(0, steps, HELD):
                    until = min(step + HELD, steps)
                    for row in range(top, bottom, ROWS):
                        if unit == 64:
                            _tile(COLUMNS, 2, given, row, origin, column, row - top, step, until)
                        else:
                            _tile(COLUMNS, 4, given, row, origin, column, row - top, step, until)
                column += COLUMNS
            for row in range(top, bottom, ROWS):
                rest = column
                while rest < last:
                    if unit == 64:
                        rest += _tile_of_fewer(2, last - rest, given, row, origin, rest, row - top, steps)
                    else:
                        rest += _tile_of_fewer(4, last - rest, given, row, origin, rest, row - top, steps)


@njit(nogil=True, cache=True, fastmath=False, error_model="numpy")
def _multiply_together(pieces, size, *arguments):
    return region(_multiply, pieces, size, arguments)


@njit(nogil=True, cache=True, fastmath=False, error_model="numpy")
def _alone(total, x, bias, out, m, k, n, like, order, *weight):
    alone(_multiply, total, _begin(total, x, m, k, n, like, order, weight), bias, out, like)


@njit(nogil=True, cache=True, fastmath=False, error_model="numpy")
def _together(pieces, total, x, bias, out, m, k, n, like, order, *weight):
    return together(_multiply, pieces, total, _begin(total, x, m, k, n, like, order, weight), bias, out, like)


@register_jitable
def _begin(total, x, m, k, n, like, order, weight):
    """What `_multiply` is told of one weight and all rows, x first in its order."""
    firsts, ordered, y = np.array([0, m]), in_lines(m * k, like), np.empty((m, n), np.float32)
    _reorder(0, m, array_at(x, (m, k), ordered), np.arange(m), firsts, order, ordered)
    return (np.zeros(1, np.int64), firsts, np.array([0, total]), *weight, ordered, k, y)


@register_jitable
def _cost(rows):
    """Of a tile of W with so many rows of x: to read it and look it up takes as long as some four of them."""
    return 4 + rows


@njit(inline="always")
def _tile_of_fewer(blocks, rest, given, row, origin, column, of_panel, steps):
    """All of a tile of as many rows of x, less than COLUMNS, as there is code for; returns how many."""
    if rest >= 4:
        _tile(4, blocks, given, row, origin, column, of_panel, 0, steps)
        return 4
    if rest >= 2:
        _tile(2, blocks, given, row, origin, column, of_panel, 0, steps)
        return 2
    _tile(1, blocks, given, row, origin, column, of_panel, 0, steps)
    return 1


@intrinsic(prefer_literal=True)
def _tile(typing_context, columns, blocks, given, row, origin, column, of_panel, step, until):
    """Steps `step` to before `until` of out[column:][:columns, row - origin:][:, :ROWS]; columns and blocks are
    literals, blocks being the scales of a step. origin: the row of the stack that column 0 of `out` belongs to.
    of_panel: the row's number in `scales`, and in `sums`, where those of COLUMNS rows of x wait for their next steps.
    With fewer columns a tile has all steps."""
    at = types.intp
    signature = types.void(columns, blocks, given, at, at, at, at, at, at)
    columns, blocks = columns.literal_value, blocks.literal_value
    vector, words = ir.VectorType(F32, LANES), ir.VectorType(I16, WORDS)
    pairs = ir.VectorType(BF16, WORDS)

    def lower(context, builder, signature, arguments):
        kinds, (_, _, values, row, origin, column, of_panel, begin, until) = signature.args[2].types, arguments
        packed, scales, units, table, inverse, x, out, sums = (
            context.make_array(kind)(context, builder, value) if isinstance(kind, types.Array) else value
            for kind, value in zip(kinds, cgutils.unpack_tuple(builder, values), strict=True)
        )
        n = builder.extract_value(out.shape, 1)
        steps = builder.udiv(units, I64(blocks))
        k = builder.mul(steps, I64(WEIGHTS))
        last = builder.sub(builder.add(origin, n), I64(1))
        rows = [builder.add(row, I64(r)) for r in range(ROWS)]
        rows = [builder.select(builder.icmp_signed("<", r, last), r, last) for r in rows]
        places = [builder.add(column, I64(c)) for c in range(columns)]
        weights_of = [builder.gep(packed.data, [builder.lshr(builder.mul(r, k), I64(1))]) for r in rows]
        scales_of = [builder.gep(scales.data, [builder.mul(units, builder.add(of_panel, I64(r)))]) for r in range(ROWS)]
        own_x = builder.gep(x.data, [builder.mul(column, k)])
        numbers = load(builder, table.data, I16, WORDS)
        lanes = ir.Constant(ir.VectorType(ir.IntType(32), LANES), [lane * blocks // LANES for lane in range(LANES)])
        zero = ir.Constant(vector, [0.0] * LANES)
        totals = [[cgutils.alloca_once_value(builder, zero) for _ in places] for _ in rows]
        every = [(r, c) for r in range(ROWS) for c in range(columns)]

        def kept(r, c):
            at = builder.add(builder.mul(of_panel, I64(COLUMNS * LANES)), I64((r * columns + c) * LANES))
            return builder.gep(sums.data, [at])

        if columns == COLUMNS:
            with builder.if_then(builder.icmp_signed(">", begin, I64(0))):
                for r, c in every:
                    builder.store(load(builder, kept(r, c), F32, LANES), totals[r][c])
        # With many rows LLVM would keep all of x in registers from one row of W to the next, and spill sums for it. It
        # knows nothing of these zeros.
        unknown = ir.FunctionType(I64, [I64])
        apart = [
            builder.asm(unknown, "", "=r,0", [I64(0)], side_effect=True) if columns == COLUMNS else I64(0) for _ in rows
        ]
        with cgutils.for_range(builder, builder.sub(until, begin)) as loop:
            step = builder.add(loop.index, begin)
            byte = builder.mul(step, I64(BYTES))
            ahead = builder.add(byte, builder.mul(k, I64(ROWS * AHEAD // 2)))
            for r in range(ROWS):
                prefetch(builder, builder.gep(weights_of[r], [ahead]), SECOND)
                lane = load(builder, builder.gep(weights_of[r], [byte]), I16, WORDS)
                indices = [lane, *(shift_right(builder, lane, bits) for bits in (4, 8, 12))]
                permuted = [call(builder, "llvm.x86.avx512.permvar.hi.512", words, numbers, i) for i in indices]
                found = [builder.bitcast(one, pairs) for one in permuted]
                scale = load(builder, builder.gep(scales_of[r], [builder.mul(step, I64(blocks))]), F32, blocks)
                here = builder.shuffle_vector(scale, scale, lanes)
                of_x = builder.add(builder.mul(step, I64(columns * WEIGHTS)), apart[r])
                for c in range(columns):
                    total = zero
                    for i, weights in enumerate(found):
                        eight = load(
                            builder, builder.gep(own_x, [builder.add(of_x, I64(c * WEIGHTS + WORDS * i))]), I16, WORDS
                        )
                        eight = builder.bitcast(eight, pairs)
                        total = call(builder, "llvm.x86.avx512bf16.dpbf16ps.512", vector, total, weights, eight)
                    total = call(builder, "llvm.fmuladd.v16f32", vector, total, here, builder.load(totals[r][c]))
                    builder.store(total, totals[r][c])

        def keep():
            for r, c in every:
                to = builder.bitcast(kept(r, c), vector.as_pointer())
                builder.store(builder.load(totals[r][c]), to, align=4)

        def end():
            for r, c in every:
                total = builder.fmul(add_up(builder, builder.load(totals[r][c])), inverse)
                place = builder.add(builder.mul(places[c], n), builder.sub(rows[r], origin))
                builder.store(total, builder.gep(out.data, [place]))

        if columns == COLUMNS:
            with builder.if_else(builder.icmp_signed("<", until, steps)) as (goes_on, ends):
                with goes_on:
                    keep()
                with ends:
                    end()
        else:
            end()
        return context.get_dummy_value()

    return signature, lower
