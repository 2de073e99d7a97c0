"""Attention of one token in plain torch: the definition, and what tests compare with."""

from __future__ import annotations

from torch import Tensor


def attend(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """As `attend` in triton.py, computed in the dtype of its arguments."""
    group = query.shape[1] // keys.shape[1]
    keys, values = (tensor.repeat_interleave(group, 1) for tensor in (keys, values))
    score = query @ keys.mT * scale
    if mask is None:
        return (score.softmax(-1) @ values).transpose(1, 2)
    weights = score.masked_fill(~mask, float("-inf")).softmax(-1)
    return (weights.masked_fill(~mask, 0.0) @ values).transpose(1, 2)  # where no token is seen, they are nan till here
