"""Gradients of `linear`, of x and of bias; a 4-bit weight has none.

grad x = grad @ W, with W dequantized to x's dtype; grad bias = the sum of grad over all rows. Only the packed weight is
kept for backward, never x, and never a dense W. Both are made of operations that have gradients themselves.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from halfbyte.library import weight_of
from halfbyte.ops import dequantize


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, packed, scale, nested, *facts, _, _ = inputs
    ctx.save_for_backward(packed, scale, *nested)
    ctx.facts, ctx.dtype, ctx.arguments = facts, x.dtype, len(inputs)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    packed, scale, *nested = ctx.saved_tensors
    grads: list[Any] = [None] * ctx.arguments
    if ctx.needs_input_grad[0]:
        grads[0] = grad @ dequantize(weight_of((packed, scale, nested, *ctx.facts), ctx.dtype))
    if ctx.needs_input_grad[-2]:
        grads[-2] = grad.reshape(-1, grad.shape[-1]).sum(0)
    grads[3] = [None] * len(nested)
    return tuple(grads)


torch.library.register_autograd("halfbyte::linear", _backward, setup_context=_setup_context)
