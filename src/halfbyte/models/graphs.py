"""One decoding step of a transformers model as a CUDA graph, for the loop that transformers itself drives.

The first step runs as it is and compiles the regions that are worth it (regions.py); the second is captured; from then
on a step is one launch, however many kernels it has. Graphs of a cache that is kept (store.py) are kept with it; those
of a caller's own cache live as long as the call of `generate`.
"""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from threading import RLock
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from halfbyte.models.attention import attention_of_steps
from halfbyte.models.caches import COUNTER, STORE, grow, is_full, updated
from halfbyte.models.captured import Captured, current
from halfbyte.models.regions import compiled_regions
from halfbyte.models.stages import staged

MOST_GRAPHS = 8  # kept with one cache; the least recently used goes
LAYERS = ("StaticLayer", "StaticSlidingWindowLayer")  # of a cache, whose state is tensors of a fixed address


def can_capture(cache: Any) -> bool:
    """True for a cache of transformers that a step changes in place, in memory that stays where it is."""
    layers = getattr(cache, "layers", ())
    return type(cache).__name__ == "StaticCache" and bool(layers) and all(type(x).__name__ in LAYERS for x in layers)


building = RLock()  # one thread at a time changes what modules and transformers' functions are


@contextmanager
def capturable(cache: Any, ours: bool) -> Iterator[None]:
    """Within, a step can be captured. ours: and has our kernels for attention and for the cache."""
    with updated(cache, appends=ours), attention_of_steps() if ours else nullcontext():
        yield


class DecodeGraphs:
    """Takes the place of a model's `__call__` in the loop of one `generate`, with its one cache."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.steps: OrderedDict[Any, Step | None] = OrderedDict()
        self.works = True

    def __call__(self, **inputs: Any) -> Any:
        cache = inputs.pop("past_key_values")
        grow(cache)
        if store := vars(cache).get(STORE):
            self.steps = store.steps
        with current(self.model.device):
            return self._step(cache, inputs)

    def _step(self, cache: Any, inputs: dict[str, Any]) -> Any:
        leaves, structure = pytree.tree_flatten(inputs)
        facts = tuple((x.shape, x.dtype) if isinstance(x, Tensor) else x for x in leaves)
        key = (structure, facts, torch.is_grad_enabled(), tuple(map(is_full, cache.layers)))
        if not self.works or not _has_masks(cache, inputs):
            return self.model(past_key_values=cache, **inputs)
        if key not in self.steps:
            self.steps[key] = None
            while len(self.steps) > MOST_GRAPHS:
                self.steps.popitem(last=False)
            with building, staged(self.model), compiled_regions(self.model), capturable(cache, ours=True):
                return self.model(past_key_values=cache, **inputs)
        self.steps.move_to_end(key)
        step = self.steps[key]
        if step is not None:
            step.fill(leaves)
            return step.replay(counts=True)
        counts = [getattr(layer, COUNTER, None) for layer in cache.layers]
        try:
            with building, staged(self.model), compiled_regions(self.model):
                self.steps[key] = step = Step(self.model, cache, leaves, structure, ours=True)
        except RuntimeError as error:
            self.works = False
            for layer, count in zip(cache.layers, counts, strict=True):
                if count is not None:
                    setattr(layer, COUNTER, count)
            warn_of_no_graph(self.model, error)
            return self.model(past_key_values=cache, **inputs)
        return step.replay()


def warn_of_no_graph(model: Any, error: RuntimeError) -> None:
    warnings.warn(
        f"halfbyte: {type(model).__name__} cannot be captured in a CUDA graph and goes on without one: {error}",
        stacklevel=3,
    )


class Step:
    """A captured call of a model: inputs that are copied into its memory, outputs that are copied out of it.

    ours: as for `capturable`.
    """

    def __init__(self, model: Any, cache: Any, leaves: list[Any], structure: pytree.TreeSpec, ours: bool) -> None:
        self.leaves = [x.clone() if isinstance(x, Tensor) else x for x in leaves]
        inputs: Mapping[str, Any] = pytree.tree_unflatten(self.leaves, structure)
        self.tokens = inputs["input_ids"].shape[1]
        self.cache = cache

        def call() -> Any:
            with capturable(cache, ours):
                return model(past_key_values=cache, **inputs)

        self.captured = Captured(call, model.device)

    @property
    def nbytes(self) -> int:
        return self.captured.nbytes

    def fill(self, leaves: list[Any]) -> None:
        for mine, given in zip(self.leaves, leaves, strict=True):
            if isinstance(given, Tensor):
                mine.copy_(given)

    def replay(self, counts: bool = False) -> Any:
        """The step's outputs. They are copies: the next step will overwrite its own.

        counts: let the cache's layers count the tokens, which the first replay after a capture has done already.
        """
        if counts and self.captured.is_graph:
            _count(self.cache, self.tokens)
        outputs = self.captured.replay()
        fields = {name: value for name, value in outputs.items() if name != "past_key_values"}
        return type(outputs)(past_key_values=self.cache, **pytree.tree_map_only(Tensor, torch.clone, fields))


def _has_masks(cache: Any, inputs: dict[str, Any]) -> bool:
    """False where a step would make its masks itself, from a number that Python counts: a graph would repeat it."""
    mask = inputs.get("attention_mask")
    made = isinstance(mask, dict) or (isinstance(mask, Tensor) and mask.dim() == 4)
    return made or not any(hasattr(layer, COUNTER) for layer in cache.layers)


def _count(cache: Any, tokens: int) -> None:
    """What a step does in Python, which a graph does not run."""
    for layer in cache.layers:
        if hasattr(layer, COUNTER):
            setattr(layer, COUNTER, getattr(layer, COUNTER) + tokens)
