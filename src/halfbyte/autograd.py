"""Gradients of `linear`, of x and of bias; a 4-bit weight has none.

grad x = grad @ W, from the 4-bit bytes where a kernel does that, else with W dequantized to x's dtype; grad bias = the
sum of grad over all rows. Only the packed weight is kept for backward, never x, and never a dense W. Both are made of
operations that have gradients themselves.

They are written for the operator, which tracing sees, for eager calls, which would otherwise pay the operator's hundred
microseconds, forward and back, and for torch.func and forward-mode AD, which also need tangents and batches.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from halfbyte import eager, transforms
from halfbyte.formats.weight import QuantizedWeight
from halfbyte.kernels.linear.reference import linear as linear_dense


def linear(x: Tensor, q: QuantizedWeight, bias: Tensor | None, batch_invariant: bool) -> Tensor:
    """x @ W.T + bias of arguments that fit, in an eager call, with all that autograd and torch.func want of it."""
    if transforms.is_active():
        return _Transformed.apply(x, q, bias, batch_invariant)  # type: ignore[no-any-return, no-untyped-call]
    if wants_gradients(x, bias):
        return _Linear.apply(x, q, bias, batch_invariant)  # type: ignore[no-any-return, no-untyped-call]
    return eager.linear(x, q, bias, batch_invariant)


def wants_gradients(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors if tensor is not None)


def linear_backward(grad: Tensor, q: QuantizedWeight) -> Tensor:
    """grad [..., N] @ W -> [..., K]. A backward pass may run under autocast, which has no say in it either."""
    if transforms.is_tracing():
        return torch.ops.halfbyte.linear_backward(grad, *q.parts)  # type: ignore[no-any-return]
    if transforms.is_active():  # grad may be many gradients, or have a tangent: torch knows what to do with these
        with transforms.outside():
            weight = eager.dequantize(q, q.scale.new_empty(q.shape, dtype=grad.dtype))
        return linear_dense(grad, weight.t(), None)
    if wants_gradients(grad):
        return _OfX.apply(grad, q)  # type: ignore[no-any-return, no-untyped-call]
    return eager.linear_backward(grad, q)


class _OfX(torch.autograd.Function):
    """That product, whose gradient is the product again."""

    @staticmethod
    def forward(ctx: Any, grad: Tensor, q: QuantizedWeight) -> Tensor:
        ctx.q = q
        return eager.linear_backward(grad, q)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return linear(grad, ctx.q, None, False), None


def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    """Of the operator: what backward needs of its inputs."""
    x, packed, scale, nested, *facts, _, _ = inputs
    ctx.save_for_backward(packed, scale, *nested)
    ctx.facts, ctx.dtype, ctx.arguments = facts, x.dtype, len(inputs)


def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """Of the operator: the gradients of its inputs."""
    packed, scale, *nested = ctx.saved_tensors
    grads: list[Any] = [None] * ctx.arguments
    if ctx.needs_input_grad[0]:
        grads[0] = linear_backward(grad, QuantizedWeight.from_parts((packed, scale, nested, *ctx.facts), ctx.dtype))
    if ctx.needs_input_grad[-2]:
        grads[-2] = grad.reshape(-1, grad.shape[-1]).sum(0)
    grads[3] = [None] * len(nested)
    return tuple(grads)


def setup_backward_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    """The same of the operator that is the gradient of x."""
    grad, packed, scale, nested, *facts = inputs
    ctx.save_for_backward(packed, scale, *nested)
    ctx.facts, ctx.dtype = facts, grad.dtype


def backward_of_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    """Of that operator: the gradients of its inputs."""
    packed, scale, *nested = ctx.saved_tensors
    parts = packed, scale, nested, *ctx.facts
    if transforms.is_tracing():
        of_grad = torch.ops.halfbyte.linear(grad, *parts, None, False)
    else:
        of_grad = linear(grad, QuantizedWeight.from_parts(parts, ctx.dtype), None, False)
    return of_grad, None, None, [None] * len(nested), *[None] * len(ctx.facts)


class _Linear(torch.autograd.Function):
    """The same for eager calls."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, q: QuantizedWeight, bias: Tensor | None, batch_invariant: bool) -> Tensor:
        ctx.q = q
        return eager.linear(x, q, bias, batch_invariant)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        of_x, _, of_bias, _ = ctx.needs_input_grad
        return (
            linear_backward(grad, ctx.q) if of_x else None,
            None,
            grad.reshape(-1, grad.shape[-1]).sum(0) if of_bias else None,
            None,
        )


class _Transformed(torch.autograd.Function):
    """The same inside torch.func and forward-mode AD; in this form a call costs a hundred microseconds more."""

    @staticmethod
    def forward(x: Tensor, q: QuantizedWeight, bias: Tensor | None, batch_invariant: bool) -> Tensor:
        return eager.linear(x, q, bias, batch_invariant)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, ctx.q, _, ctx.batch_invariant = inputs
        ctx.shape = output.shape

    backward = _Linear.backward

    @staticmethod
    def jvp(ctx: Any, x: Tensor | None, _q: None, bias: Tensor | None, _batch_invariant: None) -> Tensor:
        """The tangent of the product, of those of x and bias."""
        if x is None:
            assert bias is not None
            return bias.expand(ctx.shape).clone()
        return linear(x, ctx.q, bias, ctx.batch_invariant)

    @staticmethod
    def vmap(
        info: Any, dims: tuple[Any, ...], x: Tensor, q: QuantizedWeight, bias: Tensor | None, batch_invariant: bool
    ) -> tuple[Tensor, int]:
        return _batched(dims[0], dims[2], x, bias, lambda x, bias: linear(x, q, bias, batch_invariant))


def _batched(
    x_dim: int | None, bias_dim: int | None, x: Tensor, bias: Tensor | None,
    product: Callable[[Tensor, Tensor | None], Tensor],
) -> tuple[Tensor, int]:  # fmt: skip
    """A product of many x, which are no more than more rows, or with many biases, which are then added to it."""
    x = x.unsqueeze(0) if x_dim is None else x.movedim(x_dim, 0)
    if bias is None or bias_dim is None:
        return product(x, bias), 0
    bias = bias.movedim(bias_dim, 0)
    return product(x, None) + bias.view(len(bias), *[1] * (x.dim() - 2), bias.shape[1]), 0


def batched_operator(info: Any, dims: tuple[Any, ...], x: Tensor, *arguments: Any) -> tuple[Tensor, int]:
    """Of the operator: torch.func.vmap's rule. Raises RuntimeError where the weight is batched."""
    *weight, bias, batch_invariant = arguments
    _refuse_batched_weight(dims)
    operator = torch.ops.halfbyte.linear
    return _batched(dims[0], dims[-2], x, bias, lambda x, bias: operator(x, *weight, bias, batch_invariant))


def batched_backward_operator(info: Any, dims: tuple[Any, ...], grad: Tensor, *weight: Any) -> tuple[Tensor, int]:
    """The same of the operator that is the gradient of x."""
    _refuse_batched_weight(dims)
    return torch.ops.halfbyte.linear_backward(grad.movedim(dims[0], 0), *weight), 0


def _refuse_batched_weight(dims: tuple[Any, ...]) -> None:
    if any(dim is not None for dim in (*dims[1:3], *(dims[3] or ()))):
        raise RuntimeError("the weight of halfbyte.linear cannot be batched by torch.func.vmap; x and bias can")
