"""Where arrays of numba kernels lie: at an address, which is handed over in a tenth of the time that an array takes, or
where lines of the cache begin."""

# numba finds out the types of kernels by itself, and llvmlite has none for what it builds.
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

import numpy as np
from numba import carray
from numba.core import types
from numba.extending import intrinsic, register_jitable

LINE = 64  # bytes of the cache that come at once


@register_jitable
def in_lines(size, like):
    """So many numbers of the type of those of `like`, whatever they are, from where a line begins. A register that lies
    in two lines takes two loads."""
    room = np.empty(size + LINE // like.itemsize, like.dtype)
    first = -room.ctypes.data % LINE // like.itemsize
    return room[first : first + size]


@register_jitable
def array_at(address, shape, like):
    """The array of `shape` that begins at `address`, C-contiguous, with numbers of the type of those of `like`."""
    return carray(_pointer(address), shape, like.dtype)


@intrinsic
def _pointer(typing_context, address):
    def lower(context, builder, signature, arguments):
        return builder.inttoptr(arguments[0], context.get_value_type(types.voidptr))

    return types.voidptr(types.intp), lower
