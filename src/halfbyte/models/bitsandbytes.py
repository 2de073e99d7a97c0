"""bitsandbytes' Linear4bit modules: their class, parameters and state stay as they are, the product becomes ours.

A module gets a `forward` of its own, which shadows that of its class. What halfbyte knows of a weight hangs on the
weight's QuantState, so that it goes when the weight goes and no memory outlives a merge.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from halfbyte.formats.bitsandbytes import from_bitsandbytes
from halfbyte.formats.weight import FLOAT_DTYPES, QuantizedWeight
from halfbyte.ops import linear

ATTRIBUTE = "_halfbyte"  # of a QuantState
FORWARDS = ("forward", "_old_forward")  # the second is where accelerate's hooks keep the forward that they wrap


class View:
    """A weight as halfbyte reads it, and the memory that it was seen in. It is never copied along with its state."""

    __slots__ = ("absmax", "address", "q")

    def __init__(self, q: QuantizedWeight | None = None, absmax: Tensor | None = None, address: int = 0) -> None:
        self.q, self.absmax, self.address = q, absmax, address

    def __deepcopy__(self, memo: dict[int, Any]) -> View:
        return View()

    def __reduce__(self) -> tuple[type[View], tuple[()]]:
        return View, ()


def takes(module: nn.Module) -> bool:
    """True for a Linear4bit of bitsandbytes or a subclass, known by name: nothing is imported to find out."""
    return any(
        kind.__name__ == "Linear4bit" and kind.__module__.startswith("bitsandbytes.") for kind in type(module).__mro__
    )


def apply(module: nn.Module) -> str | None:
    """Let halfbyte compute a Linear4bit; returns None, or why it was left alone."""
    name = _wrapped(module)
    if is_applied(module):
        return None
    if name in module.__dict__ and not _is_own_forward(module, module.__dict__[name]):
        return "its forward is not that of its class: other code has replaced it"
    if reason := _reason(module):
        return reason
    setattr(module, name, MethodType(forward, module))
    _look(module)  # now, for a traced call could not
    return None


def undo(module: nn.Module) -> None:
    """Give a module back the forward of its class."""
    for name in FORWARDS:
        if not _is_ours(module.__dict__.get(name)):
            continue
        if name == "forward":
            del module.__dict__[name]
        else:
            setattr(module, name, MethodType(type(module).forward, module))
    state = _state_of(module)
    if state is not None:
        vars(state).pop(ATTRIBUTE, None)


def is_applied(module: nn.Module) -> bool:
    return any(_is_ours(module.__dict__.get(name)) for name in FORWARDS)


def forward(module: Any, x: Tensor) -> Tensor:
    """What Linear4bit.forward computes, dtypes included: x [..., K] -> [..., N] in x's dtype."""
    q = weight_of(module)
    if q is None:
        result: Tensor = type(module).forward(module, x)
        return result
    if not module.compute_type_is_set:
        module.set_compute_type(x)
        module.compute_type_is_set = True
    given = x.dtype
    dtype = module.compute_dtype or given
    bias = module.bias
    if bias is not None and bias.dtype != dtype:
        bias = bias.to(dtype)
    if dtype == given:
        return linear(x, q, bias)
    return linear(x.to(dtype), q, bias).to(given)


def weight_of(module: Any) -> QuantizedWeight | None:
    """The module's weight as it is now, sharing its memory, or None where halfbyte has no reading of it."""
    weight = module.weight
    state = getattr(weight, "quant_state", None)
    view: View | None = getattr(state, ATTRIBUTE, None)
    if state is not None and view is not None and view.absmax is state.absmax:
        if torch.compiler.is_compiling():
            return view.q
        with torch._C.DisableTorchFunctionSubclass():
            if view.address == weight.data_ptr():
                return view.q
    return None if torch.compiler.is_compiling() else _look(module)


def _look(module: Any) -> QuantizedWeight | None:
    """Read the weight anew, after it was moved, merged or replaced."""
    state = _state_of(module)
    if state is None or _reason(module) is not None:
        return None
    weight = module.weight
    if getattr(weight, "quant_state", None) is not state:  # FSDP and the like drop it from the parameter
        weight.quant_state = state
    q = from_bitsandbytes(weight, state)
    with torch._C.DisableTorchFunctionSubclass():
        setattr(state, ATTRIBUTE, View(q, state.absmax, weight.data_ptr()))
    return q


def _state_of(module: Any) -> Any:
    return getattr(module.weight, "quant_state", None) or getattr(module, "quant_state", None)


def _reason(module: Any) -> str | None:
    """Why halfbyte cannot compute a module, or None."""
    weight = module.weight
    hook = getattr(module, "_hf_hook", None)
    if getattr(hook, "offload", False):
        return "its weight is offloaded by accelerate and moves at every call"
    if weight.device.type == "meta":
        return "its weight is on the meta device, without memory"
    state = _state_of(module)
    if state is None:
        return "it is not quantized yet: move it to its device first, as in module.to('cuda')"
    if module.compute_dtype is not None and module.compute_dtype not in FLOAT_DTYPES:
        return f"its compute_dtype is {module.compute_dtype}"
    try:
        shape = from_bitsandbytes(weight, state).shape
    except (TypeError, ValueError) as error:
        return str(error)
    if shape != (module.out_features, module.in_features):
        return f"its weight has shape {list(shape)}, not [{module.out_features}, {module.in_features}]"
    return None


def _wrapped(module: nn.Module) -> str:
    return "_old_forward" if "_hf_hook" in module.__dict__ and "_old_forward" in module.__dict__ else "forward"


def _is_ours(function: Any) -> bool:
    return isinstance(function, MethodType) and function.__func__ is forward


def _is_own_forward(module: nn.Module, function: Any) -> bool:
    return isinstance(function, MethodType) and function.__func__ is type(module).forward
