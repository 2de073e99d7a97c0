"""Decoder layers of a prompt in under twenty launches each, where transformers has fifty to seventy.

For a few hundred tokens that is what a prompt takes: a GPU is done with a launch before Python has made the next one.
So norms, the turn of heads and the way into the cache, and the gate of an MLP have one launch each, and projections of
the same input have one together. Attention stays the one that transformers would have called.

`accelerate` gives every decoder layer a forward that is its class's, but within a prompt of `generate` and in a batch
of continuous batching, whose requests are one row of tokens to a layer. At first a model computes each layer both ways.
A layer that disagrees with transformers, of a version that computes something else, stays as it was.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from halfbyte.kernels.attention import reference
from halfbyte.kernels.attention.fresh import Fresh
from halfbyte.kernels.attention.fresh import supports as supports_fresh
from halfbyte.kernels.attention.plan import MOST_NEW
from halfbyte.kernels.common.slow import has_triton
from halfbyte.models.caches import COUNTER
from halfbyte.models.layers import DecoderLayer, family_of
from halfbyte.models.patch import has_forward_of_class, is_hooked, is_method_of, patch, unpatch
from halfbyte.models.whole import WholeLayer, is_pair, whole_of

ON_CPU = False  # where launches cost little; tests set it
# Rows that are computed both ways, which takes memory: a larger prompt is transformers' until a smaller one has come.
MOST_COMPARED = 16384
BATCHED = "_halfbyte_batched"  # attribute of decoder layers: the PromptLayers of a model that batches continuously
STATIC = ("StaticLayer", "StaticSlidingWindowLayer")  # layers of a cache that transformers gives its memory at first

_current: ContextVar[PromptLayers | None] = ContextVar("_current", default=None)
_is_plain: ContextVar[bool] = ContextVar("_is_plain", default=False)


@contextmanager
def every_earlier_token_is_seen() -> Iterator[None]:
    """Within, a token of this thread's prompt looks at all before it. Attention knows that without a mask, and is told
    of none: with one, torch has other kernels, which are slower."""
    token = _is_plain.set(True)
    try:
        yield
    finally:
        _is_plain.reset(token)


def supports(module: nn.Module) -> bool:
    if family_of(module, "DecoderLayer") is None:
        return False
    first = next(module.parameters(), None)
    return ON_CPU or (first is not None and first.is_cuda and has_triton())


def apply(module: nn.Module) -> None:
    if has_forward_of_class(module):
        patch(forward, module)


def undo(module: nn.Module) -> None:
    unpatch(forward, module)
    vars(module).pop(BATCHED, None)


def begin_batches(model: nn.Module) -> None:
    """From now on batches of requests go through the same layers as prompts. The model must stay what it is."""
    layers = PromptLayers()
    for module in model.modules():
        if is_method_of(forward, vars(module).get("forward")):
            setattr(module, BATCHED, layers)


def forward(module: nn.Module, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
    layers = None if args or torch.compiler.is_compiling() else _current.get() or _batched(module, kwargs)
    layer = None if layers is None else layers.of(module)
    found = None if layer is None else layer(hidden_states, **kwargs)
    return type(module).forward(module, hidden_states, *args, **kwargs) if found is None else found


def _batched(module: nn.Module, kwargs: Mapping[str, Any]) -> PromptLayers | None:
    """The layers of a call with a cache of pages."""
    return None if kwargs.get("cache") is None else vars(module).get(BATCHED)


class PromptLayers:
    """Those of one model, as long as it stays what it is. A copy of the model begins with none."""

    def __init__(self) -> None:
        self.known: dict[nn.Module, _PromptLayer | None] = {}

    def __reduce__(self) -> tuple[type[PromptLayers], tuple[()]]:
        return type(self), ()

    def of(self, module: nn.Module) -> _PromptLayer | None:
        if module not in self.known:
            is_ours = is_method_of(forward, vars(module).get("forward"))
            layer = whole_of(module) if is_ours else None
            self.known[module] = None if layer is None else _PromptLayer(module, layer)
        return self.known[module]

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Within, this thread's model computes a prompt."""
        token = _current.set(self)
        try:
            yield
        finally:
            _current.reset(token)


class _PromptLayer(WholeLayer):
    """Instead of the forward of a decoder layer. agrees: whether it gave what transformers' gives; None at first."""

    def __init__(self, module: nn.Module, layer: DecoderLayer) -> None:
        super().__init__(module, layer)
        self.agrees: bool | None = None
        self.inside = list(module.modules())[1:]
        attention: Any = layer.attention
        self.window = getattr(attention, "sliding_window", getattr(attention.config, "sliding_window", None))

    def __call__(self, x: Tensor, **kwargs: Any) -> Tensor | None:
        """The layer's result; None where transformers has to compute it, and nothing has happened."""
        norms = self.layer.norms
        if (
            self.agrees is False
            or torch.is_grad_enabled()
            or torch.is_autocast_enabled(x.device.type)
            or x.dim() != 3
            or (x.shape[1] <= MOST_NEW and kwargs.get("cache") is None)
            or not is_pair(kwargs.get("position_embeddings"))
            or any(map(is_hooked, self.inside))  # transformers adds its own when it is asked for outputs
            or any(norm.weight.dtype is not x.dtype or norm.weight.device != x.device for norm in norms)
        ):
            return None
        if self.agrees:
            return self._compute(x, **kwargs)
        if x.numel() > MOST_COMPARED * x.shape[-1] or (x.is_cuda and torch.cuda.is_current_stream_capturing()):
            return None  # nothing can be compared
        cache, mask = kwargs.get("past_key_values"), kwargs.get("attention_mask")
        if cache is not None and int(cache.get_seq_length(cast(Any, self.layer.attention).layer_idx)) > 0:
            return None  # only with an empty one it shows whether they agree
        if isinstance(mask, Tensor):  # of a cache that is longer than the prompt
            mask = mask[..., : x.shape[1]]
        alone = {**kwargs, "past_key_values": None, "attention_mask": mask}
        self.agrees, result = self._both_ways(x, partial(type(self.module).forward, self.module, x, **alone), **kwargs)
        if self.agrees is False:
            warnings.warn(
                f"halfbyte leaves prompts in {type(self.module).__name__} to transformers, whose version computes "
                "something else than the versions that are known. They are slower than they could be; please report "
                "this version",
                stacklevel=2,
            )
        return None if self.agrees is None else cast(Tensor, result)

    def _attend(
        self,
        x: Tensor,
        attention_mask: Any = None,
        position_embeddings: Any = None,
        past_key_values: Any = None,
        **others: Any,
    ) -> Tensor | None:
        layer, attention = self.layer, cast(Any, self.layer.attention)
        query, fresh = self._fresh(x, position_embeddings, slot=None)
        if not supports_fresh(fresh, query, fresh.keys, fresh.values):
            return None
        kept = None if past_key_values is None else past_key_values.layers[attention.layer_idx]
        if kept is not None and _begins(kept, query.shape[2]):
            query, keys, values = _put(kept, query, fresh)
        else:
            keys, values = torch.empty_like(fresh.keys), torch.empty_like(fresh.values)
            query = _turn(query, keys, values, fresh)
            if past_key_values is not None:
                keys, values = past_key_values.update(keys, values, attention.layer_idx)
        if layer.softcap is not None:
            others["softcap"] = layer.softcap
        if layer.sinks is not None:
            others["s_aux"] = layer.sinks
        seen, _ = _interface(attention)(
            attention, query, keys, values, None if _is_plain.get() else attention_mask,
            dropout=0.0, scaling=attention.scaling, sliding_window=self.window, **others,
        )  # fmt: skip
        seen = seen.reshape(*x.shape[:2], -1).contiguous()
        return self._add((layer.out,), seen, x, layer.added[0] if layer.added else None)


def _begins(kept: Any, tokens: int) -> bool:
    """Whether a layer of a cache is empty and takes so many tokens from its first place on."""
    return type(kept).__name__ in STATIC and not kept.is_initialized and kept.max_cache_len >= tokens


def _put(kept: Any, query: Tensor, fresh: Fresh) -> tuple[Tensor, Tensor, Tensor]:
    """What `update` of such a layer does, and the turn before it, at once."""
    tokens = query.shape[2]
    kept.lazy_initialization(fresh.keys, fresh.values)
    query = _turn(query, kept.keys[:, :, :tokens], kept.values[:, :, :tokens], fresh)
    kept.cumulative_length.add_(tokens)
    if hasattr(kept, COUNTER):
        setattr(kept, COUNTER, getattr(kept, COUNTER) + tokens)
    return query, kept.keys, kept.values


def _turn(query: Tensor, keys: Tensor, values: Tensor, fresh: Fresh) -> Tensor:
    if query.is_cuda and has_triton():
        from halfbyte.kernels.attention.turn import turn

        return turn(query, keys, values, fresh)
    return reference.turn(query, keys, values, fresh)


def _interface(attention: Any) -> Any:
    """What transformers' own forward would call: by the configuration's name, or from the model's own file."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS as functions

    eager = vars(sys.modules[type(attention).__module__]).get("eager_attention_forward")
    return functions.get_interface(attention.config._attn_implementation, eager)
