"""accelerate and restore: a loaded 4-bit model made faster in place, and back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from weakref import WeakSet

from torch import nn

from halfbyte.models import bitsandbytes, compressed_tensors, norms, own, peft, siblings, transformers, unsloth

LAYERS = (bitsandbytes, compressed_tensors, own)  # libraries whose modules get a forward of ours
HOSTS = (peft, unsloth)  # libraries whose functions are replaced for as long as any model is accelerated

_accelerated: WeakSet[nn.Module] = WeakSet()


@dataclass(frozen=True)
class Report:
    """What `accelerate` did. modules: paths of those that halfbyte computes now. skipped: path to the reason why a
    4-bit module was left alone. generation: how `generate` decodes from now on; where there are several models, which
    of them go on as before, and why."""

    modules: tuple[str, ...] = ()
    skipped: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    generation: str = ""

    def __str__(self) -> str:
        lines = [f"halfbyte computes {len(self.modules)} of {len(self.modules) + len(self.skipped)} 4-bit modules"]
        lines += [f"  left alone: {path}: {reason}" for path, reason in self.skipped.items()]
        return "\n".join([*lines, f"generate decodes {self.generation}"])


def accelerate(model: nn.Module) -> Report:
    """Make a loaded 4-bit model faster in place: same weights, same state_dict, no second copy of anything.

    model: any torch module that holds bitsandbytes' Linear4bit layers or INT4 ones of compressed-tensors, as
    transformers, PEFT and Unsloth load them. Its layers stay what they are and compute through halfbyte, those that
    are given the same x in one launch where that is faster; a transformers model on a GPU decodes on CUDA graphs in a
    plain `model.generate(...)`. Modules that halfbyte cannot take are left as they were, and the report says why.
    A second call takes what is new. Raises TypeError for what is no module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is a {type(model).__name__}; accelerate takes a torch.nn.Module: a loaded model")
    done, skipped = [], {}
    for path, module in model.named_modules():
        if peft.takes(module):
            peft.apply(module)
        layers = next((library for library in LAYERS if library.takes(module)), None)
        if layers is None:
            continue
        if reason := layers.apply(module):
            skipped[path] = reason
        else:
            done.append(path)
    if not done:
        return Report((), skipped, "as before: no module was taken")
    for module in model.modules():
        if norms.takes(module):
            norms.apply(module)
    compressed_tensors.keep_packed(model)
    siblings.link(model, LAYERS)
    for host in HOSTS:
        host.apply_to_library()
    _accelerated.add(model)
    return Report(tuple(done), skipped, transformers.apply(model))


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
