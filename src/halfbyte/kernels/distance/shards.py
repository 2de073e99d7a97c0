"""The nearest rows of a matrix whose rows several processes hold between them, in plain torch: the definition.

What a process sends is int64 [1 + P k]: how many rows it has, then k keys for each query, a key being the bits of the
distance above the row's number in that process. Places that it has no rows for hold LAST, behind NaN, whose sign goes.
"""

from __future__ import annotations

import torch
from torch import Tensor

LAST = torch.iinfo(torch.int64).max


def pack(least: Tensor, rows: Tensor, count: int, k: int) -> Tensor:
    """What a process with `count` rows sends. least: fp32 [P, k or fewer], ascending; rows: int64, of its shape."""
    p, found = least.shape
    sent = torch.full((1 + p * k,), LAST, dtype=torch.int64, device=least.device)
    sent[:1].fill_(count)
    sent[1:].view(p, k)[:, :found] = (least.view(torch.int32) & 0x7FFFFFFF).long() << 32 | rows
    return sent


def merge(everyone: Tensor, p: int, k: int) -> tuple[Tensor, Tensor]:
    """The k least distances, fp32 [P, k], and their rows among all, int64 [P, k], of what each of the processes sent,
    int64 [processes, 1 + P k]. Of rows equally far the lower comes first."""
    counts, keys = everyone[:, 0], everyone[:, 1:].view(len(everyone), p, k)
    first = counts.cumsum(0) - counts
    rows = ((keys & 0xFFFFFFFF) + first[:, None, None]).transpose(0, 1).reshape(p, -1)
    order, columns = torch.sort((keys >> 32).transpose(0, 1).reshape(p, -1), dim=1, stable=True)
    return order[:, :k].int().view(torch.float32), rows.gather(1, columns[:, :k])
