"""accelerate and restore: a loaded 4-bit model made faster in place, and back."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping
from types import MappingProxyType
from weakref import WeakSet

from torch import Tensor, nn

from halfbyte.formats.settings import check_settings
from halfbyte.formats.spec import FORMATS
from halfbyte.kernels.experts.serves import serves as serves_experts
from halfbyte.kernels.linear.serves import serves
from halfbyte.models import bitsandbytes, heads, projections, transformers
from halfbyte.models import experts as experts_of
from halfbyte.models.hosts import LIBRARIES, apply_around, undo_everything
from halfbyte.models.linears import LAYERS, Layers, layers_of
from halfbyte.models.repacked import FASTER, is_faster_in_all
from halfbyte.models.report import Report, told, weigh
from halfbyte.nn.experts import Experts4bit

_accelerated: WeakSet[nn.Module] = WeakSet()


def accelerate(model: nn.Module, experts: str | None = None) -> Report:
    """Make a loaded 4-bit model faster in place: same weights, same state_dict, no second copy of anything.

    model: any torch module that holds bitsandbytes' Linear4bit layers or INT4 ones of compressed-tensors, as
    transformers, PEFT and Unsloth load them. Its layers stay what they are and compute through halfbyte, those that
    are given the same x in one launch where that is faster; a transformers model on a GPU decodes on CUDA graphs in a
    plain `model.generate(...)`, and one on a CPU multiplies with its dense head through halfbyte where that is faster.
    Modules that halfbyte cannot take are left as they were, and so are those that bitsandbytes computes faster on this
    very CPU; the report says which, why, and what else the model is made of. A second call takes what is new. Warns
    where it takes nothing or has to leave a 4-bit module alone.

    experts: None, or the format ("nf4" and so on) in which the dense experts of a mixture-of-experts model are put in
    the place of the bf16 ones, without nested scales. That rounds weights, which nothing brings back but loading the
    model again; the report names the modules, and the state_dict has `Experts4bit`'s keys.

    Raises TypeError for what is no module, and ValueError for an unknown format.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is a {type(model).__name__}; accelerate takes a torch.nn.Module: a loaded model")
    kernels: dict[str, str] = {}
    skipped: dict[str, str] = {}
    rounded: dict[str, int] = {}
    if experts is not None:
        rounded, skipped = _round_experts(model, experts)
    for path, module in model.named_modules():
        if isinstance(module, Experts4bit):
            kernels[path] = serves_experts(module.gate_up)
            continue
        host = layers_of(module)
        if host is None:
            continue
        if reason := host.apply(module):
            skipped[path] = reason
        else:
            kernels[path] = _kernel(host, module)
    _settle(model, kernels, skipped)
    projections.link(model, LAYERS)
    generation = "as before: no module was taken"
    if kernels:
        _accelerated.add(model)
        generation = apply_around(model)
    if kernels or set(skipped.values()) == {FASTER}:
        heads.apply(model)
    _warn(model, tuple(kernels), skipped)
    packed, dense = weigh(model, _stored)
    return Report(
        tuple(kernels),
        MappingProxyType(skipped),
        generation,
        packed,
        MappingProxyType(dense),
        MappingProxyType(kernels),
        MappingProxyType(rounded),
        experts if rounded else None,
    )


def _settle(model: nn.Module, kernels: dict[str, str], skipped: dict[str, str]) -> None:
    """Where bitsandbytes is faster for some weights and halfbyte for others, leave all to whoever is in all: the
    threads of the two wait for each other."""
    if FASTER not in skipped.values():
        return
    modules = {path: module for path, module in model.named_modules() if bitsandbytes.supports(module)}
    facts = {path: found for path in modules if (found := bitsandbytes.facts_of(modules[path])) and found.may_be_faster}
    left, taken = ([path for path in facts if path in paths] for paths in (skipped, kernels))
    if not taken:
        return
    if is_faster_in_all(facts.values()):
        for path in taken:
            bitsandbytes.undo(modules[path])
            del kernels[path]
            skipped[path] = FASTER
        return
    for path in left:
        if skipped[path] == FASTER and bitsandbytes.take(modules[path]) is None:
            del skipped[path]
            kernels[path] = _kernel(bitsandbytes, modules[path])


def _round_experts(model: nn.Module, format: str) -> tuple[dict[str, int], dict[str, str]]:
    size, _ = check_settings(format, None, None, None)
    settings = {"format": format, FORMATS[format].size_name: size, "nested": False}
    rounded, left = experts_of.round_in_place(model, settings)
    if rounded and "transformers" in sys.modules:
        from halfbyte.models.saving import keep_stacks

        keep_stacks(model, format)
    return rounded, left


def _stored(module: nn.Module) -> tuple[Tensor, ...]:
    if isinstance(module, Experts4bit):
        return *module.gate_up.tensors, *module.down.tensors
    host = layers_of(module)
    tensors: tuple[Tensor, ...] = () if host is None else host.stored(module)
    return tensors


def _kernel(host: Layers, module: nn.Module) -> str:
    q = host.weight_of(module)
    assert q is not None  # it was taken
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


def release(model: nn.Module) -> None:
    """Free the caches and captured steps that an accelerated model keeps between calls of `generate`.

    They go back to torch's allocator; `torch.cuda.empty_cache()` gives that memory to other processes. What a call in
    another thread uses is freed when that call returns. The model stays accelerated, and its next call makes anew what
    it needs. A model that keeps nothing is left as it is. Raises TypeError for what is no module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is a {type(model).__name__}; release takes the torch.nn.Module that was accelerated")
    for module in model.modules():
        transformers.release(module)


def restore(model: nn.Module) -> None:
    """Undo `accelerate`: every module computes as it did before. A model that was not accelerated is left as it is.

    Experts that `accelerate(model, experts=...)` has rounded stay so, which a warning says: their dense weights are
    gone, and only loading the model again brings them back.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is a {type(model).__name__}; restore takes the torch.nn.Module that was accelerated")
    if rounded := experts_of.rounded_in(model):
        warnings.warn(
            f"halfbyte has restored all but the experts of {len(rounded)} layers, which stay in "
            f"{rounded[0].gate_up.format}: accelerate(model, experts=...) rounded them, and nothing holds their dense "
            "weights any more. Load the model again to have those back",
            UserWarning, stacklevel=2,
        )  # fmt: skip
    projections.unlink(model)
    undo_everything(model)
    _accelerated.discard(model)
    if not _accelerated:
        for library in LIBRARIES:
            library.undo_in_library()
