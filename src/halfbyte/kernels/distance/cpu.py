"""L2 distances and the nearest rows on the CPU, through numba: candidates are read once, as fast as memory goes.

query fp32 [P, D]; candidates [V, D] as the integers that fp16, bf16 and fp32 are in kernels (common/floats.py). A sum
may be taken in any order (`reassoc`), which is what lets LLVM keep it in vectors; everything else is plain arithmetic.
Bytes: candidates once, queries from cache. Flops: 3 an element and query. Bound by memory for one or two queries.
"""

# numba finds out the types of kernels by itself.
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba import njit
from torch import Tensor

from halfbyte.kernels.common.floats import BITS, from_bits
from halfbyte.kernels.common.threads import parallel
from halfbyte.kernels.distance.reference import first_of

GRAIN = 2**17  # elements that are worth waking a thread for
LISTS = 64  # of nearest rows, at most, that are merged in the end

SUMS = {"reassoc", "contract", "nsz"}


def distances(query: Tensor, candidates: Tensor, out: Tensor) -> None:
    """Write every distance into `out`, fp32 [P, V], of query [P, D] and candidates [V, D] with rows of stride 1."""
    queries, rows = query.float().numpy(), candidates.view(BITS[candidates.dtype]).numpy()
    parallel(_distances, len(rows), grain(query), queries, rows, out.numpy())


def nearest(query: Tensor, candidates: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k least distances, fp32 [P, k], ascending, and their rows, int64 [P, k]."""
    queries, rows = query.float().numpy(), candidates.view(BITS[candidates.dtype]).numpy()
    return by_lists(_nearest, query, len(rows), k, queries, rows)


def by_lists(kernel: Any, query: Tensor, rows: int, k: int, *arguments: Any) -> tuple[Tensor, Tensor]:
    """The first k of what `kernel(first list, last list, *arguments, rows of a list, distances, rows)` finds."""
    block = max(k, -(-rows // LISTS))
    lists = -(-rows // block)
    least = torch.full((len(query), lists, k), float("nan"), dtype=torch.float32, device="cpu")
    found = torch.full((len(query), lists, k), rows, dtype=torch.int64, device="cpu")
    parallel(kernel, lists, max(1, grain(query) // block), *arguments, block, least.numpy(), found.numpy())
    # Places that a list had no rows for are NaN too, and come after those of real rows.
    least, found = first_of(least.flatten(1), found.flatten(1), lists * k)
    order = torch.sort((found == rows).to(torch.uint8), dim=1, stable=True).indices[:, :k]
    return least.gather(1, order), found.gather(1, order)


def grain(query: Tensor) -> int:
    return max(1, GRAIN // max(1, query.numel()))


@njit(nogil=True, cache=True, fastmath=SUMS, error_model="numpy")
def distance(query, row):
    total = np.float32(0)
    for d in range(query.size):
        difference = from_bits(row[d]) - query[d]
        total += difference * difference
    return np.sqrt(total)


@njit(nogil=True, cache=True, fastmath=SUMS, error_model="numpy")
def _distances(begin, end, queries, rows, out):
    for v in range(begin, end):
        for p in range(len(queries)):
            out[p, v] = distance(queries[p], rows[v])


@njit(nogil=True, cache=True, fastmath=SUMS, error_model="numpy")
def _nearest(begin, end, queries, rows, block, least, found):
    """Lists `begin` to `end`, each of the `block` rows that are its own."""
    k = least.shape[2]
    order = np.empty(k, np.uint32)
    for piece in range(begin, end):
        first, last = piece * block, min((piece + 1) * block, len(rows))
        for p in range(len(queries)):
            count = 0
            distances, indices = least[p, piece], found[p, piece]
            for v in range(first, last):
                count = insert(order, distances, indices, count, distance(queries[p], rows[v]), v)


@njit(nogil=True, cache=True, error_model="numpy")
def insert(order, distances, indices, count, distance, row):
    """Put a row into its place among the `count` nearest, if it is one of them; returns how many there are then."""
    k = len(order)
    key = np.float32(distance).view(np.uint32) & np.uint32(0x7FFFFFFF)  # in order, NaN above infinity
    if count == k and key >= order[k - 1]:
        return count
    place = min(count, k - 1)
    while place > 0 and order[place - 1] > key:
        order[place], distances[place], indices[place] = order[place - 1], distances[place - 1], indices[place - 1]
        place -= 1
    order[place], distances[place], indices[place] = key, distance, row
    return min(count + 1, k)
