"""transformers' static cache, as a captured step needs it.

It is as long as the whole text will be, and transformers allocates it while the prompt is computed, when activations
take most memory. Here its layers are as long as the prompt until that is done; then they grow, one after the other,
before the first step looks at them. So the peak of memory is that of a cache that grows by itself. A cache that lies in
memory kept between calls (store.py) begins short and grows too, without a copy: prefill attends to no more than its
prompt. In a step a token is put into a layer in one launch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from torch import Tensor

from halfbyte.kernels.common.slow import has_triton
from halfbyte.models.patch import is_method_of

COUNTER = "cumulative_length_int"  # attribute of a layer with a sliding window: its length, which Python counts
LENGTHS = "_halfbyte_lengths"  # attribute of a cache: of its layers, at their full length
STORE = "_halfbyte_store"  # attribute of a cache: the CacheStore whose memory it uses


def empty_like(cache: Any, length: int) -> Any:
    """An empty StaticCache of so many tokens, made as that one was, in a tenth of the time in which transformers asks a
    configuration about its layers. None if that one is not empty, or if a layer of it does not keep everything."""
    if type(cache).__name__ != "StaticCache" or not all(
        type(layer).__name__ == "StaticLayer" and not layer.is_initialized for layer in cache.layers
    ):
        return None
    found = _same(cache)
    found.layers = [_same(layer) for layer in cache.layers]
    for layer in found.layers:
        layer.max_cache_len, layer.cumulative_length = length, torch.zeros_like(layer.cumulative_length)
    return found


def _same(made: Any) -> Any:
    found = object.__new__(type(made))
    vars(found).update(vars(made))
    return found


def begin_short(cache: Any) -> None:
    """Let a cache that is still empty begin as long as what it is given first. Whoever writes a second time without
    having asked for the sizes of masks calls `grow` before."""
    cache.get_mask_sizes = MethodType(_mask_sizes, cache)


def grow(cache: Any) -> None:
    """Give a cache the length that it was made for, if it has not. After an OutOfMemoryError it can be called again."""
    if not is_method_of(_mask_sizes, vars(cache).get("get_mask_sizes")):
        return
    store = vars(cache).get(STORE)
    lengths = vars(cache).get(LENGTHS) or [layer.max_cache_len for layer in cache.layers]
    for index, (layer, length) in enumerate(zip(cache.layers, lengths, strict=True)):
        short = layer.max_cache_len
        if layer.is_initialized and store is not None:
            store.settle(layer, index)
        elif layer.is_initialized and short < length:
            layer.keys, layer.values = (_longer(tensor, length) for tensor in (layer.keys, layer.values))
        layer.max_cache_len = length
    vars(cache).pop(LENGTHS, None)
    del cache.get_mask_sizes


def _mask_sizes(cache: Any, query_length: Any, *args: Any, **kwargs: Any) -> Any:
    """What the cache's own says, of a cache as long as it is to be now: masks are made before keys and values come."""
    if any(layer.is_initialized for layer in cache.layers):
        grow(cache)
    elif isinstance(query_length, int) and LENGTHS not in vars(cache):
        setattr(cache, LENGTHS, [layer.max_cache_len for layer in cache.layers])
        for layer in cache.layers:
            layer.max_cache_len = min(layer.max_cache_len, query_length)
    return type(cache).get_mask_sizes(cache, query_length, *args, **kwargs)


def _longer(tensor: Tensor, length: int) -> Tensor:
    """tensor [texts, heads, tokens, head size] with zeros for the tokens that it lacks."""
    longer = tensor.new_zeros((*tensor.shape[:2], length, tensor.shape[3]))
    longer[:, :, : tensor.shape[2]] = tensor
    return longer


@contextmanager
def updated(cache: Any, appends: bool) -> Iterator[None]:
    """Within, full windows slide in a way that can be captured: transformers' own copies an index from the host.

    appends: let other layers take a token in one launch, not in five.
    """
    update = _append if appends and has_triton() else _update
    layers = [layer for layer in cache.layers if "update" not in vars(layer)]
    for layer in layers:
        layer.update = MethodType(update, layer)
    try:
        yield
    finally:
        for layer in layers:
            del layer.update


def is_full(layer: Any) -> bool:
    """True for a sliding window that takes another path from now on."""
    return hasattr(layer, COUNTER) and bool(getattr(layer, COUNTER) >= layer.max_cache_len)


def _update(layer: Any, keys: Tensor, values: Tensor, *args: Any, **kwargs: Any) -> Any:
    if not is_full(layer):
        return type(layer).update(layer, keys, values, *args, **kwargs)
    tokens = keys.shape[-2]
    setattr(layer, COUNTER, getattr(layer, COUNTER) + tokens)
    for kept, new in ((layer.keys, keys), (layer.values, values)):
        kept.copy_(torch.cat((kept[:, :, tokens:], new), dim=2))
    return layer.keys, layer.values


def _append(layer: Any, keys: Tensor, values: Tensor, *args: Any, **kwargs: Any) -> Any:
    from halfbyte.kernels.cache.triton import append, supports

    room = layer.is_initialized and not is_full(layer)
    if not room or not supports(layer.keys, layer.values, keys, values, layer.cumulative_length):
        return _update(layer, keys, values, *args, **kwargs)
    append(layer.keys, layer.values, keys, values, layer.cumulative_length)
    if hasattr(layer, COUNTER):
        setattr(layer, COUNTER, getattr(layer, COUNTER) + 1)
    return layer.keys, layer.values
