"""x @ W.T on an AMD GPU for few rows of x, straight from the 4-bit bytes, in Triton.

x [M, K], fp16, bf16 or fp32; W packed two weights a byte, a scale for every `block_size` weights of the flattened W ->
[M, N], summed in fp32, the bias added, rounded once. Every format goes the same way: sixteen values, the order of the
two nibbles, and scales that are floats, nested bytes or exponents of two. triton_plan.py says which kernel runs.

linear_sum_kernel: one row of x. A program owns a few rows of W. A thread loads 16 bytes, looks their nibbles up in the
codebook in fp32, multiplies them with 32 numbers of x, and adds the sum, times the scale, to its own. No scale block is
smaller than 32 weights, so those of a thread share one.

linear_product_kernel: tiles of x and of W, multiplied by matrix cores (MFMA, WMMA). WHOLE: rows are whole scale blocks.
Then a step is weights that share a scale, and the scale multiplies the sums of the step in fp32. The codebook is
rounded to the dtype of x beforehand, times a factor with which little is lost (codebook.py). Otherwise a row may begin
inside a block, and inside a byte. Each weight is looked up alone, scaled in fp32, and cut into two numbers of the dtype
of x, its rounding and the rest, and x multiplies both.

linear_finish_kernel: where K is in several parts, adds up their sums, always in the same order.

Bytes: W and its scales, once for each tile of rows of x. Flops: 2 M N K, M filled up to tiles. What is read beyond the
ends of x and W is read from their last rows instead, and never stored.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from halfbyte.formats.constants import kept
from halfbyte.formats.spec import Format, codebook_tensor
from halfbyte.formats.weight import NestedScale
from halfbyte.kernels.common.arithmetic import power_of_two
from halfbyte.kernels.common.device import DeviceProperties, properties_of
from halfbyte.kernels.common.launch import launch
from halfbyte.kernels.linear.codebook import factor_of
from halfbyte.kernels.linear.triton_plan import TilePlan
from halfbyte.kernels.linear.triton_plan import plan as plan_tiles

ROWS_AT_ONCE = 1024  # of x: the partial sums of more would need much memory
FINISHED = 1024  # numbers of y that a program of linear_finish_kernel adds up


@triton.jit
def _scales(scale, code, absmax, offset, block, known, NESTED: tl.constexpr, EXPONENTS: tl.constexpr):
    """fp32: the scales of `block`, and 0 where it is not `known`. NESTED: so many share an entry of `absmax`, or 0."""
    scales = tl.load(scale + block, mask=known, other=0)
    if NESTED > 0:
        step = tl.load(absmax + block // NESTED, mask=known, other=0)
        scales = tl.load(code + scales.to(tl.int32)) * step + tl.load(offset)
    if EXPONENTS:
        scales = power_of_two(scales.to(tl.int32))
    return tl.where(known, scales.to(tl.float32), 0.0)


@triton.jit
def _look_up(table, octets, LOW_FIRST: tl.constexpr):
    """The values of the two weights of each byte, in order, along one more side."""
    octets = octets.to(tl.int32)
    nibbles = tl.join(octets & 15, octets >> 4) if LOW_FIRST else tl.join(octets >> 4, octets & 15)
    return tl.gather(table, nibbles.reshape(nibbles.numel), 0).reshape(nibbles.shape)


@triton.jit
def _store(
    sums, out, bias, partial, part, row, column, m, n, PARTS: tl.constexpr, BIAS: tl.constexpr, UNIT: tl.constexpr
):
    """Sums of y[row, column]: times UNIT and with the bias into `out`, or as they are into their part of `partial`."""
    there = (row < m) & (column < n)
    place = row.to(tl.int64) * n + column
    if PARTS > 1:
        tl.store(partial + (part.to(tl.int64) * m) * n + place, sums, mask=there)
    else:
        if UNIT != 1.0:
            sums *= UNIT
        if BIAS:
            sums += tl.load(bias + column, mask=column < n, other=0).to(tl.float32)
        tl.store(out + place, sums.to(out.dtype.element_ty), mask=there)


@triton.jit
def linear_sum_kernel(
    x, packed, scale, code, absmax, offset, table, bias, out, partial, m, n, row_bytes, row_blocks,
    COLUMNS: tl.constexpr, SPAN: tl.constexpr, STEPS: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr,
    NESTED: tl.constexpr, EXPONENTS: tl.constexpr, LOW_FIRST: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """x [1, K]. table: the codebook, fp32. row_bytes, row_blocks: of a row of W. BLOCK: weights that share a scale."""
    OCTETS: tl.constexpr = 16
    CHUNKS: tl.constexpr = SPAN // (2 * OCTETS)
    program = tl.program_id(0)
    tiles = tl.cdiv(n, COLUMNS)
    part = program // tiles
    column = program % tiles * COLUMNS + tl.arange(0, COLUMNS)
    line = tl.minimum(column, n - 1).to(tl.int64)
    values = tl.load(table + tl.arange(0, 16))
    octet, weight = tl.arange(0, OCTETS), tl.arange(0, 2 * OCTETS)
    row_chunks = row_bytes // OCTETS
    first = part * (STEPS * CHUNKS)
    total = tl.zeros((COLUMNS, CHUNKS), tl.float32)
    for start in range(first, tl.minimum(first + STEPS * CHUNKS, row_chunks), CHUNKS):
        chunk = start + tl.arange(0, CHUNKS)
        known = chunk < row_chunks
        at = (line * row_bytes)[:, None, None] + (chunk * OCTETS)[None, :, None] + octet[None, None, :]
        octets = tl.load(packed + at, mask=known[None, :, None], other=0)
        some = tl.load(x + (chunk * (2 * OCTETS))[:, None] + weight[None, :], mask=known[:, None], other=0)
        even, odd = tl.split(some.to(tl.float32).reshape(CHUNKS, OCTETS, 2))
        block = (line * row_blocks)[:, None] + (chunk // (BLOCK // (2 * OCTETS)))[None, :]
        scales = _scales(scale, code, absmax, offset, block, known[None, :], NESTED, EXPONENTS)
        one, other = tl.split(_look_up(values, octets, LOW_FIRST))
        products = tl.fma(other, tl.broadcast_to(odd[None, :, :], other.shape), one * even[None, :, :])
        total = tl.fma(tl.sum(products, axis=2), scales, total)
    sums = tl.sum(total, axis=1)
    _store(sums, out, bias, partial, part, tl.zeros((COLUMNS,), tl.int32), column, m, n, PARTS, BIAS, 1.0)


@triton.jit
def linear_product_kernel(
    x, packed, scale, code, absmax, offset, table, bias, out, partial, m, n, k, row_bytes, row_blocks,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, SPAN: tl.constexpr, STEPS: tl.constexpr, PARTS: tl.constexpr,
    WHOLE: tl.constexpr, BLOCK: tl.constexpr, NESTED: tl.constexpr, EXPONENTS: tl.constexpr, LOW_FIRST: tl.constexpr,
    BIAS: tl.constexpr, UNIT: tl.constexpr, OPERAND: tl.constexpr,
):  # fmt: skip
    """x [M, K]. table: with WHOLE the codebook in the dtype of x, of which UNIT times is meant; else in fp32.
    row_bytes, row_blocks: of a row of W, with WHOLE. BLOCK: weights that share a scale. OPERAND: the dtype of what
    matrix cores multiply, that of x but in Triton's interpreter.

    Row tiles are the fastest side of the grid, so that programs next to each other read the same bytes of W."""
    program = tl.program_id(0)
    row_tiles, tiles = tl.cdiv(m, ROWS), tl.cdiv(n, COLUMNS)
    row = program % row_tiles * ROWS + tl.arange(0, ROWS)
    program = program // row_tiles
    part = program // tiles
    column = program % tiles * COLUMNS + tl.arange(0, COLUMNS)
    line = tl.minimum(column, n - 1).to(tl.int64)
    x_line = (tl.minimum(row, m - 1).to(tl.int64) * k)[:, None]
    values = tl.load(table + tl.arange(0, 16))
    index, octet = tl.arange(0, SPAN), tl.arange(0, SPAN // 2)
    first = part * STEPS
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for step in range(first, tl.minimum(first + STEPS, tl.cdiv(k, SPAN))):
        place = step * SPAN + index
        if WHOLE:
            octets = tl.load(packed + (line * row_bytes)[:, None] + (step * (SPAN // 2) + octet)[None, :])
            some = tl.load(x + x_line + place[None, :]).to(OPERAND)
            block = line * row_blocks + step // (BLOCK // SPAN)
            scales = _scales(scale, code, absmax, offset, block, column < n, NESTED, EXPONENTS)
            weights = _look_up(values, octets, LOW_FIRST).reshape(COLUMNS, SPAN).to(OPERAND)
            sums = tl.dot(some, tl.trans(weights), input_precision="ieee")
            total = tl.fma(sums, tl.broadcast_to(scales[None, :], sums.shape), total)
        else:
            known = (place < k)[None, :]
            some = tl.load(x + x_line + place[None, :], mask=known, other=0).to(OPERAND)
            weight = (line * k)[:, None] + place[None, :]
            octets = tl.load(packed + (weight >> 1), mask=known, other=0).to(tl.int32)
            is_high = (weight & 1) == (1 if LOW_FIRST else 0)
            nibbles = tl.where(is_high, octets >> 4, octets & 15).reshape(COLUMNS * SPAN)
            scales = _scales(scale, code, absmax, offset, weight // BLOCK, known, NESTED, EXPONENTS)
            weights = tl.gather(values, nibbles, 0).reshape(COLUMNS, SPAN) * scales
            rounded = weights.to(OPERAND)
            total = tl.dot(some, tl.trans(rounded), total, input_precision="ieee")
            if rounded.dtype != tl.float32:
                # Of what rounds to infinity there is no rest.
                rest = tl.where(tl.abs(rounded.to(tl.float32)) == float("inf"), 0.0, weights - rounded.to(tl.float32))
                total = tl.dot(some, tl.trans(rest.to(OPERAND)), total)
    _store(total, out, bias, partial, part, row[:, None], column[None, :], m, n, PARTS, BIAS, UNIT)


@triton.jit
def linear_finish_kernel(
    partial, bias, out, size, n, PARTS: tl.constexpr, BIAS: tl.constexpr, UNIT: tl.constexpr, TILE: tl.constexpr
):
    """partial: fp32 [PARTS, M, N]. size: M N."""
    place = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    there = place < size
    at = partial + place
    sums = tl.load(at, mask=there, other=0)
    for _ in range(1, PARTS):
        at += size
        sums += tl.load(at, mask=there, other=0)
    if UNIT != 1.0:
        sums *= UNIT
    if BIAS:
        sums += tl.load(bias + place % n, mask=there, other=0).to(tl.float32)
    tl.store(out + place, sums.to(out.dtype.element_ty), mask=there)


def linear(
    x: Tensor,
    packed: Tensor,
    scale: Tensor,
    nested: NestedScale | None,
    format: Format,
    block_size: int,
    bias: Tensor | None,
    out: Tensor,
    batch_invariant: bool = False,
    plan: TilePlan | None = None,
) -> None:
    """Write x [M, K] @ W.T + bias into `out` [M, N]. x, bias [N] or None and out: contiguous, on the current device.

    packed, scale: as formats/spec.py describes them, or scale uint8 [blocks] with `nested`. With batch_invariant the
    bits of a row depend on that row and on W alone.
    """
    (m, k), n = x.shape, out.shape[1]
    if out.numel() == 0:
        return
    properties = properties_of(x.get_device())
    tile = plan or plan_tiles(m, n, k, x.dtype, block_size, properties, batch_invariant)
    weight = (packed.view(torch.uint8) if format.words else packed, scale, *(nested or (scale, scale, scale))[:3])
    for first in range(0, m, ROWS_AT_ONCE):
        rows = slice(first, first + ROWS_AT_ONCE)
        _launch(x[rows], weight, nested.block_size if nested else 0, format, block_size, bias, out[rows], tile)


def _launch(
    x: Tensor,
    weight: tuple[Tensor, ...],
    nested: int,
    format: Format,
    block_size: int,
    bias: Tensor | None,
    out: Tensor,
    tile: TilePlan,
) -> None:
    (m, k), n, index = x.shape, out.shape[1], out.get_device()
    rounds = tile.way == "product" and x.dtype != torch.float32
    table, unit = _rounded(format, x.dtype, x.device) if rounds else (codebook_tensor(format, x.device), 1.0)
    partial = out.new_empty((tile.parts, m, n), dtype=torch.float32) if tile.parts > 1 else out
    added = out if bias is None else bias  # which is not read where there is none
    constants: dict[str, Any] = {
        "COLUMNS": tile.columns, "SPAN": tile.span, "STEPS": tile.steps, "PARTS": tile.parts, "BLOCK": block_size,
        "NESTED": nested, "EXPONENTS": format.has_exponents, "LOW_FIRST": format.low_first, "BIAS": bias is not None,
        "num_warps": tile.warps, "enable_fp_fusion": False,
    }  # fmt: skip
    sizes: tuple[int, ...] = (k // 2, k // block_size)
    kernel: Any = linear_sum_kernel
    if tile.way != "sum":
        kernel, sizes = linear_product_kernel, (k, *sizes)
        constants |= {"ROWS": tile.rows, "WHOLE": tile.way == "product", "UNIT": unit}
    grid = triton.cdiv(m, tile.rows) * triton.cdiv(n, tile.columns) * tile.parts

    def configure(properties: DeviceProperties) -> tuple[int, dict[str, Any]]:
        if kernel is linear_sum_kernel:
            return grid, constants
        # Triton's interpreter has no products of bf16.
        return grid, constants | {"OPERAND": _TYPES[torch.float32 if properties.kind == "host" else x.dtype]}

    key = (tile, format, block_size, nested, x.dtype, weight[1].dtype, out.dtype, bias is not None)
    launch(kernel, index, (x, *weight, table, added, out, partial, m, n, *sizes), key, configure)
    if tile.parts > 1:
        last = {
            "PARTS": tile.parts, "BIAS": bias is not None, "UNIT": unit, "TILE": FINISHED, "num_warps": 4,
            "enable_fp_fusion": False,
        }  # fmt: skip
        last_grid = triton.cdiv(out.numel(), FINISHED)
        launch(linear_finish_kernel, index, (partial, added, out, out.numel(), n), key, lambda _: (last_grid, last))


_TYPES = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}


@kept
def _rounded(format: Format, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, float]:
    """The codebook times its factor, rounded to fp16 or bf16, and what a product with it must be multiplied by."""
    factor = factor_of(format.name, dtype)
    scaled = torch.tensor(format.codebook, dtype=torch.float64, device="cpu") * factor
    return scaled.to(dtype).to(device), 1.0 / factor
