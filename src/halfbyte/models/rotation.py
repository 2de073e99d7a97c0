"""A bucket's cache in a captured step: no Python number in it, so that one graph does for every position.

transformers' window of W tokens moves all of them by one slot with every new one. Here a token of position p lies in
slot (p - shift) % W and takes the place of the one that just left the window. Attention does not care in which order
keys come, since their positions are in them already. The first slot is the oldest one that prefill left: shift is the
prompt's length less W, or 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MethodType
from typing import Any

import torch
from torch import Tensor

from halfbyte.kernels.common import slow
from halfbyte.models.carrying import Mirrored
from halfbyte.models.patch import is_method_of
from halfbyte.models.store import CacheStore

FULL, SLIDING = "full_attention", "sliding_attention"  # what transformers calls layers and their masks


def mask_names(config: Any) -> tuple[str, ...] | str | None:
    """How a model of this text configuration takes its masks: by name, or one of a name; None if in another way."""
    if hasattr(config, "layer_types"):
        names = tuple(sorted(set(config.layer_types)))
        return names if set(names) <= {FULL, SLIDING} else None
    if getattr(config, "sliding_window", None) is not None:
        return SLIDING
    return None if getattr(config, "attention_chunk_size", None) is not None else FULL


def as_numbers(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask to add: zero where a token is seen."""
    return torch.where(mask, torch.zeros((), dtype=dtype, device=mask.device), torch.finfo(dtype).min)


class Rotation:
    """All rows of a store that has its memory, for steps of one token each.

    device: of the tokens, and so of masks; layers may lie on others.

    floats: of this dtype masks are numbers to add, as transformers' attention in plain torch wants them; None for
    booleans.
    """

    def __init__(
        self, store: CacheStore, names: tuple[str, ...] | str, floats: torch.dtype | None, device: torch.device
    ) -> None:
        self.names, self.floats, self.tokens = names, floats, store.tokens
        self.cache = store.make()
        windows = {n for layer, n in zip(self.cache.layers, store.lengths, strict=True) if layer.is_sliding}
        self.slides_any = bool(windows)
        self.window = windows.pop() if windows else store.tokens
        assert not windows, "transformers has one window a model"
        with torch.inference_mode(False), torch.no_grad():
            self.lengths = torch.tensor(store.lengths, dtype=torch.int64, device=device)
            self.slides = torch.tensor(
                [int(layer.is_sliding) for layer in self.cache.layers], dtype=torch.int64, device=device
            )
            self.shift = torch.zeros((), dtype=torch.int64, device=device)
            # [layers]: where the step's token goes. Each is aligned to 16 bytes, so that Triton compiles one kernel.
            slots = torch.zeros((len(store.lengths), 2), dtype=torch.int64, device=device)[:, 0]
            self.slots = Mirrored(slots, store.devices)
            self.places = torch.arange(max(self.tokens, self.window), dtype=torch.int64, device=device)
        for index, (layer, kept) in enumerate(zip(self.cache.layers, store.layers, strict=True)):
            assert kept is not None
            layer.keys, layer.values = kept
            layer.dtype, layer.device = layer.keys.dtype, layer.keys.device
            layer.cumulative_length = self.slots.on(layer.device)[index]
            layer.slots = layer.cumulative_length[None]
            layer.is_initialized = True
            write_at_slots(layer)

    def close(self) -> None:
        """Let go of the store's memory."""
        for layer in self.cache.layers:
            layer.keys = layer.values = None
            del layer.update

    def begin(self, prompt: int) -> int:
        """Take over from prefill, which has put `prompt` tokens into the store; returns the shift."""
        shift = max(0, prompt - self.window)
        self.shift.fill_(shift)
        return shift

    def turn(self, length: Tensor, visible: Tensor) -> Mapping[str, Tensor] | Tensor:
        """Make ready for the last of `length` tokens, an int64 without dimensions; returns the step's masks.

        visible: bool [rows, tokens], false for padding.
        """
        names = (self.names,) if isinstance(self.names, str) else self.names
        if self.floats is None and visible.is_cuda and slow.has_triton():
            masks = self._in_one_launch(names, length, visible)
        else:
            place = length - 1
            self.slots.tensor.copy_(torch.remainder(place - self.slides * self.shift, self.lengths))
            masks = {name: self._mask(name, place, visible) for name in names}
        self.slots.send()
        return masks[self.names] if isinstance(self.names, str) else masks

    def _in_one_launch(self, names: tuple[str, ...], length: Tensor, visible: Tensor) -> dict[str, Tensor]:
        from halfbyte.kernels.token.triton import step_masks

        sizes = {FULL: self.tokens, SLIDING: self.window}
        made = {name: visible.new_empty((len(visible), sizes[name])) for name in names}
        masks = made.get(FULL), made.get(SLIDING)
        step_masks(self.slots.tensor, masks, length, self.shift, self.slides, self.lengths, visible)
        return {name: mask[:, None, None] for name, mask in made.items()}

    def _mask(self, name: str, place: Tensor, visible: Tensor) -> Tensor:
        """[rows, 1, 1, tokens or window]"""
        if name == FULL:
            mask = visible & (self.places[: self.tokens] <= place)
        else:
            held = place - torch.remainder(place - self.shift - self.places[: self.window], self.window)
            mask = visible.index_select(1, held.clamp(min=0)) & (held >= 0)
        mask = mask[:, None, None]
        return mask if self.floats is None else as_numbers(mask, self.floats)


def write_at_slots(layer: Any) -> None:
    """Let a layer of a cache put what it is given where a captured step says: `cumulative_length`, int64 without
    dimensions, is the slot of the first new token, behind which the others go, and `slots` those of all."""
    layer.update = MethodType(_write, layer)


def slot_of(layer: Any) -> Tensor | None:
    """Where a step's first token goes in such a layer, or None of a layer of any other cache."""
    return layer.cumulative_length if is_method_of(_write, vars(layer).get("update")) else None


def _write(layer: Any, keys: Tensor, values: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    """In the place of a layer's `update`. The slot stays as it is, since a layer that is computed both ways puts its
    tokens there twice."""
    slot = layer.cumulative_length
    if slow.has_triton():
        from halfbyte.kernels.cache.triton import MOST_NEW, append, supports

        if supports(layer.keys, layer.values, keys, values, slot, MOST_NEW):
            append(layer.keys, layer.values, keys, values, slot, counts=False)
            return layer.keys, layer.values
    layer.keys.index_copy_(2, layer.slots, keys)
    layer.values.index_copy_(2, layer.slots, values)
    return layer.keys, layer.values
