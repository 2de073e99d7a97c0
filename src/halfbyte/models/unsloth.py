"""Unsloth: its two functions that read 4-bit weights, `fast_dequantize` and `fast_gemv`, computed by halfbyte.

Unsloth's layers do not go through Linear4bit.forward. Decoding (`fast_linear_forward`), forward passes (`matmul_lora`)
and the backward passes of its LoRA layers call these two by the names that their own modules hold, so every such name
is changed. What is no 4-bit weight of bitsandbytes (dense, fp8, 8-bit and formats of Unsloth's own) goes to Unsloth.

Unsloth can dequantize all weights into one buffer that it keeps for good (`use_global_buffer`). Here each call has
memory of its own: torch's allocator hands out again what the last product has let go, which costs no more, while one
buffer would be torn between two streams and keep the largest weight's bytes of dense memory for good.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from halfbyte.formats.bitsandbytes import from_bitsandbytes
from halfbyte.formats.weight import QuantizedWeight
from halfbyte.models.bitsandbytes import keep, known
from halfbyte.models.patch import replace_everywhere
from halfbyte.ops import dequantize, linear

HOME = "unsloth.kernels.utils"

_originals: dict[str, Callable[..., Tensor]] = {}


def apply_to_library() -> None:
    """Replace Unsloth's two functions, if Unsloth has been imported."""
    home = sys.modules.get(HOME)
    for function in (fast_dequantize, fast_gemv):
        name = function.__name__
        if name not in _originals and hasattr(home, name):
            _originals[name] = getattr(home, name)
            replace_everywhere(_originals[name], function)


def undo_in_library() -> None:
    for function in (fast_dequantize, fast_gemv):
        if original := _originals.pop(function.__name__, None):
            replace_everywhere(function, original)


def fast_dequantize(W: Any, quant_state: Any = None, out: Tensor | None = None, *args: Any, **kwargs: Any) -> Any:
    """The dense weight [N, K] in the dtype of its state, in `out` if that is given; [K, N] of a transposed `W`.

    More arguments are those of later versions: a buffer, which is not used, and a dtype, which is for fp8 alone.
    """
    q = _read(W, quant_state)
    if q is None:
        return _originals["fast_dequantize"](W, quant_state, out, *args, **kwargs)
    dense = dequantize(q, q.dtype, out)
    return dense.t() if W.shape[0] == 1 else dense


def fast_gemv(X: Tensor, W: Any, quant_state: Any, out: Tensor | None = None) -> Tensor:
    """X @ W.T of one row, X [1, 1, K] -> [1, 1, N], in `out` if that is given. No gradient flows, as in Unsloth."""
    q = _read(W, quant_state)
    if q is None or X.dtype is not q.dtype or X.numel() != q.shape[-1]:
        return _originals["fast_gemv"](X, W, quant_state, out)
    y = linear(X.detach(), q)
    return y if out is None else out.copy_(y)


def _read(weight: Any, state: Any) -> QuantizedWeight | None:
    """A weight of bitsandbytes as halfbyte reads it, kept with its state once read, or None for anything else."""
    is_list = type(state) is list  # the state of old versions, which nothing can be kept with
    if not is_list and type(state).__name__ != "QuantState":
        return None
    q = None if is_list else known(weight, state)
    if q is not None or torch.compiler.is_compiling():
        return q
    try:
        q = from_bitsandbytes(weight, state)
    except (TypeError, ValueError):  # such as one of 8 bits
        return None
    if not is_list:
        keep(q, weight, state)
    return q
