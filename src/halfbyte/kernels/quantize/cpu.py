"""Quantize on the CPU, through numba, to the very bits of bitsandbytes' CPU code.

weight fp16, bf16 or fp32 [...] -> packed and scale as formats/spec.py describes them. Nested scales: absmax fp32
[blocks] -> codes uint8 [blocks], absmax2 fp32.

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

from halfbyte.formats.nested import NESTED_BLOCK_SIZE
from halfbyte.formats.spec import Format, exponents_tensor, midpoints_tensor
from halfbyte.kernels.common.threads import parallel
from halfbyte.kernels.quantize.reference import DYNAMIC_STEPS, INFINITY, SMALLEST_DIVISOR, dynamic_table

# numba sees weights as integers, one type for each float format.
BITS = {torch.bfloat16: torch.uint16, torch.float16: torch.int16, torch.float32: torch.uint32}

# Fewer weights than this are not worth waking a thread for.
GRAIN = 2**17

# Weights that are scaled before their nibbles are looked for: a multiple of every block size, and small enough for L1.
TILE = 4096

ROUNDER = np.float32(1.5 * 2**23)
SMALLEST = np.float32(SMALLEST_DIVISOR)

options = {"nogil": True, "cache": True, "fastmath": False, "error_model": "numpy"}


def quantize(weight: Tensor, format: Format, block_size: int, packed: Tensor, scale: Tensor) -> None:
    """Quantize a contiguous fp16, bf16 or fp32 weight into `packed` and `scale`, of the format's shapes and dtypes."""
    octets, largest = packed.view(torch.uint8).view(-1).numpy(), np.float32(format.largest)
    if format.integers:
        bias = -int(format.codebook[0])
        blocks = _bits(weight), block_size, largest, bias, format.low_first, octets, _bits(scale)
        parallel(_quantize_integers, scale.numel(), GRAIN // block_size, *blocks)
        return
    if format.has_exponents:
        thresholds, nibbles = np.array(format.thresholds, np.float32), np.array(format.compared, np.uint8)
        powers, low_first = exponents_tensor(weight.device).numpy(), format.low_first
        powered = _bits(weight), block_size, format.largest_exponent, powers, thresholds, nibbles, low_first
        parallel(_quantize_exponents, scale.numel(), GRAIN // block_size, *powered, octets, scale.view(-1).numpy())
        return
    midpoints = tuple(midpoints_tensor(format, weight.device).numpy())
    halves = format.ascending[:8], format.ascending[8:]
    ascending = tuple(np.uint32(sum(nibble << 4 * i for i, nibble in enumerate(half))) for half in halves)
    arguments = _bits(weight), block_size, largest, midpoints, ascending, format.low_first, octets, _bits(scale)
    parallel(_quantize_tiles, -(-weight.numel() // TILE), GRAIN // TILE, *arguments)


def quantize_scales(absmax: Tensor, offset: Tensor) -> tuple[Tensor, Tensor]:
    """Codes uint8 [B] and absmax fp32 [ceil(B / 256)] of the fp32 scales `absmax` [B] less `offset` (one element)."""
    codes = absmax.new_empty(absmax.numel(), dtype=torch.uint8)
    absmax2 = absmax.new_empty(-(-absmax.numel() // NESTED_BLOCK_SIZE))
    arguments = absmax.numpy(), np.float32(offset.item()), dynamic_table(absmax.device).numpy()
    grain = GRAIN // NESTED_BLOCK_SIZE
    parallel(_quantize_scales, absmax2.numel(), grain, *arguments, codes.numpy(), absmax2.numpy())
    return codes, absmax2


def _bits(tensor: Tensor) -> np.ndarray[Any, Any]:
    return tensor.detach().view(-1).view(BITS[tensor.dtype]).numpy()


@njit(**options)
def _quantize_tiles(begin, end, weight, block_size, most, midpoints, ascending, low_first, packed, scales):
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
            if block.size < block_size and largest < SMALLEST:
                largest = SMALLEST
            scales[first // block_size] = _round(largest / most, scales)
            scale = _float(scales[first // block_size])
            divisor = SMALLEST if scale < SMALLEST else scale  # and NaN where it is NaN
            if block.size == block_size:
                factor = np.float32(1) / divisor
                for i in range(block.size):
                    into[i] = _float(block[i]) * factor
            else:
                for i in range(block.size):
                    into[i] = _float(block[i]) / divisor
        if size % 2:
            scaled[size] = 0
            size += 1
        _nearest(scaled[:size], midpoints, ascending, nibbles)
        octets = packed[tile * (TILE // 2) :]
        for pair in range(size // 2):
            first, second = nibbles[2 * pair], nibbles[2 * pair + 1]
            octets[pair] = second << 4 | first if low_first else first << 4 | second


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
def _quantize_integers(begin, end, weight, block_size, most, bias, low_first, packed, scales):
    """Blocks `begin` to `end`."""
    nibbles = np.empty(block_size, np.uint8)
    for index in range(begin, end):
        block = weight[index * block_size : (index + 1) * block_size]
        octets = packed[index * block_size // 2 : (index + 1) * block_size // 2]
        scales[index] = _round(_largest(block) / most, scales)
        scale = _float(scales[index])
        for i in range(block.size):
            scaled = _float(block[i]) / scale
            scaled = np.float32(0) if scaled != scaled else scaled
            clamped = max(-most, min(most, scaled))
            # From 2**23 to 2**24 the last place of an fp32 is 1: the addition rounds, ties to even.
            nibbles[i] = np.int32((clamped + ROUNDER) - ROUNDER) + bias
        for pair in range(octets.size):
            first, second = nibbles[2 * pair], nibbles[2 * pair + 1]
            octets[pair] = second << 4 | first if low_first else first << 4 | second


@njit(**options)
def _quantize_exponents(
    begin, end, weight, block_size, largest_exponent, powers, thresholds, nibbles, low_first, packed, scales
):
    """Blocks `begin` to `end`. powers: fp32 [256], what scales stand for."""
    scaled, ranks = np.empty(block_size, np.float32), np.empty(block_size, np.uint8)
    bits = scaled.view(np.uint32)
    for index in range(begin, end):
        block = weight[index * block_size : (index + 1) * block_size]
        octets = packed[index * block_size // 2 : (index + 1) * block_size // 2]
        largest = np.int64(np.float32(_largest(block)).view(np.uint32))
        exponent = 255 if largest > INFINITY else max((largest >> 23) - largest_exponent, 0)
        scales[index] = exponent
        factor = np.float32(1) / powers[exponent]  # exact: of -127 to 126
        sign = np.uint32(0 if exponent == 255 else 8)  # NaN has none, and no rank
        for i in range(block_size):
            scaled[i] = _float(block[i]) * factor
            ranks[i] = 0
        for threshold in thresholds:
            for i in range(block_size):
                ranks[i] += np.uint8(abs(scaled[i]) > threshold)
        for i in range(block_size):
            ranks[i] = nibbles[ranks[i]] | np.uint8((bits[i] >> np.uint32(28)) & sign)
        for pair in range(octets.size):
            first, second = ranks[2 * pair], ranks[2 * pair + 1]
            octets[pair] = second << 4 | first if low_first else first << 4 | second


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
