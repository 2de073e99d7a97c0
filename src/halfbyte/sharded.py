"""Search over the processes of a torch.distributed group, each of which holds some of the candidates' rows.

Rows are numbered through all processes, in the order of their ranks. Every process gets the result for all of them.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from halfbyte.eager import backend, on_its_device
from halfbyte.eager_search import MOST_NEAREST, TokenCheck, dense_chunks, lines_of, rows_of
from halfbyte.eager_search import nearest as nearest_here
from halfbyte.formats.parts import Matrix
from halfbyte.kernels.common.slow import no_kernels


@on_its_device
def nearest(query: Tensor, candidates: Matrix, k: int, group: Any) -> tuple[Tensor, Tensor]:
    """One small gather, and no process waits for its GPU: how many rows each has travels with what it found.

    Only a process with fewer rows than k looks at the sum of all, to see whether there are so many; where there are
    not, every process has fewer, so all of them raise.
    """
    if not 1 <= k <= MOST_NEAREST:
        raise ValueError(f"k is {k}; nearest takes 1 to {MOST_NEAREST}, and no more than there are candidates")
    queries, rows = lines_of(query), candidates.shape[0]
    shards = _shards(queries.device.type)
    if rows:
        least, found = nearest_here(queries, candidates, min(k, rows))
    else:
        least, found = (queries.new_empty((len(queries), 0), dtype=kind) for kind in (torch.float32, torch.int64))
    everyone = gathered(shards.pack(least, found, rows, k), group)
    if k > rows and (total := int(everyone[:, 0].sum())) < k:
        raise ValueError(f"k is {k}; nearest takes 1 to {MOST_NEAREST}, and no more than the {total} candidates")
    least, found = shards.merge(everyone, len(queries), k)
    return (least[0], found[0]) if query.dim() == 1 else (least, found)


@cache
def _shards(device_type: str) -> Any:
    in_triton = device_type == "cuda" and no_kernels(device_type) is None
    return import_module(f"halfbyte.kernels.distance.shards{'_triton' if in_triton else ''}")


@on_its_device
def token_ranks(hidden: Tensor, lm_head: Matrix, tokens: Tensor, group: Any) -> Tensor:
    import torch.distributed as dist

    sizes = _sizes(lm_head.shape[0], hidden.device, group)
    lines, tokens = lines_of(hidden), tokens.detach().long()
    check = TokenCheck(tokens, sum(sizes))
    kernels = backend("rank", lines.device.type)
    start = sum(sizes[: dist.get_rank(group)])
    mine = ((tokens >= start) & (tokens < start + lm_head.shape[0])).nonzero()[:, 0]
    own = lines.new_zeros((2, len(lines)), dtype=torch.float64)
    if len(mine):
        own[:, mine] = kernels.own_logits(lines[mine], *rows_of(lm_head, tokens[mine] - start))
    dist.all_reduce(own, group=group)
    above = torch.zeros_like(tokens)
    for first, dense in dense_chunks(lm_head):
        kernels.count_above(lines, dense, own, tokens, start + first, above)
    dist.all_reduce(above, group=group)
    check()
    return above


def _sizes(rows: int, device: torch.device, group: Any) -> list[int]:
    """How many rows each process of the group has."""
    return gathered(torch.full((1,), rows, dtype=torch.int64, device=device), group)[:, 0].tolist()


def gathered(mine: Tensor, group: Any) -> Tensor:
    """[processes, n]: what every process of the group has, each n numbers."""
    import torch.distributed as dist

    count = dist.get_world_size(group)
    everyone = mine.new_empty(count * len(mine))
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # the name before torch 2.13
    gather(everyone, mine, group=group)
    return everyone.view(count, -1)
