"""PEFT: merging, unmerging and DoRA dequantize through halfbyte; LoRA's products go through the base layers.

PEFT turns a 4-bit weight into a dense one in a single function, at every forward pass of a DoRA layer. What that
returns stays bit for bit the same.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from torch import Tensor

from halfbyte.formats.bitsandbytes import from_bitsandbytes
from halfbyte.models.patch import replace_everywhere
from halfbyte.ops import dequantize

HOME, NAME = "peft.utils.integrations", "dequantize_bnb_weight"

_original: Callable[..., Tensor] | None = None


def apply() -> None:
    """Replace PEFT's function, if PEFT has been imported."""
    global _original
    home = sys.modules.get(HOME)
    if _original is None and home is not None and hasattr(home, NAME):
        _original = getattr(home, NAME)
        replace_everywhere(_original, dequantize_bnb_weight)


def undo() -> None:
    global _original
    if _original is not None:
        replace_everywhere(dequantize_bnb_weight, _original)
        _original = None


def dequantize_bnb_weight(weight: Any, *args: Any, **kwargs: Any) -> Tensor:
    """The dense weight [N, K] of a Params4bit, in the dtype of its state; anything else goes to PEFT."""
    if type(weight).__name__ == "Params4bit" and weight.dim() == 2 and weight.shape[1] == 1:
        try:
            q = from_bitsandbytes(weight)
        except (TypeError, ValueError):  # such as one that bitsandbytes repacked for its CPU kernels
            q = None
        if q is not None:
            return dequantize(q)
    assert _original is not None
    return _original(weight, *args, **kwargs)
