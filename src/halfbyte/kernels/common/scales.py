"""Scales as numba kernels take them: plain, nested or exponents of two, always the same types."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from halfbyte.formats.spec import Format, exponents_tensor
from halfbyte.formats.weight import NestedScale

ALL = 2**62  # scales: more than any weight has


def scale_arguments(scale: Tensor, nested: NestedScale | None, format: Format) -> tuple[Any, ...]:
    """(flat, codes, code, absmax, offset, block size). A scale is flat[i] or, where `flat` is empty,
    code[codes[i]] * absmax[i // block size] + offset; what is not used is empty, 0 and 1. Exponents of two are looked
    up in `code`, and an absmax of 1 for all of them changes none."""
    nothing = np.empty(0, np.float32)
    if format.has_exponents:
        powers, one = exponents_tensor(scale.device).numpy(), np.ones(1, np.float32)
        return nothing, scale.numpy().reshape(-1), powers, one, np.float32(0), ALL
    if nested is None:
        return scale.float().view(-1).numpy(), np.empty(0, np.uint8), nothing, nothing, np.float32(0), 1
    code, absmax, offset, size = nested
    return nothing, scale.numpy().reshape(-1), code.numpy(), absmax.numpy(), np.float32(offset.item()), size
