"""Ways in which others compute a step of training, put on a model for as long as its provider runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from halfbyte.autocast import autocast_dtype
from halfbyte.bench import baselines
from halfbyte.measure import models
from halfbyte.models import peft_experts
from halfbyte.models.experts import Facts, facts_of, is_experts
from halfbyte.nn.experts import BIAS


@contextmanager
def unsloth_way(model: Any) -> Iterator[Any]:
    """Every 4-bit layer as Unsloth multiplies in training: its sequence to dequantize, torch's product, twice."""
    dequantize = baselines.Unsloth().dequantize
    layers = [module for _, module in models.four_bit(model)]
    for module in layers:
        module.forward = MethodType(partial(_DequantizedLinear.run, dequantize), module)
    try:
        yield model
    finally:
        for module in layers:
            del module.forward


def _dense_wrappers(model: Any) -> list[Any]:
    """PEFT's wrappers of dense experts, those within others included."""
    wrappers = (module for module in model.modules() if peft_experts.is_wrapper(module))
    return [wrapper for wrapper in wrappers if is_experts(wrapper.get_base_layer())]


def tell_orientation(model: Any) -> None:
    """PEFT noted how parameters lie when it wrapped the 4-bit experts, [E, N, K]; gpt-oss' dense ones are [E, K, N]."""
    for wrapper in _dense_wrappers(model):
        wrapper._did_swap_in_out_features = not wrapper.get_base_layer().is_transposed


@contextmanager
def grouped_way(model: Any) -> Iterator[Any]:
    """Adapters of dense experts as halfbyte computes those of 4-bit ones."""
    wrappers = _dense_wrappers(model)
    for wrapper in wrappers:
        facts = facts_of(wrapper.get_base_layer())
        assert not isinstance(facts, str), facts
        wrapper.forward = MethodType(partial(_grouped_experts, facts), wrapper)
    try:
        yield model
    finally:
        for wrapper in wrappers:
            del wrapper.forward


def _grouped_experts(
    facts: Facts, wrapper: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    experts, dtype = wrapper.get_base_layer(), autocast_dtype(hidden_states) or hidden_states.dtype
    rows = peft_experts.Rows(top_k_index.reshape(-1), facts.count)

    def multiply(x: Tensor, name: str, rows: peft_experts.Rows) -> Tensor:
        stack, bias = experts._parameters[name], experts._parameters.get(name + BIAS)
        y = peft_experts.product(x, stack if facts.transposed else stack.transpose(1, 2), rows)
        return y if bias is None else y + bias.to(dtype)[rows.expert.clamp(max=facts.count - 1)]

    adapters = peft_experts.adapters_of(wrapper, facts.shapes, dtype)
    return peft_experts.adapted(hidden_states.to(dtype), top_k_weights, rows, facts.activation, multiply, adapters)


class _DequantizedLinear(torch.autograd.Function):
    @staticmethod
    def run(dequantize: Callable[..., Tensor], module: Any, x: Tensor) -> Tensor:
        return _apply(x.to(module.compute_dtype), module.weight, module.bias, dequantize)

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Any, bias: Tensor | None, dequantize: Callable[..., Tensor]) -> Tensor:
        ctx.weight, ctx.dequantize = weight, dequantize
        return linear(x, dequantize(weight, weight.quant_state), bias)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return grad @ ctx.dequantize(ctx.weight, ctx.weight.quant_state), None, None, None


_apply: Callable[..., Tensor] = _DequantizedLinear.apply
