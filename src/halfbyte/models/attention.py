"""transformers' attention in a captured step: of few new tokens, by our kernel.

torch's, given a mask of booleans, first makes numbers of it in three kernels, in every layer anew, and then runs one
that is made for many tokens. What has a soft cap or sinks, as Gemma 2 and gpt-oss have, transformers computes in half a
dozen operations ("eager"). Attention of another kind goes on as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn

from halfbyte.kernels.attention import reference
from halfbyte.kernels.attention.fresh import Fresh
from halfbyte.kernels.attention.fresh import supports as supports_fresh
from halfbyte.kernels.common.slow import has_triton

NAME, EAGER = "sdpa", "eager"  # of torch's attention in transformers, and of that in a model's own file
OTHERS = ("position_bias", "cache", "output_attentions")  # what makes it attention of another kind
OURS = ("softcap", "s_aux")  # what torch's does not know, and the models' own that say it are of one kind


@contextmanager
def attention_of_steps() -> Iterator[StepAttention]:
    """Within, models whose attention is torch's, or has a soft cap or sinks, compute that of one to eight new tokens in
    one launch or two. Masks are not changed in place within, or spans of them are found too early."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS as functions

    theirs = functions.get(NAME)
    step = StepAttention()
    if theirs is None or not has_triton():
        yield step
        return
    find = functions.get_interface

    def interface(name: str, default: Callable[..., Any]) -> Callable[..., Any]:
        found = find(name, default)
        return partial(step.eager, found) if name == EAGER and found is default else found

    functions[NAME] = partial(step.sdpa, theirs)
    before = vars(functions).get("get_interface")
    functions.get_interface = interface
    try:
        yield step
    finally:
        del functions[NAME]  # ours; below may lie what is registered for all
        if functions.get(NAME) is not theirs:
            functions[NAME] = theirs
        del functions.get_interface
        if before is not None:
            functions.get_interface = before


class StepAttention:
    """Attention functions of one step, whose layers see by few masks, and one span of tokens for each of these."""

    def __init__(self) -> None:
        self.spans: list[tuple[Tensor, int, Tensor]] = []

    def sdpa(self, theirs: Callable[..., Any], module: nn.Module, *args: Any, **others: Any) -> Any:
        known = all(others.get(name) is None for name in OURS)
        return (partial(self.attention, theirs) if known else theirs)(module, *args, **others)

    def eager(self, theirs: Callable[..., Any], module: nn.Module, *args: Any, **others: Any) -> Any:
        """Without such a name a model's own attention may be anything. It returns its weights, where they are asked
        for."""
        known = any(name in others for name in OURS)
        wanted = getattr(getattr(module, "config", None), "output_attentions", False)
        return (partial(self.attention, theirs) if known and not wanted else theirs)(module, *args, **others)

    def attention(
        self,
        theirs: Callable[..., Any],
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        **others: Any,
    ) -> Any:
        from halfbyte.kernels.attention.attend import attend
        from halfbyte.kernels.attention.triton import supports

        asked = (others.get(name) for name in OTHERS)
        another = dropout or any(value is not None and value is not False for value in asked)
        # Without a mask several new tokens are a prompt, whose causal mask transformers leaves to torch.
        prompt = attention_mask is None and query.shape[2] > 1
        sinks, softcap = others.get("s_aux"), others.get("softcap")
        if another or prompt or not supports(query, key, value, attention_mask, sinks):
            return theirs(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **others)
        scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
        spans = None if attention_mask is None else self.spans_of(attention_mask, len(query))
        softcap = None if softcap is None else float(softcap)
        return attend(query, key, value, attention_mask, scale, softcap=softcap, sinks=sinks, spans=spans), None

    def of_new_tokens(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        mask: Tensor | None,
        scale: float,
        softcap: float | None,
        sinks: Tensor | None,
        fresh: Fresh,
        settled: bool,
    ) -> Tensor | None:
        """The attention of new tokens of each text, whose keys and values are put into the cache on the way; None on a
        GPU whose kernel does not support it. Shapes, and settled but for spans: as for `attend`."""
        if not has_triton():
            return None if query.is_cuda else reference.attend(
                reference.put(query, keys, values, fresh), keys, values, mask, scale, softcap, sinks
            )  # fmt: skip
        from halfbyte.kernels.attention.attend import attend
        from halfbyte.kernels.attention.triton import supports

        if not supports(query, keys, values, mask, sinks) or not supports_fresh(fresh, query, keys, values):
            return None
        settled = settled and (mask is None or self._known(mask, len(query)) is not None)
        spans = None if mask is None else self.spans_of(mask, len(query))
        return attend(
            query, keys, values, mask, scale, softcap=softcap, sinks=sinks, spans=spans, fresh=fresh, settled=settled
        )

    def _known(self, mask: Tensor, texts: int) -> Tensor | None:
        return next((spans for known, rows, spans in self.spans if known is mask and rows == texts), None)

    def spans_of(self, mask: Tensor, texts: int) -> Tensor:
        from halfbyte.kernels.attention.spans import spans_of

        known = self._known(mask, texts)
        if known is not None:
            return known
        spans = spans_of(mask, texts)
        self.spans = [*self.spans[-3:], (mask, texts, spans)]  # masks are kept, so that no other has their identity
        return spans
