"""Ranks of tokens in plain torch, on any device: the definition, the fallback, and what tests compare with.

hidden [T, D], lm_head [V, D], both fp16, bf16 or fp32. A logit is the fp64 product of a line of one with a line of the
other; the rank of a token is how many logits are above its own, equal ones of lower index counted as above.
"""

from __future__ import annotations

import torch
from torch import Tensor

TIE = 2.0**-45  # of |h| |w|: logits that differ by less are equal, for sums of the same numbers may differ by as much
ROWS = 1024  # of the head at a time


def own_logits(hidden: Tensor, rows: Tensor, index: Tensor) -> Tensor:
    """fp64 [2, T]: the logit of each token, by row index[t] of `rows`, and |h| |w| of it.

    index: int64 [T]. What is outside of `rows` is taken as its nearest end.
    """
    h, w = hidden.double(), rows[index.clamp(0, len(rows) - 1)].double()
    return torch.stack(((h * w).sum(dim=1), h.norm(dim=1) * w.norm(dim=1)))


def count_above(hidden: Tensor, lm_head: Tensor, own: Tensor, tokens: Tensor, first: int, above: Tensor) -> None:
    """Add to `above`, int64 [T], how many rows of `lm_head` beat each token.

    own: of `own_logits`. first: the index that row 0 of `lm_head` has among those that `tokens` counts.
    """
    logit, length = own[:, :, None]
    for start in range(0, len(lm_head), ROWS):
        lead = hidden.double() @ lm_head[start : start + ROWS].double().T - logit
        index = torch.arange(first + start, first + start + lead.shape[1], dtype=torch.int64, device=lead.device)
        tie = lead.abs() <= TIE * length
        above += torch.where(tie, index < tokens[:, None], lead > 0).sum(dim=1)
