"""Arrays by their address, in numba kernels: a number is handed over in a tenth of the time that an array takes."""

# numba finds out the types of kernels by itself, and llvmlite has none for what it builds.
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

from numba import carray
from numba.core import types
from numba.extending import intrinsic, register_jitable


@register_jitable
def array_at(address, shape, like):
    """The array of `shape` that begins at `address`, C-contiguous, with numbers of the type of those of `like`."""
    return carray(_pointer(address), shape, like.dtype)


@intrinsic
def _pointer(typing_context, address):
    def lower(context, builder, signature, arguments):
        return builder.inttoptr(arguments[0], context.get_value_type(types.voidptr))

    return types.voidptr(types.intp), lower
