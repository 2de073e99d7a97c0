"""Caches and captured steps that a model keeps between calls of `generate`, within a bounded share of memory.

One `StepPool` a model, one `Bucket` for each size that was used. Two threads that generate at once use two buckets of
that size. What was used least recently goes first; all goes with `release`, with `restore`, where the model has changed
since, and where memory is short.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from halfbyte.models.ahead import Ahead
from halfbyte.models.buckets import (
    cache_bytes,
    layers_by_device,
    least_bytes,
    longest_text,
    texts_bucket,
    tokens_bucket,
    total_bytes,
)
from halfbyte.models.caches import empty_like
from halfbyte.models.fingerprint import fingerprint
from halfbyte.models.graphs import building
from halfbyte.models.loop import TokenBuffers
from halfbyte.models.prompt_graphs import PromptGraphs
from halfbyte.models.prompt_layers import PromptLayers
from halfbyte.models.rotation import Rotation
from halfbyte.models.store import CacheStore

T = TypeVar("T")
POOL = "_halfbyte_steps"  # attribute of a model that generates
SHARE = 0.1  # of each device's memory, for what is kept between calls
MOST_KINDS = 8  # of steps captured for one bucket, besides those that transformers drives


class Kept(Protocol):
    """What a bucket keeps: a step (stepping.py), or several that belong together (guessing.py)."""

    @property
    def nbytes(self) -> int: ...
    def close(self) -> None: ...
    def try_again(self) -> None: ...


S = TypeVar("S", bound=Kept)


class Bucket:
    """A cache of one size, and the steps that were captured for it."""

    def __init__(self, key: Hashable, store: CacheStore, expected: int) -> None:
        self.key, self.store, self.expected = key, store, expected
        self.buffers: TokenBuffers | None = None
        self.rotation: Rotation | None = None
        self.loops: OrderedDict[Hashable, Kept] = OrderedDict()
        self.is_busy, self.is_stale = False, False
        self.done: dict[torch.device, torch.cuda.Event] = {}  # recorded behind the last call's work

    @property
    def nbytes(self) -> int:
        steps = [step for step in (*self.loops.values(), *self.store.steps.values()) if step is not None]
        buffers = self.buffers.nbytes if self.buffers is not None else 0
        cache = self.store.nbytes if self.store.is_filled else self.expected
        graphs = sum(int(step.nbytes) for step in steps)
        return cache + buffers + graphs

    def loop(self, key: Hashable, make: Callable[[], S]) -> S:
        """The step of a key, new or kept."""
        step: Any = self.loops.get(key)
        if step is None:
            step = self.loops[key] = make()
            while len(self.loops) > MOST_KINDS:
                self.loops.popitem(last=False)[1].close()
        self.loops.move_to_end(key)
        return step  # type: ignore[no-any-return]

    def record(self, devices: Iterable[torch.device]) -> None:
        for device in devices:
            if device.type == "cuda":
                with torch.cuda.device(device):
                    self.done[device] = torch.cuda.Event()
                    self.done[device].record()

    def wait(self) -> None:
        """Let what follows on these streams begin after the last call, which may have used others."""
        for device, event in self.done.items():
            torch.cuda.current_stream(device).wait_event(event)

    def close(self) -> None:
        """Give all memory back at once, not when Python looks for circles. The last call's work may have been on
        another stream, so it must be over."""
        for event in self.done.values():
            event.synchronize()
        for step in self.loops.values():
            step.close()
        self.loops.clear()
        self.store.close()
        if self.rotation is not None:
            self.rotation.close()


class StepPool:
    """The buckets of one model. A copy of the model begins with an empty one."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.buckets: list[Bucket] = []  # the most recently used last
        self.fingerprint: Hashable = None
        self.ahead = Ahead()
        self.prompt_layers, self.prompt_graphs = PromptLayers(), PromptGraphs()
        self.layers: Counter[torch.device] = Counter()  # of a model with this fingerprint, by device
        self.memory = 0  # of these devices, as far as its cache can use it
        self.empty: tuple[Any, Any] = None, None  # the StaticCache of a call, before it was filled, and its layers

    def __reduce__(self) -> tuple[type[StepPool], tuple[()]]:
        return type(self), ()

    @property
    def nbytes(self) -> int:
        """What is kept."""
        with self.lock:
            return self._nbytes()

    @contextmanager
    def lease(self, model: Any, kind: type, texts: int, tokens: int) -> Iterator[Bucket | None]:
        """A bucket for a call of so many texts and so many tokens in the cache, which is the caller's alone within.

        kind: transformers' StaticCache. None where other calls of this model have taken the memory that there is.
        """
        with building:  # no other thread has changed what its modules are
            found = fingerprint(model)
        with self.lock:
            if found != self.fingerprint:
                self._forget()
                if self.fingerprint is not None:
                    self.ahead.forget()
                self.fingerprint, self.layers = found, layers_by_device(model)
                self.prompt_layers, self.prompt_graphs = PromptLayers(), PromptGraphs()
                self.empty = None, None
                self.memory = least_bytes(self.layers, total_bytes)
            bucket = self._take(model, kind, texts, tokens)
        try:
            if bucket is not None:
                bucket.wait()
            yield bucket
        finally:
            if bucket is not None:
                bucket.record({model.device, *bucket.store.devices})
                with self.lock:
                    self._give_back(bucket)

    def holds(self, model: Any, texts: int, tokens: int) -> bool:
        """Whether a call of so many texts and tokens finds the memory of an earlier one."""
        key = _key_of(model, texts_bucket(texts), tokens_bucket(tokens, longest_text(model)))
        with self.lock:
            return self._unused(key) is not None

    def remember(self, model: Any, cache: Any) -> None:
        """How transformers has made a cache, for later calls."""
        found = empty_like(cache, 0)
        self.empty = found, None if found is None else _layers_of_cache(model)

    def empty_cache(self, model: Any, length: int) -> Any:
        """What transformers would make for so many tokens, or None where it has to be asked."""
        cache, layers = self.empty
        return None if cache is None or layers != _layers_of_cache(model) else empty_like(cache, length)

    def prompt(self, model: Any, ids: Tensor, inputs: Mapping[str, Any], store: CacheStore) -> Any:
        """What the model returns for a prompt, computed on a graph or as one is; None where it must be computed as the
        caller has it. As of `PromptGraphs.compute`, within a lease."""
        if len(self.layers) > 1:
            return None
        return self.prompt_graphs.compute(model, self.prompt_layers, ids, inputs, store, self._limit())

    def retried(self, function: Callable[[], T]) -> T:
        """What `function` returns; where memory is short, everything that is kept and not in use is freed first."""
        with suppress(torch.OutOfMemoryError):
            return function()
        with self.lock:
            self._trim(0)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return function()

    def release(self) -> None:
        """Free everything but what calls use at this moment, which is freed after them."""
        with self.lock:
            self._forget()

    def _take(self, model: Any, kind: type, texts: int, tokens: int) -> Bucket | None:
        limit = self._limit()
        rows, length = texts_bucket(texts), tokens_bucket(tokens, longest_text(model))
        if cache_bytes(model, rows, length) > limit:  # too large to be kept, so no larger than it must be
            rows, length = texts, tokens
        key = _key_of(model, rows, length)
        bucket = self._unused(key)
        if bucket is None:
            need = cache_bytes(model, rows, length)
            self._trim(limit - need)
            if any(bucket.is_busy for bucket in self.buckets) and self._nbytes() + need > limit:
                return None
            config = model.config.get_text_config(decoder=True)
            bucket = Bucket(key, CacheStore(kind, config, rows, length), need)
            self.buckets.append(bucket)
        self.buckets.remove(bucket)
        self.buckets.append(bucket)
        bucket.is_busy = True
        return bucket

    def _unused(self, key: Hashable) -> Bucket | None:
        """The bucket of a key that was used last, of those that no call has."""
        found = (one for one in reversed(self.buckets) if one.key == key and not one.is_busy and not one.is_stale)
        return next(found, None)

    def _give_back(self, bucket: Bucket) -> None:
        bucket.is_busy = False
        if bucket.is_stale:
            self._drop(bucket)
        self._trim(self._limit())

    def _limit(self) -> int:
        """Bytes that may be kept, most of them where the layers are."""
        return int(SHARE * self.memory)

    def _nbytes(self) -> int:
        return sum(bucket.nbytes for bucket in self.buckets) + self.prompt_graphs.nbytes

    def _trim(self, most: int) -> None:
        """Drop what was used least recently until at most so many bytes are kept, or everything is in use."""
        for bucket in list(self.buckets):
            if self._nbytes() <= most:
                return
            if not bucket.is_busy:
                self._drop(bucket)
        if self._nbytes() > most:
            self.prompt_graphs.close(wait=False)

    def _forget(self) -> None:
        self.prompt_graphs.close()
        for bucket in list(self.buckets):
            bucket.is_stale = True
            if not bucket.is_busy:
                self._drop(bucket)

    def _drop(self, bucket: Bucket) -> None:
        self.buckets.remove(bucket)
        bucket.close()


def _key_of(model: Any, rows: int, length: int) -> Hashable:
    """Of buckets whose steps compute the same."""
    return rows, length, model.device, model.dtype, _settings(model.device)


def _settings(device: torch.device) -> Hashable:
    """What changes a model's computation without being a part of it."""
    autocast = torch.is_autocast_enabled(device.type)
    return (
        torch.is_inference_mode_enabled(),
        torch.is_grad_enabled(),
        torch.get_autocast_dtype(device.type) if autocast else None,
        torch.get_float32_matmul_precision(),
    )


def pool_of(model: nn.Module) -> StepPool | None:
    """The pool of a model that keeps its steps, or None."""
    found = vars(model).get(POOL)
    return found if isinstance(found, StepPool) else None


def _layers_of_cache(model: Any) -> Any:
    """What a StaticCache's layers follow from."""
    config = model.config.get_text_config(decoder=True)
    each = getattr(config, "layer_types", None)
    return config.num_hidden_layers, getattr(config, "sliding_window", None), None if each is None else tuple(each)
