"""What transformers does with the tensors of experts while from_pretrained loads them as `Experts4bit`.

A checkpoint holds the experts of a layer one by one (Mixtral, Qwen3-MoE, DeepSeek-V3) or in stacks (gpt-oss, and what
halfbyte saved), dense or in 4 bits:

    experts.E.PROJECTION.weight, or with bitsandbytes' or compressed-tensors' endings
    experts.NAMEs.E.weight, .bias                       gpt-oss in bitsandbytes' 4 bits, as Unsloth uploads it
    experts.NAME                                        a dense stack
    experts.NAME, NAME_scale                            our own, in the format that config.json names
    experts.NAME_blocks, NAME_scales                    gpt-oss' MXFP4

NAME is gate_up_proj or down_proj. The converters here take the place of those that make dense stacks; what they do with
the tensors is in experts_tensors.py.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from torch import Tensor
from transformers.core_model_loading import WeightConverter

from halfbyte.formats import bitsandbytes, compressed_tensors, gpt_oss
from halfbyte.formats.spec import FORMATS
from halfbyte.models.experts import Facts, facts_of, is_experts, misfit, quantize_stack
from halfbyte.models.experts_tensors import ATTRIBUTE, Arriving, Merge, Places, Settings, StackBiases, Unread, arrive
from halfbyte.nn.experts import BIAS, PROJECTIONS, SCALE, Experts4bit

# Of a weight's keys; zero points and activation orders only to be refused by name.
FORMS = (*bitsandbytes.SUFFIXES, *compressed_tensors.SUFFIXES, "_zero_point", "_g_idx", *gpt_oss.SUFFIXES)
ENDINGS = "|".join(map(re.escape, FORMS))


def expect(model: Any, is_wanted: Callable[[str], bool], settings: Settings | None) -> frozenset[str]:
    """Get the modules of dense experts in `model` ready for 4-bit stacks; returns their paths.

    settings: what they will be rounded to, or None where the checkpoint says what is 4-bit. Warns of those that are
    left dense. Raises ValueError where experts cannot be cut into blocks.
    """
    paths, reasons, misfits = [], [], []
    for path, module in model.named_modules():
        if not is_experts(module) or not is_wanted(path):
            continue
        facts = facts_of(module)
        if settings is None:
            vars(module)[ATTRIBUTE] = facts if isinstance(facts, str) else Arriving(facts)
        elif isinstance(facts, str):
            reasons.append(facts)
            continue
        else:
            spec = FORMATS[settings["format"]]
            if why := misfit(facts, spec.name, settings[spec.size_name]):
                misfits.append(f"{path} ({why})")
            vars(module)[ATTRIBUTE] = Arriving(facts)
        paths.append(path)
    if misfits:
        raise ValueError(
            f"the experts of {len(misfits)} layers cannot be quantized: {misfits[0]}{', ...' if misfits[1:] else ''}. "
            "Choose another size or format for them, or experts=False, which leaves them dense"
        )
    if reasons:
        warnings.warn(
            f"halfbyte leaves the experts of {len(reasons)} layers dense: {reasons[0]}", UserWarning, stacklevel=2
        )
    return frozenset(paths)


def settle(model: Any) -> str | None:
    """After loading: forget what did not arrive; returns the format of the model's 4-bit experts, if it has any.

    Raises ValueError where only one projection of a module came in 4 bits, and where there are two formats, which no
    config.json could name.
    """
    for path, module in model.named_modules():
        arriving = vars(module).pop(ATTRIBUTE, None)
        if isinstance(arriving, Arriving) and arriving.stacks:
            (there,) = arriving.stacks
            raise ValueError(f"of the experts {path!r} only {there} is 4-bit; both projections must be, or none")
    modules = [module for module in model.modules() if isinstance(module, Experts4bit)]
    formats = {q.format for module in modules for q in (module.gate_up, module.down)}
    if len(formats) > 1:
        raise ValueError(f"the checkpoint has experts in several formats ({', '.join(sorted(formats))})")
    return next(iter(formats), None)


def round_stack(
    model: Any, path: str, name: str, dense: Tensor, settings: Settings, missing_keys: set[str] | None
) -> None:
    """Quantize a dense stack that transformers has made."""
    facts: Facts = vars(model.get_submodule(path))[ATTRIBUTE].facts
    arrive(model, path, name, quantize_stack(dense, facts, name, settings), missing_keys)


def converters(
    paths: Iterable[str], conversions: Iterable[Any], settings: Settings, pre_quantized: bool, places: Places
) -> list[Any]:
    """What reads the experts of the modules at `paths`, to be asked before `conversions`, which are the model's.

    Experts that those make in another way than by merging are made dense by them first.
    """
    conversions, ours = list(conversions), []
    merge = partial(Merge, settings=settings, pre_quantized=pre_quantized, places=places)
    for last in sorted({path.rpartition(".")[2] for path in paths}):
        for name in PROJECTIONS:
            target = f"{last}.{name}"
            parts = _parts(conversions, target)
            if parts:
                one_by_one = rf"\b{last}\.\d+\.(?:{'|'.join(parts)})\.weight(?:{ENDINGS})?$"
                ours.append(Unread(one_by_one, target, merge(parts)))
            whole = parts is not None or pre_quantized  # whether a tensor of this very name is for us
            stacks = rf"{name}(?:{SCALE}|{'|'.join(gpt_oss.SUFFIXES)}){'?' if whole else ''}$"
            unsloth = rf"{name}s\.\d+\.weight(?:{ENDINGS})?$"
            ours.append(Unread(rf"\b{last}\.(?:{stacks}|{unsloth})", target, merge((f"{name}s",))))
            ours.append(Unread(rf"\b{last}\.{name}s\.\d+\.bias$", target + BIAS, StackBiases()))
    return ours


def is_ours(operation: object) -> bool:
    """Whether an operation is one of the converters here."""
    return isinstance(operation, (Merge, StackBiases))


def _parts(conversions: Iterable[Any], target: str) -> tuple[str, ...] | None:
    """The projections, one by one in the checkpoint, that a model's converter merges; () if there is no converter, and
    None if it does something else."""
    for conversion in conversions:
        if not isinstance(conversion, WeightConverter) or not conversion.target_patterns[0].endswith(target):
            continue
        merges = all(type(step).__name__ in ("MergeModulelist", "Concatenate") for step in conversion.operations)
        found = [re.search(r"\*\.(\w+)\.weight$", source) for source in conversion.source_patterns]
        return tuple(match[1] for match in found if match) if merges and all(found) else None
    return ()
