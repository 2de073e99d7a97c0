"""Quantize on the CPU, through numba, to the very bits of bitsandbytes' CPU code.

Blockwise ("nf4", "fp4"): weight fp16, bf16 or fp32 of any shape -> packed uint8 [(numel + 1) // 2], the first weight of
a pair in the high nibble, and absmax fp32 [blocks]. Nested scales: absmax -> codes uint8 [blocks], absmax2 fp32.
Grouped ("int4"): weight [N, K] -> packed int32 [N, K / 8] and scale [N, K / G].

A block is read twice, the second time from the cache: once for its largest magnitude, once to compare every weight with
the fifteen midpoints. Loops are plain and branch-free, so that LLVM turns them into vector code for the CPU at hand.

Bytes moved a weight: 2 or 4 read, 1/2 written, and 4 written for every block. Flops: a multiplication.
Source: the rules, NaN and zeros included, are those spelled out in reference.py.
"""

# numba finds out the types of kernels by itself.
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba import njit, types
from numba.extending import overload
from torch import Tensor

from halfbyte.formats.blockwise import NESTED_BLOCK_SIZE, BlockwiseFormat, midpoints_tensor
from halfbyte.formats.grouped import BIAS, LARGEST
from halfbyte.kernels.common.threads import parallel
from halfbyte.kernels.quantize.reference import DYNAMIC_STEPS, SMALLEST_DIVISOR, dynamic_table

# numba sees weights as integers, one type for each float format.
BITS = {torch.bfloat16: torch.uint16, torch.float16: torch.int16, torch.float32: torch.uint32}

# Fewer weights than this are not worth waking a thread for.
GRAIN = 2**17

# Weights that are scaled before their nibbles are looked for: a multiple of every block size, and small enough for L1.
TILE = 4096

ROUNDER = np.float32(1.5 * 2**23)
SMALLEST = np.float32(SMALLEST_DIVISOR)

options = {"nogil": True, "cache": True, "fastmath": False, "error_model": "numpy"}


def quantize_blockwise(
    weight: Tensor, format: BlockwiseFormat, block_size: int, packed: Tensor, absmax: Tensor
) -> None:
    """Quantize a contiguous fp16, bf16 or fp32 weight of any shape into `packed` and `absmax`."""
    midpoints = tuple(midpoints_tensor(format.name, weight.device).numpy())
    halves = format.ascending[:8], format.ascending[8:]
    ascending = tuple(np.uint32(sum(nibble << 4 * i for i, nibble in enumerate(half))) for half in halves)
    arguments = _bits(weight), block_size, midpoints, ascending, packed.view(-1).numpy(), absmax.numpy()
    parallel(_quantize_tiles, -(-weight.numel() // TILE), GRAIN // TILE, *arguments)


def quantize_scales(absmax: Tensor, offset: Tensor) -> tuple[Tensor, Tensor]:
    """Codes uint8 [B] and absmax fp32 [ceil(B / 256)] of the fp32 scales `absmax` [B] less `offset` (one element)."""
    codes = absmax.new_empty(absmax.numel(), dtype=torch.uint8)
    absmax2 = absmax.new_empty(-(-absmax.numel() // NESTED_BLOCK_SIZE))
    arguments = absmax.numpy(), np.float32(offset.item()), dynamic_table(absmax.device).numpy()
    grain = GRAIN // NESTED_BLOCK_SIZE
    parallel(_quantize_scales, absmax2.numel(), grain, *arguments, codes.numpy(), absmax2.numpy())
    return codes, absmax2


def quantize_grouped(weight: Tensor, group_size: int, packed: Tensor, scale: Tensor) -> None:
    """Quantize a contiguous weight [N, K] into int32 `packed` [N, K / 8] and `scale` [N, K / group_size]."""
    arguments = _bits(weight), group_size, packed.view(-1).view(torch.uint8).numpy(), _bits(scale)
    parallel(_quantize_groups, scale.numel(), GRAIN // group_size, *arguments)


def _bits(tensor: Tensor) -> np.ndarray[Any, Any]:
    return tensor.detach().view(-1).view(BITS[tensor.dtype]).numpy()


@njit(**options)
def _quantize_tiles(begin, end, weight, block_size, midpoints, ascending, packed, absmax):
    """Tiles `begin` to `end`: blocks until TILE weights are scaled, then all their nibbles."""
    scaled = np.empty(TILE, np.float32)
    nibbles = np.empty(TILE, np.uint8)
    for tile in range(begin, end):
        size = min(TILE, weight.size - tile * TILE)
        for start in range(0, size, block_size):
            # Slices, since numba asks of every other index whether it is negative, which keeps LLVM from vectorizing.
            first = tile * TILE + start
            block = weight[first : first + min(block_size, size - start)]
            into = scaled[start : start + block.size]
            largest = _largest(block)
            divisor = SMALLEST if largest < SMALLEST else largest  # and NaN where it is NaN
            if block.size == block_size:
                absmax[first // block_size] = largest
                factor = np.float32(1) / divisor
                for i in range(block.size):
                    into[i] = _float(block[i]) * factor
            else:
                absmax[first // block_size] = divisor
                for i in range(block.size):
                    into[i] = _float(block[i]) / divisor
        if size % 2:
            scaled[size] = 0
            size += 1
        _nearest(scaled[:size], midpoints, ascending, nibbles)
        octets = packed[tile * (TILE // 2) :]
        for pair in range(size // 2):
            octets[pair] = nibbles[2 * pair] << 4 | nibbles[2 * pair + 1]


@njit(**options)
def _nearest(scaled, midpoints, ascending, nibbles):
    """The nibble of each of `scaled`: a binary search for the first midpoint not below it (none is not, for NaN).

    It does not branch and it looks nothing up in memory: the nibbles, in the order of their values, are two words.
    """
    m0, m1, m2, m3, m4, m5, m6, m7, m8, m9, m10, m11, m12, m13, m14 = midpoints
    lower, upper = ascending
    for i in range(scaled.size):
        x = scaled[i]
        eight = not m7 >= x
        four = not (m11 if eight else m3) >= x
        two = not ((m13 if eight else m5) if four else (m9 if eight else m1)) >= x
        above = (m14 if eight else m6) if four else (m10 if eight else m2)
        below = (m12 if eight else m4) if four else (m8 if eight else m0)
        one = not (above if two else below) >= x
        nibbles[i] = (upper if eight else lower) >> np.uint32(16 * four + 8 * two + 4 * one) & np.uint32(15)


@njit(**options)
def _largest(values):
    """The largest magnitude, in fp32; NaN if there is a NaN. As integers, magnitudes have the order of their values."""
    largest = _magnitude(values[0])
    for i in range(values.size):
        largest = max(largest, _magnitude(values[i]))
    return _float(largest)


@njit(**options)
def _quantize_scales(begin, end, scales, offset, table, codes, absmax):
    """Blocks `begin` to `end` of 256 scales."""
    shifted = np.empty(NESTED_BLOCK_SIZE, np.float32)
    for index in range(begin, end):
        block = scales[index * NESTED_BLOCK_SIZE : (index + 1) * NESTED_BLOCK_SIZE]
        into = codes[index * NESTED_BLOCK_SIZE : (index + 1) * NESTED_BLOCK_SIZE]
        largest = np.float32(0)
        for i in range(block.size):
            shifted[i] = block[i] - offset
            magnitude = abs(shifted[i])
            largest = magnitude if magnitude > largest else largest  # not so for NaN
        absmax[index] = largest
        factor = np.float32(1) / largest
        for i in range(block.size):
            scaled = shifted[i] * factor
            half = (max(np.float32(-1), min(np.float32(1), scaled)) + np.float32(1)) * np.float32(0.5)
            # One rounding for both the multiplication and the addition: in fp64 they are exact.
            step = np.float32(np.float64(half) * (DYNAMIC_STEPS - 1) + 0.5)
            into[i] = table[np.uint16(step)] if scaled == scaled else 0
        if largest == 0:
            into[:] = 0


@njit(**options)
def _quantize_groups(begin, end, weight, group_size, packed, scales):
    """Groups `begin` to `end`. Little-endian, the first of two weights is in the low nibble of a byte."""
    nibbles = np.empty(group_size, np.uint8)
    for index in range(begin, end):
        group = weight[index * group_size : (index + 1) * group_size]
        octets = packed[index * group_size // 2 : (index + 1) * group_size // 2]
        scales[index] = _round(_largest(group) / np.float32(LARGEST), scales)
        scale = _float(scales[index])
        for i in range(group.size):
            scaled = _float(group[i]) / scale
            scaled = np.float32(0) if scaled != scaled else scaled
            clamped = max(np.float32(-LARGEST), min(np.float32(LARGEST), scaled))
            # From 2**23 to 2**24 the last place of an fp32 is 1: the addition rounds, ties to even.
            nibbles[i] = np.int32((clamped + ROUNDER) - ROUNDER) + BIAS
        for pair in range(octets.size):
            octets[pair] = nibbles[2 * pair] | nibbles[2 * pair + 1] << 4


def _float(bits):
    """The fp32 value of a weight's bits."""


def _magnitude(bits):
    """A weight's bits without the sign."""


def _round(value, like):
    """The bits of an fp32 value, rounded to nearest even, in the float format of array `like`."""


@overload(_float)
def _float_of(bits):
    if bits == types.uint16:
        return lambda bits: np.uint32(np.uint32(bits) << np.uint32(16)).view(np.float32)
    if bits == types.int16:
        return _float_of_fp16
    return lambda bits: np.uint32(bits).view(np.float32)


def _float_of_fp16(bits):
    magnitude = np.uint32((bits & 0x7FFF) << 13)
    # From exponent bias 15 to 127: exact, for subnormals too. Infinity and NaN have the largest exponent in both.
    value = magnitude.view(np.float32) * np.float32(2.0**112)
    value = np.uint32(magnitude | 0x7F800000).view(np.float32) if magnitude >= 0x0F800000 else value
    return -value if bits < 0 else value


@overload(_magnitude)
def _magnitude_of(bits):
    if bits == types.uint32:
        return lambda bits: np.uint32(bits & np.uint32(0x7FFFFFFF))
    if bits == types.uint16:
        return lambda bits: np.uint16(bits & np.uint16(0x7FFF))
    return lambda bits: np.int16(bits & np.int16(0x7FFF))


@overload(_round)
def _round_to(value, like):
    if like.dtype == types.uint16:
        return _round_to_bf16
    if like.dtype == types.int16:
        return _round_to_fp16
    return lambda value, like: np.float32(value).view(np.uint32)


def _round_to_bf16(value, like):
    bits = np.float32(value).view(np.uint32)
    return np.uint16(0x7FC0 if value != value else (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16)


def _round_to_fp16(value, like):
    """Of a value that is not negative."""
    bits = np.float32(value).view(np.uint32)
    if value != value:
        return np.int16(0x7E00)
    if value >= np.float32(2.0**16):
        return np.int16(0x7C00)
    if value < np.float32(2.0**-14):
        # Adding 0.5 puts the last place of an fp16 subnormal at the last place of an fp32: the addition rounds.
        return np.int16(np.float32(value + np.float32(0.5)).view(np.uint32) - 0x3F000000)
    # From exponent bias 127 to 15, and just under half of the last place that is kept.
    return np.int16((bits + ((bits >> 13) & 1) - (112 << 23) + 0xFFF) >> 13)
