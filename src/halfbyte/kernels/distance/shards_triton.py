"""The nearest rows of a matrix whose rows several GPUs hold between them: what each sends, and what all make of it.

The same numbers as shards.py, in one launch each. Both handle a few kilobytes, and a launch is all that they cost:
a dozen of torch's operations would take longer on the host than the search itself on the GPU.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from halfbyte.kernels.common.device import DeviceProperties
from halfbyte.kernels.common.launch import launch

LAST = tl.constexpr(2**63 - 1)  # behind every key, as in shards.py
AT_ONCE = tl.constexpr(32)  # keys that others are held against together


@triton.jit
def pack_kernel(least, rows, sent, count, found, k: tl.constexpr, K: tl.constexpr):
    """A program a query. least, rows: [P, found]. sent: [1 + P k]. K: a power of two, k at least."""
    query = tl.program_id(0)
    place = tl.arange(0, K)
    inside = place < found
    bits = tl.load(least + query * found + place, mask=inside, other=0.0).to(tl.int32, bitcast=True) & 0x7FFFFFFF
    row = tl.load(rows + query * found + place, mask=inside, other=0)
    key = tl.where(inside, (bits.to(tl.int64) << 32) | row, LAST)
    tl.store(sent + 1 + query * k + place, key, mask=place < k)
    if query == 0:
        tl.store(sent, tl.zeros((), tl.int64) + count)


@triton.jit
def merge_kernel(everyone, least, rows, stride, k: tl.constexpr, PROCESSES: tl.constexpr, N: tl.constexpr):
    """A program a query. everyone: [PROCESSES, stride]. N: a power of two, PROCESSES times k at least."""
    query = tl.program_id(0)
    index = tl.arange(0, N)
    key = _load(everyone, index, query, stride, k, PROCESSES)
    order, first = key >> 32, tl.zeros((N,), tl.int64)
    counts = everyone
    for process in range(PROCESSES):
        first += tl.where(index // k > process, tl.load(counts), 0)
        counts += stride
    ahead = tl.zeros((N,), tl.int32)
    for start in range(0, N, AT_ONCE):
        other = start + tl.arange(0, AT_ONCE)
        theirs = _load(everyone, other, query, stride, k, PROCESSES) >> 32
        wins = (theirs[:, None] < order[None, :]) | (
            (theirs[:, None] == order[None, :]) & (other[:, None] < index[None, :])
        )
        ahead += tl.sum(wins.to(tl.int32), axis=0)
    mine = (index < PROCESSES * k) & (ahead < k)
    tl.store(least + query * k + ahead, order.to(tl.int32).to(tl.float32, bitcast=True), mask=mine)
    tl.store(rows + query * k + ahead, (key & 0xFFFFFFFF) + first, mask=mine)


@triton.jit
def _load(everyone, index, query, stride, k: tl.constexpr, PROCESSES: tl.constexpr):
    """Keys of a query by their number: all of the first process, then all of the next."""
    place = (index // k).to(tl.int64) * stride + 1 + query * k + index % k
    return tl.load(everyone + place, mask=index < PROCESSES * k, other=LAST)


def pack(least: Tensor, rows: Tensor, count: int, k: int) -> Tensor:
    """As in shards.py; least and rows are contiguous."""
    p, found = least.shape
    sent = rows.new_empty(1 + p * k)

    def configure(properties: DeviceProperties) -> tuple[int, dict[str, Any]]:
        return p, {"k": k, "K": max(AT_ONCE.value, triton.next_power_of_2(k)), "num_warps": 1}

    if p:
        launch(pack_kernel, sent.get_device(), (least, rows, sent, count, found), (p, k), configure)
    else:
        sent.fill_(count)
    return sent


def merge(everyone: Tensor, p: int, k: int) -> tuple[Tensor, Tensor]:
    """As in shards.py; everyone is contiguous."""
    processes, stride = everyone.shape
    least = everyone.new_empty((p, k), dtype=torch.float32)
    rows = everyone.new_empty((p, k))

    def configure(properties: DeviceProperties) -> tuple[int, dict[str, Any]]:
        size = max(AT_ONCE.value, triton.next_power_of_2(processes * k))
        return p, {"k": k, "PROCESSES": processes, "N": size, "num_warps": 1 if size <= 128 else 4}

    if p:
        launch(merge_kernel, rows.get_device(), (everyone, least, rows, stride), (p, k, processes), configure)
    return least, rows
