"""Weights as parameters of a vLLM layer: those that wait for a checkpoint, and those that kernels read.

While vLLM builds a model, a layer gets one small parameter for each key that a checkpoint may hold of its weights.
Its `weight_loader` hands the tensors on (arrivals.py); the parameter itself is a tally with an element for every tensor
that is to come, from which vLLM's reload knows when a layer is complete. Once all have come, the layer's weights take
their place. A reload makes them anew and copies them into the old ones, so that captured graphs keep their addresses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from halfbyte.formats.weight import QuantizedWeight
from halfbyte.nn.linear import NAMES
from halfbyte.serving.arrivals import Weight


def expect(layer: nn.Module, name: str, count: int, dtype: torch.dtype, loader: Callable[..., Any]) -> None:
    """Give the layer a parameter that takes `count` tensors. loader: called with the parameter and each tensor."""
    device = torch.get_default_device()  # vLLM builds a model with its device as that
    tally = nn.Parameter(torch.empty(count, dtype=dtype, device=device), requires_grad=False)
    tally.weight_loader = loader  # type: ignore[attr-defined]
    layer.register_parameter(name, tally)


def count(tally: Tensor) -> bool:
    """Count a tensor that has come; False where vLLM only counts, for a layer that it will load later."""
    tally.data[:1].copy_(torch.ones(1, dtype=tally.dtype, device=tally.device))
    return not tally.is_meta


@dataclass(frozen=True)
class Held:
    """A weight among a layer's parameters: their names, and what they are of. names has one of a dense weight."""

    names: tuple[str, ...]
    parts: tuple[Any, ...]

    @classmethod
    def put(cls, layer: nn.Module, name: str, weight: Weight) -> Held:
        """Register the weight's tensors, the first as `name`."""
        if isinstance(weight, QuantizedWeight):
            format, block_size, nested_block_size = weight.kind
            names = tuple(name if part == NAMES[0] else f"{name}_{part}" for part in NAMES[: len(weight.tensors)])
            held = cls(names, (format, tuple(weight.shape), block_size, nested_block_size, weight.dtype))
            packed, scale, *nested = weight.tensors
            # All weights that halfbyte rounds share one code, and a reload writes into each layer's parameters.
            tensors: Sequence[Tensor] = [packed, scale, *(tensor.clone() for tensor in nested)]
        else:
            held, tensors = cls((name,), ("dense", tuple(weight.shape), str(weight.dtype))), (weight,)
        for each, tensor in zip(held.names, tensors, strict=True):
            layer.register_parameter(each, nn.Parameter(tensor, requires_grad=False))
        return held

    def get(self, layer: nn.Module) -> Weight:
        """The weight as it is now, sharing the parameters' memory."""
        tensors = [getattr(layer, name) for name in self.names]
        if len(tensors) == 1:
            dense: Tensor = tensors[0]
            return dense
        format, shape, block_size, nested_block_size, dtype = self.parts
        packed, scale, *nested = tensors
        return QuantizedWeight.from_parts((packed, scale, nested, format, shape, block_size, nested_block_size), dtype)


def forget(layer: nn.Module, names: Sequence[str]) -> None:
    """Take the parameters that waited for a checkpoint away."""
    for name in names:
        layer._parameters.pop(name, None)
