"""The operators `torch.ops.halfbyte`: what tracing sees. Eager calls never come through them; see ops.py."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from halfbyte import autograd, autograd_experts, eager, eager_experts, eager_fused, eager_search
from halfbyte.formats.nested import NESTED_BLOCK_SIZE
from halfbyte.formats.parts import GroupParts, group_of, matrix_of
from halfbyte.formats.weight import Parts, QuantizedWeight
from halfbyte.kernels.common.norm import Norm
from halfbyte.kernels.experts.block import Block
from halfbyte.kernels.linear.fusion import Beside, Residual

WEIGHT = (
    "Tensor packed, Tensor scale, Tensor[] nested, str format, SymInt[] shape, int block_size, int nested_block_size"
)


def _quantize_op(weight: Tensor, format: str, block_size: int, nested: bool) -> list[Tensor]:
    parts = eager.quantize(weight, format, block_size, nested)
    if nested:
        parts[2] = parts[2].clone()  # an operator may not return the same tensor twice
    return parts


def _quantize_fake(weight: Tensor, format: str, block_size: int, nested: bool) -> list[Tensor]:
    packed, scale = eager.empty_quantized(weight, format, block_size)
    if not nested:
        return [packed, scale]
    absmax = scale.new_empty((-(-scale.numel() // NESTED_BLOCK_SIZE),))
    return [
        packed,
        scale.new_empty(scale.shape, dtype=torch.uint8),
        scale.new_empty((256,)),
        absmax,
        scale.new_empty(()),
    ]


def _dequantize_op(*arguments: Any) -> Tensor:
    q = _weight_of(arguments[:-1], arguments[-1])
    return eager.dequantize(q, q.packed.new_empty(q.shape, dtype=q.dtype))


def _dequantize_fake(packed: Tensor, *arguments: Any) -> Tensor:
    *_, shape, _, _, dtype = arguments
    return packed.new_empty(shape, dtype=dtype)


def _linear_op(x: Tensor, *arguments: Any) -> Tensor:
    *parts, bias, batch_invariant = arguments
    return eager.linear(x, _weight_of(parts, x.dtype), bias, batch_invariant)


def _linear_backward_op(grad: Tensor, *parts: Any) -> Tensor:
    return eager.linear_backward(grad, _weight_of(parts, grad.dtype))


def _linear_backward_fake(grad: Tensor, *parts: Any) -> Tensor:
    return grad.new_empty((*grad.shape[:-1], parts[4][1]))


def _weight_of(parts: Sequence[Any], dtype: torch.dtype) -> QuantizedWeight:
    return QuantizedWeight.from_parts(cast(Parts, tuple(parts)), dtype)


def _linear_fake(x: Tensor, *arguments: Any) -> Tensor:
    shape = arguments[4]
    return x.new_empty((*x.shape[:-1], shape[0]))


def _linear_group_op(x: Tensor, *arguments: Any) -> list[Tensor]:
    *parts, biases = arguments
    weights = group_of(cast(GroupParts, tuple(parts)), x.dtype)
    found = eager.linear_group(x, weights, biases)
    return found or [eager.linear(x, q, bias, False) for q, bias in zip(weights, biases, strict=True)]


def _linear_group_fake(x: Tensor, *arguments: Any) -> list[Tensor]:
    return [x.new_empty((*x.shape[:-1], n)) for n in arguments[4]]


def _fused_products_op(x: Tensor, *arguments: Any) -> list[Tensor]:
    *parts, biases, norm, epsilon, activation, residual = arguments
    weights = group_of(cast(GroupParts, tuple(parts)), x.dtype)
    beside = Beside(_norm_of(norm, epsilon), activation, None if residual is None else Residual(residual))
    return eager_fused.products(x, weights, biases, beside, eager_fused.has_many(x))


def _norm_of(weight: Tensor | None, epsilon: float) -> Norm | None:
    return None if weight is None else Norm(weight, epsilon)


def _fused_products_fake(x: Tensor, *arguments: Any) -> list[Tensor]:
    n, activation = arguments[4], arguments[-2]
    return [x.new_empty((*x.shape[:-1], rows)) for rows in (n[:1] if activation else n)]


def _fused_mlp_op(x: Tensor, *arguments: Any) -> Tensor:
    *parts, biases, norm, epsilon, activation = arguments
    gates, down = group_of(cast(GroupParts, tuple(parts[:8])), x.dtype), _weight_of(parts[8:], x.dtype)
    return eager_fused.whole_mlp(x, (*gates, down), biases, Beside(_norm_of(norm, epsilon), activation, Residual(x)))


def _fused_mlp_fake(x: Tensor, *arguments: Any) -> Tensor:
    return x.new_empty(x.shape)


def _grouped_linear_op(x: Tensor, *arguments: Any) -> Tensor:
    *parts, expert, bias = arguments
    return eager_experts.grouped_linear(x, _weight_of(parts, x.dtype), expert, bias)


def _grouped_linear_fake(x: Tensor, *arguments: Any) -> Tensor:
    return x.new_empty((x.shape[0], arguments[4][1]))


def _grouped_linear_backward_op(grad: Tensor, *arguments: Any) -> Tensor:
    *parts, expert = arguments
    return eager_experts.grouped_linear_backward(grad, _weight_of(parts, grad.dtype), expert)


def _grouped_linear_backward_fake(grad: Tensor, *arguments: Any) -> Tensor:
    return grad.new_empty((grad.shape[0], arguments[4][2]))


def _moe_op(x: Tensor, index: Tensor, weights: Tensor, *arguments: Any) -> Tensor:
    gate_up, down = (_weight_of(arguments[first : first + 7], x.dtype) for first in (0, 7))
    return eager_experts.moe(x, index, weights, Block(gate_up, down, *arguments[14:]))


def _moe_fake(x: Tensor, *arguments: Any) -> Tensor:
    return x.new_empty(x.shape)


def _distances_op(query: Tensor, *parts: Any) -> Tensor:
    return eager_search.distances(query, matrix_of(parts))


def _distances_fake(query: Tensor, *parts: Any) -> Tensor:
    return query.new_empty((*query.shape[:-1], parts[4][0]), dtype=torch.float32)


def _nearest_op(query: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    *parts, k = arguments
    return eager_search.nearest(query, matrix_of(parts), k)


def _nearest_fake(query: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    shape = (*query.shape[:-1], arguments[-1])
    return query.new_empty(shape, dtype=torch.float32), query.new_empty(shape, dtype=torch.int64)


def _token_ranks_op(hidden: Tensor, *arguments: Any) -> Tensor:
    *parts, tokens = arguments
    return eager_search.token_ranks(hidden, matrix_of(parts), tokens)


def _token_ranks_fake(hidden: Tensor, *arguments: Any) -> Tensor:
    return arguments[-1].new_empty(hidden.shape[:1], dtype=torch.int64)  # type: ignore[no-any-return]


# Two weights of one operator have names of their own.
STACKS = ", ".join(re.sub(r"(\w+)(,|$)", rf"{name}_\1\2", WEIGHT) for name in ("gate_up", "down"))
MATRIX = f"{WEIGHT}, ScalarType dtype"
# `nested`: three of each weight, one weight after the other, or none at all.
WEIGHTS = (
    "Tensor[] packed, Tensor[] scale, Tensor[] nested, str format, SymInt[] n, SymInt k, int block_size, "
    "int nested_block_size"
)
DOWN = re.sub(r"(\w+)(,|$)", r"down_\1\2", WEIGHT)

OPERATORS: tuple[tuple[str, Callable[..., Any], Callable[..., Any]], ...] = (
    ("quantize(Tensor weight, str format, int block_size, bool nested) -> Tensor[]", _quantize_op, _quantize_fake),
    (f"dequantize({WEIGHT}, ScalarType dtype) -> Tensor", _dequantize_op, _dequantize_fake),
    (f"linear(Tensor x, {WEIGHT}, Tensor? bias, bool batch_invariant) -> Tensor", _linear_op, _linear_fake),
    (f"linear_backward(Tensor grad, {WEIGHT}) -> Tensor", _linear_backward_op, _linear_backward_fake),
    (f"linear_group(Tensor x, {WEIGHTS}, Tensor?[] biases) -> Tensor[]", _linear_group_op, _linear_group_fake),
    (
        f"fused_products(Tensor x, {WEIGHTS}, Tensor?[] biases, Tensor? norm, float epsilon, str activation, "
        "Tensor? residual) -> Tensor[]",
        _fused_products_op,
        _fused_products_fake,
    ),
    (
        f"fused_mlp(Tensor x, {WEIGHTS}, {DOWN}, Tensor?[] biases, Tensor? norm, float epsilon, str activation) "
        "-> Tensor",
        _fused_mlp_op,
        _fused_mlp_fake,
    ),
    (
        f"grouped_linear(Tensor x, {WEIGHT}, Tensor expert, Tensor? bias) -> Tensor",
        _grouped_linear_op,
        _grouped_linear_fake,
    ),
    (
        f"grouped_linear_backward(Tensor grad, {WEIGHT}, Tensor expert) -> Tensor",
        _grouped_linear_backward_op,
        _grouped_linear_backward_fake,
    ),
    (
        f"moe(Tensor x, Tensor top_k_index, Tensor top_k_weights, {STACKS}, str activation, Tensor? gate_up_bias, "
        "Tensor? down_bias) -> Tensor",
        _moe_op,
        _moe_fake,
    ),
    (f"distances(Tensor query, {MATRIX}) -> Tensor", _distances_op, _distances_fake),
    (f"nearest(Tensor query, {MATRIX}, int k) -> (Tensor, Tensor)", _nearest_op, _nearest_fake),
    (f"token_ranks(Tensor hidden, {MATRIX}, Tensor tokens) -> Tensor", _token_ranks_op, _token_ranks_fake),
)

_library = torch.library.Library("halfbyte", "DEF")
for _schema, _real, _fake in OPERATORS:
    _name = _library.define(_schema)
    _library.impl(_name, _real, "CompositeExplicitAutograd")
    torch.library.register_fake(f"halfbyte::{_name}", _fake, lib=_library)

torch.library.register_autograd("halfbyte::linear", autograd.backward, setup_context=autograd.setup_context)
torch.library.register_vmap("halfbyte::linear", autograd.batched_operator)
torch.library.register_autograd(
    "halfbyte::linear_backward", autograd.backward_of_backward, setup_context=autograd.setup_backward_context
)
torch.library.register_vmap("halfbyte::linear_backward", autograd.batched_backward_operator)

torch.library.register_autograd(
    "halfbyte::grouped_linear",
    autograd_experts.grouped_linear_gradients,
    setup_context=autograd_experts.setup_grouped_linear,
)
torch.library.register_autograd(
    "halfbyte::moe", autograd_experts.moe_gradients, setup_context=autograd_experts.setup_moe
)
