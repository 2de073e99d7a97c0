"""Keys and values of one bucket, in memory that stays where it is from one call of `generate` to the next.

Prefill, and steps that transformers drives, see it through a StaticCache of as many texts as the call has
(`CacheStore.begin`). Steps of the token loop see all rows of it through a `Rotation` (rotation.py).
"""

from __future__ import annotations

from collections import OrderedDict
from functools import partial
from typing import Any

import torch
from torch import Tensor

from halfbyte.models.caches import COUNTER, LENGTHS, STORE, begin_short


class CacheStore:
    """For each layer two tensors [rows, heads, tokens or window, head size], made after the first prompt.

    kind: transformers' StaticCache. config: of the model's text part.
    """

    def __init__(self, kind: type, config: Any, rows: int, tokens: int) -> None:
        self.kind, self.config, self.rows, self.tokens = kind, config, rows, tokens
        self.lengths: list[int] = [layer.max_cache_len for layer in self.make().layers]
        self.layers: list[tuple[Tensor, Tensor] | None] = [None] * len(self.lengths)
        self.counters: dict[torch.device, Tensor] = {}  # [layers] int64: what transformers' layers count on each device
        self.caches: dict[int, Any] = {}
        self.steps: OrderedDict[Any, Any] = OrderedDict()  # graphs.Step by its inputs, for steps driven by transformers

    def make(self) -> Any:
        return self.kind(config=self.config, max_cache_len=self.tokens)

    @property
    def is_filled(self) -> bool:
        """Whether every layer has its memory."""
        return all(kept is not None for kept in self.layers)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for kept in self.layers if kept is not None for tensor in kept)

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """Where layers have their memory."""
        return tuple(dict.fromkeys(kept[0].device for kept in self.layers if kept is not None))

    def close(self) -> None:
        """Let go of all memory."""
        self.steps.clear()
        self.layers, self.counters = [None] * len(self.layers), {}
        for cache in self.caches.values():
            for layer in cache.layers:
                layer.keys = layer.values = None
                del layer.lazy_initialization
        self.caches.clear()

    def begin(self, texts: int, clears: bool = True) -> Any:
        """The StaticCache of `texts` texts, at most `rows`: empty, and as short as the prompt until `grow`.

        It is the same object in every call, because captured steps count in it. All memory is zeros again: a masked
        value that is not finite would still spoil a sum. clears: False where all of it will be overwritten.
        """
        self.clear(clears)
        cache = self.caches.get(texts)
        if cache is None:
            cache = self.caches[texts] = self.make()
            setattr(cache, STORE, self)
            for index, layer in enumerate(cache.layers):
                layer.lazy_initialization = partial(self._initialize, layer, index)
        vars(cache).pop(LENGTHS, None)
        for layer, length in zip(cache.layers, self.lengths, strict=True):
            layer.max_cache_len, layer.is_initialized, layer.keys, layer.values = length, False, None, None
            layer.cumulative_length = torch.zeros((), dtype=torch.int64, device="cpu")  # until it is initialized
            if hasattr(layer, COUNTER):
                setattr(layer, COUNTER, 0)
        begin_short(cache)
        return cache

    def clear(self, memory: bool = True) -> None:
        """Count no tokens. memory: and make it zeros."""
        with torch.inference_mode(False), torch.no_grad():
            if memory and (kept := [tensor for pair in self.layers if pair is not None for tensor in pair]):
                torch._foreach_zero_(kept)
            for counters in self.counters.values():
                counters.zero_()

    def _initialize(self, layer: Any, index: int, keys: Tensor, values: Tensor) -> None:
        """In the place of a layer's `lazy_initialization`, which would allocate."""
        kept = self.layers[index]
        if kept is None:
            type(layer).lazy_initialization(layer, keys, values)
            return
        layer.dtype, layer.device = keys.dtype, keys.device
        layer.batch_size, layer.num_heads = keys.shape[:2]
        layer.k_head_dim, layer.v_head_dim = keys.shape[-1], values.shape[-1]
        layer.keys, layer.values = (tensor[: len(keys), :, : layer.max_cache_len] for tensor in kept)
        layer.cumulative_length = self.counters[keys.device][index]
        layer.is_initialized = True

    def settle(self, layer: Any, index: int) -> None:
        """Let a layer that has its prompt use kept memory of full length; the first prompt is copied there."""
        texts = len(layer.keys)
        kept = self.layers[index]
        if kept is None:
            counted = layer.cumulative_length
            kept = self.allocate(index, layer.keys, layer.values)
            counter = self.counters[kept[0].device][index]
            with torch.inference_mode(False), torch.no_grad():
                counter.copy_(counted)
                for room, prompt in zip(kept, (layer.keys, layer.values), strict=True):
                    room[:texts, :, : prompt.shape[2]].copy_(prompt)
            layer.cumulative_length = counter
        layer.keys, layer.values = (tensor[:texts] for tensor in kept)

    def allocate(self, index: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """The memory of a layer, which has none, for keys and values [texts, heads, tokens, head size] like these."""
        length = self.lengths[index]
        with torch.inference_mode(False), torch.no_grad():
            made = (
                torch.zeros((self.rows, like.shape[1], length, like.shape[3]), dtype=like.dtype, device=like.device)
                for like in (keys, values)
            )
            return self.keep(index, next(made), next(made))

    def keep(self, index: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Let this be the memory of a layer, which has none."""
        with torch.inference_mode(False), torch.no_grad():
            if keys.device not in self.counters:
                # Each is aligned to 16 bytes, so that Triton compiles one kernel.
                pairs = torch.zeros((len(self.layers), 2), dtype=torch.int64, device=keys.device)
                self.counters[keys.device] = pairs[:, 0]
        kept = self.layers[index] = keys, values
        return kept

    def copy_to(self, cache: Any, texts: int, seen: int, shift: int | None = None) -> None:
        """Fill an empty StaticCache, which then holds what transformers' own would after `seen` tokens of each text.

        shift: a window of W slots has its token p in slot (p - shift) % W; by default the oldest is in slot 0.
        """
        for layer, kept, window in zip(cache.layers, self.layers, self.lengths, strict=True):
            assert kept is not None
            keys, values = (tensor[:texts] for tensor in kept)
            layer.lazy_initialization(keys, values)
            held = min(seen, layer.max_cache_len)
            if hasattr(layer, COUNTER):
                setattr(layer, COUNTER, seen)
                oldest = max(0, seen - window) if shift is None else shift
                index = (torch.arange(seen - held, seen, dtype=torch.int64, device=keys.device) - oldest) % window
                layer.keys[:, :, :held] = keys.index_select(2, index)
                layer.values[:, :, :held] = values.index_select(2, index)
            else:
                layer.keys[:, :, :held] = keys[:, :, :held]
                layer.values[:, :, :held] = values[:, :, :held]
            layer.cumulative_length.fill_(held)
