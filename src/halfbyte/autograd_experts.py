"""Gradients of `grouped_linear` and `moe`: of x, of the biases and of top_k_weights. Frozen 4-bit experts have none.

Of a product: grad x = grad @ W of each row's expert; grad bias = the sum over its rows. Of `moe` only its arguments are
kept for backward, which computes the gate and up rows anew. Sums are made in fp32 and in a fixed order. Like
autograd.py's, these serve eager calls and the operators, and have gradients themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from halfbyte import eager_experts, transforms
from halfbyte.autograd import wants_gradients
from halfbyte.formats.weight import QuantizedWeight
from halfbyte.kernels.experts import reference
from halfbyte.kernels.experts.block import Block
from halfbyte.kernels.linear.reference import linear as linear_dense


def grouped_linear(x: Tensor, q: QuantizedWeight, expert: Tensor, bias: Tensor | None) -> Tensor:
    """The products of arguments that fit, with gradients."""
    if transforms.is_tracing():
        return torch.ops.halfbyte.grouped_linear(x, *q.parts, expert, bias)  # type: ignore[no-any-return]
    if wants_gradients(x, bias):
        return _GroupedLinear.apply(x, q, expert, bias)  # type: ignore[no-any-return, no-untyped-call]
    return eager_experts.grouped_linear(x, q, expert, bias)


def moe(x: Tensor, top_k_index: Tensor, top_k_weights: Tensor, block: Block) -> Tensor:
    """The block of experts, of arguments that fit, with gradients."""
    if transforms.is_tracing():
        result: Tensor = torch.ops.halfbyte.moe(
            x, top_k_index, top_k_weights, *block.gate_up.parts, *block.down.parts, *block[2:]
        )
        return result
    if wants_gradients(x, top_k_weights, *block.biases):
        return _Moe.apply(x, top_k_index, top_k_weights, *block)  # type: ignore[no-any-return, no-untyped-call]
    return eager_experts.moe(x, top_k_index, top_k_weights, block)


def _of_x(grad: Tensor, q: QuantizedWeight, expert: Tensor) -> Tensor:
    """grad [S, N] @ W -> [S, K]."""
    if transforms.is_tracing():
        return torch.ops.halfbyte.grouped_linear_backward(grad, *q.parts, expert)  # type: ignore[no-any-return]
    if wants_gradients(grad):
        return _OfX.apply(grad, q, expert)  # type: ignore[no-any-return, no-untyped-call]
    return eager_experts.grouped_linear_backward(grad, q, expert)


def _of_bias(grad: Tensor, expert: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    """The sum of grad [S, N] over the rows of each expert -> [E, N]. A product adds in the same order every time."""
    rows = expert == torch.arange(count, dtype=torch.int64, device=expert.device).unsqueeze(1)
    return linear_dense(rows.float(), grad.float().t(), None).to(dtype)  # autocast has no say


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, q: QuantizedWeight, expert: Tensor, bias: Tensor | None) -> Tensor:
        ctx.q = q
        ctx.save_for_backward(expert)
        return eager_experts.grouped_linear(x, q, expert, bias)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        (expert,), (of_x, _, _, of_bias) = ctx.saved_tensors, ctx.needs_input_grad
        return _grouped_gradients(grad, ctx.q, expert, of_x, of_bias)


class _OfX(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, grad: Tensor, q: QuantizedWeight, expert: Tensor) -> Tensor:
        ctx.q = q
        ctx.save_for_backward(expert)
        return eager_experts.grouped_linear_backward(grad, q, expert)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        (expert,) = ctx.saved_tensors
        return grouped_linear(grad, ctx.q, expert, None), None, None


def _grouped_gradients(grad: Tensor, q: QuantizedWeight, expert: Tensor, of_x: bool, of_bias: bool) -> tuple[Any, ...]:
    return (
        _of_x(grad, q, expert) if of_x else None,
        None,
        None,
        _of_bias(grad, expert, q.shape[0], grad.dtype) if of_bias else None,
    )


class _Moe(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, weights: Tensor, *parts: Any) -> Tensor:
        block = Block(*parts)
        ctx.save_for_backward(x, index, weights, *block.biases)
        ctx.block = block.with_biases(None, None)  # saved apart, as tensors that may have gradients
        return eager_experts.moe(x, index, weights, block)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        needs = [ctx.needs_input_grad[place] for place in (0, 2, -2, -1)]
        x, index, weights, *biases = ctx.saved_tensors
        of_x, of_weights, *of_biases = _moe_gradients(grad, needs, x, index, weights, ctx.block.with_biases(*biases))
        return of_x, None, of_weights, None, None, None, *of_biases


def _moe_gradients(
    grad: Tensor, needs: Sequence[bool], x: Tensor, top_k_index: Tensor, top_k_weights: Tensor, block: Block
) -> list[Tensor | None]:
    """The gradients of x, top_k_weights and the two biases, as far as `needs` asks for them.

    A pair of a token and an expert is a row. A row whose expert is out of range has zeros from both products.
    """
    gate_up, down, activation, gate_up_bias, down_bias = block
    (tokens, k), count = top_k_index.shape, gate_up.shape[0]
    expert = top_k_index.reshape(-1)
    valid = ((expert >= 0) & (expert < count)).unsqueeze(1)
    weights = torch.where(valid, top_k_weights.reshape(-1, 1).float(), 0)
    of_pairs = grad.repeat_interleave(k, 0)
    pairs = grouped_linear(x.repeat_interleave(k, 0), gate_up, expert, gate_up_bias).float()
    of_inner = _of_x(of_pairs, down, expert).float()
    of_x, of_weights, of_gate_up_bias, of_down_bias = needs
    found: list[Tensor | None] = [None] * 4
    if of_x or of_gate_up_bias:
        before = reference.activate_backward(weights * of_inner, pairs, activation).to(x.dtype)
        if of_x:
            of_rows = _of_x(before, gate_up, expert).view(tokens, k, x.shape[1])
            found[0] = of_rows.sum(1, dtype=torch.float32).to(x.dtype)
        if of_gate_up_bias:
            found[2] = _of_bias(before, expert, count, x.dtype)
    if of_weights:
        each = (of_inner * reference.activate(pairs, activation).to(x.dtype)).sum(1)
        if down_bias is not None:
            biases = down_bias[expert.clamp(0, count - 1).long()]
            each = each + torch.where(valid, of_pairs.float() * biases, 0).sum(1)
        found[1] = each.view(tokens, k).to(top_k_weights.dtype)
    if of_down_bias:
        found[3] = _of_bias(weights * of_pairs, expert, count, x.dtype)
    return found


# Of the operators. A weight is seven of their arguments, the third of which is a list of tensors.


def setup_grouped_linear(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, packed, scale, nested, *facts, expert, _ = inputs
    ctx.save_for_backward(expert, packed, scale, *nested)
    ctx.facts, ctx.dtype = facts, x.dtype


def grouped_linear_gradients(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    expert, packed, scale, *nested = ctx.saved_tensors
    q = QuantizedWeight.from_parts((packed, scale, nested, *ctx.facts), ctx.dtype)
    of_x, *_, of_bias = _grouped_gradients(grad, q, expert, ctx.needs_input_grad[0], ctx.needs_input_grad[-1])
    return of_x, *_of_parts(nested), None, of_bias


def setup_moe(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, index, weights, *parts = inputs
    gate_up, down, (ctx.activation, *biases) = parts[:7], parts[7:14], parts[14:]
    ctx.save_for_backward(x, index, weights, *biases, *gate_up[:2], *gate_up[2], *down[:2], *down[2])
    ctx.gate_up_facts, ctx.down_facts, ctx.nested = gate_up[3:], down[3:], len(gate_up[2])


def moe_gradients(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    (x, index, weights, *biases), tensors = ctx.saved_tensors[:5], ctx.saved_tensors[5:]
    first, second = tensors[: 2 + ctx.nested], tensors[2 + ctx.nested :]
    gate_up = QuantizedWeight.from_parts((first[0], first[1], list(first[2:]), *ctx.gate_up_facts), grad.dtype)
    down = QuantizedWeight.from_parts((second[0], second[1], list(second[2:]), *ctx.down_facts), grad.dtype)
    needs = [ctx.needs_input_grad[place] for place in (0, 2, -2, -1)]
    block = Block(gate_up, down, ctx.activation, *biases)
    of_x, of_weights, *of_biases = _moe_gradients(grad, needs, x, index, weights, block)
    stacks = *_of_parts(first[2:]), *_of_parts(second[2:])
    return of_x, None, of_weights, *stacks, None, *of_biases


def _of_parts(nested: Sequence[Any]) -> list[Any]:
    """The gradients of a weight's parts: none of them."""
    return [None, None, [None] * len(nested), *[None] * 4]
