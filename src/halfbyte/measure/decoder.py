"""A model that decodes one token a step: as it is, as a CUDA graph, or as a graph whose small kernels are fused, by
torch.compile, and in an accelerated model as `generate` does it. And how far its logits are from those of the same
weights in fp32."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from halfbyte.measure import models
from halfbyte.measure.ab_run import ab_runs, clock, enough, random_ids
from halfbyte.measure.error import relative_error
from halfbyte.measure.kept import KeptSteps, can_keep, prompt_ms
from halfbyte.models.accelerate import is_accelerated
from halfbyte.models.caches import COUNTER
from halfbyte.models.captured import Captured
from halfbyte.models.experts import dense_module
from halfbyte.models.graphs import Step, capturable
from halfbyte.models.regions import compiled_regions
from halfbyte.models.steps import pool_of
from halfbyte.terminal import say

CHECKED_LAYERS = 4  # that the fp32 reference has: all of a 70B model would not fit
STEPS, LONG = 16, 200.0  # in a sample at most; ms that are enough for one of fewer
# ‖ours - bitsandbytes'‖ / ‖bitsandbytes'‖ of a whole model's logits: bf16 noise of all its layers. Where two experts
# have nearly the same score, that noise also chooses between them.
MOST_APART, MOST_APART_OF_EXPERTS = 0.1, 0.3
FUSED = "fused graph"
MODES = ("eager", "graph", FUSED)  # of a step


def modes_of(device: torch.device) -> Sequence[str]:
    return MODES if device.type == "cuda" else MODES[:1]


def step_inputs(model: Any, cache: Any, ids: Tensor, length: int) -> dict[str, Any]:
    """What `generate` gives the model for the token [texts, 1] behind `length` others, but for the cache: with masks
    made beforehand, which depend on numbers that Python counts."""
    inputs: dict[str, Any] = model.prepare_inputs_for_generation(
        ids,
        next_sequence_length=1,
        past_key_values=cache,
        attention_mask=torch.ones((len(ids), length + 1), dtype=torch.long, device=ids.device),
        position_ids=torch.full((len(ids), 1), length, dtype=torch.long, device=ids.device),
        use_cache=True,
    )
    del inputs["past_key_values"]
    return inputs


@contextmanager
def as_captured(model: Any, cache: Any, mode: str) -> Iterator[None]:
    """Within, a step computes what it does in one of the modes, captured or not."""
    if mode == "eager":
        yield
        return
    regions = compiled_regions(model) if mode == FUSED else nullcontext()
    with regions, capturable(cache, is_accelerated(model)):
        yield


class Decoder:
    """A model with a static cache, `context` tokens in it, that decodes one token a step in one of three modes."""

    def __init__(self, model: Any, batch: int, context: int, mode: str) -> None:
        from transformers import StaticCache

        self.model, self.context, self.device = model, context, model.device
        self.ids = random_ids(model, batch, context, seed=0)
        self.steps_kept: KeptSteps | None = None
        self.cache = StaticCache(config=model.config, max_cache_len=context + 2 * STEPS)
        self._fill()
        self.inputs = step_inputs(model, self.cache, self.ids[:, :1], context)
        self.run: Callable[[], Any] = self._eager
        if mode == FUSED and is_accelerated(model) and can_keep(model):
            self.steps_kept = KeptSteps(model, self.ids, context + 2 * STEPS)
            for _ in range(2):
                self.steps_kept.step()
            self.run = Captured(self.steps_kept.step, self.device).replay
        elif mode != "eager":
            with torch.no_grad(), as_captured(model, self.cache, mode):
                for _ in range(2):
                    self._eager()
                leaves, structure = torch.utils._pytree.tree_flatten(self.inputs)
                self.run = Step(model, self.cache, leaves, structure, is_accelerated(model)).replay
        self.reset()
        self.logits: Tensor = self.run().logits

    def _eager(self) -> Any:
        with torch.no_grad():
            return self.model(past_key_values=self.cache, **self.inputs)

    def reset(self) -> None:
        """Back to where the context ends; later entries of the cache are masked."""
        for layer in self.cache.layers:
            layer.cumulative_length.fill_(self.context)
            if hasattr(layer, COUNTER):
                setattr(layer, COUNTER, self.context)

    def prefill(self) -> float:
        """Milliseconds that the context takes as `generate` computes it."""
        found = prompt_ms(self.model, self.ids)
        return self._fill() if found is None else found

    def _fill(self) -> float:
        """Compute the context into the cache of the steps, as it is."""
        self.cache.reset()
        pool = pool_of(self.model)
        with torch.no_grad(), nullcontext() if pool is None else pool.prompt_layers.at_work():
            return clock(
                lambda: self.model(self.ids, past_key_values=self.cache, use_cache=True, logits_to_keep=1), self.device
            )

    @cached_property
    def steps(self) -> int:
        """In a sample: fewer of slow ones."""
        self.reset()
        return enough(clock(self.run, self.device), LONG, least=4, most=STEPS)

    def sample(self) -> float:
        """Milliseconds a step."""
        steps = self.steps
        self.reset()
        return clock(lambda: [self.run() for _ in range(steps)][-1], self.device) / steps


def errors_against_fp32(
    name: str, device: torch.device, dtype: torch.dtype, modes: Sequence[str] = ()
) -> dict[tuple[str, str], float]:
    """‖logits - exact‖ / ‖exact‖ by provider and mode of a step, the exact ones being of dequantized weights in fp32.
    modes: all that the device has by default.

    Over the first layers; a prompt and then single tokens, so that every kernel that decoding takes has its part.
    """
    model = models.load(name, device, dtype, layers=CHECKED_LAYERS)
    experts = models.experts_of(model)  # which the dense ones of bitsandbytes, in bf16, are rounded from
    ids = random_ids(model, 4, 48, seed=2)
    results = {}
    for ab_run in ab_runs(model, dtype, say):
        for provider, run_by in ab_run.providers.items():
            with run_by() as running:
                for mode in modes or modes_of(device):
                    results[provider, mode] = _logits(running, ids, mode)
    for path, module in experts.items():
        model.set_submodule(path, dense_module(module, torch.float32))
    models.make_dense(model, torch.float32)
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    exact = _logits(model, ids, "eager").double()
    torch.set_float32_matmul_precision(precision)
    return {key: float(f"{relative_error(result, exact):.4g}") for key, result in results.items()}


def _logits(model: Any, ids: Tensor, mode: str) -> Tensor:
    """Of a prompt of 32 tokens, of each further token of four texts, and of one text alone. A graph would compute what
    its step does while it is captured, so none is made."""
    from transformers import StaticCache

    parts: list[Tensor] = []
    with torch.no_grad():
        for texts in (ids, ids[:1]):
            if mode == FUSED and is_accelerated(model) and can_keep(model):
                parts += _kept_logits(model, texts)
                continue
            cache = StaticCache(config=model.config, max_cache_len=texts.shape[1])
            parts.append(model(texts[:, :32], past_key_values=cache, use_cache=True).logits)
            for position in range(32, texts.shape[1]):
                inputs = step_inputs(model, cache, texts[:, position : position + 1], position)
                with as_captured(model, cache, mode):
                    parts.append(model(past_key_values=cache, **inputs).logits)
    return torch.cat([part.flatten(0, 1) for part in parts])


def _kept_logits(model: Any, texts: Tensor) -> Iterator[Tensor]:
    """The same on a kept cache."""
    kept = KeptSteps(model, texts[:, :32], texts.shape[1])
    yield kept.prompt
    for position in range(32, texts.shape[1]):
        kept.token.copy_(texts[:, position : position + 1])
        kept.go_to(position)
        yield kept.step().logits
