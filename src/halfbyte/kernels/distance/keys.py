"""Lists of the nearest rows on a GPU: 64-bit keys, the best of many, and lists merged into one.

A key is the complement of (bits of the distance) << 32 | row, so the largest key is the nearest, the lower row of equal
ones, and NaN comes last. Distances are not negative: their bits are in their order. Merging lists of K needs no more
than the K lists with the best heads: any key of another list is behind K heads.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from halfbyte.kernels.common.device import DeviceFacts
from halfbyte.kernels.common.launch import launch
from halfbyte.kernels.distance.plan import LISTS

EMPTY = tl.constexpr(-(2**63))  # behind every key
SORTED = tl.constexpr(256)  # keys that are sorted at once
TOGETHER = tl.constexpr(8)  # lists that are merged two by two at once
MERGED = LISTS  # that one program merges


@triton.jit
def key_of(distance, row):
    bits = distance.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    return ~((bits.to(tl.int64) << 32) | row.to(tl.int64))


@triton.jit
def leading(keys, K: tl.constexpr):
    """The K largest of keys [n], in descending order; n and K are powers of two."""
    return tl.max(keys.reshape(1, keys.shape[0]), axis=1) if K == 1 else tl.topk(keys, K)


@triton.jit
def merged(best, some, K: tl.constexpr):
    """The K largest of two lists of K, or of pairs of lists, all in descending order along the last axis."""
    return tl.bitonic_merge(tl.maximum(best, tl.flip(some, len(some.shape) - 1)), descending=True)


@triton.jit
def _halved(lists, N: tl.constexpr, K: tl.constexpr):
    """N // 2 lists of K of lists [N, K]."""
    some, others = tl.split(tl.permute(lists.reshape(N // 2, 2, K), (0, 2, 1)))
    return merged(some, others, K)


@triton.jit
def merge_kernel(
    lists, shorter, least, rows, n_lists, n_shorter, list_rows,
    LISTS: tl.constexpr, K: tl.constexpr, k: tl.constexpr, LAST: tl.constexpr,
):  # fmt: skip
    """The best K of up to LISTS lists. LAST: they are written as distances and rows, else as another list."""
    program = tl.program_id(0).to(tl.int64)
    query, part = program // n_shorter, program % n_shorter
    first = part * LISTS
    lists += query * n_lists * K
    number = first + tl.arange(0, LISTS)
    heads = tl.load(lists + number * K, mask=number < n_lists, other=EMPTY)
    heads = leading(heads, K) if LISTS > K else heads
    if K == 1:
        best = heads
    else:
        SORTS: tl.constexpr = K < 64
        AT_ONCE: tl.constexpr = min(SORTED // K if SORTS else TOGETHER, K, LISTS)
        best = tl.full((K,), EMPTY, tl.int64)
        place = tl.arange(0, min(K, LISTS))
        for start in range(0, min(K, LISTS), AT_ONCE):
            # Number `start` and its followers among the heads, whose rows tell which list they lead.
            wanted = place[None, :] == start + tl.arange(0, AT_ONCE)[:, None]
            head = tl.max(tl.where(wanted, heads[None, :], EMPTY), axis=1)
            led = ((~head) & 0x7FFFFFFF) // list_rows
            at = led[:, None] * K + tl.arange(0, K)[None, :]
            keys = tl.load(lists + at, mask=(head != EMPTY)[:, None], other=EMPTY)
            if SORTS or AT_ONCE < TOGETHER:
                some = leading(keys.reshape(AT_ONCE * K), K)
            else:
                some = _halved(_halved(_halved(keys, 8, K), 4, K), 2, K).reshape(K)
            best = merged(best, some, K)
    place = tl.arange(0, K)
    if LAST:
        key = ~best
        tl.store(least + query * k + place, (key >> 32).to(tl.int32).to(tl.float32, bitcast=True), mask=place < k)
        tl.store(rows + query * k + place, key & 0x7FFFFFFF, mask=place < k)
    else:
        tl.store(shorter + program * K + place, best)


def merge(lists: Tensor, list_rows: int, k: int) -> tuple[Tensor, Tensor]:
    """The first k of int64 lists [P, n, K], of which number i holds keys of the `list_rows` rows from i * list_rows on.

    Returns distances, fp32 [P, k], and rows, int64 [P, k].
    """
    p, n, keep = lists.shape
    least = lists.new_empty((p, k), dtype=torch.float32)
    rows = lists.new_empty((p, k))
    while p:
        parts = triton.cdiv(n, MERGED)
        shorter = lists.new_empty((p, parts, keep))
        size = triton.next_power_of_2(min(n, MERGED))
        _merge(lists, shorter, least, rows, p, n, parts, list_rows, size, keep, k)
        if parts == 1:
            break
        lists, n, list_rows = shorter, parts, list_rows * MERGED
    return least, rows


def _merge(
    lists: Tensor, shorter: Tensor, least: Tensor, rows: Tensor,
    p: int, n: int, parts: int, list_rows: int, size: int, keep: int, k: int,
) -> None:  # fmt: skip
    def configure(facts: DeviceFacts) -> tuple[int, dict[str, Any]]:
        constants = {"LISTS": size, "K": keep, "k": k, "LAST": parts == 1}
        return p * parts, constants | {"num_warps": 8 if 1 < keep < 32 else 4}

    arguments = (lists, shorter, least, rows, n, parts, list_rows)
    launch(merge_kernel, lists.get_device(), arguments, (p, size, keep, k), configure)
