"""Decoder layers in a captured step, with five launches each where transformers has thirty.

Query, key and value are one product, which norms x as it reads it. Attention norms and rotates the heads and puts a
text's new tokens, of which guesses make several, into the cache. The product of its result adds the residual, gate and
up are one product that norms and gates, and the product behind them adds the residual again. Gemma norms what it adds:
that is a launch more, twice. In the place of an MLP there may be experts: the router, which norms what it reads, two
launches of experts, and a sum.

The first step of a bucket computes each layer both ways. A layer that disagrees with transformers, of a version that
computes something else, stays as it was.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from halfbyte.kernels.attention.plan import MOST_NEW
from halfbyte.models import outside, prompt_layers
from halfbyte.models.attention import StepAttention
from halfbyte.models.layers import DecoderLayer
from halfbyte.models.patch import is_method_of
from halfbyte.models.regions import put_back, uncompiled
from halfbyte.models.rotation import slot_of
from halfbyte.models.whole import WholeLayer, is_pair, whole_of

# Attribute of a layer that was computed both ways: whether the results agree, by the number of new tokens of a text.
AGREES = "_halfbyte_agrees"


@contextmanager
def fused_layers(model: nn.Module, attention: StepAttention) -> Iterator[None]:
    """Within, decoder layers of `model` of which halfbyte computes some projections or the experts, and what stands
    outside of them (outside.py), compute a few new tokens of each text in few launches, where the cache puts them at
    slots (rotation.py)."""
    with ExitStack() as stack:
        inside: set[nn.Module] = set()
        found = {module: layer for module in model.modules() if (layer := _fusible(module)) is not None}
        for number, (module, layer) in enumerate(found.items()):
            inside.update(module.modules())
            _replace(stack, module, _Layer(module, layer, attention, is_first=number == 0))
        if found:
            for module, forward in outside.forwards(model, inside):
                _replace(stack, module, forward)
        yield


def _fusible(module: nn.Module) -> DecoderLayer | None:
    own, known = vars(module).get("forward"), vars(module).get(AGREES, {})
    replaced = own is not None and not is_method_of(prompt_layers.forward, own)
    return None if replaced or False in known.values() else whole_of(module)


def _replace(stack: ExitStack, module: nn.Module, forward: Any) -> None:
    before = vars(module).get("forward")
    module.forward = forward
    stack.callback(put_back, module, before)


class _Layer(WholeLayer):
    """In the place of the forward of a decoder layer. is_first: of those of a step."""

    def __init__(self, module: nn.Module, layer: DecoderLayer, attention: StepAttention, is_first: bool) -> None:
        super().__init__(module, layer)
        self.attention, self.is_first = attention, is_first
        self.theirs = module.forward

    def __call__(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        known = vars(self.module).get(AGREES, {})
        new = hidden_states.shape[1] if hidden_states.dim() == 3 else 0
        agrees = known.get(new)
        if args or agrees is False:
            return self.theirs(hidden_states, *args, **kwargs)
        if agrees or (hidden_states.is_cuda and torch.cuda.is_current_stream_capturing()):
            ours = self._compute(hidden_states, **kwargs)
            return self.theirs(hidden_states, **kwargs) if ours is None else ours
        # Each way puts the tokens into the cache, at the same place.
        agrees, result = self._both_ways(hidden_states, partial(self._plainly, hidden_states, **kwargs), **kwargs)
        if agrees is not None:
            setattr(self.module, AGREES, {**known, new: agrees})
        if agrees is False:
            warnings.warn(
                f"halfbyte leaves {type(self.module).__name__} to transformers, whose version computes something else "
                "than the versions that are known. Decoding is slower than it could be; please report this version",
                stacklevel=2,
            )
        return result

    @uncompiled()
    def _plainly(self, x: Tensor, **kwargs: Any) -> Any:
        """As transformers has it; compiled regions would not pay for a single time."""
        return self.theirs(x, **kwargs)

    def _attend(
        self,
        x: Tensor,
        attention_mask: Any = None,
        position_embeddings: Any = None,
        past_key_values: Any = None,
        **others: Any,
    ) -> Tensor | None:
        layer, attention = self.layer, cast(Any, self.layer.attention)
        if x.dim() != 3 or x.shape[1] > MOST_NEW or past_key_values is None or not is_pair(position_embeddings):
            return None
        kept = past_key_values.layers[attention.layer_idx]
        slot, mask = slot_of(kept), attention_mask
        if slot is None or not all(outside.may_fuse(x, norm) for norm in layer.norms):
            return None
        query, fresh = self._fresh(x, position_embeddings, slot)
        # Behind another layer's attention, which waited for all that came before it, only the projections are new.
        settled = not self.is_first
        seen = self.attention.of_new_tokens(
            query, kept.keys, kept.values, mask, float(attention.scaling), layer.softcap, layer.sinks, fresh, settled
        )
        if seen is None:
            return None
        return self._add((layer.out,), seen.reshape(*x.shape[:2], -1), x, layer.added[0] if layer.added else None)
