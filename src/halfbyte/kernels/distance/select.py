"""The k nearest of many on a GPU, picked from their distances, or from keys (keys.py), without sorting them.

A program takes thousands. In 2 K groups of them, each has a best one; the K-th best of these is a floor that at least K
reach. In any order, about 1.4 K do, and these are written as a list of 2 K keys, in any order. What programs leave is
picked from in the same way, until it is one program's; then what reaches the floor is ranked, each key against each
other. Where there is no room for all that reach it (many are equal, or rows come in the groups' own rhythm), the best
is taken K times.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from halfbyte.kernels.common.device import DeviceProperties
from halfbyte.kernels.common.launch import launch
from halfbyte.kernels.common.overlap import SINCE, let_the_next_begin, wait_for_the_one_ahead
from halfbyte.kernels.distance.keys import EMPTY, key_of, leading

TAKEN = {torch.float32: 2048, torch.int64: 4096}  # distances, or keys, by one program
FEW = tl.constexpr(128)  # keys that are ranked without a floor
AT_ONCE = tl.constexpr(32)  # keys that others are held against together
NAN = tl.constexpr(0x7FFFFFFE)  # bits that stand for any NaN where only order counts
NOTHING = tl.constexpr(-(2**31))  # behind the order of every distance


@triton.jit
def _floor(order, nothing: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    """What K of N reach, if there are so many."""
    if N < 2 * K:
        floor = tl.min(order, axis=0)
    else:
        # Which of them make a group does not matter, so none has to move to another thread for it.
        peaks = tl.max(tl.reshape(order, (N // (2 * K), 2 * K), can_reorder=True), axis=0)
        if 2 * K > 64:
            floor = tl.min(leading(peaks, K), axis=0)
        else:
            reached = tl.sum((peaks[:, None] >= peaks[None, :]).to(tl.int32), axis=0)
            floor = tl.max(tl.where(reached >= K, peaks, nothing), axis=0)
    return floor


@triton.jit
def _rank(keys, count, least, rows, N: tl.constexpr, k: tl.constexpr):
    """Write the k best of `count` keys in memory, at most N, at their places."""
    index = tl.arange(0, N)
    mine = tl.load(keys + index, mask=index < count, other=EMPTY)
    ahead = tl.zeros((N,), tl.int32)
    if N <= FEW:  # all loads at once
        for start in tl.static_range(0, N, AT_ONCE):
            ahead += _ahead(keys, start, count, mine)
    else:
        for start in range(0, count, AT_ONCE):
            ahead += _ahead(keys, start, count, mine)
    _write(mine, ahead, least, rows, (mine != EMPTY) & (ahead < k))


@triton.jit
def _ahead(keys, start, count, mine):
    """How many of the next keys from `start` on are ahead of each of mine."""
    other = start + tl.arange(0, AT_ONCE)
    theirs = tl.load(keys + other, mask=other < count, other=EMPTY)
    return tl.sum((theirs[:, None] > mine[None, :]).to(tl.int32), axis=0)


@triton.jit
def _write(key, place, least, rows, mask):
    key = ~key
    tl.store(least + place, (key >> 32).to(tl.int32).to(tl.float32, bitcast=True), mask=mask)
    tl.store(rows + place, key & 0x7FFFFFFF, mask=mask)


@triton.jit
def select_kernel(
    source, lists, least, rows, n, n_parts, stride,
    N: tl.constexpr, K: tl.constexpr, k: tl.constexpr, ROOM: tl.constexpr, KEYS: tl.constexpr, LAST: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    """source: [P, n], KEYS or fp32 distances. lists: int64 [P, n_parts, ROOM]; if LAST, they are what is ranked into
    least, fp32, and rows, int64, [P, k]."""
    if OVERLAPS:
        let_the_next_begin()
        wait_for_the_one_ahead()
    program = tl.program_id(0).to(tl.int64)
    query, part = program // n_parts, program % n_parts
    source += query * stride
    lists += program * ROOM
    least += query * k
    rows += query * k
    if KEYS and LAST and K > 1 and N <= FEW:
        _rank(source, n, least, rows, N, k)
    else:
        number = part * N + tl.arange(0, N)
        inside = number < n
        nothing: tl.constexpr = EMPTY if KEYS else NOTHING
        if KEYS:
            keys = tl.load(source + number, mask=inside, other=EMPTY)
            order = keys
        else:
            away = tl.load(source + number, mask=inside, other=0.0)
            keys = tl.where(inside, key_of(away, number), EMPTY)
            bits = away.to(tl.int32, bitcast=True) & 0x7FFFFFFF
            order = tl.where(inside, ~tl.minimum(bits, NAN), NOTHING)  # half the work of keys
        one_by_one = True
        if K > 1:
            reaches = ((order >= _floor(order, nothing, N, K)) & (order != nothing)).to(tl.int32)
            count = tl.sum(reaches, axis=0)
            one_by_one = count > ROOM
            if not one_by_one:
                tl.store(lists + tl.cumsum(reaches, axis=0) - 1, keys, mask=reaches > 0)
                if LAST:
                    tl.debug_barrier()
                    _rank(lists, count, least, rows, ROOM, k)
                else:
                    place = tl.arange(0, ROOM)
                    tl.store(lists + place, EMPTY, mask=place >= count)
        if one_by_one:
            if not LAST:
                rest = tl.arange(0, ROOM)
                tl.store(lists + rest, EMPTY, mask=rest >= K)
            for place in range(K):
                best = tl.max(keys, axis=0)
                if LAST:
                    _write(best, place, least, rows, place < k)
                else:
                    tl.store(lists + place, best)
                keys = tl.where(keys == best, EMPTY, keys)


def select(source: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k nearest of fp32 distances [P, n], whose columns are the rows, or of int64 keys [P, n]; n is k at least.

    Returns distances, fp32 [P, k], ascending, and rows, int64 [P, k].
    """
    p, n = source.shape
    keep = triton.next_power_of_2(k)
    least = source.new_empty((p, k), dtype=torch.float32)
    rows = source.new_empty((p, k), dtype=torch.int64)
    while p:
        parts = triton.cdiv(n, TAKEN[source.dtype])
        lists = rows.new_empty((p, parts * _room(keep, last=parts == 1)))
        _select(source, lists, least, rows, parts, keep)
        if parts == 1:
            break
        source, n = lists, lists.shape[1]
    return least, rows


def _room(keep: int, last: bool) -> int:
    """Keys of a list. Those that are to be ranked at last may be more."""
    return 1 if keep == 1 else max(64, 4 * keep) if last else max(32, 2 * keep)


def _select(source: Tensor, lists: Tensor, least: Tensor, rows: Tensor, parts: int, keep: int) -> None:
    (p, n), k = source.shape, least.shape[1]
    size = triton.next_power_of_2(min(n, TAKEN[source.dtype]))

    def configure(properties: DeviceProperties) -> tuple[int, dict[str, Any]]:
        constants = {"N": size, "K": keep, "k": k, "ROOM": lists.shape[1] // parts, "LAST": parts == 1}
        constants |= {"KEYS": source.dtype == torch.int64, "OVERLAPS": properties.ptx >= SINCE}
        return p * parts, constants | {"num_warps": 8 if constants["KEYS"] and size > FEW.value else 4}

    arguments = (source, lists, least, rows, n, parts, source.stride(0))
    launch(select_kernel, rows.get_device(), arguments, (p, size, keep, k, source.dtype), configure)
