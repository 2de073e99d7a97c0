"""PEFT: a LoRA layer over a 4-bit one in a few launches, and dequantization by halfbyte in DoRA, merge and unmerge.

PEFT computes y = base(x), then adds lora_B(lora_A(dropout(x))) * scaling in a dozen operations, each with its node in
autograd. At the sizes of fine-tuning Python, not the GPU, is what that waits for. Here it is one node:

    forward     h = d @ A.T * scaling                 y = x @ W.T + h @ B.T
    backward    e = grad @ B * scaling                grad x = grad @ W (+ e @ A)        d = dropout(x), or x itself
                grad A = e.T @ d                      grad B = grad.T @ h

Variants (DoRA and others), several active adapters, merged or disabled ones, adapters that compute in another dtype
than the layer, and traced calls go PEFT's own way. What PEFT dequantizes stays the same, bit for bit.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from halfbyte.autograd import linear_backward
from halfbyte.formats.bitsandbytes import from_bitsandbytes
from halfbyte.formats.weight import QuantizedWeight
from halfbyte.models import bitsandbytes
from halfbyte.models.patch import replace_everywhere
from halfbyte.models.projections import shared
from halfbyte.ops import dequantize, linear

HOME, NAME = "peft.utils.integrations", "dequantize_bnb_weight"

_original: Callable[..., Tensor] | None = None


def apply_to_library() -> None:
    """Replace PEFT's function that dequantizes, if PEFT has been imported."""
    global _original
    home = sys.modules.get(HOME)
    if _original is None and home is not None and hasattr(home, NAME):
        _original = getattr(home, NAME)
        replace_everywhere(_original, dequantize_bnb_weight)


def undo_in_library() -> None:
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


def supports(module: nn.Module) -> bool:
    """True for PEFT's LoRA layer over a Linear4bit, known by name: nothing is imported to find out."""
    kind = type(module)
    return kind.__name__ == "Linear4bit" and kind.__module__.startswith("peft.tuners.lora.")


def apply(module: nn.Module) -> None:
    """Let a LoRA layer compute as above wherever it can."""
    if "forward" not in module.__dict__:
        module.forward = MethodType(forward, module)


def undo(module: nn.Module) -> None:
    if getattr(module.__dict__.get("forward"), "__func__", None) is forward:
        del module.__dict__["forward"]


def forward(module: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """What PEFT's lora.Linear4bit.forward computes: x [..., K] -> [..., N]."""
    adapter = None if args or kwargs else _adapter(module, x)
    if adapter is None:
        result: Tensor = type(module).forward(module, x, *args, **kwargs)
        return result
    x = x.contiguous()
    given = adapter.dropout(x) if adapter.dropout.training else x
    if torch.is_grad_enabled() and (x.requires_grad or adapter.a.requires_grad or adapter.b.requires_grad):
        return _apply(x, None if given is x else given, adapter.a, adapter.b, adapter)
    return _product(x, given, adapter)[0]


class Adapter(NamedTuple):
    """a [r, K], b [N, r]: of LoRA. q [N, K], bias: of the layer under it, `base`."""

    a: Tensor
    b: Tensor
    scaling: float
    dropout: nn.Module
    q: QuantizedWeight
    bias: Tensor | None
    base: nn.Module


def _adapter(module: Any, x: Tensor) -> Adapter | None:
    """The one plain adapter that is active, or None where PEFT's own way is the right one."""
    names = module.active_adapters
    base = module.base_layer
    if module.disable_adapters or module.merged or len(names) != 1 or torch.compiler.is_compiling():
        return None
    name = names[0]
    if (
        name not in module.lora_A
        or name in getattr(module, "lora_variant", {})
        or getattr(module, "lora_bias", {}).get(name, False)
        or not bitsandbytes.is_applied(base)
        or base.compute_dtype is not x.dtype
        or not base.compute_type_is_set
    ):
        return None
    a, b, bias = module.lora_A[name], module.lora_B[name], base.bias
    device = x.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else a.weight.dtype
    if dtype is not x.dtype or type(a) is not nn.Linear or type(b) is not nn.Linear or a._forward_hooks:
        return None
    q = bitsandbytes.weight_of(base)
    if q is None or (bias is not None and (bias.requires_grad or bias.dtype is not x.dtype)):
        return None
    return Adapter(a.weight, b.weight, module.scaling[name], module.lora_dropout[name], q, bias, base)


def _product(x: Tensor, given: Tensor, adapter: Adapter) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """y [..., N] and, for backward, h [M, r], a and b in x's dtype; `given` is what the adapter gets of x."""
    a, b = adapter.a.to(x.dtype), adapter.b.to(x.dtype)
    h = _scaled(given.view(-1, given.shape[-1]), a.t(), adapter.scaling)
    # Siblings without an adapter have a node each for such an x, and take nothing.
    y = None if x.requires_grad else shared(adapter.base, x)
    if y is None:
        y = linear(x, adapter.q, adapter.bias)
    y.view(-1, y.shape[-1]).addmm_(h, b.t())
    return y, h, a, b


class _Lora(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dropped: Tensor | None, a: Tensor, b: Tensor, adapter: Adapter) -> Tensor:
        given = x if dropped is None else dropped
        y, *kept = _product(x, given, adapter)
        ctx.save_for_backward(given, *kept)
        ctx.adapter = adapter
        return y

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        given, h, a, b = ctx.saved_tensors
        adapter, (of_x, of_dropped, of_a, of_b, _) = ctx.adapter, ctx.needs_input_grad
        grad, flat = grad.reshape(-1, grad.shape[-1]), given.view(-1, given.shape[-1])
        e = _scaled(grad, b, adapter.scaling)
        grad_x = grad_dropped = None
        if of_x:
            grad_x = linear_backward(grad, adapter.q)
            if not of_dropped:
                grad_x.addmm_(e, a)
            grad_x = grad_x.view(given.shape)
        if of_dropped:
            grad_dropped = (e @ a).view(given.shape)
        grad_a = _mm(e.t(), flat, adapter.a.dtype) if of_a else None
        grad_b = _mm(grad.t(), h, adapter.b.dtype) if of_b else None
        return grad_x, grad_dropped, grad_a, grad_b, None


def _scaled(x: Tensor, y: Tensor, scaling: float) -> Tensor:
    """x @ y * scaling, rounded once."""
    if scaling == 1:
        return x @ y
    return torch.addmm(x.new_empty((len(x), y.shape[1])), x, y, beta=0, alpha=scaling)


def _mm(x: Tensor, y: Tensor, dtype: torch.dtype) -> Tensor:
    """x @ y in `dtype`, on a GPU without rounding to that of x first."""
    if x.is_cuda and dtype is torch.float32:
        return torch.mm(x, y, out_dtype=dtype)
    return (x @ y).to(dtype)


_apply: Callable[..., Tensor] = _Lora.apply
