"""One decoding step of a transformers model as a CUDA graph.

The first step runs as it is and compiles the regions that are worth it (regions.py); the second is captured; from then
on a step is one launch, however many kernels it has. Graphs live as long as one call of `generate` and keep no memory
beyond it.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from threading import RLock
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from halfbyte.kernels.common.capture import capture
from halfbyte.kernels.linear.workspace import workspaces_of_graph
from halfbyte.models.attention import attention_of_steps
from halfbyte.models.caches import COUNTER, grow, is_full, updated
from halfbyte.models.regions import compiled_regions

LAYERS = ("StaticLayer", "StaticSlidingWindowLayer")  # of a cache, whose state is tensors of a fixed address


def can_capture(cache: Any) -> bool:
    """True for a cache of transformers that a step changes in place, in memory that stays where it is."""
    layers = getattr(cache, "layers", ())
    return type(cache).__name__ == "StaticCache" and bool(layers) and all(type(x).__name__ in LAYERS for x in layers)


_building = RLock()  # one thread at a time changes what modules and transformers' functions are


@contextmanager
def capturable(cache: Any, ours: bool) -> Iterator[None]:
    """Within, a step can be captured. ours: and has our kernels for attention and for the cache."""
    with updated(cache, appends=ours), attention_of_steps() if ours else nullcontext():
        yield


class DecodeGraphs:
    """Takes the place of a model's `__call__` in the loop of one `generate`, with its one cache."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.steps: dict[Any, Step | None] = {}
        self.works = True

    def __call__(self, **inputs: Any) -> Any:
        cache = inputs.pop("past_key_values")
        grow(cache)
        with torch.cuda.device(self.model.device):
            return self._step(cache, inputs)

    def _step(self, cache: Any, inputs: dict[str, Any]) -> Any:
        leaves, structure = pytree.tree_flatten(inputs)
        facts = tuple((x.shape, x.dtype) if isinstance(x, Tensor) else x for x in leaves)
        key = (structure, facts, torch.is_grad_enabled(), tuple(map(is_full, cache.layers)))
        if not self.works or not _has_masks(cache, inputs):
            return self.model(past_key_values=cache, **inputs)
        if key not in self.steps:
            self.steps[key] = None
            with _building, compiled_regions(self.model), capturable(cache, ours=True):
                return self.model(past_key_values=cache, **inputs)
        step = self.steps[key]
        if step is not None:
            _count(cache, step.tokens)
            step.fill(leaves)
            return step.replay()
        counts = [getattr(layer, COUNTER, None) for layer in cache.layers]
        try:
            with _building, compiled_regions(self.model):
                self.steps[key] = step = Step(self.model, cache, leaves, structure, ours=True)
        except RuntimeError as error:
            self.works = False
            for layer, count in zip(cache.layers, counts, strict=True):
                if count is not None:
                    setattr(layer, COUNTER, count)
            warnings.warn(
                f"halfbyte: {type(self.model).__name__} cannot be captured in a CUDA graph and goes on without one: "
                f"{error}",
                stacklevel=2,
            )
            return self.model(past_key_values=cache, **inputs)
        return step.replay()


class Step:
    """A captured call of a model: inputs that are copied into its memory, outputs that are copied out of it.

    ours: as for `capturable`.
    """

    def __init__(self, model: Any, cache: Any, leaves: list[Any], structure: pytree.TreeSpec, ours: bool) -> None:
        self.leaves = [x.clone() if isinstance(x, Tensor) else x for x in leaves]
        inputs: Mapping[str, Any] = pytree.tree_unflatten(self.leaves, structure)
        self.tokens = inputs["input_ids"].shape[1]
        self.cache = cache
        self.graph = torch.cuda.CUDAGraph()
        with workspaces_of_graph() as self.workspaces, capturable(cache, ours), capture(self.graph):
            outputs = model(past_key_values=cache, **inputs)
        self.kind = type(outputs)
        self.fields = {name: value for name, value in outputs.items() if name != "past_key_values"}

    def fill(self, leaves: list[Any]) -> None:
        for mine, given in zip(self.leaves, leaves, strict=True):
            if isinstance(given, Tensor):
                mine.copy_(given)

    def replay(self) -> Any:
        """The step's outputs. They are copies: the next step will overwrite its own."""
        self.graph.replay()
        return self.kind(past_key_values=self.cache, **pytree.tree_map_only(Tensor, torch.clone, self.fields))


def _has_masks(cache: Any, inputs: dict[str, Any]) -> bool:
    """False where a step would make its masks itself, from a number that Python counts: a graph would repeat it."""
    return isinstance(inputs.get("attention_mask"), dict) or not any(hasattr(layer, COUNTER) for layer in cache.layers)


def _count(cache: Any, tokens: int) -> None:
    """What a step does in Python, which a graph does not run."""
    for layer in cache.layers:
        if hasattr(layer, COUNTER):
            setattr(layer, COUNTER, getattr(layer, COUNTER) + tokens)
