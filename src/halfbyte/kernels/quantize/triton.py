"""Quantize on a GPU: a dense weight in, packed nibbles and scales out, each weight read once.

A program owns a tile of [blocks, block_size]. It reduces each row to its largest magnitude,
scales by the reciprocal and rounds. Rounding is one table look-up and one comparison instead of fifteen comparisons:
cells around the multiples of 1/16 are narrower than the gap between any two thresholds, so a cell holds one at the
most, and the table gives that threshold and how many lie below the cell. The cell's number is in the low bits of
x * 16 + 1.5 * 2^23.

Nested scales: absmax - offset in blocks of 256, rounded to the dynamic code by bitsandbytes' own search, whose ties and
order it is that count. Formats of integers round their quotients instead, in tiles of blocks. An e8m0 scale is the
exponent of the largest magnitude, less a constant, so products with its reciprocal are exact.

Bytes a weight, 16-bit: 2 in + 1/2 packed + 4/block_size of scales. bitsandbytes' CUDA library is built with fast-math,
so on NVIDIA the reciprocal is `rcp.approx.ftz` and products are `mul.ftz` here too.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from halfbyte.formats.constants import kept
from halfbyte.formats.nested import NESTED_BLOCK_SIZE, dynamic_code
from halfbyte.formats.spec import Format
from halfbyte.kernels.common.arithmetic import multiply, power_of_two
from halfbyte.kernels.common.device import DeviceProperties
from halfbyte.kernels.common.launch import launch

CELLS = 64  # 33 are in use, for x from -1 to 1; number 63 is where NaN falls
TILE_WEIGHTS = 1024  # a program's: with two warps, 16 a thread
BLOCKS_OF_SCALES = 4  # a program's: every look-up brings the code into shared memory anew, so more share it
CELL = tl.constexpr(16.0)
MAGIC = tl.constexpr(12582912.0 + 16.0)  # 1.5 * 2^23 rounds to integers; 16 more makes x = -1 cell 0
LOWEST = tl.constexpr(-3.4028234663852886e38)
SMALLEST_NORMAL = tl.constexpr(1.1754943508222875e-38)
INFINITY = tl.constexpr(0x7F800000)  # the bits of fp32; above are those of NaN


@triton.jit
def _largest(values, FLUSH: tl.constexpr):
    """The largest magnitude of each row, NaN passed over; a row of nothing else gives the lowest float."""
    largest = tl.max(tl.abs(values), axis=1)
    largest = tl.where(largest == largest, largest, LOWEST)
    if FLUSH:
        largest = tl.where(tl.abs(largest) < SMALLEST_NORMAL, 0.0, largest)
    return largest


@triton.jit
def _reciprocal(x, PTX: tl.constexpr):
    if PTX > 0:
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    return 1.0 / x


@triton.jit
def nearest_kernel(
    weight, thresholds, below, packed, scale, numel, n_bytes,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, SIGNED_MAGNITUDE: tl.constexpr, LOWER: tl.constexpr,
    UPPER: tl.constexpr, IN_ORDER: tl.constexpr, IN_CELLS: tl.constexpr, THRESHOLDS: tl.constexpr,
    LARGEST: tl.constexpr, EXPONENTS: tl.constexpr, LARGEST_EXPONENT: tl.constexpr, LOW_FIRST: tl.constexpr,
    PTX: tl.constexpr,
):  # fmt: skip
    """thresholds, below: fp32 and int32 [CELLS], the threshold in each cell and the count of those below the cell; or,
    without IN_CELLS, that many THRESHOLDS. SIGNED_MAGNITUDE: thresholds are of magnitudes and the sign is a nibble's
    high bit. LOWER, UPPER: nibbles of the values in ascending order, eight a word; IN_ORDER: they are 0, 1, 2, ...
    LARGEST: of the codebook's magnitudes. EXPONENTS: scales are exponents of two; LARGEST_EXPONENT: that of LARGEST.
    LOW_FIRST: the first weight of a byte is in its low half."""
    TILE: tl.constexpr = BLOCKS * BLOCK
    first_block = tl.program_id(0).to(tl.int64) * BLOCKS
    first = first_block * BLOCK
    left = tl.minimum(numel - first, TILE).to(tl.int32)
    block = tl.arange(0, BLOCKS)
    element = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    element = tl.max_contiguous(element, (1, 8))
    values = tl.load(weight + first + element, mask=element < left, other=0, eviction_policy="evict_first")
    values = values.to(tl.float32)

    if EXPONENTS:  # of infinity 128, of subnormal numbers -127
        largest = tl.max(tl.abs(values).to(tl.int32, bitcast=True), axis=1)
        exponent = tl.maximum((largest >> 23) - LARGEST_EXPONENT, 0)
        stored = tl.where(largest > INFINITY, 255, exponent)
        reciprocal = power_of_two(tl.where(stored == 255, 255, 254 - stored))
    else:
        largest = _largest(values, PTX > 0)
        if LARGEST != 1.0:
            largest = tl.div_rn(largest, tl.full((BLOCKS,), LARGEST, tl.float32))
        stored = largest.to(scale.dtype.element_ty)
        reciprocal = _reciprocal(stored.to(tl.float32), PTX)
    tl.store(scale + first_block + block, stored.to(scale.dtype.element_ty), mask=block * BLOCK < left)
    x = multiply(values, tl.broadcast_to(reciprocal[:, None], (BLOCKS, BLOCK)), PTX > 0 and not EXPONENTS)

    magnitude = tl.abs(x) if SIGNED_MAGNITUDE else x
    if IN_CELLS:
        near = magnitude
        if PTX == 0:  # without flush-to-zero, the reciprocal of a subnormal scale may be infinite
            near = tl.minimum(tl.maximum(magnitude, -1.0), 1.0)
        cell = tl.fma(near, CELL, MAGIC).to(tl.int32, bitcast=True) & 63
        if PTX == 0:
            cell = tl.where(magnitude == magnitude, cell, 63)
        cell = cell.reshape(TILE)
        table = tl.arange(0, 64)
        threshold = tl.gather(tl.load(thresholds + table), cell, 0).reshape(BLOCKS, BLOCK)
        rank = tl.gather(tl.load(below + table), cell, 0).reshape(BLOCKS, BLOCK)
        rank += (magnitude > threshold).to(tl.int32)
    else:
        rank = tl.zeros((BLOCKS, BLOCK), tl.int32)
        for i in tl.static_range(THRESHOLDS):
            rank += (magnitude > tl.load(thresholds + i)).to(tl.int32)
    nibble = rank
    if not IN_ORDER:
        nibble = tl.full((BLOCKS, BLOCK), LOWER, tl.int32) >> ((rank & 7) * 4)
        if not SIGNED_MAGNITUDE:
            nibble = tl.where(rank < 8, nibble, tl.full((BLOCKS, BLOCK), UPPER, tl.int32) >> ((rank & 7) * 4))
        nibble = nibble & 15
    if EXPONENTS:
        nibble = nibble | tl.where(x == x, (x.to(tl.int32, bitcast=True) >> 28) & 8, 0)
    elif SIGNED_MAGNITUDE:
        nibble = nibble | (x < 0).to(tl.int32) << 3

    first_nibble, second_nibble = tl.split(nibble.reshape(BLOCKS, BLOCK // 2, 2))
    high = second_nibble if LOW_FIRST else first_nibble
    low = first_nibble if LOW_FIRST else second_nibble
    byte = tl.max_contiguous(block[:, None] * (BLOCK // 2) + tl.arange(0, BLOCK // 2)[None, :], (1, 4))
    left = tl.minimum(n_bytes - first // 2, TILE // 2).to(tl.int32)
    tl.store(packed + first // 2 + byte, ((high << 4) | low).to(tl.uint8), mask=byte < left)


@triton.jit
def scales_kernel(
    absmax, offset, code, codes, absmax2, n_scales, NESTED: tl.constexpr, BLOCKS: tl.constexpr, PTX: tl.constexpr
):
    """A tile of [blocks, NESTED scales of a block]; `code` is fp32 [256] ascending."""
    TILE: tl.constexpr = BLOCKS * NESTED
    first_block = tl.program_id(0).to(tl.int64) * BLOCKS
    first = first_block * NESTED
    left = tl.minimum(n_scales - first, TILE).to(tl.int32)
    block = tl.arange(0, BLOCKS)
    element = block[:, None] * NESTED + tl.arange(0, NESTED)[None, :]
    # The difference is torch's in bitsandbytes, and so it keeps its subnormal numbers.
    values = tl.load(absmax + first + element, mask=element < left, other=0) - tl.load(offset)
    values = tl.where(element < left, values, 0.0)
    largest = _largest(values, PTX > 0)
    tl.store(absmax2 + first_block + block, largest, mask=block * NESTED < left)
    reciprocal = tl.broadcast_to(_reciprocal(largest, PTX)[:, None], (BLOCKS, NESTED))
    x = multiply(values, reciprocal, PTX > 0).reshape(TILE)

    table = tl.load(code + tl.arange(0, 256))
    pivot = tl.full((TILE,), 127, tl.int32)
    below = tl.full((TILE,), 0, tl.int32)
    above = tl.full((TILE,), 255, tl.int32)
    for halving in tl.static_range(7):
        up = x > tl.gather(table, pivot, 0)
        below = tl.where(up, pivot, below)
        above = tl.where(up, above, pivot)
        pivot = tl.where(up, pivot + (64 >> halving), pivot - (64 >> halving))
    value = tl.gather(table, pivot, 0)
    to_above = (x > value) & (x > (tl.gather(table, above, 0) + value) * 0.5)
    to_below = (x <= value) & (x < (tl.gather(table, below, 0) + value) * 0.5)
    pivot = tl.where(to_above, above, tl.where(to_below, below, pivot)).reshape(BLOCKS, NESTED)
    tl.store(codes + first + element, pivot.to(tl.uint8), mask=element < left)


@triton.jit
def integers_kernel(weight, packed, scale, n_blocks, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, LARGEST: tl.constexpr):
    """A tile of [blocks, weights of a block]; a word is eight neighbours of a row, the first in its low bits."""
    first = tl.program_id(0).to(tl.int64) * BLOCKS
    block = tl.arange(0, BLOCKS)
    in_range = block < tl.minimum(n_blocks - first, BLOCKS).to(tl.int32)
    element = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    values = tl.load(weight + first * BLOCK + element, mask=in_range[:, None], other=0).to(tl.float32)
    has_nan = tl.max((values != values).to(tl.int32), axis=1) > 0
    largest = tl.where(has_nan, float("nan"), tl.max(tl.abs(values), axis=1))
    step = tl.div_rn(largest, tl.full((BLOCKS,), LARGEST, tl.float32)).to(scale.dtype.element_ty)
    tl.store(scale + first + block, step, mask=in_range)

    x = tl.div_rn(values, tl.broadcast_to(step.to(tl.float32)[:, None], (BLOCKS, BLOCK)))
    x = tl.where(x == x, x, 0.0)
    x = tl.minimum(tl.maximum(x, -LARGEST), LARGEST)
    nibble = (x + 12582912.0).to(tl.int32, bitcast=True) + 8 & 15  # round to even, as torch.round does
    shift = 4 * tl.arange(0, 8)
    words = tl.sum(nibble.reshape(BLOCKS, BLOCK // 8, 8) << shift[None, None, :], axis=2)
    word = block[:, None] * (BLOCK // 8) + tl.arange(0, BLOCK // 8)[None, :]
    tl.store(packed + first * (BLOCK // 8) + word, words, mask=in_range[:, None])


@kept
def cells(format: Format, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, bool]:
    """For each cell of a format: the threshold in it (+inf if none), and how many thresholds lie below it; and True.
    Where two thresholds share a cell, or one lies beyond them: all thresholds, the counts, and False."""
    numbers = [round(16 * threshold) + 16 for threshold in format.thresholds]
    below = [sum(number < cell for number in numbers) for cell in range(CELLS - 1)] + [0]
    counts = torch.tensor(below, dtype=torch.int32, device=device)
    inside = [float("inf")] * CELLS
    fits = len(set(numbers)) == len(numbers) and min(numbers) >= 0 and max(numbers) <= 32
    for number, threshold in zip(numbers if fits else range(CELLS), format.thresholds, strict=False):
        inside[number] = threshold
    return torch.tensor(inside, dtype=torch.float32, device=device), counts, fits


def quantize(weight: torch.Tensor, format: Format, block_size: int, packed: torch.Tensor, scale: torch.Tensor) -> None:
    """Quantize a contiguous fp16, bf16 or fp32 weight into `packed` and `scale`, of the format's shapes and dtypes. All
    on the current device."""
    if weight.numel() == 0:
        return
    launched = _integers if format.integers else _nearest
    launched(weight, format, block_size, packed.view(torch.uint8) if format.words else packed, scale)


def _nearest(weight: torch.Tensor, format: Format, block_size: int, packed: torch.Tensor, scale: torch.Tensor) -> None:
    numel = weight.numel()
    thresholds, below, in_cells = cells(format, weight.device)

    def configure(properties: DeviceProperties) -> tuple[int, dict[str, Any]]:
        blocks = max(1, TILE_WEIGHTS // block_size)
        lower, upper = _words(format.compared[:8]), _words(format.compared[8:])
        constants = {
            "BLOCK": block_size, "BLOCKS": blocks, "SIGNED_MAGNITUDE": format.signed_magnitude, "LOWER": lower,
            "UPPER": upper, "IN_ORDER": format.compared == tuple(range(len(format.compared))), "IN_CELLS": in_cells,
            "THRESHOLDS": len(format.thresholds), "LARGEST": format.largest, "EXPONENTS": format.has_exponents,
            "LARGEST_EXPONENT": format.largest_exponent, "LOW_FIRST": format.low_first, "PTX": properties.ptx,
        }  # fmt: skip
        warps = 2 if block_size <= TILE_WEIGHTS else block_size // 512
        return triton.cdiv(numel, block_size * blocks), constants | {"num_warps": warps, "enable_fp_fusion": False}

    arguments = (weight, thresholds, below, packed, scale, numel, (numel + 1) // 2)
    key = (numel, weight.dtype, scale.dtype, block_size, format)
    launch(nearest_kernel, weight.get_device(), arguments, key, configure)


def _integers(weight: torch.Tensor, format: Format, block_size: int, packed: torch.Tensor, scale: torch.Tensor) -> None:
    blocks = scale.numel()

    def configure(_: DeviceProperties) -> tuple[int, dict[str, Any]]:
        at_once = 2 * TILE_WEIGHTS // block_size
        constants = {"BLOCK": block_size, "BLOCKS": at_once, "LARGEST": format.largest}
        return triton.cdiv(blocks, at_once), constants | {"num_warps": 4, "enable_fp_fusion": False}

    key = (blocks, weight.dtype, scale.dtype, block_size, format)
    words = packed.view(torch.int32)  # blocks are whole words
    launch(integers_kernel, weight.get_device(), (weight, words, scale, blocks), key, configure)


def _words(nibbles: tuple[int, ...]) -> int:
    """Up to eight nibbles as an int32, the first in its low bits."""
    word = sum(nibble << 4 * i for i, nibble in enumerate(nibbles))
    return word - (1 << 32) if word >> 31 else word


def quantize_scales(absmax: torch.Tensor, offset: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes uint8 [B] and absmax fp32 [ceil(B / 256)] of the fp32 scales `absmax` [B] less `offset` (one element)."""
    n_scales = absmax.numel()
    blocks = -(-n_scales // NESTED_BLOCK_SIZE)
    codes = absmax.new_empty(absmax.shape, dtype=torch.uint8)
    absmax2 = absmax.new_empty(blocks)

    def configure(properties: DeviceProperties) -> tuple[int, dict[str, Any]]:
        constants = {"NESTED": NESTED_BLOCK_SIZE, "BLOCKS": BLOCKS_OF_SCALES, "PTX": properties.ptx}
        return triton.cdiv(blocks, BLOCKS_OF_SCALES), constants | {"num_warps": 4, "enable_fp_fusion": False}

    if blocks:
        arguments = (absmax, offset, dynamic_code(absmax.device), codes, absmax2, n_scales)
        launch(scales_kernel, absmax.get_device(), arguments, n_scales, configure)
    return codes, absmax2
