"""gpt-oss' MXFP4 experts seen as a QuantizedWeight, and the keys that MXFP4 weights have in a checkpoint.

    NAME_blocks    uint8 [E, rows, K / 32, 16], two weights a byte, the first in the low nibble
    NAME_scales    uint8 [E, rows, K / 32], E8M0

A single weight has the same two without E. gpt-oss' gate and up rows take turns: gate is rows 0, 2, 4, ... of
gate_up_proj. Source: the checkpoints of openai/gpt-oss.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from halfbyte.formats.lookup import Tensors, find
from halfbyte.formats.mxfp4 import MXFP4
from halfbyte.formats.weight import QuantizedWeight

FORMATS = {MXFP4.name: MXFP4}
SUFFIXES = ("_blocks", "_scales")


def from_gpt_oss(blocks: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype = torch.bfloat16) -> QuantizedWeight:
    """A stack of MXFP4 experts of gpt-oss as a QuantizedWeight [E, rows, K] that shares its memory.

    blocks: uint8 [E, rows, K / 32, 16], contiguous, or [E, rows, K / 2], as transformers holds it in a model. Without
        the first side it is one expert's, [rows, K]. scales: uint8 [E, rows, K / 32]. dtype: the one that `dequantize`
        returns by default; the model is bf16.

    Raises ValueError or TypeError where they do not fit together.
    """
    for name, tensor in (("blocks", blocks), ("scales", scales)):
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name} is a {type(tensor).__name__}; it must be a torch.Tensor")
        if not tensor.is_contiguous():
            raise ValueError(f"{name} is not contiguous; pass {name}.contiguous()")
    if scales.dim() not in (2, 3):
        raise ValueError(f"scales has shape {list(scales.shape)}; [E, rows, K / {MXFP4.block_size}] is expected")
    groups, octets = scales.shape[-1], MXFP4.block_size // 2
    if blocks.shape not in ((*scales.shape, octets), (*scales.shape[:-1], groups * octets)):
        raise ValueError(
            f"blocks has shape {list(blocks.shape)} and scales {list(scales.shape)}; blocks must be "
            f"{[*scales.shape, octets]} or {[*scales.shape[:-1], groups * octets]}"
        )
    packed = blocks.view(*scales.shape[:-1], groups * octets)
    shape = (*scales.shape[:-1], groups * MXFP4.block_size)
    return QuantizedWeight(MXFP4.name, packed, scales, shape, dtype, MXFP4.block_size)


def keys(name: str, q: QuantizedWeight) -> list[str]:
    """The keys under which a weight like `q` is saved as `name`."""
    return [name + suffix for suffix in SUFFIXES]


def to_tensors(name: str, q: QuantizedWeight) -> dict[str, torch.Tensor]:
    """The tensors, by their keys, of `q` saved as `name`. Raises ValueError unless `q` is mxfp4."""
    if q.format != MXFP4.name:
        raise ValueError(f"format is {q.format!r}; blocks and scales are 'mxfp4': dequantize, then quantize to it")
    return {f"{name}_blocks": q.packed.view(*q.scale.shape, MXFP4.block_size // 2), f"{name}_scales": q.scale}


def is_complete(name: str, tensors: Mapping[str, torch.Tensor]) -> bool:
    """Whether all keys of the weight `name` are there, for those who get them one by one and in any order."""
    return all(name + suffix in tensors for suffix in SUFFIXES)


def from_tensors(name: str, tensors: Tensors) -> QuantizedWeight:
    """The weight that was saved as `name`, from a mapping of keys to tensors or a function that looks them up.

    A function returns None, or raises KeyError, for a key that is not there. It stands for a bf16 weight. Raises
    ValueError, saying which key is at fault, where one is missing or the parts do not fit.
    """
    parts = []
    for suffix in SUFFIXES:
        part = find(tensors, name + suffix)
        if part is None:
            raise ValueError(f"key {name + suffix!r} is missing and an mxfp4 weight needs it; the file is incomplete")
        parts.append(part)
    try:
        return from_gpt_oss(parts[0], parts[1])
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name!r} does not fit together: {error}") from error
