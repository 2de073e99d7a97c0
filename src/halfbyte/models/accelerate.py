"""accelerate and restore: a loaded 4-bit model made faster in place, and back."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any
from weakref import WeakSet

from torch import Tensor, nn

from halfbyte.kernels.linear.serves import serves
from halfbyte.models import bitsandbytes, compressed_tensors, norms, own, peft, siblings, transformers, unsloth
from halfbyte.models.repacked import FASTER
from halfbyte.models.report import Report, told, weigh

LAYERS = (bitsandbytes, compressed_tensors, own)  # libraries whose modules get a forward of ours
HOSTS = (peft, unsloth)  # libraries whose functions are replaced for as long as any model is accelerated

_accelerated: WeakSet[nn.Module] = WeakSet()


def accelerate(model: nn.Module) -> Report:
    """Make a loaded 4-bit model faster in place: same weights, same state_dict, no second copy of anything.

    model: any torch module that holds bitsandbytes' Linear4bit layers or INT4 ones of compressed-tensors, as
    transformers, PEFT and Unsloth load them. Its layers stay what they are and compute through halfbyte, those that
    are given the same x in one launch where that is faster; a transformers model on a GPU decodes on CUDA graphs in a
    plain `model.generate(...)`. Modules that halfbyte cannot take are left as they were, and so are those that
    bitsandbytes computes faster on this very CPU; the report says which, why, and what else the model is made of.
    A second call takes what is new. Warns where it takes nothing or has to leave a 4-bit module alone. Raises TypeError
    for what is no module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is a {type(model).__name__}; accelerate takes a torch.nn.Module: a loaded model")
    kernels, skipped = {}, {}
    for path, module in model.named_modules():
        if peft.takes(module):
            peft.apply(module)
        host = _host(module)
        if host is None:
            continue
        if reason := host.apply(module):
            skipped[path] = reason
        else:
            kernels[path] = _kernel(host, module)
    siblings.link(model, LAYERS)
    generation = "as before: no module was taken"
    if kernels:
        for module in model.modules():
            if norms.takes(module):
                norms.apply(module)
        compressed_tensors.keep_packed(model)
        for library in HOSTS:
            library.apply_to_library()
        _accelerated.add(model)
        generation = transformers.apply(model)
    _warn(model, tuple(kernels), skipped)
    packed, dense = weigh(model, _stored)
    skips, rest, by = map(MappingProxyType, (skipped, dense, kernels))
    return Report(tuple(kernels), skips, generation, packed, rest, by)


def _host(module: nn.Module) -> Any:
    """The one of LAYERS that a module is of."""
    return next((library for library in LAYERS if library.takes(module)), None)


def _stored(module: nn.Module) -> tuple[Tensor, ...]:
    host = _host(module)
    tensors: tuple[Tensor, ...] = () if host is None else host.stored(module)
    return tensors


def _kernel(host: Any, module: nn.Module) -> str:
    q = host.weight_of(module)
    return serves(q, getattr(module, "compute_dtype", None) or q.dtype)


def _warn(model: nn.Module, taken: tuple[str, ...], skipped: Mapping[str, str]) -> None:
    """One warning, unless all is well."""
    wrong = {path: reason for path, reason in skipped.items() if reason != FASTER}
    if wrong:
        reasons = "; ".join(f"{count}: {words}" for count, words in told(wrong)[:3])
        warnings.warn(
            f"halfbyte leaves {len(wrong)} of {len(taken) + len(skipped)} 4-bit modules as they were ({reasons}). The "
            "report's `skipped` names each; mend what it says and call accelerate again",
            UserWarning, stacklevel=3,
        )  # fmt: skip
    elif not taken and not skipped:
        warnings.warn(
            f"halfbyte found no 4-bit layer in this {type(model).__name__} and changed nothing. Load it in 4 bits: "
            "from_pretrained(..., quantization_config=halfbyte.HalfbyteConfig()), or bitsandbytes' load_in_4bit=True",
            UserWarning, stacklevel=3,
        )  # fmt: skip


def is_accelerated(model: nn.Module) -> bool:
    """Whether `accelerate` was called with this very model, and `restore` not since."""
    return model in _accelerated


def restore(model: nn.Module) -> None:
    """Undo `accelerate`: every module computes as it did before. A model that was not accelerated is left as it is."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is a {type(model).__name__}; restore takes the torch.nn.Module that was accelerated")
    transformers.undo(model)
    siblings.unlink(model)
    for module in model.modules():
        if bitsandbytes.takes(module):
            bitsandbytes.undo(module)
        elif peft.takes(module):
            peft.undo(module)
        elif compressed_tensors.is_applied(module):
            compressed_tensors.undo(module)
        elif own.takes(module):
            own.undo(module)
        else:
            norms.undo(module)
    compressed_tensors.let_unpack(model)
    _accelerated.discard(model)
    if not _accelerated:
        for host in HOSTS:
            host.undo_in_library()
