"""halfbyte's own Linear4bit in an accelerated model, where it gains nothing but fused projections."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from halfbyte.autocast import autocast_dtype
from halfbyte.formats.weight import QuantizedWeight
from halfbyte.models.patch import has_forward_of_class, patch, replaced_by, unpatch
from halfbyte.models.projections import Inputs, parameter, shared, version_of
from halfbyte.nn import Linear4bit


def supports(module: nn.Module) -> bool:
    return isinstance(module, Linear4bit)


def apply(module: nn.Module) -> str | None:
    """A layer whose forward is another one, of a subclass or of other code, is as fast as it is; nothing is wrong."""
    if type(module).forward is Linear4bit.forward and has_forward_of_class(module):
        patch(forward, module)
    return None


def undo(module: nn.Module) -> None:
    """Give a module back the forward of its class."""
    unpatch(forward, module)


def is_applied(module: nn.Module) -> bool:
    return bool(replaced_by(forward, module))


def forward(module: Any, x: Tensor) -> Tensor:
    y = shared(module, x)
    return Linear4bit.forward(module, x) if y is None else y


def weight_of(module: Any) -> QuantizedWeight:
    q: QuantizedWeight = module.weight
    return q


def stored(module: Any) -> tuple[Tensor, ...]:
    """The tensors of a module's weight."""
    return weight_of(module).tensors


def operands(module: Any, x: Tensor) -> Inputs | None:
    q, bias = weight_of(module), parameter(module, "bias")
    version = version_of(q.packed, q.scale, bias)
    dtype = autocast_dtype(x)
    if version is None or (dtype is None and bias is not None and bias.dtype is not x.dtype):
        return None
    dtype = dtype or x.dtype
    return Inputs(q, bias, dtype, dtype, version)
