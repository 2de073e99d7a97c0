"""What transformers does with the tensors of experts while from_pretrained loads them as `Experts4bit`.

A checkpoint holds the experts of a layer one by one (Mixtral, Qwen3-MoE, DeepSeek-V3) or in stacks (gpt-oss, and what
halfbyte saved), dense or in 4 bits:

    experts.E.PROJECTION.weight, or with bitsandbytes' or compressed-tensors' endings
    experts.NAMEs.E.weight, .bias                       gpt-oss in bitsandbytes' 4 bits, as Unsloth uploads it
    experts.NAME                                        a dense stack
    experts.NAME, NAME_scale                            our own, in the format that config.json names
    experts.NAME_blocks, NAME_scales                    gpt-oss' MXFP4

NAME is gate_up_proj or down_proj. The converters here take the place of those that make dense stacks. They are given
tensors that are not read yet, and read, round and let go of one expert after the other. While a model loads, its
experts' modules are transformers' own, on the meta device; once both stacks of one are there, `Experts4bit` follows.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers.core_model_loading import Concatenate, ConversionOps, MergeModulelist, WeightConverter

from halfbyte.formats import bitsandbytes, compressed_tensors, gpt_oss
from halfbyte.formats.spec import FORMATS
from halfbyte.formats.stacks import StackWriter, as_stack, block_size_of
from halfbyte.formats.weight import QuantizedWeight
from halfbyte.models.experts import Facts, facts_of, is_experts, misfit, quantize_stack, replacement
from halfbyte.nn.experts import BIAS, PROJECTIONS, SCALE, Experts4bit
from halfbyte.ops import quantize

ATTRIBUTE = "_halfbyte_arriving"  # of a module of dense experts that is to become Experts4bit

# Of a weight's keys; zero points and activation orders only to be refused by name.
FORMS = (*bitsandbytes.SUFFIXES, *compressed_tensors.SUFFIXES, "_zero_point", "_g_idx", *gpt_oss.SUFFIXES)
ENDINGS = "|".join(map(re.escape, FORMS))

Settings = Mapping[str, Any]  # as `halfbyte.quantize` takes them


class Arriving:
    """The stacks of a module that are there already."""

    def __init__(self, facts: Facts) -> None:
        self.facts = facts
        self.stacks: dict[str, QuantizedWeight] = {}


class Unread(WeightConverter):  # type: ignore[misc]
    """Gives its operation the tensors by their keys in the checkpoint, each a function that reads it."""

    __slots__ = ()

    def __init__(self, pattern: str, target: str, operation: ConversionOps) -> None:
        # On a GPU only what is packed: releases that know no force_cpu bring an expert, or a dense stack, there first.
        options = {"force_cpu": True} if "force_cpu" in WeightConverter.__slots__ else {}
        super().__init__(pattern, target, [operation], **options)

    def add_tensor(self, target_key: str, source_key: str, source_pattern: str, future: Any) -> None:
        self.collected_tensors[source_key].append(future)
        self.layer_targets[target_key].add(source_key)

    def materialize_tensors(self) -> dict[str, Callable[[], Tensor]]:
        keys = list(self.collected_tensors)
        return {key: partial(_read, self.collected_tensors.pop(key)) for key in keys}


def _read(given: list[Any]) -> Tensor:
    """The tensor; nothing else holds it afterwards."""
    one = given.pop()
    tensor: Tensor = one.result() if isinstance(one, Future) else one() if callable(one) else one
    return tensor


class Merge(ConversionOps):  # type: ignore[misc]
    """Make the 4-bit stack of a projection of what a checkpoint holds of it.

    parts: the projections, by their names in the checkpoint, whose rows follow each other in an expert. settings: of
    the format to round dense experts to, and of saved stacks; pre_quantized: dense experts are left dense.
    device_map: transformers', from names of modules to devices.
    """

    # transformers copies an operation for every weight: what is kept here is small.

    def __init__(
        self, parts: tuple[str, ...], settings: Settings, pre_quantized: bool, device_map: Mapping[str, Any]
    ) -> None:
        self.parts, self.settings, self.pre_quantized, self.device_map = parts, settings, pre_quantized, device_map

    def convert(
        self,
        input_dict: dict[str, Callable[[], Tensor]],
        *,
        full_layer_name: str,
        model: Any,
        missing_keys: set[str] | None,
        **_: Any,
    ) -> dict[str, Tensor]:
        path, name = full_layer_name.rsplit(".", 1)
        module = model.get_submodule(path)
        parameter = module._parameters[name]
        arriving: Arriving | str | None = vars(module).get(ATTRIBUTE)
        found = _by_expert(input_dict, path.rpartition(".")[2], name)
        is_dense = all(t.keys() == {""} for pieces in found.values() for t in pieces.values())
        if None not in found:
            self._check_all(full_layer_name, found, len(parameter))
        if is_dense and (self.pre_quantized or not isinstance(arriving, Arriving)):
            dense = found[None][name][""]() if None in found else self._merged(found)
            return {full_layer_name: dense.to(parameter.dtype)}
        if not isinstance(arriving, Arriving):
            raise ValueError(f"{full_layer_name!r} is 4-bit and cannot be computed: {arriving}")
        device = self._device(full_layer_name)
        if None not in found:
            q = self._joined(found, arriving.facts, name, parameter.dtype, device)
        elif is_dense:
            q = self._rounded(found[None][name][""](), arriving.facts, name, device)
        else:
            q = self._saved_stack(found[None][name], name, arriving.facts, parameter.dtype).to(device)
        arrive(model, path, name, q, missing_keys)
        return {}

    def _device(self, key: str) -> torch.device:
        """Where transformers puts a parameter."""
        while key and key not in self.device_map:
            key = key.rpartition(".")[0]
        place = self.device_map.get(key, "cpu")
        return torch.device(place)

    def _rounded(self, dense: Tensor, facts: Facts, name: str, device: torch.device) -> QuantizedWeight:
        n, k = facts.shapes[name]
        expected = [facts.count, *((k, n) if facts.transposed else (n, k))]
        if list(dense.shape) != expected:
            raise ValueError(f"{name} has shape {list(dense.shape)}; the model has {expected}")
        return quantize_stack(dense, facts, name, self.settings, device)

    def _saved_stack(
        self, tensors: Mapping[str, Callable[[], Tensor]], name: str, facts: Facts, dtype: torch.dtype
    ) -> QuantizedWeight:
        read = {name + suffix: tensor() for suffix, tensor in tensors.items()}
        if f"{name}_blocks" in read:
            return as_stack(replace(gpt_oss.from_tensors(name, read), dtype=dtype))
        if read.keys() != {name, name + SCALE}:
            raise ValueError(f"only {', '.join(read)} of a stack are there; {name} and {name + SCALE} are needed")
        packed, scale, format = read[name], read[name + SCALE], self.settings["format"]
        size = block_size_of(packed, scale, format)
        return QuantizedWeight(format, packed, scale, (len(packed), *facts.shapes[name]), dtype, size)

    def _check_all(self, full_name: str, found: Mapping[int | None, Any], count: int) -> None:
        needed = {(expert, part) for expert in range(count) for part in self.parts}
        there = {(expert, part) for expert, pieces in found.items() for part in pieces}
        if lost := sorted(needed - there):
            raise ValueError(
                f"{full_name!r}: {len(lost)} of {len(needed)} projections are missing, such as {lost[0][1]} of expert "
                f"{lost[0][0]}; the checkpoint is incomplete"
            )
        if extra := there - needed:
            raise ValueError(f"{full_name!r} has projections of {len(extra)} experts more than the model's {count}")

    def _merged(self, found: Mapping[int | None, Any]) -> Tensor:
        return torch.stack([torch.cat([found[e][part][""]() for part in self.parts]) for e in range(len(found))])

    def _joined(
        self, found: Mapping[int | None, Any], facts: Facts, name: str, dtype: torch.dtype, device: torch.device
    ) -> QuantizedWeight:
        writer = StackWriter((facts.count, *facts.shapes[name]))
        for expert in range(facts.count):
            row, dense = 0, []
            for part in self.parts:
                tensors = found[expert].pop(part)
                if tensors.keys() == {""}:
                    dense.append(tensors[""]().to(device))
                    continue
                q = _saved(part, {part + suffix: tensor() for suffix, tensor in tensors.items()}, dtype)
                writer.write(expert, row, q.to(device))
                row += q.shape[0]
            if dense and row:
                raise ValueError(f"expert {expert} is dense in part and in part quantized")
            if dense:
                # Whole experts are rounded, so that the blocks are those of a stack.
                writer.write(expert, 0, quantize(torch.cat(dense), **self.settings))
        return writer.weight()


class StackBiases(ConversionOps):  # type: ignore[misc]
    """The biases of experts that a checkpoint holds one by one, as one parameter."""

    def convert(
        self, input_dict: dict[str, Callable[[], Tensor]], *, full_layer_name: str, model: Any, **_: Any
    ) -> dict[str, Tensor]:
        by_expert = {int(key.split(".")[-2]): tensor for key, tensor in input_dict.items()}
        biases = torch.stack([by_expert[expert]() for expert in range(len(by_expert))])
        return {full_layer_name: biases.to(model.get_parameter(full_layer_name).dtype)}


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

    Raises ValueError where there are two, which no config.json could name.
    """
    for module in model.modules():
        vars(module).pop(ATTRIBUTE, None)
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


def arrive(model: Any, path: str, name: str, q: QuantizedWeight, missing_keys: set[str] | None) -> None:
    """Keep the stack of one projection, and put `Experts4bit` in place once the other one is there, too."""
    module = model.get_submodule(path)
    arriving: Arriving = vars(module)[ATTRIBUTE]
    if q.shape[1:] != arriving.facts.shapes[name] or len(q) != arriving.facts.count:
        expected = [arriving.facts.count, *arriving.facts.shapes[name]]
        raise ValueError(f"{path}.{name} has shape {list(q.shape)}; the model has {expected}")
    arriving.stacks[name] = q
    if len(arriving.stacks) < len(PROJECTIONS):
        return
    del module.__dict__[ATTRIBUTE]
    model.set_submodule(path, replacement(module, arriving.facts, arriving.stacks))
    if missing_keys is not None:
        missing_keys.difference_update(f"{path}.{projection}" for projection in PROJECTIONS)


def converters(
    paths: Iterable[str], conversions: Iterable[Any], settings: Settings, pre_quantized: bool, device_map: Any
) -> list[Any]:
    """What reads the experts of the modules at `paths`, to be asked before `conversions`, which are the model's.

    Experts that those make in another way than by merging are made dense by them first.
    """
    device_map = device_map if isinstance(device_map, dict) else {}
    conversions, ours = list(conversions), []
    merge = partial(Merge, settings=settings, pre_quantized=pre_quantized, device_map=device_map)
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


def _parts(conversions: Iterable[Any], target: str) -> tuple[str, ...] | None:
    """The projections, one by one in the checkpoint, that a model's converter merges; () if there is no converter, and
    None if it does something else."""
    for conversion in conversions:
        if not isinstance(conversion, WeightConverter) or not conversion.target_patterns[0].endswith(target):
            continue
        merges = all(isinstance(step, (MergeModulelist, Concatenate)) for step in conversion.operations)
        found = [re.search(r"\*\.(\w+)\.weight$", source) for source in conversion.source_patterns]
        return tuple(match[1] for match in found if match) if merges and all(found) else None
    return ()


def _by_expert(tensors: Mapping[str, Any], last: str, name: str) -> dict[int | None, dict[str, dict[str, Any]]]:
    """expert -> projection -> ending -> tensor, of tensors by their keys; a stack's expert is None."""
    found: dict[int | None, dict[str, dict[str, Any]]] = {}
    forms = (
        (rf"{last}\.(?P<expert>\d+)\.(?P<part>\w+)\.weight(?P<ending>.*)$"),
        (rf"{last}\.(?P<part>{name}s)\.(?P<expert>\d+)\.weight(?P<ending>.*)$"),
        (rf"{last}\.(?P<part>{name})(?P<ending>.*)$"),
    )
    for key, tensor in tensors.items():
        match = next(match for form in forms if (match := re.search(form, key)))
        groups = match.groupdict()
        expert = int(groups["expert"]) if "expert" in groups else None
        found.setdefault(expert, {}).setdefault(groups["part"], {})[groups["ending"]] = tensor
    return found


def _saved(name: str, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> QuantizedWeight:
    """A weight that a library saved; `dtype` is what it stands for where that is not saved."""
    if f"{name}_blocks" in tensors:
        return replace(gpt_oss.from_tensors(name, tensors), dtype=dtype)
    library = compressed_tensors if f"{name}_packed" in tensors else bitsandbytes
    q: QuantizedWeight = library.from_tensors(name, tensors)
    return q
