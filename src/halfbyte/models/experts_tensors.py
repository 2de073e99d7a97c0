"""The tensors of experts in a checkpoint, made into 4-bit stacks while transformers reads them.

The converter here gives its operation tensors that are not read yet, and that one reads, rounds and lets go of one
expert after the other. While a model loads, its experts' modules are transformers' own, on the meta device; once both
stacks of one are there, `Experts4bit` takes its place. Which converters there are says experts_loading.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers.core_model_loading import ConversionOps, WeightConverter

from halfbyte.formats import bitsandbytes, compressed_tensors, gpt_oss
from halfbyte.formats.stacks import StackWriter, as_stack, block_size_of
from halfbyte.formats.weight import QuantizedWeight
from halfbyte.models.experts import Facts, quantize_stack, replacement
from halfbyte.nn.experts import PROJECTIONS, SCALE
from halfbyte.ops import quantize

ATTRIBUTE = "_halfbyte_arriving"  # of a module of dense experts that is to become Experts4bit

Settings = Mapping[str, Any]  # as `halfbyte.quantize` takes them


class Places:
    """Where transformers puts parameters. It knows so only after it has been given the converters, and copies those."""

    def __init__(self) -> None:
        self.device_map: Any = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Places:
        return self

    def of(self, key: str) -> torch.device:
        """The device of a parameter."""
        places = self.device_map if isinstance(self.device_map, dict) else {}
        while key and key not in places:
            key = key.rpartition(".")[0]
        return torch.device(places.get(key, "cpu"))


class Arriving:
    """The stacks of a module that are there already."""

    def __init__(self, facts: Facts) -> None:
        self.facts = facts
        self.stacks: dict[str, QuantizedWeight] = {}


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


class Unread(WeightConverter):  # type: ignore[misc]
    """Gives its operation the tensors by their keys in the checkpoint, each a function that reads it."""

    __slots__ = ()

    def __init__(self, pattern: str, target: str, operation: ConversionOps) -> None:
        # On a GPU only what is packed: releases that know no force_cpu bring an expert, or a dense stack, there first.
        options = {"force_cpu": True} if hasattr(WeightConverter, "force_cpu") else {}
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
    """

    # transformers copies an operation for every weight: what is kept here is small.

    def __init__(self, parts: tuple[str, ...], settings: Settings, pre_quantized: bool, places: Places) -> None:
        self.parts, self.settings, self.pre_quantized, self.places = parts, settings, pre_quantized, places

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
        if hasattr(parameter, "placements"):
            raise ValueError(f"{full_layer_name!r} is sharded over devices, which 4-bit experts do not support yet")
        if not all(map(callable, input_dict.values())):
            raise ValueError(
                f"transformers {transformers.__version__} reads tensors in a way that halfbyte does not know; load "
                "dense experts with HalfbyteConfig(experts=False), or another version"
            )
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
        device = self.places.of(full_layer_name)
        if None not in found:
            q = self._joined(found, arriving.facts, name, parameter.dtype, device)
        elif is_dense:
            q = self._rounded(found[None][name][""](), arriving.facts, name, device)
        else:
            q = self._saved_stack(found[None][name], name, arriving.facts, parameter.dtype).to(device)
        arrive(model, path, name, q, missing_keys)
        return {}

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


def _by_expert(tensors: Mapping[str, Any], last: str, name: str) -> dict[int | None, dict[str, dict[str, Any]]]:
    """expert -> projection -> ending -> tensor, of tensors by their keys; a stack's expert is None.

    Keys are those of the file. One that has nothing of a module's name in it is of a stack that transformers renames.
    """
    found: dict[int | None, dict[str, dict[str, Any]]] = {}
    forms = (
        (rf"{last}\.(?P<expert>\d+)\.(?P<part>\w+)\.weight(?P<ending>.*)$"),
        (rf"{last}\.(?P<part>{name}s)\.(?P<expert>\d+)\.weight(?P<ending>.*)$"),
        (rf"{last}\.(?P<part>{name})(?P<ending>.*)$"),
    )
    for key, tensor in tensors.items():
        match = next((match for form in forms if (match := re.search(form, key))), None)
        renamed = {"part": name, "ending": next((e for e in (SCALE, *gpt_oss.SUFFIXES) if key.endswith(e)), "")}
        groups = renamed if match is None else match.groupdict()
        expert = int(groups["expert"]) if "expert" in groups else None
        pieces = found.setdefault(expert, {}).setdefault(groups["part"], {})
        if groups["ending"] in pieces:
            raise ValueError(f"{key!r} is a second tensor for the same part of {last}.{name}")
        pieces[groups["ending"]] = tensor
    return found


def _saved(name: str, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> QuantizedWeight:
    """A weight that a library saved; `dtype` is what it stands for where that is not saved."""
    if f"{name}_blocks" in tensors:
        return replace(gpt_oss.from_tensors(name, tensors), dtype=dtype)
    library = compressed_tensors if f"{name}_packed" in tensors else bitsandbytes
    q: QuantizedWeight = library.from_tensors(name, tensors)
    return q
