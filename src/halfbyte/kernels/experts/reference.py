"""Products with a stack of experts in plain torch, on any device: the definition, and what runs where no kernel does.

Rows are sorted by expert, and each expert's rows are multiplied at once with its weight. Activations, their gradients
and the weighted sum are here for every device; they compute in fp32. Bytes: the dense weight of each expert that has
rows, written and read, besides the packed one. Flops: 2 N K a row.
Sources: `MixtralExperts` and `GptOssExperts` of transformers 5.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from halfbyte.kernels.experts.plan import Group, groups_of

# gpt-oss' activation: gate and up are clamped to LIMIT, and ALPHA is in the sigmoid's argument.
LIMIT, ALPHA = 7.0, 1.702
SWIGLU_OAI = "swiglu_oai"
GELUS = {"gelu": "none", "gelu_tanh": "tanh"}  # as torch names their approximations
ACTIVATIONS = ("silu", *GELUS, SWIGLU_OAI)


def sort(expert: Tensor, count: int) -> tuple[Tensor, tuple[Group, ...]]:
    """The places in `expert` [S] whose ids are 0 to count - 1, ordered by id, then by place; and each id's group."""
    key = torch.where((expert >= 0) & (expert < count), expert, count).long()
    groups = groups_of(torch.bincount(key, minlength=count + 1)[:count].tolist())
    return key.argsort(stable=True)[: groups[-1].last if groups else 0], groups


def grouped_linear(
    x: Tensor,
    source: Tensor,
    groups: tuple[Group, ...],
    multiply: Callable[[Tensor, int], Tensor],
    out: Tensor,
    target: Tensor,
) -> None:
    """out[target[i]] = multiply(x[source[i]], expert) for the rows i of each group."""
    for expert, first, last in groups:
        out[target[first:last]] = multiply(x[source[first:last]], expert).to(out.dtype)


def activate(gate_up: Tensor, activation: str) -> Tensor:
    """Gate and up rows [S, 2I] fp32 -> [S, I]: activation(gate) * up."""
    gate, up = _parted(gate_up, activation)
    if activation == SWIGLU_OAI:
        gate, up = gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT)
        return (up + 1) * (gate * torch.sigmoid(gate * ALPHA))
    return _activated(gate, activation) * up


def activate_backward(grad: Tensor, gate_up: Tensor, activation: str) -> Tensor:
    """The gradient of `activate`'s first argument, of the one of its result; both fp32."""
    gate, up = _parted(gate_up, activation)
    if activation == SWIGLU_OAI:
        lower, inner = gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT)
        of_gate = torch.where(gate <= LIMIT, grad * (inner + 1) * _slope(lower, ALPHA), 0)
        of_up = torch.where(up.abs() <= LIMIT, grad * lower * torch.sigmoid(lower * ALPHA), 0)
        return torch.stack((of_gate, of_up), dim=-1).flatten(-2)
    if activation == "silu":
        of_gate = grad * up * _slope(gate, 1)
    else:
        of_gate = torch.ops.aten.gelu_backward(grad * up, gate, approximate=GELUS[activation])
    return torch.cat((of_gate, grad * _activated(gate, activation)), dim=-1)


def _slope(gate: Tensor, alpha: float) -> Tensor:
    """The derivative of gate * sigmoid(alpha * gate), of operations that have derivatives themselves."""
    sigmoid = torch.sigmoid(gate * alpha)
    return sigmoid * (1 + alpha * gate * (1 - sigmoid))


def _parted(gate_up: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """Gate and up, which gpt-oss interleaves."""
    if activation == SWIGLU_OAI:
        return gate_up[..., ::2], gate_up[..., 1::2]
    gate, up = gate_up.chunk(2, dim=-1)
    return gate, up


def _activated(gate: Tensor, activation: str) -> Tensor:
    return functional.silu(gate) if activation == "silu" else functional.gelu(gate, approximate=GELUS[activation])


def combine(y: Tensor, weights: Tensor, dtype: torch.dtype) -> Tensor:
    """The sum of y [T, k, H] fp32 times weights [T, k] over k, in the order of k, in fp32, rounded once to `dtype`."""
    total = y.new_zeros((y.shape[0], y.shape[2]))
    for place in range(y.shape[1]):
        total.addcmul_(y[:, place], weights[:, place, None].float())
    return total.to(dtype)
