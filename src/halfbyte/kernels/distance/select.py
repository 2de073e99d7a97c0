"""The k nearest of many on a GPU, picked from their distances, or from keys (keys.py), without sorting them.

A program takes thousands. In 2 K groups of them, each has a best one; the K-th best of these is a floor that at least K
reach. In any order, about 1.4 K do. They are brought together as keys and ranked, each one against each other, which
leaves a list of K keys in order; what programs leave is picked from in the same way. Where there is no room for all
that reach the floor (many are equal, or rows come in the groups' own rhythm), the best is taken K times.
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
from halfbyte.kernels.distance.keys import EMPTY, key_of, leading

TAKEN = {torch.float32: 8192, torch.int64: 2048}  # distances, or keys, by one program
FEW = tl.constexpr(64)  # keys that are held against each other in registers; more are from memory
AT_ONCE = tl.constexpr(32)  # of those
NAN = tl.constexpr(0x7FFFFFFE)  # bits that stand for any NaN where only order counts
NOTHING = tl.constexpr(-(2**31))  # behind the order of every distance


@triton.jit
def _places(order, N: tl.constexpr):
    """The place of each of N in descending order; equal ones keep theirs."""
    i, j = tl.arange(0, N)[:, None], tl.arange(0, N)[None, :]
    ahead = (order[None, :] > order[:, None]) | ((order[None, :] == order[:, None]) & (j < i))
    return tl.sum(ahead.to(tl.int32), axis=1)


@triton.jit
def _floor(order, nothing: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    """What K of N reach, if there are so many."""
    if N < 2 * K:
        floor = tl.min(order, axis=0)
    else:
        # Which of them make a group does not matter, so none has to move to another thread for it.
        peaks = tl.max(tl.reshape(order, (N // (2 * K), 2 * K), can_reorder=True), axis=0)
        if 2 * K > FEW:
            floor = tl.min(leading(peaks, K), axis=0)
        else:
            floor = tl.max(tl.where(_places(peaks, 2 * K) == K - 1, peaks, nothing), axis=0)
    return floor


@triton.jit
def _write(key, place, shorter, least, rows, K: tl.constexpr, k: tl.constexpr, LAST: tl.constexpr):
    """Keys at their places: k as distances and rows if nothing is picked from them again, else a list of K."""
    if LAST:
        key = ~key
        tl.store(least + place, (key >> 32).to(tl.int32).to(tl.float32, bitcast=True), mask=place < k)
        tl.store(rows + place, key & 0x7FFFFFFF, mask=place < k)
    else:
        tl.store(shorter + place, key, mask=place < K)


@triton.jit
def select_kernel(
    source, shorter, room, least, rows, n, n_parts, stride,
    N: tl.constexpr, K: tl.constexpr, k: tl.constexpr, ROOM: tl.constexpr, KEYS: tl.constexpr, LAST: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    """source: [P, n], KEYS or fp32 distances. shorter: int64 [P, n_parts, K], or, if LAST, least, fp32, and rows,
    int64, [P, k]. room: int64 [programs, ROOM]."""
    if OVERLAPS:
        let_the_next_begin()
        wait_for_the_one_ahead()
    program = tl.program_id(0).to(tl.int64)
    query, part = program // n_parts, program % n_parts
    shorter += program * K
    room += program * ROOM
    least += query * k
    rows += query * k
    number = part * N + tl.arange(0, N)
    inside = number < n
    nothing: tl.constexpr = EMPTY if KEYS else NOTHING
    if KEYS:
        keys = tl.load(source + query * stride + number, mask=inside, other=EMPTY)
        order = keys
    else:
        away = tl.load(source + query * stride + number, mask=inside, other=0.0)
        keys = tl.where(inside, key_of(away, number), EMPTY)
        bits = away.to(tl.int32, bitcast=True) & 0x7FFFFFFF
        order = tl.where(inside, ~tl.minimum(bits, NAN), NOTHING)  # half the work of keys

    if K > 1 and N <= FEW:
        _write(keys, _places(keys, N), shorter, least, rows, K, k, LAST)
    else:
        one_by_one = True
        if K > 1:
            reaches = ((order >= _floor(order, nothing, N, K)) & (order != nothing)).to(tl.int32)
            count = tl.sum(reaches, axis=0)
            one_by_one = count > ROOM
            if not one_by_one:
                tl.store(room + tl.cumsum(reaches, axis=0) - 1, keys, mask=reaches > 0)
                tl.debug_barrier()
                index = tl.arange(0, ROOM)
                mine = tl.load(room + index, mask=index < count, other=EMPTY)
                ahead = tl.zeros((ROOM,), tl.int32)
                for start in range(0, count, AT_ONCE):
                    other = start + tl.arange(0, AT_ONCE)
                    theirs = tl.load(room + other, mask=other < count, other=EMPTY)
                    ahead += tl.sum((theirs[None, :] > mine[:, None]).to(tl.int32), axis=1)
                _write(mine, tl.where(index < count, ahead, index), shorter, least, rows, K, k, LAST)
        if one_by_one:
            for place in range(K):
                best = tl.max(keys, axis=0)
                _write(best, place, shorter, least, rows, K, k, LAST)
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
        shorter = rows.new_empty((p, parts * keep))
        _select(source, shorter, least, rows, parts, keep)
        if parts == 1:
            break
        source, n = shorter, parts * keep
    return least, rows


def _select(source: Tensor, shorter: Tensor, least: Tensor, rows: Tensor, parts: int, keep: int) -> None:
    (p, n), k = source.shape, least.shape[1]
    size, space = triton.next_power_of_2(min(n, TAKEN[source.dtype])), max(FEW.value, 4 * keep)
    room = rows.new_empty((p * parts, space))

    def configure(facts: DeviceFacts) -> tuple[int, dict[str, Any]]:
        constants = {"N": size, "K": keep, "k": k, "ROOM": space, "KEYS": source.dtype == torch.int64}
        constants |= {"LAST": parts == 1, "OVERLAPS": facts.ptx >= SINCE}
        return p * parts, constants | {"num_warps": 16 if size > 2048 else 8 if size > 512 else 4}

    arguments = (source, shorter, room, least, rows, n, parts, source.stride(0))
    launch(select_kernel, rows.get_device(), arguments, (p, size, keep, k, source.dtype), configure)
