"""Tensor maps: what Hopper's copy engine goes by when it brings a box of an array into shared memory."""

from __future__ import annotations

import ctypes
from functools import lru_cache

from halfbyte.kernels.common.driver import call

SWIZZLES = {16: 0, 32: 1, 64: 2, 128: 3}  # bytes that a box is wide to what the driver calls the swizzle of such lines


@lru_cache(1 << 14)
def tensor_map(address: int, sizes: tuple[int, ...], strides: tuple[int, ...], box: tuple[int, ...]) -> bytes:
    """The 128 bytes that describe an array of bytes at `address`, the innermost dimension first.

    sizes: of the array. strides: in bytes, of all dimensions but the innermost, multiples of 16. box: what one copy
    takes; its innermost side is swizzled in pieces of 16 bytes. What of a box is beyond the array arrives as zeros.
    """
    rank = len(sizes)
    space = ctypes.create_string_buffer(192)
    aligned = ctypes.addressof(space) + -ctypes.addressof(space) % 64
    call(
        "cuTensorMapEncodeTiled",
        ctypes.c_void_p(aligned), 0, rank, ctypes.c_void_p(address),  # 0: bytes
        (ctypes.c_uint64 * rank)(*sizes), (ctypes.c_uint64 * (rank - 1))(*strides),
        (ctypes.c_uint32 * rank)(*box), (ctypes.c_uint32 * rank)(*(1,) * rank),
        0, SWIZZLES[box[0]], 2, 0,  # no interleaving, 128 bytes at a time into L2, zeros out of bounds
    )  # fmt: skip
    return ctypes.string_at(aligned, 128)
