"""compressed-tensors' "pack-quantized" INT4 weights seen as a QuantizedWeight, and the keys they have in a checkpoint.

    LAYER.weight_packed    int32 [N, K / 8], eight integers a word along K, stored as value + 8
    LAYER.weight_scale     a float dtype [N, K / G], one scale a row and group
    LAYER.weight_shape     int64 [2], N and K

Symmetric weights in groups along K are read. Zero points, activation order (`weight_g_idx`) and one scale a row or a
tensor are other formats, and are refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from halfbyte.formats.int4 import INT4
from halfbyte.formats.lookup import Tensors, find
from halfbyte.formats.weight import QuantizedWeight

FORMATS = {INT4.name: INT4}
SUFFIXES = ("_packed", "_scale", "_shape")
GROUP_SIZES = INT4.block_sizes


def from_compressed_tensors(
    weight_packed: torch.Tensor, weight_scale: torch.Tensor, shape: Sequence[int] | torch.Tensor
) -> QuantizedWeight:
    """An INT4 weight of compressed-tensors as a QuantizedWeight that shares its memory.

    weight_packed: int32 [N, K / 8]. weight_scale: fp16, bf16 or fp32 [N, K / G]; G, one of 32, 64 and 128, follows from
    it, and its dtype becomes the weight's. shape: N and K, a sequence or a tensor as checkpoints have it.

    Raises ValueError or TypeError where they do not fit together.
    """
    for name, tensor in (("weight_packed", weight_packed), ("weight_scale", weight_scale)):
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name} is a {type(tensor).__name__}; it must be a torch.Tensor")
        if tensor.dim() != 2:
            raise ValueError(f"{name} has shape {list(tensor.shape)}; two dimensions are expected, the first one N")
    sizes = [int(size) for size in (shape.tolist() if isinstance(shape, torch.Tensor) else shape)]
    if len(sizes) != 2:
        raise ValueError(f"shape is {sizes}; a weight of two dimensions [N, K] is expected")
    k, groups = sizes[1], weight_scale.shape[1]
    if groups == 0 or k % groups or k // groups not in GROUP_SIZES:
        raise ValueError(
            f"weight_scale has {groups} columns for K = {k}; int4 takes groups of {GROUP_SIZES} along K. "
            "One scale a row (strategy 'channel') is not accepted: quantize the dense weight anew"
        )
    return QuantizedWeight(INT4.name, weight_packed, weight_scale, (sizes[0], k), weight_scale.dtype, k // groups, None)


def keys(name: str, q: QuantizedWeight) -> list[str]:
    """The keys under which compressed-tensors saves a weight like `q` as `name`."""
    return [name + suffix for suffix in SUFFIXES]


def to_tensors(name: str, q: QuantizedWeight) -> dict[str, torch.Tensor]:
    """The tensors, by their keys, under which compressed-tensors saves `q` as `name` ("...weight").

    Raises ValueError unless `q` is int4.
    """
    if q.format != INT4.name:
        raise ValueError(f"format is {q.format!r}; compressed-tensors has 'int4': dequantize, then quantize to it")
    return {
        f"{name}_packed": q.packed,
        f"{name}_scale": q.scale,
        f"{name}_shape": torch.tensor(q.shape, dtype=torch.int64, device="cpu"),
    }


def is_complete(name: str, tensors: Mapping[str, torch.Tensor]) -> bool:
    """Whether all keys of the weight `name` are there, for those who get them one by one and in any order."""
    return all(name + suffix in tensors for suffix in SUFFIXES)


def from_tensors(name: str, tensors: Tensors) -> QuantizedWeight:
    """The weight that compressed-tensors saved as `name`, from a mapping of keys to tensors or a function.

    A function returns None, or raises KeyError, for a key that is not there. Raises ValueError, saying which key is at
    fault, where one is missing, the parts do not fit, or the weight has zero points or an activation order.
    """

    for suffix, what in (("_zero_point", "zero points"), ("_g_idx", "an activation order")):
        if find(tensors, name + suffix) is not None:
            raise ValueError(f"{name!r} has {what} ({name + suffix!r}); only symmetric groups along K are accepted")
    parts = []
    for suffix in SUFFIXES:
        part = find(tensors, name + suffix)
        if part is None:
            raise ValueError(
                f"key {name + suffix!r} is missing and an int4 weight needs it; the checkpoint is incomplete"
            )
        parts.append(part)
    try:
        return from_compressed_tensors(*parts)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name!r} does not fit together: {error}") from error
