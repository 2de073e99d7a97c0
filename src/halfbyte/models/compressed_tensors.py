"""compressed-tensors' INT4 modules, as transformers loads them: their tensors stay packed, the product becomes ours.

transformers (5 and later) leaves the weights of a "pack-quantized" checkpoint packed, and a hook of compressed-tensors
on the model makes all of them dense at the first forward pass; before, each module did so in its own. Modules that
halfbyte computes are kept from both, so that the model stays as small as its file. All others become dense as ever.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from halfbyte.autocast import autocast_dtype, cast
from halfbyte.formats.compressed_tensors import from_compressed_tensors
from halfbyte.formats.weight import QuantizedWeight
from halfbyte.models.patch import forward_name, patch, replaced_by, unpatch
from halfbyte.models.projections import Inputs, parameter, shared, version_of
from halfbyte.ops import linear

ATTRIBUTE = "_halfbyte"  # of a module
HANDLE = "ct_decompress_hook"  # the attribute in which compressed-tensors keeps the handle of its hook


class View:
    """A module's weight as halfbyte reads it, the tensors and memory that it was seen in, and the module's own forward.

    Only the last goes along when the module is copied: the weight is then another one.
    """

    __slots__ = ("addresses", "forward", "q", "tensors")

    def __init__(self, forward: Callable[..., Tensor] | None = None) -> None:
        self.forward = forward
        self.q: QuantizedWeight | None = None
        self.tensors: tuple[Tensor, ...] = ()
        self.addresses: tuple[int, ...] = ()

    def __deepcopy__(self, memo: dict[int, Any]) -> View:
        return View(self.forward)

    def __reduce__(self) -> tuple[type[View], tuple[()]]:
        return View, ()


class Hook:
    """In the place of compressed-tensors' hook on a model: makes dense only what halfbyte does not compute."""

    def __init__(self, original: Callable[..., None]) -> None:
        self.original = original
        self.done = False

    def __call__(self, model: nn.Module, args: Any) -> None:
        if self.done:
            return
        handle = vars(model)[HANDLE]
        quantized = list(_quantized(model))
        rest = [module for module in quantized if _is_packed(module) and not is_applied(module)]
        if any(map(_is_offloaded, rest)):  # the original can unpack what lies elsewhere, and takes all modules or none
            for module in quantized:
                undo(module)
            model._forward_pre_hooks[handle.id] = self.original
            self.original(model, args)
            return
        for module in rest:
            import_module("compressed_tensors.compressors").decompress_module(module)
        self.done = any(map(is_applied, quantized))
        if not self.done:  # all are dense: there is nothing to come back to
            handle.remove()
            delattr(model, HANDLE)


def supports(module: nn.Module) -> bool:
    """True for a linear layer to which compressed-tensors gives 4 bits, whether or not it is packed now."""
    weights = getattr(vars(module).get("quantization_scheme"), "weights", None)
    return isinstance(module, nn.Linear) and getattr(weights, "num_bits", None) == 4


def apply(module: nn.Module) -> str | None:
    """Let halfbyte compute a module; returns None, or why it was left alone."""
    found = _read(module)
    if isinstance(found, str):
        return found
    if is_applied(module):
        return None
    name = forward_name(module)
    before = getattr(vars(module).get(name), "__func__", None)
    if not _is_known(type(module).forward) or (name in vars(module) and not _is_known(before)):
        return "its forward is not that of a linear layer: other code has replaced it"
    setattr(module, ATTRIBUTE, View(before))
    patch(forward, module)
    return None


def undo(module: nn.Module) -> None:
    """Give a module back the forward that it had."""
    view: View | None = vars(module).pop(ATTRIBUTE, None)
    unpatch(forward, module, view.forward if view is not None else None)


def is_applied(module: nn.Module) -> bool:
    return bool(replaced_by(forward, module))


def keep_packed(model: nn.Module) -> None:
    """Keep the modules of `model` that halfbyte computes from being made dense at the first forward pass."""
    for module, hooks, key in _hooked(model):
        if not isinstance(hooks[key], Hook):
            hooks[key] = Hook(hooks[key])
            # Said here, so that nothing is left to find out in a forward pass that is traced.
            hooks[key].done = all(is_applied(m) or not _is_packed(m) for m in _quantized(module))


def let_unpack(model: nn.Module) -> None:
    """Undo `keep_packed`, after the modules: at the next forward pass, what is packed will become dense."""
    for module, hooks, key in _hooked(model):
        if isinstance(hooks[key], Hook):
            if all(map(_is_packed, _quantized(module))):
                hooks[key] = hooks[key].original
            else:  # the original would fail on those that are dense by now
                hooks[key].done = False


def forward(module: Any, x: Tensor) -> Tensor:
    """What F.linear of the dense weight computes, under autocast too: x [..., K] -> [..., N]."""
    y = shared(module, x)
    if y is not None:
        return y
    q = weight_of(module)
    if q is None:
        before = module.__dict__[ATTRIBUTE].forward or type(module).forward
        result: Tensor = before(module, x)
        return result
    x, bias = cast(x, module.bias)
    return linear(x, q, bias)


def operands(module: Any, x: Tensor) -> Inputs | None:
    """What `forward` multiplies x with, where it can."""
    q = weight_of(module)
    if q is None:
        return None
    packed, scale = module.__dict__[ATTRIBUTE].tensors
    bias, dtype = parameter(module, "bias"), autocast_dtype(x)
    version = version_of(packed, scale, bias)
    if version is None or (dtype is None and bias is not None and bias.dtype is not x.dtype):
        return None
    dtype = dtype or x.dtype
    return Inputs(q, bias, dtype, dtype, version)


def stored(module: Any) -> tuple[Tensor, ...]:
    """The tensors of a module's packed weight; none of one that was made dense."""
    names = ("weight_packed", "weight_scale", "weight_zero_point", "weight_g_idx", "weight_shape")
    tensors = (getattr(module, name, None) for name in names if _is_packed(module))
    return tuple(tensor for tensor in tensors if tensor is not None)


def weight_of(module: Any) -> QuantizedWeight | None:
    """The module's weight as it is now, sharing its memory, or None where halfbyte has no reading of it."""
    view: View = module.__dict__[ATTRIBUTE]
    packed: Any = getattr(module, "weight_packed", None)
    scale: Any = getattr(module, "weight_scale", None)
    known = view.q is not None and packed is view.tensors[0] and scale is view.tensors[1]
    if torch.compiler.is_compiling():
        return view.q if known else None
    if known and view.addresses == (packed.data_ptr(), scale.data_ptr()):
        return view.q
    return _look(module)


def _look(module: Any) -> QuantizedWeight | None:
    """Read the weight anew, after it was moved, replaced or made dense."""
    view: View = module.__dict__[ATTRIBUTE]
    view.q, view.tensors = None, ()  # first of all, so that no memory is held which the module has let go
    found = _read(module) if supports(module) else None
    if found is None or isinstance(found, str):
        return None
    view.q = found
    view.tensors = (module.weight_packed, module.weight_scale)
    view.addresses = (module.weight_packed.data_ptr(), module.weight_scale.data_ptr())
    return view.q


def _read(module: Any) -> QuantizedWeight | str:
    """The weight, or why halfbyte cannot compute the module."""
    scheme = module.quantization_scheme
    weights = scheme.weights
    if not _is_packed(module):
        return (
            "its weight is dense: compressed-tensors unpacks all weights at the first forward pass. Load the model "
            "again and call accelerate before using it"
        )
    if _is_offloaded(module):
        return "its weight is offloaded and moves at every call"
    if scheme.input_activations is not None or scheme.output_activations is not None:
        return "its activations are quantized too; only weights are accepted"
    if weights.type != "int" or not hasattr(module, "weight_packed"):
        return f"its format is {_text(scheme.format)}; packed integers are accepted"
    if not weights.symmetric or hasattr(module, "weight_zero_point"):
        return "it has zero points; only symmetric weights are accepted"
    if hasattr(module, "weight_g_idx") or _text(getattr(weights, "actorder", None)) == "group":
        return "it has an activation order (weight_g_idx); only groups along K are accepted"
    if module.weight_packed.device.type == "meta":
        return "its weight is on the meta device, without memory"
    try:
        q = from_compressed_tensors(module.weight_packed.data, module.weight_scale.data, module.weight_shape.data)
    except (AttributeError, TypeError, ValueError) as error:
        return str(error)
    if q.shape != (module.out_features, module.in_features):
        return f"its weight has shape {list(q.shape)}, not [{module.out_features}, {module.in_features}]"
    return q


def _quantized(model: nn.Module) -> Iterator[nn.Module]:
    return (module for module in model.modules() if vars(module).get("quantization_scheme") is not None)


def _is_packed(module: Any) -> bool:
    return _text(getattr(module, "quantization_status", None)) == "compressed"


def _is_offloaded(module: nn.Module) -> bool:
    """True if accelerate or compressed-tensors keeps the module's tensors elsewhere."""
    return getattr(vars(module).get("_hf_hook"), "offload", False) or type(module._parameters) is not dict


def _text(member: object) -> object:
    """What a member of an enumeration stands for; anything else as it is."""
    value: object = getattr(member, "value", member)
    return value


def _hooked(model: nn.Module) -> Iterator[tuple[nn.Module, dict[int, Any], int]]:
    """Modules with compressed-tensors' hook on them, their hooks, and the key of that one."""
    for module in model.modules():
        key = getattr(vars(module).get(HANDLE), "id", None)
        if key in module._forward_pre_hooks:
            yield module, module._forward_pre_hooks, key


def _is_known(function: Any) -> bool:
    """True for a linear layer's forward, and for those with which compressed-tensors replaces it."""
    home = getattr(function, "__globals__", {}).get("__name__", "")  # its __module__ is that of the one it wraps
    return function is nn.Linear.forward or home.startswith(
        ("compressed_tensors.quantization.", "compressed_tensors.linear.")
    )
