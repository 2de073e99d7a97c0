"""What a router does in plain torch: the definition, and what runs where no kernel is for it."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear


def route(scores: Tensor, k: int, before: bool, normalizes: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(ids, weights) [T, k] of scores [T, E]: the k best experts of each token, int64, and their weights in `dtype`.

    before: weights are softmax over all experts, and with `normalizes` over the sum of the k best. Else they are
    softmax over the k best. Computed in fp32.
    """
    wide = scores.float()
    values, ids = torch.topk(wide.softmax(-1) if before else wide, k, dim=-1)
    if not before:
        values = values.softmax(-1)
    elif normalizes:
        values = values / values.sum(-1, keepdim=True)
    return ids, values.to(dtype)


def choose(
    x: Tensor, weight: Tensor, bias: Tensor | None, k: int, before: bool, normalizes: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """`route` of the scores of x [T, K], which a router's weight [E, K] and bias [E] give in the dtype of x."""
    return route(linear(x, weight, bias), k, before, normalizes, dtype)
