"""Quantize on a GPU: a dense weight in, packed nibbles and scales out, each weight read once.

Blockwise (nf4, fp4): a program owns a tile of [blocks, block_size]. It reduces each row to its largest magnitude,
scales by the reciprocal and rounds. Rounding is one table look-up and one comparison instead of fifteen comparisons:
cells around the multiples of 1/16 are narrower than the gap between any two thresholds, so a cell holds one at the
most, and the table gives that threshold and how many lie below the cell. The cell's number is in the low bits of
x * 16 + 1.5 * 2^23.

Nested scales: absmax - offset in blocks of 256, rounded to the dynamic code by bitsandbytes' own search, whose ties and
order it is that count. Grouped (int4): rows of one group each.

Bytes a weight, 16-bit: 2 in + 1/2 packed + 4/block_size of scales. bitsandbytes' CUDA library is built with fast-math,
so on NVIDIA the reciprocal is `rcp.approx.ftz` and products are `mul.ftz` here too.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

from halfbyte.formats.blockwise import FORMATS, NESTED_BLOCK_SIZE, BlockwiseFormat, dynamic_code
from halfbyte.kernels.common.arithmetic import multiply
from halfbyte.kernels.common.device import DeviceFacts
from halfbyte.kernels.common.launch import launch

CELLS = 64  # 33 are in use, for x from -1 to 1; number 63 is where NaN falls
TILE_WEIGHTS = 1024  # a program's: with two warps, 16 a thread
BLOCKS_OF_SCALES = 4  # a program's: every look-up brings the code into shared memory anew, so more share it
CELL = tl.constexpr(16.0)
MAGIC = tl.constexpr(12582912.0 + 16.0)  # 1.5 * 2^23 rounds to integers; 16 more makes x = -1 cell 0
LOWEST = tl.constexpr(-3.4028234663852886e38)
SMALLEST_NORMAL = tl.constexpr(1.1754943508222875e-38)


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
def blockwise_kernel(
    weight, thresholds, below, packed, absmax, numel, n_bytes,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, SIGNED_MAGNITUDE: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """thresholds, below: fp32 and int32 [CELLS], the threshold in each cell and the count of those below the cell.
    SIGNED_MAGNITUDE: thresholds are of magnitudes and the sign is a nibble's high bit (fp4)."""
    TILE: tl.constexpr = BLOCKS * BLOCK
    first_block = tl.program_id(0).to(tl.int64) * BLOCKS
    first = first_block * BLOCK
    left = tl.minimum(numel - first, TILE).to(tl.int32)
    block = tl.arange(0, BLOCKS)
    element = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    element = tl.max_contiguous(element, (1, 8))
    values = tl.load(weight + first + element, mask=element < left, other=0, eviction_policy="evict_first")
    values = values.to(tl.float32)

    largest = _largest(values, PTX > 0)
    tl.store(absmax + first_block + block, largest, mask=block * BLOCK < left)
    reciprocal = tl.broadcast_to(_reciprocal(largest, PTX)[:, None], (BLOCKS, BLOCK))
    x = multiply(values, reciprocal, PTX > 0)

    magnitude = tl.abs(x) if SIGNED_MAGNITUDE else x
    near = magnitude
    if PTX == 0:  # without flush-to-zero, the reciprocal of a subnormal scale may be infinite
        near = tl.minimum(tl.maximum(magnitude, -1.0), 1.0)
    cell = tl.fma(near, CELL, MAGIC).to(tl.int32, bitcast=True) & 63
    if PTX == 0:
        cell = tl.where(magnitude == magnitude, cell, 63)
    cell = cell.reshape(TILE)
    table = tl.arange(0, 64)
    threshold = tl.gather(tl.load(thresholds + table), cell, 0).reshape(BLOCKS, BLOCK)
    nibble = tl.gather(tl.load(below + table), cell, 0).reshape(BLOCKS, BLOCK)
    nibble += (magnitude > threshold).to(tl.int32)
    if SIGNED_MAGNITUDE:
        # fp4 counts its magnitudes 0 1 6 7 4 5 2 3
        nibble = nibble ^ ((nibble & 2) << 1) | (x < 0).to(tl.int32) << 3

    high, low = tl.split(nibble.reshape(BLOCKS, BLOCK // 2, 2))
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
def grouped_kernel(weight, packed, scale, n_groups, GROUP: tl.constexpr, GROUPS: tl.constexpr):
    """A tile of [groups, weights of a group]; a word is eight neighbours of a row."""
    first = tl.program_id(0).to(tl.int64) * GROUPS
    group = tl.arange(0, GROUPS)
    in_range = group < tl.minimum(n_groups - first, GROUPS).to(tl.int32)
    element = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    values = tl.load(weight + first * GROUP + element, mask=in_range[:, None], other=0).to(tl.float32)
    has_nan = tl.max((values != values).to(tl.int32), axis=1) > 0
    largest = tl.where(has_nan, float("nan"), tl.max(tl.abs(values), axis=1))
    step = tl.div_rn(largest, tl.full((GROUPS,), 7.0, tl.float32)).to(scale.dtype.element_ty)
    tl.store(scale + first + group, step, mask=in_range)

    x = tl.div_rn(values, tl.broadcast_to(step.to(tl.float32)[:, None], (GROUPS, GROUP)))
    x = tl.where(x == x, x, 0.0)
    x = tl.minimum(tl.maximum(x, -7.0), 7.0)
    nibble = (x + 12582912.0).to(tl.int32, bitcast=True) + 8 & 15  # round to even, as torch.round does
    shift = 4 * tl.arange(0, 8)
    words = tl.sum(nibble.reshape(GROUPS, GROUP // 8, 8) << shift[None, None, :], axis=2)
    word = group[:, None] * (GROUP // 8) + tl.arange(0, GROUP // 8)[None, :]
    tl.store(packed + first * (GROUP // 8) + word, words, mask=in_range[:, None])


@cache
def cells(name: str, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """For each cell of a format: the threshold in it (+inf if none), and how many thresholds lie below it."""
    thresholds = FORMATS[name].cuda_thresholds
    numbers = [round(16 * threshold) + 16 for threshold in thresholds]
    assert len(set(numbers)) == len(numbers), "two thresholds in one cell"
    inside = [float("inf")] * CELLS
    for number, threshold in zip(numbers, thresholds, strict=True):
        inside[number] = threshold
    below = [sum(number < cell for number in numbers) for cell in range(CELLS - 1)] + [0]
    return (
        torch.tensor(inside, dtype=torch.float32, device=device),
        torch.tensor(below, dtype=torch.int32, device=device),
    )


def quantize_blockwise(
    weight: torch.Tensor, format: BlockwiseFormat, block_size: int, packed: torch.Tensor, absmax: torch.Tensor
) -> None:
    """Quantize a contiguous fp16, bf16 or fp32 weight of any shape into `packed` uint8 [(numel + 1) // 2] and `absmax`
    fp32 [blocks]. All on the current device."""
    numel = weight.numel()
    if numel == 0:
        return

    def configure(facts: DeviceFacts) -> tuple[int, dict[str, Any]]:
        blocks = max(1, TILE_WEIGHTS // block_size)
        constants = {
            "BLOCK": block_size, "BLOCKS": blocks, "SIGNED_MAGNITUDE": format.signed_magnitude, "PTX": facts.ptx,
        }  # fmt: skip
        warps = 2 if block_size <= TILE_WEIGHTS else block_size // 512
        return triton.cdiv(numel, block_size * blocks), constants | {"num_warps": warps, "enable_fp_fusion": False}

    thresholds, below = cells(format.name, weight.device)
    arguments = (weight, thresholds, below, packed, absmax, numel, (numel + 1) // 2)
    key = (numel, weight.dtype, block_size, format.name)
    launch(blockwise_kernel, weight.get_device(), arguments, key, configure)


def quantize_scales(absmax: torch.Tensor, offset: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes uint8 [B] and absmax fp32 [ceil(B / 256)] of the fp32 scales `absmax` [B] less `offset` (one element)."""
    n_scales = absmax.numel()
    blocks = -(-n_scales // NESTED_BLOCK_SIZE)
    codes = absmax.new_empty(absmax.shape, dtype=torch.uint8)
    absmax2 = absmax.new_empty(blocks)

    def configure(facts: DeviceFacts) -> tuple[int, dict[str, Any]]:
        constants = {"NESTED": NESTED_BLOCK_SIZE, "BLOCKS": BLOCKS_OF_SCALES, "PTX": facts.ptx}
        return triton.cdiv(blocks, BLOCKS_OF_SCALES), constants | {"num_warps": 4, "enable_fp_fusion": False}

    if blocks:
        arguments = (absmax, offset, dynamic_code(absmax.device), codes, absmax2, n_scales)
        launch(scales_kernel, absmax.get_device(), arguments, n_scales, configure)
    return codes, absmax2


def quantize_grouped(weight: torch.Tensor, group_size: int, packed: torch.Tensor, scale: torch.Tensor) -> None:
    """Quantize a contiguous weight [N, K] into int32 `packed` [N, K / 8] and `scale` [N, K / group_size]."""
    n_groups = scale.numel()

    def configure(_: DeviceFacts) -> tuple[int, dict[str, Any]]:
        groups = 2 * TILE_WEIGHTS // group_size
        constants = {"GROUP": group_size, "GROUPS": groups}
        return triton.cdiv(n_groups, groups), constants | {"num_warps": 4, "enable_fp_fusion": False}

    if n_groups:
        key = (n_groups, weight.dtype, scale.dtype, group_size)
        launch(grouped_kernel, weight.get_device(), (weight, packed, scale, n_groups), key, configure)
