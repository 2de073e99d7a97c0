"""Products with layers that are made of several weights, such as q, k and v: in one launch where that can be."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import torch
from torch import Tensor

from halfbyte.formats.shards import concatenated
from halfbyte.formats.weight import QuantizedWeight
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
    biases = [None] * len(weights) if bias is None else bias.split([weight.shape[0] for weight in weights])
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
