"""x @ W.T on the CPU, straight from the 4-bit bytes, through numba: for one weight, and for the experts of a stack.

x [T, K] fp32, W packed two weights a byte, one scale for every `block_size` weights -> sums in fp32. Rows of x that go
to the same matrix of a stack [E, N, K] form a group; a weight [N, K] is a stack of one, and all rows are its group.

A weight becomes a number in one instruction: the sixteen values of a block, codebook * scale, fill a vector register,
and a permutation of that register by sixteen nibbles looks sixteen weights up (`look_up` in llvm.py). They are the
dequantized fp32 weights to the bit. What is left is one multiply-add for each row of x.

A tile is four rows of W times one to four rows of x, in registers; x is put into the order in which the nibbles of a
byte come out. Four rows of W meet all rows of their group before the next four, so the packed bytes of a matrix come
from memory once. Each output is summed in sixteen lanes, in chains of multiply-adds along K that are added one by one;
at last the lanes are added in pairs. That order depends neither on how many rows a group has, nor on a row's place, nor
on the threads, which share the rows of W: the same bits, always.

Bytes moved: the packed weights and scales of the matrices that have rows, once, while the rows of x of a group fit into
the cache. Flops: 2 N K for each row.
"""

# numba finds out the types of kernels by itself, and llvmlite has none for what it builds.
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from itertools import accumulate, pairwise
from typing import Any

import llvmlite.ir as ir
import numpy as np
import torch
from numba import njit
from numba.core import cgutils, types
from numba.extending import intrinsic, register_jitable
from torch import Tensor

from halfbyte.formats.spec import Format, codebook_tensor
from halfbyte.formats.weight import NestedScale, QuantizedWeight
from halfbyte.kernels.common.addresses import array_at, in_lines
from halfbyte.kernels.common.floats import BITS, LIKE, from_bits, to_bits
from halfbyte.kernels.common.llvm import F32, I8, I64, LOOK_UP_ORDER, add_up, call, load, look_up, prefetch, splat
from halfbyte.kernels.common.region import region
from halfbyte.kernels.common.scales import decode_scales, scale_arguments
from halfbyte.kernels.common.threads import OUT_OF_MEMORY, has_regions, parallel, pieces_of

# A step takes so many packed bytes of a row, which are so many weights. The smallest block is one step.
BYTES, WEIGHTS, LANES = 16, 32, 16

# Rows of W and of x in a tile, and how many tiles ahead the bytes of W are asked for.
ROWS, COLUMNS, AHEAD = 4, 4, 2

# Scales in a chain. One chain for all of K = 4096 has 1.1 times the error of MKL's fp32 product, and these have half.
CHAIN = 8

# Fewer multiply-adds than this are not worth waking a thread for.
GRAIN = 2**20

# out = x @ W.T + bias, of x [..., K], its rows, bias [N] or None, and out, all contiguous; False where threads are
# wanted that cannot begin in machine code here.
Call = Callable[[Tensor, int, Tensor | None, Tensor], bool]

# Where in a step the 32 weights of its 16 bytes lie, in the order in which `look_up` finds them: those of all high
# nibbles, then of all low ones, bytes taken as it takes them.
HIGH_FIRST = np.array([2 * byte + low for low in (0, 1) for byte in LOOK_UP_ORDER])
LOW_FIRST = HIGH_FIRST ^ 1
AS_IT_IS = np.arange(WEIGHTS)


def order_of(format: Format) -> Any:
    """The order in which `multiply` wants each step of x."""
    return LOW_FIRST if format.low_first else HIGH_FIRST


def widen(x: Tensor, order: Any) -> Any:
    """x [M, K] as fp32 numbers, rows of whole steps, filled up with zeros, each step in `order`."""
    m, k = x.shape
    whole = -(-k // WEIGHTS) * WEIGHTS
    wide = in_lines(m * whole, LIKE[torch.float32].view(np.float32)).reshape(m, whole)
    parallel(_widen, m, max(1, GRAIN // max(k, 1)), array_of(x), order, wide)
    return wide


def weight_arguments(
    packed: Tensor, scale: Tensor, nested: NestedScale | None, format: Format, block_size: int
) -> tuple[Any, ...]:
    """A weight as kernels take it: bytes, five for its scales, two binary logarithms of block sizes, the codebook."""
    *scales, nested_size = scale_arguments(scale, nested, format)
    octets, codebook = packed.numpy().reshape(-1).view(np.uint8), codebook_tensor(format, packed.device).numpy()
    return octets, *scales, _log2(nested_size), _log2(block_size), codebook


def weight_in_place(q: QuantizedWeight) -> Callable[[], tuple[Any, ...]]:
    """What gives `weight_arguments` without a hold on any tensor of the weight, as long as they lie where they do."""
    places = {tensor.data_ptr() for tensor in q.tensors}
    weight = tuple(
        _in_place(array) if isinstance(array, np.ndarray) and array.size and array.ctypes.data in places else array
        for array in weight_arguments(q.packed, q.scale, q.nested, q.spec, q.block_size)
    )
    if q.nested is None:
        return lambda: weight
    # Of these numbers one is in memory, too.
    (*before, _), after, offset = weight[:6], weight[6:], _in_place(q.nested.offset.numpy().reshape(-1))
    return lambda: (*before, offset[0], *after)


def _in_place(array: Any) -> Any:
    """The same numbers, which nothing keeps where they are."""
    return np.frombuffer((ctypes.c_uint8 * array.nbytes).from_address(array.ctypes.data), array.dtype)


def multiply(
    wide: Any, k: int, source: Any, weight: tuple[Any, ...], block_size: int, n: int, matrices: Any, first: Any
) -> Any:
    """y [first[-1], N] fp32: y[i] = x[source[i]] @ W.T, of the W that i's group has; K a multiple of a step.

    wide: x from `widen`, in `order_of` the format. weight: from `weight_arguments`, of a stack of matrices [N, K].
    matrices: int64 [G], which of the stack each group has. first: int64 [G + 1], where the rows of each group begin.
    """
    y = np.empty((len(source), n), np.float32)
    # What a tile of W costs is counted in tiles of x, so that threads get as much to do where groups differ in rows.
    begins = begins_of(first, lambda rows: tiles_of(rows, COLUMNS) * tiles_of(n, ROWS))
    total = int(begins[-1])
    grain = grain_of(total, n * k * len(source))
    arguments = matrices, first, begins, *weight, _unit(k, block_size), wide, k, source, y
    parallel(_multiply, total, grain, *arguments, region=_multiply_together)
    return y


def bind(
    weight: Callable[[], tuple[Any, ...]], format: Format, block_size: int, n: int, k: int, dtype: torch.dtype
) -> Call:
    """Products with a weight [N, K], given as `weight_arguments`, by one call of machine code; K a multiple of a step.
    dtype: of x, bias and results. The bits are those of `multiply` and `finish`."""
    order, unit = order_of(format), _unit(k, block_size)
    tiles = lambda m: tiles_of(m, COLUMNS) * tiles_of(n, ROWS)  # noqa: E731
    return in_one_call(_alone, _together, tiles, n, k, dtype, lambda: (order, *weight(), unit))


def in_one_call(
    alone: Any,
    together: Any,
    tiles: Callable[[int], int],
    n: int,
    k: int,
    dtype: torch.dtype,
    told: Callable[[], tuple[Any, ...]],
) -> Call:
    """Calls one of two kernels, the second of which has a region. tiles: for so many rows. told: what both are told of
    the weight."""
    like = LIKE[dtype]

    @cache
    def work(m: int) -> tuple[int, int]:
        total = tiles(m)
        return total, grain_of(total, n * k * m)

    def call(x: Tensor, m: int, bias: Tensor | None, out: Tensor) -> bool:
        total, grain = work(m)
        pieces = pieces_of(total, grain, True)
        places = x.data_ptr(), 0 if bias is None else bias.data_ptr(), out.data_ptr()
        if pieces == 1:
            alone(total, *places, m, k, n, like, *told())
        elif not has_regions():
            return False
        elif not together(pieces, total, *places, m, k, n, like, *told()):
            raise MemoryError(OUT_OF_MEMORY)
        return True

    return call


def finish(y: Any, target: Any, bias: Tensor | None, which: Any, out: Tensor) -> None:
    """out[target[i]] = y[i] + bias[which[i]], rounded once; `bias` may be of any dtype."""
    arguments = y, target, added_to(bias, out), which, array_of(out)
    parallel(_finish, len(y), max(1, GRAIN // max(1, y.shape[1])), *arguments)


def array_of(tensor: Tensor) -> Any:
    """Its bits, as kernels take them."""
    return tensor.view(BITS[tensor.dtype]).numpy()


def added_to(bias: Tensor | None, out: Tensor) -> Any:
    """A bias as kernels take it; an empty one where there is none."""
    return np.empty((1, 0), array_of(out).dtype) if bias is None else array_of(bias)


def _unit(k: int, block_size: int) -> int:
    """Weights a scale: of two steps where they share one everywhere, else of one."""
    return 2 * WEIGHTS if k % (2 * WEIGHTS) == 0 and block_size >= 2 * WEIGHTS else WEIGHTS


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
def _finish(begin, end, y, target, bias, which, out):
    """Rows of fp32 y plus the bias, if there is one, rounded once."""
    for row in range(begin, end):
        to = target[row]
        if bias.size:
            matrix = which[row]
            for column in range(y.shape[1]):
                out[to, column] = to_bits(y[row, column] + from_bits(bias[matrix, column]), out)
        else:
            for column in range(y.shape[1]):
                out[to, column] = to_bits(y[row, column], out)


def begins_of(first, cost):
    """Where the tiles of each group begin, counted by what they cost; cost: of so many rows of x."""
    return np.array(list(accumulate((cost(end - begin) for begin, end in pairwise(first.tolist())), initial=0)))


def grain_of(total, multiply_adds):
    """How much of `total` is worth a thread, where that stands for so many multiply-adds."""
    return max(1, total * GRAIN // max(1, multiply_adds))


@register_jitable
def tiles_of(size, tile):
    return -(-size // tile)


@njit(nogil=True, cache=True, fastmath=False, error_model="numpy")
def _multiply(
    begin, end, matrices, firsts, begins, packed, flat, codes, code, absmax, offset, nested_log2, log2, codebook, unit,
    x, k, source, out,
):  # fmt: skip
    """The tiles of W that begin from `begin` to before `end`. Scales are `flat` or, if that is empty, the five after
    it."""
    n, units = out.shape[1], k // unit
    scales = np.empty(ROWS * units, np.float32)
    for group in range(len(matrices)):
        first, last, origin = firsts[group], firsts[group + 1], matrices[group] * n
        cost = tiles_of(last - first, COLUMNS)
        low = origin + rows_before(begin - begins[group], cost, ROWS)
        high = origin + min(rows_before(end - begins[group], cost, ROWS), n)
        for row in range(low, high, ROWS):
            decode_scales(scales, row, ROWS, origin + n, k, unit, log2, flat, codes, code, absmax, offset, nested_log2)
            column = first
            while column < last:
                rest = last - column
                if unit == WEIGHTS:
                    _tile_of_any(1, rest, packed, row, origin, scales, units, codebook, x, source, column, out)
                else:
                    _tile_of_any(2, rest, packed, row, origin, scales, units, codebook, x, source, column, out)
                column += COLUMNS


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
    """What `_multiply` is told of one weight and all rows, x first in its order. weight: and the weights a scale."""
    y = np.empty((m, n), np.float32)
    wide = in_lines(m * k, y).reshape((m, k))
    _widen(0, m, array_at(x, (m, k), like), order, wide)
    return (np.zeros(1, np.int64), np.array([0, m]), np.array([0, total]), *weight, wide, k, np.arange(m), y)


# Inlined, since numba does not cache what hands a kernel over to another function.
@njit(inline="always")
def alone(kernel, total, given, bias, out, like):
    """A product by what a kernel is told of it, its results in fp32 last."""
    kernel(0, total, *given)
    _finish_at(given[-1], bias, out, like)


@njit(inline="always")
def together(kernel, pieces, total, given, bias, out, like):
    """The same in a region; whether all pieces were computed."""
    done = region(kernel, pieces, total, given)
    _finish_at(given[-1], bias, out, like)
    return done


@register_jitable
def _finish_at(y, bias, out, like):
    """`finish` of all rows, whose bias and results are at these addresses; bias: 0 for none."""
    m, n = y.shape
    added = array_at(bias, (1, n if bias else 0), like)
    _finish(0, m, y, np.arange(m), added, np.zeros(m, np.int64), array_at(out, (m, n), like))


@njit(inline="always")
def rows_before(place, cost, rows):
    """Rows of W in the tiles of a group that begin before a place in it, each of so many rows; costs as `begins_of`."""
    return max(0, tiles_of(place, cost)) * rows


@njit(inline="always")
def _tile_of_any(steps, rest, packed, row, origin, scales, units, codebook, x, source, column, out):
    """A tile of as many rows of x as there are, four at most."""
    if rest >= 4:
        _tile(4, steps, packed, row, origin, scales, units, codebook, x, source, column, out)
    elif rest == 3:
        _tile(3, steps, packed, row, origin, scales, units, codebook, x, source, column, out)
    elif rest == 2:
        _tile(2, steps, packed, row, origin, scales, units, codebook, x, source, column, out)
    else:
        _tile(1, steps, packed, row, origin, scales, units, codebook, x, source, column, out)


@intrinsic(prefer_literal=True)
def _tile(typing_context, columns, steps, packed, row, origin, scales, units, codebook, x, source, column, out):
    """out[column:][:columns, row - origin:][:, :ROWS], of `units` scales a row with `steps` steps each; `columns` and
    `steps` are literals. origin: the row of the stack that column 0 of `out` belongs to."""
    at = types.intp
    signature = types.void(columns, steps, packed, at, at, scales, at, codebook, x, source, at, out)
    columns, steps = columns.literal_value, steps.literal_value
    vector = ir.VectorType(F32, LANES)

    def lower(context, builder, signature, arguments):
        _, _, packed, row, origin, scales, units, codebook, x, source, column, out = (
            context.make_array(kind)(context, builder, value) if isinstance(kind, types.Array) else value
            for kind, value in zip(signature.args, arguments, strict=True)
        )
        k, n = builder.extract_value(x.shape, 1), builder.extract_value(out.shape, 1)
        last = builder.sub(builder.add(origin, n), I64(1))
        rows = [builder.add(row, I64(r)) for r in range(ROWS)]
        rows = [builder.select(builder.icmp_signed("<", r, last), r, last) for r in rows]
        places = [builder.add(column, I64(c)) for c in range(columns)]
        weights_of = [builder.gep(packed.data, [builder.lshr(builder.mul(r, k), I64(1))]) for r in rows]
        scales_of = [builder.gep(scales.data, [builder.mul(units, I64(r))]) for r in range(ROWS)]
        x_rows = [builder.load(builder.gep(source.data, [place])) for place in places]
        x_of = [builder.gep(x.data, [builder.mul(x_row, k)]) for x_row in x_rows]

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
                place = builder.add(builder.mul(places[c], n), builder.sub(rows[r], origin))
                builder.store(total, builder.gep(out.data, [place]))
        return context.get_dummy_value()

    return signature, lower
