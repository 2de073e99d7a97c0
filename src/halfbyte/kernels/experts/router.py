"""What a router does with its scores, in one launch where torch takes half a dozen: softmax, the k best, their weights.

Bytes: the scores of a token, a few hundred, so that a launch is all of the time. Ties go to the expert of the lower
number; torch says nothing of them.
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

MOST_EXPERTS, MOST_K = 1024, 32


@triton.jit
def route_kernel(
    scores, ids, weights, experts,
    K: tl.constexpr, PADDED_K: tl.constexpr, D: tl.constexpr, BEFORE: tl.constexpr, NORMALIZES: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Program i: token i. BEFORE: softmax over all experts, and NORMALIZES: then over the sum of the best; else softmax
    over the best."""
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, D)
    place = tl.arange(0, PADDED_K)
    if OVERLAPS:
        wait_for_the_one_ahead()
        let_the_next_begin()
    left = tl.load(scores + token * experts + expert, expert < experts, float("-inf")).to(tl.float32)
    if BEFORE:
        powers = tl.exp(left - tl.max(left, axis=0))
        left = tl.where(expert < experts, powers / tl.sum(powers, axis=0), float("-inf"))
    best = tl.full((PADDED_K,), float("-inf"), tl.float32)
    chosen = tl.zeros((PADDED_K,), tl.int32)
    for turn in tl.static_range(K):
        value, at = tl.max(left, axis=0, return_indices=True)
        best = tl.where(place == turn, value, best)
        chosen = tl.where(place == turn, at, chosen)
        left = tl.where(expert == at, float("-inf"), left)
    inside = place < K
    if not BEFORE:
        best = tl.exp(best - tl.max(best, axis=0))
    share = tl.where(inside, best, 0.0)
    if NORMALIZES:
        share = share / tl.sum(share, axis=0)
    tl.store(ids + token * K + place, chosen.to(tl.int64), inside)
    tl.store(weights + token * K + place, share, inside)


def supports(scores: Tensor, k: int) -> bool:
    """Whether `route` is for scores [T, E]."""
    experts = scores.shape[-1]
    return scores.dim() == 2 and len(scores) > 0 and 0 < k <= min(experts, MOST_K) and experts <= MOST_EXPERTS


def route(scores: Tensor, k: int, before: bool, normalizes: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """As in router_reference.py, of contiguous scores on the current device."""
    tokens, experts = scores.shape
    ids = torch.empty((tokens, k), dtype=torch.int64, device=scores.device)
    weights = torch.empty((tokens, k), dtype=dtype, device=scores.device)
    normalizes = normalizes or not before
    d = max(16, triton.next_power_of_2(experts))

    def configure(properties: DeviceProperties) -> tuple[int, dict[str, Any]]:
        constants = {"K": k, "PADDED_K": triton.next_power_of_2(k), "D": d, "BEFORE": before, "NORMALIZES": normalizes}
        return tokens, constants | {"OVERLAPS": properties.ptx >= SINCE, "num_warps": 1 if d <= 256 else 4}

    key = (scores.dtype, dtype, tokens, k, before, normalizes)
    launch(route_kernel, scores.get_device(), (scores, ids, weights, experts), key, configure)
    return ids, weights
