"""The tensors of 4-bit weights as a loader brings them: one by one, in any order, several weights for one layer.

A vLLM layer has a parameter for each key that a checkpoint may hold of a weight. Where several weights make one layer
(q, k and v; gate and up; the experts of a block), a slot says which of them a tensor is of. What is complete is made a
QuantizedWeight, cut to what this process keeps, and moved to its device at once, so that nothing whole waits for the
rest of the checkpoint. Nothing here needs vLLM.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from halfbyte.formats import bitsandbytes, compressed_tensors, gpt_oss
from halfbyte.formats.shards import columns, rows
from halfbyte.formats.weight import QuantizedWeight
from halfbyte.ops import quantize

WEIGHT = "weight"
LAYOUTS: dict[str, ModuleType] = {
    "bitsandbytes": bitsandbytes, "compressed-tensors": compressed_tensors, "gpt-oss": gpt_oss,
}  # fmt: skip
REFUSED = ("_zero_point", "_g_idx")  # compressed-tensors' other kinds: they land, so that an error names them

Weight = QuantizedWeight | Tensor
"""A 4-bit weight [N, K], or a dense one that a checkpoint leaves as it is."""


def parameter_of(key: str) -> str:
    """The name of the parameter for a checkpoint's key "weight.absmax": a parameter's name has no dots."""
    return key.replace(".", "_")


def keys_of(layouts: Sequence[str]) -> tuple[str, ...]:
    """Every key that these layouts have for a weight, the plain weight's first."""
    suffixes = [suffix for layout in layouts for suffix in LAYOUTS[layout].SUFFIXES]
    return tuple(WEIGHT + suffix for suffix in ("", *suffixes, *(REFUSED if "compressed-tensors" in layouts else ())))


def dtype_of(key: str, layouts: Sequence[str], nested: bool, dtype: torch.dtype) -> torch.dtype:
    """What a key usually has, for vLLM to warn of another. dtype: of dense weights and of INT4's scales."""
    usual = {
        WEIGHT: torch.uint8 if layouts else dtype,
        f"{WEIGHT}.absmax": torch.uint8 if nested else torch.float32,
        f"{WEIGHT}_packed": torch.int32,
        f"{WEIGHT}_scale": dtype,
        f"{WEIGHT}_shape": torch.int64,
    }
    is_bytes = bitsandbytes.STATE_KEY in key or key.removeprefix(WEIGHT) in gpt_oss.SUFFIXES
    return usual.get(key, torch.uint8 if is_bytes else torch.float32)


@dataclass(frozen=True)
class Span:
    """A side of a weight, of which this process keeps a part.

    total: its length on disk. kept: the length that this process keeps. rank, size: of this process, and how many there
    are. Where `total` has fewer parts than there are processes, neighbours keep the same one, as with k and v heads.
    """

    total: int
    kept: int
    rank: int = 0
    size: int = 1

    @property
    def range(self) -> tuple[int, int]:
        """First and last. Raises ValueError where the parts do not fit the processes."""
        parts = self.total // max(self.kept, 1)
        if self.kept * parts != self.total or not parts or self.size % parts:
            raise ValueError(f"{self.total} cannot be cut into parts of {self.kept} for {self.size} processes")
        first = self.rank // (self.size // parts) * self.kept
        return first, first + self.kept


def cut(weight: Weight, n: tuple[int, int], k: tuple[int, int]) -> Weight:
    """Rows n[0] to n[1] and columns k[0] to k[1], in memory of their own where that is not all."""
    if isinstance(weight, QuantizedWeight):
        return columns(rows(weight, *n), *k)
    part = weight[slice(*n), slice(*k)]
    return weight if part.shape == weight.shape else part.clone(memory_format=torch.contiguous_format)


class Arrivals:
    """What has come of the weights of one layer.

    device, dtype: of the layer; dense weights that arrive become `dtype`.
    settings: how a dense weight is rounded, as `quantize` takes it; None leaves it dense.
    layouts: names of LAYOUTS, whose keys may come.
    """

    def __init__(
        self, device: torch.device, dtype: torch.dtype, settings: dict[str, Any] | None, layouts: Sequence[str]
    ) -> None:
        self.device, self.dtype, self.settings = device, dtype, settings
        self.layouts = [LAYOUTS[name] for name in layouts]
        self.waiting: dict[tuple[Hashable, ...], dict[str, Tensor]] = {}
        self.found: dict[Hashable, Weight] = {}

    def add(
        self,
        slots: tuple[Hashable, ...],
        key: str,
        tensor: Tensor,
        k: int,
        cuts: Callable[[Weight], dict[Hashable, Weight]],
    ) -> None:
        """Take the tensor that a checkpoint holds as `key` of the weight for `slots`, whose K on disk is `k`.

        slots: one, or several where the checkpoint keeps their weights in one. cuts: what the whole weight becomes, by
        slot; asked when it is complete. Raises ValueError where its tensors do not fit together or are of a kind that
        is not read.
        """
        tensors = self.waiting.setdefault(slots, {})
        tensors[key] = tensor
        whole = self._whole(tensors, k)
        if whole is None:
            return
        del self.waiting[slots]
        for place, part in cuts(whole).items():
            self.found[place] = part.to(self.device)

    def _whole(self, tensors: dict[str, Tensor], k: int) -> Weight | None:
        for layout in self.layouts:
            if layout.is_complete(WEIGHT, tensors):
                q: QuantizedWeight = layout.from_tensors(WEIGHT, tensors)
                return q
        weight = tensors.get(WEIGHT)
        # bitsandbytes may store its bytes in a float dtype, but as one column.
        if weight is None or not weight.is_floating_point() or weight.dim() != 2 or weight.shape[1] != k or k == 1:
            return None
        if self.settings is None:
            return weight.to(self.dtype)
        dense = weight.to(self.device, self.dtype).contiguous()
        return quantize(dense, **self.settings)

    def take(self, slots: Sequence[Hashable], layer: str) -> list[Weight]:
        """The weights of these slots, which are let go of. Raises ValueError where any has not come as a whole."""
        for slot in slots:
            if slot not in self.found:
                parts = [sorted(tensors) for waiting, tensors in self.waiting.items() if slot in waiting]
                raise ValueError(
                    f"{layer} lacks a weight, number {slot}: the checkpoint gave {parts or 'nothing'} of it, which is "
                    "not all that a weight needs; get it again"
                )
        refused = {WEIGHT + suffix for suffix in REFUSED}
        for tensors in self.waiting.values():
            if more := sorted(refused & tensors.keys()):
                raise ValueError(f"{layer} has {', '.join(more)}; only symmetric groups along K are accepted")
        self.waiting.clear()
        return [self.found.pop(slot) for slot in slots]
