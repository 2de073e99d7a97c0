"""Which tensors of a checkpoint are quantized, and how its config.json says so."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from halfbyte.checkpoints.experts import is_one
from halfbyte.checkpoints.reader import FLOATS, Entry
from halfbyte.formats import bitsandbytes, compressed_tensors
from halfbyte.formats.layouts import layout_of
from halfbyte.formats.spec import FORMATS

# Output layers, by the names that models give them. Where embeddings are tied they are not in the checkpoint at all,
# yet transformers must be told to leave them dense.
HEADS = ("lm_head", "embed_out", "proj_out", "classifier", "score", "qa_outputs")

_EMBEDDING = re.compile(r"emb(ed\w*)?$|^embed|^(wte|wpe|shared)$|relative_attention_bias")

_NOT_LINEAR = re.compile(r"emb(ed|$)|norm|(^|_)ln(_|\d|$)|^(wte|wpe|shared|router)$")
_NOT_LINEAR_LAST = re.compile(r"^(gate|router|output)$|_gate$|relative_attention_bias")

# Their layers keep the weight transposed (transformers' Conv1D), and bitsandbytes' checkpoints hold it the other way.
_TRANSPOSED_MODELS = ("gpt2", "openai-gpt", "imagegpt", "decision_transformer", "clvp")


def is_linear(name: str) -> bool:
    """Whether a two-dimensional tensor of this name is, by convention, the weight of a linear layer.

    It is if it ends in ".weight", no part of its path names an embedding (embed.., ..emb, wte, wpe, shared), a norm or
    a router or one of several experts, and its last part neither an output layer (HEADS, output) nor an expert gate
    (gate, .._gate).
    """
    *path, last = name.split(".")
    if last != "weight" or not path or is_one(name):
        return False
    parts = [part.lower() for part in path]
    if any(_NOT_LINEAR.search(part) for part in parts):
        return False
    output = parts[-1] == "output" and len(parts) > 1  # only a lone "output" is the head, not BERT's layer.0.output
    return parts[-1] not in HEADS and (output or not _NOT_LINEAR_LAST.search(parts[-1]))


def check_globs(include: Sequence[str], only: Sequence[str]) -> None:
    """Raise ValueError where both are given."""
    if include and only:
        raise ValueError(
            "only says itself which weights are quantized, and include adds to the default; give one of them"
        )


def select(
    entries: Mapping[str, Entry],
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    only: Sequence[str] = (),
    tied: bool = False,
    experts: Collection[str] = (),
) -> list[str]:
    """The names of the weights to quantize: fp16, bf16 or fp32, two dimensions, ending in ".weight", and

    - all that `is_linear` takes for the weight of a linear layer, and those that match a glob of `include`;
    - weights of `experts`, one by one or in stacks of three dimensions;
    - with `only`, those that match one of its globs, instead;
    - in either case none that match a glob of `exclude`.

    Globs are shell patterns on the whole name, with or without ".weight". tied: the output layer is the embeddings.
    Raises ValueError for a glob that matches nothing which can be quantized, and for a weight among those chosen that
    nothing could load in 4 bits.
    """
    check_globs(include, only)
    able = [
        name
        for name, entry in entries.items()
        if name in experts
        or (name.endswith(".weight") and len(entry.shape) == 2 and entry.nbytes and entry.dtype in FLOATS)
    ]
    for option, globs in (("include", include), ("only", only)):
        for glob in globs:
            if not any(_matches(name, [glob]) for name in able):
                raise ValueError(
                    f"{option} {glob!r} matches none of the {len(able)} tensors that can be quantized (fp16, bf16 or "
                    f"fp32, two dimensions, ending in '.weight'){f', such as {able[0]!r}' if able else ''}"
                )

    def is_usual(name: str) -> bool:
        return name in experts or is_linear(name) or _matches(name, include)

    chosen = [name for name in able if (_matches(name, only) if only else is_usual(name))]
    chosen = [name for name in chosen if not _matches(name, exclude)]
    for name in chosen:
        if name not in experts and (why := _not_loaded(name, entries, tied)):
            raise ValueError(
                f"{'only' if only else 'include'} takes in {name!r}, {why}; nothing would load it in 4 bits: leave it "
                f"out, with exclude {name.removesuffix('.weight')!r} for one"
            )
    return chosen


def _not_loaded(name: str, entries: Mapping[str, Entry], tied: bool) -> str:
    """What a weight is that no library loads in 4 bits, or "" for one that may be a linear layer's."""
    module = name.removesuffix(".weight")
    parent, _, last = module.rpartition(".")
    if is_one(name):
        return "one of several experts, of a kind that nothing keeps in 4 bits or that were to stay dense"
    if _EMBEDDING.search(last.lower()) and last not in HEADS:
        return "an embedding"
    if last in ("gate", "router") and any(other.startswith(f"{parent}.experts.") for other in entries):
        return "a router"
    if tied and last in HEADS:
        return "which config.json ties to the embeddings"
    return ""


def _matches(name: str, globs: Iterable[str]) -> bool:
    module = name.removesuffix(".weight")
    return any(fnmatchcase(name, glob) or fnmatchcase(module, glob) for glob in globs)


def check_model(config: Mapping[str, Any]) -> None:
    """Raise ValueError for models whose weights have another orientation in a 4-bit checkpoint than in a dense one."""
    if config.get("model_type") in _TRANSPOSED_MODELS:
        raise ValueError(
            f"config.json says model_type {config['model_type']!r}, whose layers keep weights transposed (Conv1D); "
            "such checkpoints are not converted: load the model with transformers and load_in_4bit, and save that"
        )


def dense_modules(entries: Mapping[str, Entry], chosen: Iterable[str]) -> list[str]:
    """The modules that transformers must not replace by quantized ones: those with a weight that was not chosen."""
    quantized = {name.removesuffix(".weight") for name in chosen}
    names = {n.removesuffix(".weight") for n, e in entries.items() if n.endswith(".weight") and len(e.shape) >= 2}
    matrices = {re.sub(r"((^|\.)experts)\.\d+(\..*)?$", r"\1", name) for name in names}  # one entry for all experts
    heads = [head for head in HEADS if not any(name.endswith(head) for name in quantized | matrices)]
    return sorted(matrices - quantized) + heads


def quantization_config(
    format: str, block_size: int, nested: bool, dtype: str, dense: Sequence[str], experts: bool | str = False
) -> dict[str, Any]:
    """What config.json says of a quantized checkpoint, in the words of transformers.

    block_size is int4's group size; bitsandbytes finds its own beside each weight. dtype is the weights' ("bfloat16").
    experts: whether there are some in 4 bits, or their format where that is another one. These, and mxfp4, no other
    library loads: what is said then is what `halfbyte.HalfbyteConfig` says.
    """
    if experts or layout_of(format) not in (bitsandbytes, compressed_tensors):
        sizes = {"block_size": None, "group_size": None, FORMATS[format].size_name: block_size}
        return {
            "quant_method": "halfbyte", "format": format, **sizes, "nested": nested,
            "experts": True if experts == format else experts or True,
            "modules_to_not_convert": None,
        }  # fmt: skip
    if layout_of(format) is bitsandbytes:
        return {
            "quant_method": "bitsandbytes",
            "load_in_4bit": True,
            "load_in_8bit": False,
            "bnb_4bit_quant_type": format,
            "bnb_4bit_use_double_quant": nested,
            "bnb_4bit_compute_dtype": dtype,
            "bnb_4bit_quant_storage": "uint8",
            "llm_int8_skip_modules": list(dense),
        }
    weights = {
        "num_bits": 4,
        "type": "int",
        "symmetric": True,
        "strategy": "group",
        "group_size": block_size,
        "dynamic": False,
        "actorder": None,
        "block_structure": None,
        "observer": "minmax",
        "observer_kwargs": {},
    }
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": list(dense),
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }
