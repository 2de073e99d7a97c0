"""L2 distances and the nearest rows in plain torch, on any device: the definition, and what tests compare with.

query [P, D], candidates [V, D], both fp16, bf16 or fp32 -> the square root of the sum of (c - q)^2, everything in fp32.
Bytes: several times what a kernel moves. Flops: 3 a candidate element and query.
"""

from __future__ import annotations

import torch
from torch import Tensor

CHUNK = 2**22  # elements of candidates that become differences at once


def distances(query: Tensor, candidates: Tensor, out: Tensor) -> None:
    """Write every distance into `out`, fp32 [P, V]."""
    rows = max(1, CHUNK // max(1, candidates.shape[1]))
    for first in range(0, len(candidates), rows):
        chunk = candidates[first : first + rows].float()
        for p, q in enumerate(query.float()):
            out[p, first : first + rows] = torch.linalg.vector_norm(chunk - q, dim=1)


def nearest(query: Tensor, candidates: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k least distances, fp32 [P, k], ascending, and their rows, int64 [P, k]."""
    everything = query.new_empty((len(query), len(candidates)), dtype=torch.float32)
    distances(query, candidates, everything)
    return first_of(everything, None, k)


def first_of(distances: Tensor, rows: Tensor | None, k: int) -> tuple[Tensor, Tensor]:
    """The k least of each line and their `rows` (None: their columns). Of equals the left comes first; NaN is last."""
    least, columns = torch.sort(distances, dim=1, stable=True)
    least, columns = least[:, :k].contiguous(), columns[:, :k].contiguous()
    return least, columns if rows is None else rows.gather(1, columns)
