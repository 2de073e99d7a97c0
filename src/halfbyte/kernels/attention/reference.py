"""Attention of few new tokens in plain torch: the definition, and what tests compare with."""

from __future__ import annotations

import torch
from torch import Tensor


def attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """As `attend` in triton.py, computed in the dtype of its arguments."""
    group = query.shape[1] // keys.shape[1]
    keys, values = (tensor.repeat_interleave(group, 1) for tensor in (keys, values))
    score = query @ keys.mT * scale
    if softcap is not None:
        score = softcap * torch.tanh(score / softcap)
    if mask is not None and mask.is_floating_point():
        score, mask = score + mask, mask > torch.finfo(mask.dtype).min
    if mask is not None:
        score = score.masked_fill(~mask, float("-inf"))
    if sinks is not None:
        sink = sinks.to(score.dtype)[None, :, None, None].expand(*score.shape[:3], 1)
        weights = torch.cat((score, sink), -1).softmax(-1)[..., :-1]
    else:
        weights = score.softmax(-1).nan_to_num(0.0) if mask is not None else score.softmax(-1)
    return (weights @ values).transpose(1, 2)
