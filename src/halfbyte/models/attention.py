"""transformers' attention in a captured step: of one new token, by our kernel.

torch's, given a mask of booleans, first makes numbers of it in three kernels, in every layer anew, and then runs one
that is made for many tokens. Attention of another kind goes on as it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from halfbyte.kernels.common.slow import has_triton

NAME = "sdpa"  # of torch's attention in transformers
OTHERS = ("softcap", "position_bias", "s_aux", "cache", "output_attentions")  # what makes it attention of another kind


@contextmanager
def attention_of_steps() -> Iterator[None]:
    """Within, models whose attention is torch's compute that of one token in one launch or two."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS as functions

    theirs = functions.get(NAME)
    if theirs is None or not has_triton():
        yield
        return
    from halfbyte.kernels.attention.triton import attend, takes

    def forward(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        **others: Any,
    ) -> Any:
        asked = (others.get(name) for name in OTHERS)
        another = dropout or any(value is not None and value is not False for value in asked)
        if another or not takes(query, key, value, attention_mask):
            return theirs(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **others)
        scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
        return attend(query, key, value, attention_mask, scale), None

    functions[NAME] = forward
    try:
        yield
    finally:
        del functions[NAME]  # ours; below may lie what is registered for all
        if functions.get(NAME) is not theirs:
            functions[NAME] = theirs
