"""bitsandbytes' Linear4bit modules: their class, parameters and state stay as they are, the product becomes ours.

A module gets a `forward` of its own, which shadows that of its class. What halfbyte knows of a weight hangs on the
weight's QuantState, so that it goes when the weight goes and no memory outlives a merge.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from halfbyte.formats.bitsandbytes import FORMATS, from_bitsandbytes
from halfbyte.formats.weight import FLOAT_DTYPES, QuantizedWeight
from halfbyte.models.patch import has_forward_of_class, patch, replaced_by, unpatch
from halfbyte.models.projections import Inputs, parameter, shared, version_of
from halfbyte.models.repacked import FASTER, Facts, is_faster
from halfbyte.ops import linear

ATTRIBUTE = "_halfbyte"  # of a QuantState


class View:
    """A weight as halfbyte reads it, and the memory that it was seen in. It is never copied along with its state."""

    __slots__ = ("absmax", "address", "q")

    def __init__(self, q: QuantizedWeight | None = None, absmax: Tensor | None = None, address: int = 0) -> None:
        self.q, self.absmax, self.address = q, absmax, address

    def __deepcopy__(self, memo: dict[int, Any]) -> View:
        return View()

    def __reduce__(self) -> tuple[type[View], tuple[()]]:
        return View, ()


def known(weight: Any, state: Any) -> QuantizedWeight | None:
    """What `keep` kept of a weight, if that is still where it was. A traced call cannot look at addresses."""
    view: View | None = getattr(state, ATTRIBUTE, None)
    if view is None or view.absmax is not state.absmax:
        return None
    return view.q if torch.compiler.is_compiling() or view.address == _address(weight) else None


def keep(q: QuantizedWeight, weight: Any, state: Any) -> None:
    setattr(state, ATTRIBUTE, View(q, state.absmax, _address(weight)))


def supports(module: nn.Module) -> bool:
    """True for a Linear4bit of bitsandbytes or a subclass, known by name: nothing is imported to find out."""
    return any(
        kind.__name__ == "Linear4bit" and kind.__module__.startswith("bitsandbytes.") for kind in type(module).__mro__
    )


def apply(module: nn.Module) -> str | None:
    """Let halfbyte compute a Linear4bit; returns None, or why it was left alone."""
    applied = is_applied(module)
    if not applied and not has_forward_of_class(module):
        return "its forward is not that of its class: other code has replaced it"
    if (facts := facts_of(module)) is not None and is_faster(facts):
        undo(module)  # of an earlier call, in training; what is kept of the weight would outlive its repacking
        return FASTER
    return None if applied else take(module)


def take(module: nn.Module) -> str | None:
    """Let halfbyte compute a module that has the forward of its class, whoever is faster; None, or why it cannot."""
    found = _look(module)  # now, for a traced call could not
    if isinstance(found, str):
        return found
    patch(forward, module)
    return None


def undo(module: nn.Module) -> None:
    """Give a module back the forward of its class."""
    unpatch(forward, module)
    state = _state_of(module) if supports(module) else None
    if state is not None:
        vars(state).pop(ATTRIBUTE, None)


def is_applied(module: nn.Module) -> bool:
    return bool(replaced_by(forward, module))


def forward(module: Any, x: Tensor) -> Tensor:
    """What Linear4bit.forward computes, dtypes included: x [..., K] -> [..., N] in x's dtype."""
    y = shared(module, x)
    if y is not None:
        return y
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


def stored(module: Any) -> tuple[Tensor, ...]:
    """The tensors of a module's 4-bit weight; none of one that is not quantized."""
    state = _state_of(module)
    if state is None:
        return ()
    nested = getattr(state, "state2", None)
    scales = (state.absmax,) if nested is None else (state.absmax, nested.absmax, nested.code, state.offset)
    return module.weight, *scales


def operands(module: Any, x: Tensor) -> Inputs | None:
    """What `forward` multiplies x with, from its second call on and once the weight is known."""
    weight, bias = parameter(module, "weight"), parameter(module, "bias")
    view: View | None = getattr(getattr(weight, "quant_state", None), ATTRIBUTE, None)
    if view is None or view.q is None or view.absmax is not weight.quant_state.absmax or not module.compute_type_is_set:
        return None
    with torch._C.DisableTorchFunctionSubclass():
        if weight.data_ptr() != view.address:
            return None
        version = version_of(weight, view.q.scale, bias)
    given = x.dtype
    return None if version is None else Inputs(view.q, bias, module.compute_dtype or given, given, version)


def weight_of(module: Any) -> QuantizedWeight | None:
    """The module's weight as it is now, sharing its memory, or None where halfbyte has no reading of it."""
    weight = module.weight
    q = known(weight, getattr(weight, "quant_state", None))
    if q is not None or torch.compiler.is_compiling():
        return q
    found = _look(module)
    return None if isinstance(found, str) else found


def _look(module: Any) -> QuantizedWeight | str:
    """Read the weight anew, as at first and after it was moved, merged or replaced; or why halfbyte cannot."""
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
        q = from_bitsandbytes(weight, state)
    except (TypeError, ValueError) as error:
        return str(error)
    if q.shape != (module.out_features, module.in_features):
        return f"its weight has shape {list(q.shape)}, not [{module.out_features}, {module.in_features}]"
    if getattr(weight, "quant_state", None) is not state:  # FSDP and the like drop it from the parameter
        weight.quant_state = state
    keep(q, weight, state)
    return q


def facts_of(module: Any) -> Facts | None:
    """What tells whether bitsandbytes is the faster one for a module; None where it has no 4-bit weight yet."""
    state = _state_of(module)
    if state is None or state.quant_type not in FORMATS:
        return None
    # Of a weight that it has repacked, bitsandbytes keeps what it was.
    dtype = module.compute_dtype or getattr(state, "original_dtype", state.dtype)
    if dtype not in FLOAT_DTYPES:
        return None
    return Facts(
        module.weight.device.type, bool(getattr(module, "support_avx512bf16_for_cpu", False)), module.training,
        module.out_features, module.in_features, state.quant_type, state.blocksize,
        bool(getattr(state, "original_nested", state.nested)), dtype,
    )  # fmt: skip


def _state_of(module: Any) -> Any:
    return getattr(module.weight, "quant_state", None) or getattr(module, "quant_state", None)


def _address(weight: Any) -> int:
    with torch._C.DisableTorchFunctionSubclass():  # Params4bit hooks every torch call
        address: int = weight.data_ptr()
    return address
