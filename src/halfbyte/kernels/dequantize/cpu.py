"""Dequantize on the CPU, through numba.

packed and scale as formats/spec.py describes them, scale plain or nested.        value = codebook[nibble] * scale
An int32 word is, little-endian, four bytes whose first weight is in the low half.

Within a block there are but sixteen values: they are multiplied and rounded once, and looked up (common/decode.py).

Bytes moved a weight: 1/2 read, 2 or 4 written, and 1 or 4 read for every block. Flops: 16 a block.
Source: formats/.
"""

# numba finds out the types of kernels by itself.
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

import ctypes
import sys

import numpy as np
from numba import njit
from torch import Tensor

from halfbyte.formats.spec import Format
from halfbyte.formats.weight import NestedScale
from halfbyte.kernels.common.decode import BYTES, WEIGHTS, decode
from halfbyte.kernels.common.floats import BITS
from halfbyte.kernels.common.products import weight_arguments
from halfbyte.kernels.common.scales import scale_of
from halfbyte.kernels.common.threads import parallel

# Fewer weights than this are not worth waking a thread for.
GRAIN = 2**20


def dequantize(
    packed: Tensor,
    scale: Tensor,
    nested: NestedScale | None,
    format: Format,
    block_size: int,
    out: Tensor,
    first: int = 0,
) -> None:
    """Write the weights of `packed` into `out`: contiguous, fp16, bf16 or fp32, the shape of the dense weight, or of a
    part that begins with weight number `first`, a block's first, and ends with a block or with the weight."""
    if out.numel() == 0:
        return
    advise_huge_pages(out)
    octets, *weight = weight_arguments(packed, scale, nested, format, block_size)
    bits = out.view(-1).view(BITS[out.dtype]).numpy()
    blocks = -(-out.numel() // block_size)
    arguments = octets[first // 2 :], *weight, format.low_first, bits, first // block_size
    parallel(_dequantize_blocks, blocks, GRAIN // block_size, *arguments)


@njit(nogil=True, cache=True, fastmath=False, error_model="numpy")
def _dequantize_blocks(
    begin, end, packed, flat, codes, code, absmax, offset, nested_log2, log2, codebook, low_first, out, skipped
):
    """Blocks `begin` to `end` of `packed`, ahead of which `skipped` others have scales. Scales come from `flat` or,
    where that is empty, from the five arguments after it."""
    whole = out.size >> log2
    for block in range(begin, min(end, whole)):
        scale = scale_of(skipped + block, flat, codes, code, absmax, offset, nested_log2)
        first = block << log2
        decode(packed, first // 2, (1 << log2) // WEIGHTS, scale, codebook, low_first, out, first)
    if end > whole:  # a part of a block, and of a step
        scale = scale_of(skipped + whole, flat, codes, code, absmax, offset, nested_log2)
        first = whole << log2
        steps = (out.size - first) // WEIGHTS
        decode(packed, first // 2, steps, scale, codebook, low_first, out, first)
        first += steps * WEIGHTS
        if first < out.size:
            bytes_left = np.zeros(BYTES, np.uint8)
            bytes_left[: packed.size - first // 2] = packed[first // 2 :]
            weights = np.empty(WEIGHTS, out.dtype)
            decode(bytes_left, 0, 1, scale, codebook, low_first, weights, 0)
            out[first:] = weights[: out.size - first]


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
