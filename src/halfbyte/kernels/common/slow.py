"""Nothing is slow in silence: one warning a process for each fast path that is out of reach."""

from __future__ import annotations

import sys
import warnings
from functools import cache
from importlib.util import find_spec

import torch

_told: set[str] = set()


def warn(path: str, reason: str) -> None:
    """Tell why `path`, a fast one, is out of reach, and how to mend that, unless this process has told it already."""
    if path not in _told:
        _told.add(path)
        warnings.warn(f"halfbyte: {reason}", UserWarning, stacklevel=2)


@cache
def has_triton() -> bool:
    """True where Triton is installed; it is not imported to find out."""
    return find_spec("triton") is not None


@cache
def has_numba() -> bool:
    """True where numba is installed; it is not imported to find out."""
    return find_spec("numba") is not None


@cache
def no_kernels(device_type: str) -> str | None:
    """Why plain torch serves a kind of device, and how to mend that; None where it has kernels."""
    if device_type == "cpu":
        missing = None if has_numba() else "numba is missing", "pip install numba"
    elif device_type == "cuda":
        missing = None if has_triton() else "Triton is missing", _get_triton()
    else:
        missing = f"there are no kernels for {device_type} devices", "a CPU or a CUDA GPU has them"
    reason, mend = missing
    return None if reason is None else f"{reason}, so plain torch computes on {device_type}, slowly; {mend}"


def _get_triton() -> str:
    if torch.version.hip:
        return "pip install pytorch-triton-rocm, of the index that this torch came from"
    return "pip install triton-windows" if sys.platform == "win32" else "pip install triton"
