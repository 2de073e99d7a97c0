"""transformers' other loops on captured steps: beam search, and speculation with an `assistant_model`, or with
`prompt_lookup_num_tokens` where a call asks for more than the loop of guessing.py does.

The loops stay transformers'. The model that they ask is a `StandIn`, which runs a captured step on a kept cache. Our
products take as long for eight rows as for one, so it looks at a handful of guessed tokens in the time of one. Those
that turn out wrong are forgotten by counting back: the next step writes over them.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from halfbyte.models.carrying import Mirrored
from halfbyte.models.rotation import FULL, mask_names, write_at_slots
from halfbyte.models.stepping import Stepper
from halfbyte.models.steps import Bucket, StepPool
from halfbyte.models.store import CacheStore

WIDTHS = (1, 8, 32)  # tokens of a captured step; a call with more is not captured
INPUTS = {  # of the model, that a captured step has or does not need
    "input_ids", "position_ids", "attention_mask", "past_key_values", "use_cache", "logits_to_keep", "return_dict"
}  # fmt: skip


def room(tokens: int) -> int:
    """Tokens of a cache for a text of so many, behind which a step may write what it does not look at."""
    return tokens + WIDTHS[-1]


def attends_to_all(model: Any) -> bool:
    """True for a model without windows: in one, guessed tokens would push out others that are still needed."""
    names = mask_names(model.config.get_text_config(decoder=True))
    return names == FULL or names == (FULL,)


class DrivenStep(Stepper):
    """Feeds `width` tokens of each row of a store behind `place` others.

    outputs: the logits [rows, width, vocabulary].
    """

    def __init__(self, model: Any, store: CacheStore, width: int, retried: Any) -> None:
        super().__init__(model, model.device, retried)
        device = model.device
        self.names, self.width = mask_names(store.config), width
        self.floats = model.dtype if store.config._attn_implementation == "eager" else None
        with torch.inference_mode(False), torch.no_grad():
            self.ids = torch.zeros((store.rows, width), dtype=torch.int64, device=device)
            self.positions, self.places = (
                torch.zeros_like(self.ids),
                torch.arange(store.tokens, dtype=torch.int64, device=device),
            )
            self.steps = torch.arange(width, dtype=torch.int64, device=device)
            self.slots = Mirrored(torch.zeros_like(self.ids[0]), store.devices)
            self.place = Mirrored(torch.zeros((), dtype=torch.int64, device=device), store.devices)
            self.visible = torch.ones((store.rows, store.tokens), dtype=torch.bool, device=device)
        self.cache = store.make()
        for layer, kept in zip(self.cache.layers, store.layers, strict=True):
            assert kept is not None
            layer.keys, layer.values = kept
            layer.dtype, layer.device, layer.is_initialized = layer.keys.dtype, layer.keys.device, True
            layer.cumulative_length = self.place.on(layer.device)
            layer.slots = self.slots.on(layer.device)
            write_at_slots(layer)

    def close(self) -> None:
        super().close()
        for layer in self.cache.layers:
            layer.keys = layer.values = None
            del layer.update

    def logits(self, ids: Tensor, positions: Tensor, mask: Tensor | None, place: int) -> Tensor:
        """ids: int64 [texts, tokens], at most `rows` and `width`. positions: int64 [texts or 1, tokens]. mask: [texts,
        place + tokens], or None. Returns a copy."""
        texts, count = ids.shape
        self.ids[:texts, :count].copy_(ids)
        self.positions[:texts].copy_(positions[:, -1:])  # of those behind the last one, too
        self.positions[:texts, :count].copy_(positions)
        self.visible.fill_(True)
        if mask is not None:
            self.visible[:texts, : mask.shape[1]].copy_(mask)
        self.place.tensor.fill_(place)
        self.advance()
        logits: Tensor = self.outputs[:texts, :count].clone()
        return logits

    def step(self) -> Tensor:
        slots = self.slots.tensor.copy_(self.place.tensor + self.steps)
        self.slots.send()
        self.place.send()
        mask = ((self.places <= slots[:, None]) & self.visible[:, None])[:, None]
        if self.floats is not None:
            zero = torch.zeros((), dtype=self.floats, device=mask.device)
            mask = torch.where(mask, zero, torch.finfo(self.floats).min)
        outputs = self.model(
            input_ids=self.ids,
            position_ids=self.positions,
            attention_mask=mask if isinstance(self.names, str) else {FULL: mask},
            past_key_values=self.cache,
            use_cache=True,
            return_dict=True,
        )
        logits: Tensor = outputs.logits
        return logits


class StandIn:
    """Takes a model's place in one loop of transformers, within one call of `generate`.

    `cache` is a DynamicCache to transformers: it grows, can be cropped and put into another order. Its keys and values
    are the beginning of a store's, so nothing is copied when it grows.
    """

    def __init__(self, model: Any, pool: StepPool, bucket: Bucket, texts: int) -> None:
        from transformers import DynamicCache

        self.model, self.pool, self.bucket, self.texts = model, pool, bucket, texts
        bucket.store.clear()
        for step in bucket.loops.values():
            step.try_again()
        self.cache = DynamicCache(config=bucket.store.config)
        for index, layer in enumerate(self.cache.layers):
            layer.update = partial(self._extend, layer, index)
            layer.reorder_cache = partial(_reorder, layer)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def close(self) -> None:
        """Let go of the store's memory."""
        for layer in self.cache.layers:
            layer.keys = layer.values = None
            del layer.update, layer.reorder_cache

    def copy_to(self, cache: Any) -> Any:
        """Give an empty DynamicCache what this one holds."""
        for index, layer in enumerate(self.cache.layers):
            cache.update(layer.keys, layer.values, index)
        return cache

    def __call__(self, **inputs: Any) -> Any:
        from transformers.modeling_outputs import CausalLMOutputWithPast

        ids, place = inputs["input_ids"], self.cache.get_seq_length()
        count = ids.shape[1]
        width = next((width for width in WIDTHS if width >= count), None)
        given = {name for name, value in inputs.items() if value is not None}
        if not place or width is None or not given <= INPUTS or inputs["past_key_values"] is not self.cache:
            return self.model(**inputs)
        store = self.bucket.store
        step = self.bucket.loop((DrivenStep, width), lambda: DrivenStep(self.model, store, width, self.pool.retried))
        logits = step.logits(ids, inputs["position_ids"], inputs.get("attention_mask"), place)
        for layer, kept in zip(self.cache.layers, store.layers, strict=True):
            assert kept is not None
            layer.keys, layer.values = (tensor[: self.texts, :, : place + count] for tensor in kept)
        return CausalLMOutputWithPast(logits=logits, past_key_values=self.cache)

    def _extend(
        self, layer: Any, index: int, keys: Tensor, values: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """In the place of a layer's `update`, where the model runs as it is."""
        kept = self.bucket.store.layers[index] or self.bucket.store.allocate(index, keys, values)
        if not layer.is_initialized:
            layer.lazy_initialization(keys, values)
        first = layer.get_seq_length()
        last = first + keys.shape[2]
        for tensor, new in zip(kept, (keys, values), strict=True):
            tensor[: self.texts, :, first:last].copy_(new)
        layer.keys, layer.values = (tensor[: self.texts, :, :last] for tensor in kept)
        return layer.keys, layer.values


def _reorder(layer: Any, texts: Tensor) -> None:
    """In the place of a layer's `reorder_cache`, which would make new tensors. texts: int, which text goes where."""
    for tensor in (layer.keys, layer.values):
        tensor.copy_(tensor.index_select(0, texts.to(tensor.device)))
