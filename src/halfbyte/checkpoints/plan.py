"""What each weight becomes, before it is read: the keys it is made of, and the tensors it will be written as."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from halfbyte.checkpoints.experts import SCALE, SavedStacks, is_stack
from halfbyte.checkpoints.reader import DTYPES, Checkpoint
from halfbyte.checkpoints.writer import Spec
from halfbyte.formats import bitsandbytes, compressed_tensors, gpt_oss, stacks
from halfbyte.formats.layouts import layout_of
from halfbyte.formats.nested import NESTED_BLOCK_SIZE
from halfbyte.formats.spec import FORMATS
from halfbyte.formats.weight import QuantizedWeight


@dataclass(frozen=True)
class Weight:
    """A weight to convert: its dense shape, the keys it is read from, and the tensors it is written to."""

    name: str
    shape: tuple[int, ...]
    keys: tuple[str, ...]
    specs: tuple[Spec, ...]


def plan_quantized(checkpoint: Checkpoint, name: str, format: str, size: int, nested: bool) -> Weight:
    """A weight to quantize; its specs are of the tensors that the format's `to_tensors` will make of it.

    size: weights that share a scale.
    """
    entry = checkpoint.entries[name]
    spec, shape = FORMATS[format], tuple(entry.shape)
    packed, scales = spec.packed_shape(shape), spec.scale_shape(shape, size)
    if layout_of(format) is compressed_tensors:
        specs = [
            Spec.of(f"{name}_packed", torch.int32, packed),
            Spec.of(f"{name}_scale", DTYPES[entry.dtype], scales),
            Spec.of(f"{name}_shape", torch.int64, (2,)),
        ]
    elif layout_of(format) is gpt_oss:
        specs = [
            Spec.of(f"{name}_blocks", torch.uint8, (*scales, packed[-1] // scales[-1])),
            Spec.of(f"{name}_scales", torch.uint8, scales),
        ]
    else:
        specs = [
            Spec.of(name, torch.uint8, packed),
            Spec.of(f"{name}.absmax", torch.uint8 if nested else torch.float32, scales),
            Spec.of(f"{name}.quant_map", torch.float32, (16,)),
            Spec.blob(name + bitsandbytes.STATE_KEY + format),
        ]
        if nested:
            specs += [
                Spec.of(f"{name}.nested_absmax", torch.float32, (-(-scales[0] // NESTED_BLOCK_SIZE),)),
                Spec.of(f"{name}.nested_quant_map", torch.float32, (256,)),
            ]
    return Weight(name, entry.shape, (name,), tuple(specs))


def plan_stack(checkpoint: Checkpoint, name: str, format: str, size: int, shape: tuple[int, int]) -> Weight:
    """A dense stack of experts to quantize; shape: [N, K] of an expert."""
    entry = checkpoint.entries[name]
    spec = FORMATS[format]
    packed, scales = stacks.shapes(spec, (entry.shape[0], *shape), size)
    scale_dtype = getattr(torch, spec.scale_dtype) if spec.scale_dtype else DTYPES[entry.dtype]
    specs = (
        Spec.of(name, getattr(torch, spec.packed_dtype), packed),
        Spec.of(name + SCALE, scale_dtype, scales),
    )
    return Weight(name, entry.shape, (name,), specs)


def quantized_names(checkpoint: Checkpoint) -> list[str]:
    """The names of all 4-bit weights, in the checkpoint's order; also of those with parts missing."""
    names: dict[str, None] = {}
    for key in checkpoint.entries:
        if bitsandbytes.STATE_KEY in key:
            names[key.partition(bitsandbytes.STATE_KEY)[0]] = None
        elif key.endswith(".weight.absmax"):
            names[key.removesuffix(".absmax")] = None
        elif key.endswith(".weight_packed"):
            names[key.removesuffix("_packed")] = None
        elif key.endswith("_blocks") and key.removesuffix("_blocks") + "_scales" in checkpoint.entries:
            names[key.removesuffix("_blocks")] = None
        elif key.endswith(SCALE) and is_stack(name := key.removesuffix(SCALE)) and name in checkpoint.entries:
            names[name] = None
    return list(names)


def read_quantized(checkpoint: Checkpoint, name: str, saved: SavedStacks, *, planning: bool = False) -> QuantizedWeight:
    """A 4-bit weight in any layout. When planning, its large tensors are only checked and come as meta tensors."""

    def find(key: str) -> torch.Tensor | None:
        entry = checkpoint.entries.get(key)
        if entry is None:
            return None
        small = key.endswith((".quant_map", "weight_shape")) or bitsandbytes.STATE_KEY in key
        if small or not planning:
            return entry.read()
        return torch.empty(entry.shape, dtype=DTYPES.get(entry.dtype, torch.bool), device="meta")

    try:
        if f"{name}_packed" in checkpoint.entries:
            return compressed_tensors.from_tensors(name, find)
        if f"{name}_blocks" in checkpoint.entries:
            return replace(gpt_oss.from_tensors(name, find), dtype=saved.dtype)
        if is_stack(name):
            return saved.read(name, find)
        return bitsandbytes.from_tensors(name, find)
    except ValueError as error:
        raise ValueError(f"{checkpoint.path}: {error}") from error


def plan_dequantized(checkpoint: Checkpoint, name: str, dtype: torch.dtype | None, saved: SavedStacks) -> Weight:
    """A weight to dequantize. Raises ValueError where its parts are missing or do not fit together."""
    q = read_quantized(checkpoint, name, saved, planning=True)
    shape = (q.shape[0], q.shape[2], q.shape[1]) if len(q.shape) == 3 and saved.transposed else q.shape
    suffixes = (*layout_of(q.format).SUFFIXES, *((SCALE,) if is_stack(name) else ()))
    keys = tuple(key for key in (name, *(name + s for s in suffixes)) if key in checkpoint.entries)
    return Weight(name, shape, keys, (Spec.of(name, dtype or q.dtype, shape),))
