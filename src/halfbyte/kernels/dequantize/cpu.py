"""Dequantize on the CPU, through numba.

Blockwise ("nf4", "fp4"): packed uint8 [(numel + 1) // 2], two weights a byte, the first in the high nibble; one scale
for each `block_size` weights, fp32 or nested.        value = codebook[nibble] * scale
Grouped ("int4"): packed int32 [N, K / 8], which little-endian is two weights a byte, the first in the *low* nibble.
value = (nibble - 8) * scale: the same again, with the integers -8 to 7 for a codebook.

Within a block there are but sixteen values. They are multiplied and rounded once, kept in registers as tables of bytes,
and looked up sixteen at a time by the byte shuffle that every x86-64 (pshufb) and Arm (tbl) has: no arithmetic is left
for the weights themselves. The shuffle is the reason for writing LLVM by hand below; LLVM never finds it on its own.

Bytes moved a weight: 1/2 read, 2 or 4 written, and 1 or 4 read for every block. Flops: 16 a block.
Source: formats/.
"""

# numba finds out the types of kernels by itself, and llvmlite has none for what it builds.
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

import ctypes
import sys
from typing import Any

import llvmlite.ir as ir
import numpy as np
import torch
from numba import njit
from numba.core import cgutils, types
from numba.extending import intrinsic
from torch import Tensor

from halfbyte.formats import grouped
from halfbyte.formats.weight import NestedScale
from halfbyte.kernels.common.floats import BITS, ROUND
from halfbyte.kernels.common.llvm import (
    I8,
    I32,
    I64,
    constant,
    interleave,
    join,
    load,
    shift_right,
    shuffle,
    splat,
    store,
)
from halfbyte.kernels.common.scales import scale_arguments
from halfbyte.kernels.common.threads import parallel

# A step of the kernel: so many packed bytes become twice as many weights. The smallest block is one step.
BYTES, WEIGHTS = 16, 32

# Fewer weights than this are not worth waking a thread for.
GRAIN = 2**20


def dequantize_blockwise(
    packed: Tensor, scale: Tensor, nested: NestedScale | None, codebook: Tensor, block_size: int, out: Tensor
) -> None:
    """Write the weights of `packed` into `out`: contiguous, fp16, bf16 or fp32, any shape, any number of elements."""
    _dequantize(packed.reshape(-1), scale_arguments(scale, nested), codebook, block_size, False, out)


def dequantize_grouped(packed: Tensor, scale: Tensor, group_size: int, out: Tensor) -> None:
    """Write the weights of int32 `packed` [N, K / 8] and `scale` [N, K / group_size] into `out` [N, K]."""
    codebook = grouped.codebook_tensor(out.device)
    _dequantize(packed.view(torch.uint8).view(-1), scale_arguments(scale, None), codebook, group_size, True, out)


def _dequantize(
    packed: Tensor, scales: tuple[Any, ...], codebook: Tensor, block_size: int, low_first: bool, out: Tensor
) -> None:
    if out.numel() == 0:
        return
    advise_huge_pages(out)
    bits = out.view(-1).view(BITS[out.dtype]).numpy()
    blocks = -(-out.numel() // block_size)
    arguments = packed.numpy(), *scales, codebook.numpy(), block_size, low_first, bits
    parallel(_dequantize_blocks, blocks, GRAIN // block_size, *arguments)


@njit(nogil=True, cache=True, fastmath=False, error_model="numpy")
def _dequantize_blocks(
    begin, end, packed, flat, codes, code, absmax, offset, absmax_block, codebook, block_size, low_first, out
):
    """Blocks `begin` to `end`. Scales come from `flat` or, where that is empty, from the five arguments after it."""
    for block in range(begin, end):
        # The multiplication and the addition are rounded one by one: numba fuses nothing without fastmath.
        scale = flat[block] if flat.size else code[codes[block]] * absmax[block // absmax_block] + offset
        first = block * block_size
        size = min(block_size, out.size - first)
        steps = size // WEIGHTS
        _decode(packed, first // 2, steps, scale, codebook, low_first, out, first)
        first += steps * WEIGHTS
        if first < block * block_size + size:  # the end of the last block is less than one step
            bytes_left = np.zeros(BYTES, np.uint8)
            bytes_left[: packed.size - first // 2] = packed[first // 2 :]
            weights = np.empty(WEIGHTS, out.dtype)
            _decode(bytes_left, 0, 1, scale, codebook, low_first, weights, 0)
            out[first:] = weights[: out.size - first]


@intrinsic
def _decode(typing_context, packed, byte, steps, scale, codebook, low_first, out, weight):
    """packed[byte:] -> out[weight:], `steps` times 16 bytes and 32 weights of one scale."""
    signature = types.void(packed, types.intp, types.intp, types.float32, codebook, types.boolean, out, types.intp)

    def lower(context, builder, signature, arguments):
        packed, byte, steps, scale, codebook, low_first, out, weight = arguments

        def pointer(position, array):
            return context.make_array(signature.args[position])(context, builder, array).data

        table = load(builder, pointer(4, codebook), I32, 16)
        scales = splat(builder, builder.bitcast(scale, I32), 16)
        floats = ir.VectorType(ir.FloatType(), 16)
        product = builder.fmul(builder.bitcast(table, floats), builder.bitcast(scales, floats))
        words = ROUND[signature.args[6].dtype](builder, product)
        look_up = shuffle(context)
        width = words.type.element.width // 8
        tables = [builder.trunc(shift_right(builder, words, 8 * i), ir.VectorType(I8, 16)) for i in range(width)]

        source = builder.gep(pointer(0, packed), [byte])
        target = builder.gep(pointer(6, out), [weight])
        with cgutils.for_range(builder, steps) as loop:
            octets = load(builder, builder.gep(source, [builder.mul(loop.index, I64(BYTES))]), I8, BYTES)
            high = shift_right(builder, octets, 4)
            low = builder.and_(octets, constant(octets.type, 15))
            nibbles = interleave(builder, builder.select(low_first, low, high), builder.select(low_first, high, low))
            here = builder.mul(loop.index, I64(WEIGHTS))
            for half in nibbles:
                parts = [look_up(builder, table, half) for table in tables]
                for values in join(builder, parts):
                    store(builder, values, builder.gep(target, [here]), words.type.element)
                    here = builder.add(here, I64(16 * 8 // words.type.element.width))
        return context.get_dummy_value()

    return signature, lower


# glibc gives blocks of this size and more pages of their own, and takes the pages back when they are freed.
HUGE_PAGE, WORTHWHILE = 2**21, 2**25


def advise_huge_pages(out: Tensor) -> None:
    """Ask Linux for 2 MiB pages behind a large output that was never written: page faults cost more than the kernel.

    Writing 117 MB to fresh memory takes 26 ms with pages of 4 KiB and 6 ms with these. It is a hint: where it cannot be
    followed, or the memory is already in use, nothing happens.
    """
    if sys.platform != "linux" or out.nbytes < WORTHWHILE:
        return
    begin = -(-out.data_ptr() // HUGE_PAGE) * HUGE_PAGE
    end = (out.data_ptr() + out.nbytes) // HUGE_PAGE * HUGE_PAGE
    madv_hugepage = 14
    ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), madv_hugepage)
