"""Prompts and steps of an accelerated model as `generate` computes them: on kept caches, layers in few launches."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from halfbyte.measure.ab_run import clock
from halfbyte.models.caches import grow
from halfbyte.models.graphs import building
from halfbyte.models.rotation import Rotation, mask_names
from halfbyte.models.stepping import built
from halfbyte.models.steps import pool_of
from halfbyte.models.store import CacheStore


def can_keep(model: Any) -> bool:
    """True for a model whose masks `generate` knows how to make inside a step."""
    return mask_names(model.config.get_text_config(decoder=True)) is not None


def prompt_ms(model: Any, ids: Tensor) -> float | None:
    """Milliseconds that `generate` takes for a prompt [texts, tokens], on a graph from the third one of its size on.
    None where it computes the prompt as any other call of the model."""
    from transformers import StaticCache

    pool, (texts, tokens) = pool_of(model), ids.shape
    if pool is None:
        return None
    positions = torch.arange(tokens, dtype=torch.int64, device=ids.device).expand(texts, tokens)
    with torch.no_grad(), pool.lease(model, StaticCache, texts, tokens) as bucket:
        if bucket is None:
            return None
        inputs = {
            "past_key_values": bucket.store.begin(texts), "position_ids": positions, "use_cache": True,
            "logits_to_keep": 1,
        }  # fmt: skip
        found: list[Any] = []

        def run() -> None:
            found.append(pool.prompt(model, ids, inputs, bucket.store))

        with pool.prompt_layers.at_work():
            elapsed = clock(run, ids.device)
        return None if found[0] is None else elapsed


class KeptSteps:
    """Makes steps of one token behind a prompt, each at the same place, until it is told another one.

    ids: the prompt [texts, tokens]. tokens: of the cache. It feeds `token` [texts, 1].
    """

    def __init__(self, model: Any, ids: Tensor, tokens: int) -> None:
        from transformers import StaticCache

        self.model = model
        config = model.config.get_text_config(decoder=True)
        self.store = CacheStore(StaticCache, config, len(ids), tokens)
        cache = self.store.begin(len(ids))
        with torch.no_grad(), building:
            self.prompt: Tensor = model(ids, past_key_values=cache, use_cache=True).logits
            grow(cache)
            names = mask_names(config)
            assert names is not None
            floats = model.dtype if config._attn_implementation == "eager" else None
            self.rotation = Rotation(self.store, names, floats, ids.device)
            self.rotation.begin(ids.shape[1])
        self.visible = torch.ones((len(ids), tokens), dtype=torch.bool, device=ids.device)
        self.token = ids[:, :1].clone()
        self.length = torch.empty((), dtype=torch.int64, device=ids.device)  # that a text has with the token
        self.positions = torch.empty_like(self.token)
        self.go_to(ids.shape[1])

    def go_to(self, place: int) -> None:
        self.length.fill_(place + 1)
        self.positions.fill_(place)

    def step(self) -> Any:
        """The model's outputs for `token`, which takes its place in the cache."""
        with torch.no_grad(), built(self.model):
            return self.model(
                input_ids=self.token,
                position_ids=self.positions,
                attention_mask=self.rotation.turn(self.length, self.visible),
                past_key_values=self.rotation.cache,
                use_cache=True,
            )
