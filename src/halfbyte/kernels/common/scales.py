"""Scales as numba kernels take them: plain or nested, always the same types."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from halfbyte.formats.weight import NestedScale


def scale_arguments(scale: Tensor, nested: NestedScale | None) -> tuple[Any, ...]:
    """(flat, codes, code, absmax, offset, block size). A scale is flat[i] or, where `flat` is empty,
    code[codes[i]] * absmax[i // block size] + offset; what is not used is empty, 0 and 1."""
    nothing = np.empty(0, np.float32)
    if nested is None:
        return scale.float().view(-1).numpy(), np.empty(0, np.uint8), nothing, nothing, np.float32(0), 1
    code, absmax, offset, size = nested
    return nothing, scale.numpy(), code.numpy(), absmax.numpy(), np.float32(offset.item()), size
