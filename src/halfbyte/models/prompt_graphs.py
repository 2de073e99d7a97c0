"""Prompts of `generate` on CUDA graphs, one graph for all lengths up to a multiple of 32 or 64 tokens.

Even in few launches (prompt_layers.py) a layer takes Python longer than a GPU needs for a few hundred tokens of it. So
a prompt is filled up behind its end, where no token of it looks, to a size that other prompts share. The first prompt
of a size is computed as it is, the second one is captured, all others are one launch. Every prompt of a size is
computed by the same kernels, whether on a graph or not, so its tokens do not depend on what came before.

The graph has keys and values of its own, which are copied into the cache of the call, so it serves caches of any size.

Texts of different lengths have padding in front, and a mask over it. Larger prompts keep a GPU busy, and go without
graphs. So do those that fill a window up, and all of models whose layers are not ours.
"""

from __future__ import annotations

import threading
import warnings
from collections import OrderedDict
from collections.abc import Hashable, Mapping
from contextlib import nullcontext
from itertools import chain
from math import inf, prod
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.functional import pad

from halfbyte.models.buckets import cache_bytes, most_prompt_rows, prompt_bucket
from halfbyte.models.caches import COUNTER
from halfbyte.models.captured import GRAPHS, Captured, can_replay, current
from halfbyte.models.graphs import building
from halfbyte.models.preparation import INPUTS, MOVING, is_plain, rotary_kinds
from halfbyte.models.prompt_layers import PromptLayers, every_earlier_token_is_seen
from halfbyte.models.rotation import as_numbers, mask_names
from halfbyte.models.store import CacheStore

MOST_GRAPHS = 24  # the least recently used goes
LEAST_MEMORY = 256  # rows that graphs have room for; prompts up to 512, 1024, ... rows share another
SHARE = 0.25  # of the memory that may be kept between calls, for prompts

Pair = tuple[Tensor, Tensor]
Shape = tuple[int, int, int, torch.dtype]  # of keys and values in a layer: heads, the sizes of a key and of a value


class PromptGraphs:
    """Those of one model, as long as it stays what it is. A copy of the model begins with none."""

    def __init__(self) -> None:
        self.lock = threading.Lock()  # the graphs share their memory
        self.prompts: OrderedDict[Hashable, _Prompt] = OrderedDict()
        self.is_ours: bool | None = None  # whether all layers are; None before the first prompt
        self.captures = True
        self.memory: dict[int, list[Pair]] = {}  # by rows: for each layer room for their keys and values, flat
        self.shapes: list[Shape] = []
        self.seen: Tensor | None = None  # [length, length] of the longest: which tokens each sees; up to 4 MB
        self.pool: Any = None  # of the graphs' intermediate results
        self.done: torch.cuda.Event | None = None  # recorded behind the last prompt's work

    def __reduce__(self) -> tuple[type[PromptGraphs], tuple[()]]:
        return type(self), ()

    @property
    def nbytes(self) -> int:
        graphs = [prompt.nbytes for prompt in list(self.prompts.values())]
        layers = chain.from_iterable(list(self.memory.values()))
        return sum(graphs) + sum(tensor.nbytes for pair in layers for tensor in pair)

    def close(self, wait: bool = True) -> None:
        """Give all memory back. wait: for a thread that computes a prompt; otherwise leave it what it uses."""
        if not self.lock.acquire(blocking=wait):
            return
        try:
            self._wait()
            self.prompts.clear()
            self.memory, self.seen, self.pool, self.done = {}, None, None, None
        finally:
            self.lock.release()

    def _wait(self) -> None:
        if self.done is not None:
            self.done.synchronize()

    def compute(
        self, model: Any, layers: PromptLayers, ids: Tensor, inputs: Mapping[str, Any], store: CacheStore, most: int
    ) -> Any:
        """What the model returns for a prompt [texts, tokens], whose keys and values are then in the empty cache of
        the inputs; None where the prompt must be computed as it is, and nothing has happened.

        most: bytes that may be kept.
        """
        texts, tokens = ids.shape
        length = prompt_bucket(texts, tokens)
        if self.is_ours is False or not _fits(model, texts, length, store) or not _takes(model, ids, inputs):
            return None
        masks = _masks(model, inputs.get("attention_mask"))
        key = (texts, length, masks, torch.is_inference_mode_enabled(), torch.get_float32_matmul_precision())
        with self.lock, current(ids.device):
            if self.done is not None:
                torch.cuda.current_stream().wait_event(self.done)
            if is_new := key not in self.prompts:
                seen = None if masks is None else self._seen(length, ids.device)
                self.prompts[key] = _Prompt(model, texts, length, masks, seen, store)
                while len(self.prompts) > MOST_GRAPHS:
                    self._wait()
                    self.prompts.popitem(last=False)
            self.prompts.move_to_end(key)
            prompt = self.prompts[key]
            prompt.fill(ids, inputs["position_ids"], inputs.get("attention_mask"))
            if prompt.captured is None and self.captures and self.is_ours and not is_new:
                self._capture(model, prompt, ids.device, most * SHARE)
            outputs = prompt.compute()
            found = type(outputs)(logits=outputs.logits.clone(), past_key_values=inputs["past_key_values"])
            _hand_over(prompt.cache, inputs["past_key_values"], store, tokens)
            if self.is_ours is None:
                self._look(layers, prompt)
            prompt.let_go()
            if ids.is_cuda:
                self.done = torch.cuda.Event()
                self.done.record()
        return found

    def _look(self, layers: PromptLayers, prompt: _Prompt) -> None:
        """Find out after a prompt whether all layers are ours."""
        found = [False if layer is None else layer.agrees for layer in layers.known.values()]
        if not found or False in found:
            self.is_ours = False
            return
        if None in found:  # somebody listens to a layer
            return
        self.is_ours = True
        pairs = [(layer.keys, layer.values) for layer in prompt.cache.layers]
        self.shapes = [(keys.shape[1], keys.shape[3], values.shape[3], keys.dtype) for keys, values in pairs]

    def _capture(self, model: Any, prompt: _Prompt, device: torch.device, most: float) -> None:
        rows = min(max(LEAST_MEMORY, 1 << (prompt.ids.numel() - 1).bit_length()), most_prompt_rows(model))
        if rows not in self.memory and self.nbytes + cache_bytes(model, 1, rows) > most:
            return
        try:
            if rows not in self.memory:
                with torch.inference_mode(False):
                    self.memory[rows] = [
                        (
                            torch.empty(rows * heads * key, dtype=dtype, device=device),
                            torch.empty(rows * heads * value, dtype=dtype, device=device),
                        )
                        for heads, key, value, dtype in self.shapes
                    ]
            if self.pool is None and device.type == "cuda":
                self.pool = torch.cuda.graph_pool_handle()
            prompt.use(self.memory[rows], self.shapes)
            if prompt.mask is None:
                seen = self._seen(prompt.ids.shape[1], device)
                prompt.masks = _named(seen[None, None], prompt.store.config)
            if device.type in GRAPHS:
                # cuDNN plans attention when it first meets keys that lie so, and allocates what a capture must not.
                prompt.run()
            with building:
                prompt.captured = Captured(prompt.run, device, self.pool)
        except RuntimeError as error:
            self.captures = False
            prompt.forget()
            if not any(other.captured for other in self.prompts.values()):
                self.memory, self.pool = {}, None
            warnings.warn(
                f"halfbyte: prompts of {type(model).__name__} cannot be captured in CUDA graphs and go on without: "
                f"{error}",
                stacklevel=2,
            )

    def _seen(self, length: int, device: torch.device) -> Tensor:
        """[length, length]: a token sees itself and all before it. Masks of texts with padding are made of it; of those
        without it is the mask. Layers that are ours do without, but transformers would make one in every capture."""
        if self.seen is None or len(self.seen) < length:
            with torch.inference_mode(False):
                self.seen = torch.ones((length, length), dtype=torch.bool, device=device).tril()
        return self.seen[:length, :length]


class _Prompt:
    """A size of prompts: tensors with the inputs, a cache, and once captured a graph from these to that.

    masks: their dtype, and seen: what they are made of, [length, length]; or None.
    """

    def __init__(
        self, model: Any, texts: int, length: int, masks: torch.dtype | None, seen: Tensor | None, store: CacheStore
    ) -> None:
        self.model, self.texts, self.seen = model, texts, seen
        self.store = CacheStore(store.kind, store.config, texts, length)
        self.captured: Captured | None = None
        device = model.device
        with torch.inference_mode(False), torch.no_grad():
            self.ids = torch.zeros((texts, length), dtype=torch.int64, device=device)
            self.positions = torch.arange(length, dtype=torch.int64, device=device).repeat(texts, 1)
            self.last = torch.zeros(1, dtype=torch.int64, device=device)
            self.mask: Tensor | None = None  # [texts, 1, tokens, tokens]
            if masks is not None:
                self.mask = torch.zeros((texts, 1, length, length), dtype=masks, device=device)
        self.masks = None if self.mask is None else _named(self.mask, store.config)
        self.cache: Any = None

    @property
    def nbytes(self) -> int:
        return self.captured.nbytes if self.captured is not None else 0

    def fill(self, ids: Tensor, positions: Tensor, mask: Tensor | None) -> None:
        """mask: [texts, tokens], without padding None."""
        tokens = ids.shape[1]
        self.ids.zero_()
        self.ids[:, :tokens] = ids
        self.positions[:, :tokens] = positions
        self.last.fill_(tokens - 1)
        if self.mask is not None:
            seen = cast(Tensor, self.seen)
            if mask is not None:
                seen = seen & pad(mask.bool(), (0, len(seen) - tokens))[:, None, None, :]
            self.mask.copy_(seen if self.mask.dtype is torch.bool else as_numbers(seen, self.mask.dtype))

    def use(self, memory: list[Pair], shapes: list[Shape]) -> None:
        """Let keys and values be parts of this memory."""
        for index, ((keys, values), (heads, key, value, _)) in enumerate(zip(memory, shapes, strict=True)):
            texts, length = self.ids.shape
            self.store.keep(index, _part(keys, texts, heads, length, key), _part(values, texts, heads, length, value))

    def run(self) -> Any:
        """The model's outputs, keys and values in `cache`."""
        self.cache = self.store.begin(self.texts, clears=False)
        with nullcontext() if self.mask is not None else every_earlier_token_is_seen():
            return self.model(
                input_ids=self.ids, position_ids=self.positions, past_key_values=self.cache, use_cache=True,
                logits_to_keep=self.last, return_dict=True, attention_mask=self.masks,
            )  # fmt: skip

    def compute(self) -> Any:
        return self.run() if self.captured is None else self.captured.replay()

    def let_go(self) -> None:
        """Of memory that a prompt without a graph had for itself."""
        if self.captured is None:
            self.forget()

    def forget(self) -> None:
        self.cache = None
        self.store.close()


def _named(mask: Tensor, config: Any) -> Any:
    """As a model of this text configuration takes it; in no window of it a token is too old."""
    names = mask_names(config)
    return dict.fromkeys(names, mask) if isinstance(names, tuple) else mask


def _part(flat: Tensor, *shape: int) -> Tensor:
    return flat[: prod(shape)].view(shape)


def _hand_over(filled: Any, cache: Any, store: CacheStore, tokens: int) -> None:
    """Let an empty cache of a store hold the first tokens of a filled one, as if it had been given them."""
    for index, (there, here) in enumerate(zip(filled.layers, cache.layers, strict=True)):
        pair = there.keys[:, :, :tokens], there.values[:, :, :tokens]
        kept = store.layers[index]
        if kept is None:
            kept = store.allocate(index, *pair)
        for room, new in zip(kept, pair, strict=True):
            room[: len(new), :, :tokens].copy_(new)
        here.lazy_initialization(*pair)
        if hasattr(here, COUNTER):
            setattr(here, COUNTER, tokens)
    for counters in store.counters.values():
        counters.fill_(tokens)


def _fits(model: Any, texts: int, length: int, store: CacheStore) -> bool:
    """Whether a prompt of this size is small enough, and leaves room in every window."""
    window = getattr(store.config, "sliding_window", None) or inf
    return texts * length <= most_prompt_rows(model) and length <= store.tokens and length < window


def _takes(model: Any, ids: Tensor, inputs: Mapping[str, Any]) -> bool:
    """Whether nothing else goes in and out than what a prompt on a graph has."""
    mask, positions = inputs.get("attention_mask"), inputs.get("position_ids")
    return (
        can_replay(model.device)
        and ids.device == model.device
        and set(inputs) <= INPUTS
        and inputs.get("use_cache") is True
        and inputs.get("logits_to_keep") == 1
        and isinstance(positions, Tensor)
        and positions.shape[-1] == ids.shape[1]
        and (mask is None or mask.shape == ids.shape)
        and not torch.is_grad_enabled()
        and not torch.is_autocast_enabled(ids.device.type)
        and not any(kind in MOVING for kind in rotary_kinds(model.config.get_text_config(decoder=True)))
        and is_plain(model)
    )


def _masks(model: Any, mask: Tensor | None) -> torch.dtype | None:
    """The dtype of a mask that attention needs: none where each token looks at all before it, and torch knows that."""
    if model.config._attn_implementation != "sdpa":
        return model.dtype  # type: ignore[no-any-return]
    return None if mask is None or bool(mask.all()) else torch.bool
