"""The experts of a checkpoint: which of its tensors they are, and which layers of them can be 4-bit.

A layer's experts are either all quantized or all dense, as a model keeps them in one stack. They lie in a checkpoint
one by one (`experts.3.up_proj.weight`), and are written so, or in stacks of three dimensions (`experts.gate_up_proj`).
Such stacks are written K-last, as `halfbyte.nn.Experts4bit` holds them, whichever way round the dense ones are.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from halfbyte.checkpoints.reader import FLOATS, Entry
from halfbyte.formats.lookup import Tensors, find
from halfbyte.formats.spec import FORMATS
from halfbyte.formats.stacks import StackWriter, block_size_of, shapes
from halfbyte.formats.weight import FLOAT_DTYPES, QuantizedWeight
from halfbyte.ops import dequantize, quantize

STACKS = ("gate_up_proj", "down_proj")
SCALE = "_scale"  # what follows a stack's name, of its scales
TRANSPOSED = ("gpt_oss", "openai_privacy_filter", "aria")  # models whose dense stacks are [E, K, N]

_ONE = re.compile(r"^(?P<layer>(?:.*\.)?experts)\.(?P<expert>\d+)\.(?P<part>\w+)\.weight$")
_ONE_OF_STACK = re.compile(rf"^(?P<layer>(?:.*\.)?experts)\.(?P<part>{'|'.join(STACKS)})s\.(?P<expert>\d+)\.weight$")
_PARTS = ({"gate_proj", "up_proj", "down_proj"}, {"w1", "w2", "w3"})
_ACTIVATIONS = (None, "silu", "swish", "gelu", "gelu_pytorch_tanh")


class Place(NamedTuple):
    """Where a weight of experts is. layer: its path. expert: None of a stack."""

    layer: str
    expert: int | None
    part: str


@dataclass(frozen=True)
class Layer:
    """The experts of one layer. names: of their tensors. shapes: [N, K] of each. transposed: of stacks."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, int], ...]
    transposed: bool = False


def is_one(name: str) -> bool:
    """Whether a tensor of this name is a weight of a single expert."""
    return _ONE.match(name) is not None


def is_stack(name: str) -> bool:
    """Whether a tensor of this name is a stack of experts."""
    *path, last = name.split(".")
    return last in STACKS and "experts" in path


def place_of(name: str) -> Place | None:
    """Where the weight of this name is among experts, or None where it is none of theirs. Those of gpt-oss that Unsloth
    quantized one by one are called `experts.down_projs.3.weight`."""
    if match := _ONE.match(name) or _ONE_OF_STACK.match(name):
        return Place(match["layer"], int(match["expert"]), match["part"])
    layer, _, part = name.rpartition(".")
    return Place(layer, None, part) if is_stack(name) else None


def dense_names(entries: Mapping[str, Entry]) -> list[str]:
    """The names of all dense weights of experts: one by one, or in stacks of three dimensions."""
    return [
        name
        for name, entry in entries.items()
        if entry.dtype in FLOATS
        and (is_one(name) if len(entry.shape) == 2 else "experts" in name.split(".") and len(entry.shape) == 3)
    ]


def layers(entries: Mapping[str, Entry], config: Mapping[str, Any]) -> dict[str, Layer]:
    """The layers whose experts a model could have in 4 bits, by their paths."""
    if config.get("hidden_act") not in _ACTIVATIONS:
        return {}
    ones: dict[str, dict[tuple[int, str], str]] = {}
    stacks: dict[str, dict[str, str]] = {}
    for name in dense_names(entries):
        if match := _ONE.match(name):
            ones.setdefault(match["layer"], {})[int(match["expert"]), match["part"]] = name
        else:
            path, _, last = name.rpartition(".")
            stacks.setdefault(path, {})[last] = name
    found = {}
    for path, experts in ones.items():
        parts, numbers = {part for _, part in experts}, {number for number, _ in experts}
        if parts in _PARTS and len(experts) == len(parts) * len(numbers) and numbers == set(range(len(numbers))):
            sides = [entries[name].shape for name in experts.values()]
            found[path] = Layer(tuple(experts.values()), tuple((n, k) for n, k in sides))
    for path, names in stacks.items():
        layer = _stacked(entries, names) if names.keys() == set(STACKS) else None
        if layer is not None:
            found[path] = layer
    return found


def _stacked(entries: Mapping[str, Entry], names: Mapping[str, str]) -> Layer | None:
    """The layer of two stacks whose sides follow each other one way round or the other."""
    (count, *up), (other, *down) = (entries[names[name]].shape for name in STACKS)
    for transposed in (False, True):
        (twice, hidden), (out, inner) = (up[::-1], down[::-1]) if transposed else (up, down)
        if count == other and hidden == out and twice == 2 * inner:
            return Layer(tuple(names[name] for name in STACKS), ((twice, hidden), (out, inner)), transposed)
    return None


def cut(layers: Iterable[Layer], format: str, size: int) -> list[str]:
    """The names of those experts that cannot be cut into blocks, with all others of their layers."""
    misfits: list[str] = []
    for layer in layers:
        try:
            for n, k in layer.shapes:
                shapes(FORMATS[format], (1, n, k), size)
        except ValueError:
            misfits += layer.names
    return misfits


def check_whole(layers: Mapping[str, Layer], chosen: Collection[str]) -> None:
    """Raise ValueError for a layer of which some experts were chosen, and others not."""
    for path, layer in layers.items():
        count = len(set(layer.names) & set(chosen))
        if count not in (0, len(layer.names)):
            raise ValueError(
                f"{count} of the {len(layer.names)} weights of {path!r} are chosen; in a model the experts of a layer "
                f"are one stack, all 4-bit or all dense: exclude '{path}.*', or none of them"
            )


@dataclass(frozen=True)
class SavedStacks:
    """What config.json says of the stacks beside it. format: of those that halfbyte wrote. dtype: of dense weights.
    hidden: the model's width. transposed: whether dense stacks are [E, K, N]."""

    format: str
    dtype: torch.dtype
    hidden: int
    transposed: bool

    @staticmethod
    def of(config: Mapping[str, Any] | None) -> SavedStacks:
        config = config or {}
        text = {**config, **(config.get("text_config") or {})}
        said = config.get("quantization_config") or {}
        format = said.get("experts", True)
        dtype = getattr(torch, str(text.get("dtype") or text.get("torch_dtype") or "bfloat16"), None)
        return SavedStacks(
            str(said.get("format") or said.get("bnb_4bit_quant_type") if format is True else format),
            dtype if dtype in FLOAT_DTYPES else torch.bfloat16,
            int(text.get("hidden_size") or 0),
            text.get("model_type") in TRANSPOSED,
        )

    def read(self, name: str, tensors: Tensors) -> QuantizedWeight:
        """A stack that halfbyte wrote. Raises ValueError where its tensors misfit, or config.json tells too little."""
        packed, scale = find(tensors, name), find(tensors, name + SCALE)
        if packed is None or scale is None:
            raise ValueError(f"of the stack {name!r} only one of packed weights and scales is there")
        if self.format not in FORMATS or not self.hidden:
            raise ValueError(f"{name!r} is a stack of experts, whose format and hidden_size config.json does not tell")
        size = block_size_of(packed, scale, self.format)
        other = scale.numel() * size // max(1, len(packed) * self.hidden)
        shape = (len(packed), self.hidden, other) if name.endswith("down_proj") else (len(packed), other, self.hidden)
        return QuantizedWeight(self.format, packed, scale, shape, self.dtype, size)


def quantize_stack(dense: torch.Tensor, transposed: bool, settings: Mapping[str, Any]) -> QuantizedWeight:
    """The 4-bit stack [E, N, K] of a dense one, expert by expert. settings: as `halfbyte.quantize` takes them."""
    count, *sides = dense.shape
    n, k = sides[::-1] if transposed else sides
    writer = StackWriter((count, n, k))
    for number, expert in enumerate(dense):
        writer.write(number, 0, quantize(expert.T if transposed else expert, **settings, nested=False))
    return writer.weight()


def dequantize_stack(q: QuantizedWeight, transposed: bool, dtype: torch.dtype | None = None) -> torch.Tensor:
    """The dense stack, [E, N, K] or [E, K, N]."""
    dense = dequantize(q, dtype)
    return dense.transpose(1, 2).contiguous() if transposed else dense
