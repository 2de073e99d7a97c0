"""Lists of the nearest rows merged into one, on a GPU.

Each list holds K keys (keys.py) in descending order. No more than the K lists with the best heads matter: any key of
another list is behind K heads. Which they are need not be known to find a floor that K heads reach: of 2 K groups of
lists, the K-th best of the groups' best heads. Only lists whose head reaches it are read on, and of these only the keys
that reach it, 22 of 16,000 for K = 16 and rows in any order, are ranked: each one against each other, without sorting.
Where more than there is room for reach it (rows sorted by distance), or K is large, lists are sorted and merged.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from halfbyte.kernels.common.device import DeviceFacts
from halfbyte.kernels.common.launch import launch
from halfbyte.kernels.common.overlap import SINCE, let_the_next_begin, wait_for_the_one_ahead
from halfbyte.kernels.distance.keys import EMPTY, leading, merged
from halfbyte.kernels.distance.plan import LISTS

SORTED = tl.constexpr(256)  # keys that are sorted at once
TOGETHER = tl.constexpr(8)  # lists that are merged two by two at once
RANKED = 16  # the largest K that goes by ranks
ROOM = tl.constexpr(64)  # keys that are ranked at most
TAKEN = tl.constexpr(1024)  # keys that are held against the floor together, or two of every list
MERGED = LISTS  # that one program merges, if that is all there are
SHARED = 256  # that it merges of more, if they are ranked: in two thirds of the time


@triton.jit
def _halved(lists, N: tl.constexpr, K: tl.constexpr):
    """N // 2 lists of K of lists [N, K]."""
    some, others = tl.split(tl.permute(lists.reshape(N // 2, 2, K), (0, 2, 1)))
    return merged(some, others, K)


@triton.jit
def _write(key, place, shorter, least, rows, K: tl.constexpr, k: tl.constexpr, LAST: tl.constexpr):
    """Keys at their places: k as distances and rows if there is no list behind this one, else K as another list."""
    if LAST:
        key = ~key
        tl.store(least + place, (key >> 32).to(tl.int32).to(tl.float32, bitcast=True), mask=place < k)
        tl.store(rows + place, key & 0x7FFFFFFF, mask=place < k)
    else:
        tl.store(shorter + place, key, mask=place < K)


@triton.jit
def _place(keys, N: tl.constexpr):
    """The place of each of N keys in descending order; those that are equal, EMPTY ones, keep their order."""
    i, j = tl.arange(0, N)[:, None], tl.arange(0, N)[None, :]
    ahead = (keys[None, :] > keys[:, None]) | ((keys[None, :] == keys[:, None]) & (j < i))
    return tl.sum(ahead.to(tl.int32), axis=1)


@triton.jit
def _floor(heads, LISTS: tl.constexpr, K: tl.constexpr):
    """The K-th best of the best heads of 2 K groups, which at least K keys reach."""
    peaks = tl.max(heads.reshape(LISTS // (2 * K), 2 * K), axis=0)
    return tl.max(tl.where(_place(peaks, 2 * K) == K - 1, peaks, EMPTY), axis=0)


@triton.jit
def _collect(lists, heads, number, room, LISTS: tl.constexpr, K: tl.constexpr):
    """Write the keys that reach the floor into `room`, in any order, and return how many there are, or would be."""
    COLUMNS: tl.constexpr = min(K, max(2, TAKEN // LISTS))
    floor = _floor(heads, LISTS, K)
    count, column, deeper = 0, 0, 1
    while deeper > 0:
        at = number[:, None] * K + column + tl.arange(0, COLUMNS)[None, :]
        keys = tl.load(lists + at, mask=((heads >= floor) & (heads != EMPTY))[:, None], other=EMPTY)
        reaches = (keys >= floor) & (keys != EMPTY)
        keys, flat = keys.reshape(LISTS * COLUMNS), reaches.reshape(LISTS * COLUMNS).to(tl.int32)
        place = count + tl.cumsum(flat, axis=0) - 1
        tl.store(room + place, keys, mask=(flat > 0) & (place < ROOM))
        count += tl.sum(flat, axis=0)
        column += COLUMNS
        last = tl.arange(0, COLUMNS)[None, :] == COLUMNS - 1
        deeper = tl.sum(tl.sum((reaches & last & (column < K)).to(tl.int32), axis=1), axis=0)
    return count


@triton.jit
def _sorted(lists, heads, list_rows, LISTS: tl.constexpr, K: tl.constexpr):
    """The K best keys of lists [n, K] that have these heads, in descending order."""
    heads = leading(heads, K) if LISTS > K else heads
    SORTS: tl.constexpr = K < 64
    SOME: tl.constexpr = min(SORTED // K if SORTS else TOGETHER, K, LISTS)
    best = tl.full((K,), EMPTY, tl.int64)
    place = tl.arange(0, min(K, LISTS))
    for start in range(0, min(K, LISTS), SOME):
        # Number `start` and its followers among the heads, whose rows tell which list they lead.
        wanted = place[None, :] == start + tl.arange(0, SOME)[:, None]
        head = tl.max(tl.where(wanted, heads[None, :], EMPTY), axis=1)
        led = ((~head) & 0x7FFFFFFF) // list_rows
        at = led[:, None] * K + tl.arange(0, K)[None, :]
        keys = tl.load(lists + at, mask=(head != EMPTY)[:, None], other=EMPTY)
        if SORTS or SOME < TOGETHER:
            some = leading(keys.reshape(SOME * K), K)
        else:
            some = _halved(_halved(_halved(keys, 8, K), 4, K), 2, K).reshape(K)
        best = merged(best, some, K)
    return best


@triton.jit
def merge_kernel(
    lists, shorter, room, least, rows, n_lists, n_shorter, list_rows,
    LISTS: tl.constexpr, K: tl.constexpr, k: tl.constexpr, LAST: tl.constexpr, RANKS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    """The best K of up to LISTS lists. LAST: they are written as distances and rows, else as another list.

    room: int64 [programs, ROOM], for keys to be ranked.
    """
    if OVERLAPS:
        let_the_next_begin()
        wait_for_the_one_ahead()
    program = tl.program_id(0).to(tl.int64)
    query, part = program // n_shorter, program % n_shorter
    lists += query * n_lists * K
    shorter += program * K
    room += program * ROOM
    least += query * k
    rows += query * k
    first = part * LISTS
    if K > 1 and LISTS * K <= ROOM:
        at = first * K + tl.arange(0, LISTS * K)
        keys = tl.load(lists + at, mask=at < n_lists * K, other=EMPTY)
        _write(keys, _place(keys, LISTS * K), shorter, least, rows, K, k, LAST)
    else:
        number = first + tl.arange(0, LISTS)
        heads = tl.load(lists + number * K, mask=number < n_lists, other=EMPTY)
        crowded = True
        if RANKS:
            count = _collect(lists, heads, number, room, LISTS, K)
            crowded = count > ROOM
            if not crowded:
                tl.debug_barrier()
                place = tl.arange(0, ROOM)
                few = tl.load(room + place, mask=place < count, other=EMPTY)
                _write(few, _place(few, ROOM), shorter, least, rows, K, k, LAST)
        if crowded:
            best = leading(heads, 1) if K == 1 else _sorted(lists, heads, list_rows, LISTS, K)
            _write(best, tl.arange(0, K), shorter, least, rows, K, k, LAST)


def merge(lists: Tensor, list_rows: int, k: int) -> tuple[Tensor, Tensor]:
    """The first k of int64 lists [P, n, K], of which number i holds keys of the `list_rows` rows from i * list_rows on.

    Returns distances, fp32 [P, k], and rows, int64 [P, k].
    """
    p, n, keep = lists.shape
    least = lists.new_empty((p, k), dtype=torch.float32)
    rows = lists.new_empty((p, k))
    while p:
        most = SHARED if n > MERGED and 1 < keep <= RANKED else MERGED
        parts = triton.cdiv(n, most)
        shorter = lists.new_empty((p, parts, keep))
        _merge(lists, shorter, least, rows, list_rows, triton.next_power_of_2(min(n, most)))
        if parts == 1:
            break
        lists, n, list_rows = shorter, parts, list_rows * most
    return least, rows


def _merge(lists: Tensor, shorter: Tensor, least: Tensor, rows: Tensor, list_rows: int, size: int) -> None:
    p, n, keep = lists.shape
    parts, k = shorter.shape[1], least.shape[1]
    ranks = 1 < keep <= RANKED and size >= 2 * keep
    room = lists.new_empty((p * parts, ROOM.value)) if ranks else lists

    def configure(facts: DeviceFacts) -> tuple[int, dict[str, Any]]:
        constants = {"LISTS": size, "K": keep, "k": k, "LAST": parts == 1, "RANKS": ranks}
        warps = 8 if 1 < keep < 32 and size > SHARED else 4
        return p * parts, constants | {"OVERLAPS": facts.ptx >= SINCE, "num_warps": warps}

    arguments = (lists, shorter, room, least, rows, n, parts, list_rows)
    launch(merge_kernel, lists.get_device(), arguments, (p, size, keep, k), configure)
