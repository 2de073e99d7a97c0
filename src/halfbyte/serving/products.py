"""Products with layers that are made of several weights, such as q, k and v, in one launch where that can be; and with
what stands beside them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import torch
from torch import Tensor

from halfbyte import eager_fused, transforms
from halfbyte.formats.parts import group_parts
from halfbyte.formats.shards import concatenated
from halfbyte.formats.weight import QuantizedWeight, part_of
from halfbyte.kernels.common.norm import Norm
from halfbyte.kernels.linear.fusion import Beside, Residual
from halfbyte.ops import linear, linear_group
from halfbyte.serving.arrivals import Weight


def merged(weights: Sequence[Weight]) -> list[Weight]:
    """The same rows in as few weights as keep every byte: neighbours with plain scales become one, and so do dense
    ones. Nested weights stay apart, as each has an offset of its own; their product is one launch all the same."""
    found: list[Weight] = []
    for kind, group in groupby(enumerate(weights), key=lambda place: _kind(*place)):
        neighbours = [weight for _, weight in group]
        if len(neighbours) == 1:
            found += neighbours
        elif kind == ("dense",):
            found.append(torch.cat([weight for weight in neighbours if isinstance(weight, Tensor)]))
        else:
            found.append(concatenated([weight for weight in neighbours if isinstance(weight, QuantizedWeight)]))
    return found


def _kind(place: int, weight: Weight) -> tuple[object, ...]:
    """The same for neighbours that can be one weight."""
    if not isinstance(weight, QuantizedWeight):
        return ("dense",)
    whole = weight.spec.along_k or weight.numel % weight.block_size == 0
    return (weight.format, weight.block_size) if weight.nested is None and whole else (place,)


def product(x: Tensor, weights: Sequence[Weight], bias: Tensor | None, batch_invariant: bool = False) -> Tensor:
    """x [..., K] times the rows of all weights, one weight after the other, plus bias [N] -> [..., N].

    batch_invariant: a row's bits do not depend on the other rows; then each weight is a launch of its own.
    """
    if len(weights) == 1:
        return _one(x, weights[0], bias, batch_invariant)
    biases = _biases(weights, bias)
    quantized = as_one(weights)
    if quantized and not batch_invariant:
        found = linear_group(x, quantized, biases)
        assert found is not None  # only `one_launch` makes it None
    else:
        found = [_one(x, *each, batch_invariant) for each in zip(weights, biases, strict=True)]
    return torch.cat(found, -1)


def as_one(weights: Sequence[Weight]) -> list[QuantizedWeight]:
    """All of the weights where one launch can be for them, else none."""
    quantized = [weight for weight in weights if isinstance(weight, QuantizedWeight)]
    return quantized if len(quantized) == len(weights) and len({q.kind for q in quantized}) == 1 else []


def _one(x: Tensor, weight: Weight, bias: Tensor | None, batch_invariant: bool) -> Tensor:
    if isinstance(weight, QuantizedWeight):
        return linear(x, weight, bias, batch_invariant)
    return torch.nn.functional.linear(x, weight, bias)


# -- With what stands beside them in a decoder layer -------------------------------------------------------------------


def apart(weights: Sequence[QuantizedWeight], sizes: Sequence[int]) -> list[QuantizedWeight]:
    """The weights of so many rows that `merged` has made one of, sharing its memory."""
    if len(weights) == len(sizes):
        return list(weights)
    (whole,), found, first = weights, [], 0
    for size in sizes:
        found.append(part_of(whole, first, first + size))
        first += size
    return found


def normed_product(x: Tensor, weights: Sequence[QuantizedWeight], bias: Tensor | None, norm: Norm) -> Tensor:
    """As `product`, of x normed first."""
    found = _fused(x, weights, _biases(weights, bias), norm)
    return found[0] if len(found) == 1 else torch.cat(found, -1)


def added_product(x: Tensor, weight: QuantizedWeight, bias: Tensor | None, residual: Tensor) -> Tensor:
    """The residual plus x @ weight.T + bias."""
    return _fused(x, [weight], [bias], residual=residual)[0]


def gated_product(x: Tensor, gate_up: Sequence[QuantizedWeight], bias: Tensor | None, norm: Norm) -> Tensor:
    """silu(n @ gate.T) * (n @ up.T), n being x normed."""
    return _fused(x, gate_up, _biases(gate_up, bias), norm, "silu")[0]


def added_mlp(
    x: Tensor,
    gate_up: Sequence[QuantizedWeight],
    down: QuantizedWeight,
    biases: tuple[Tensor | None, Tensor | None],
    norm: Norm,
) -> Tensor:
    """x plus the gated product of it through `down`. biases: of gate and up, and of down."""
    each = [*_biases(gate_up, biases[0]), biases[1]]
    if transforms.is_tracing():
        parts = (*group_parts(gate_up), *down.parts)
        traced: Tensor = torch.ops.halfbyte.fused_mlp(x, *parts, each, norm.weight, norm.epsilon, "silu")
        return traced
    return eager_fused.whole_mlp(x, (*gate_up, down), each, Beside(norm, "silu", Residual(x)))


def _biases(weights: Sequence[Weight], bias: Tensor | None) -> list[Tensor | None]:
    if bias is None:
        return [None] * len(weights)
    return list(bias.split([weight.shape[0] for weight in weights]))


def _fused(
    x: Tensor,
    weights: Sequence[QuantizedWeight],
    biases: Sequence[Tensor | None],
    norm: Norm | None = None,
    activation: str = "",
    residual: Tensor | None = None,
) -> list[Tensor]:
    if transforms.is_tracing():
        weight, epsilon = (None, 0.0) if norm is None else (norm.weight, norm.epsilon)
        traced: list[Tensor] = torch.ops.halfbyte.fused_products(
            x, *group_parts(weights), biases, weight, epsilon, activation, residual
        )
        return traced
    beside = Beside(norm, activation, None if residual is None else Residual(residual))
    return eager_fused.products(x, weights, biases, beside, eager_fused.has_many(x))
