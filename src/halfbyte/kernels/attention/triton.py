"""Attention of one new token to the keys and values of a static cache.

The heads that share keys are the rows of one product, so every key and value is read once, and those that the mask
forbids are not read at all. Where texts and heads are fewer than the GPU has room for, the tokens are cut too: each
part keeps its sum, its highest score and the sum of its weights, as in flash decoding (arXiv:2311.01282), and a second
kernel adds the parts up, always in the same order.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from halfbyte.kernels.attention.plan import AttentionPlan, plan_for
from halfbyte.kernels.common.device import DeviceProperties, properties_of
from halfbyte.kernels.common.launch import launch
from halfbyte.kernels.common.overlap import SINCE, let_the_next_begin, wait_for_the_one_ahead

DTYPES = (torch.float16, torch.bfloat16)
MOST_GROUP = 32  # heads that share keys
MOST_HEAD = 256  # the size of a head
LEAST_ROWS = 16  # of a product on tensor cores


@triton.jit
def attend_kernel(
    query, keys, values, mask, out, sums, tokens, heads, query_text, query_head, mask_text,
    SCALE: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr,
    D: tl.constexpr, E: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, PARTS: tl.constexpr,
    MASKED: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Program i: the GROUP heads of keys i / PARTS, of which there are `heads` a text, and the i % PARTS-th BLOCKS
    blocks of tokens. out: sums / weights where PARTS is 1. Else sums [heads of query, PARTS, E + 2]: the sum, the
    highest score and the weights."""
    which = tl.program_id(0) // PARTS
    part = tl.program_id(0) % PARTS
    text = which // heads
    row = tl.arange(0, ROWS)[:, None]
    d = tl.arange(0, D)
    e = tl.arange(0, E)
    if OVERLAPS:
        wait_for_the_one_ahead()
        let_the_next_begin()
    head = which % heads * GROUP + row
    q = tl.load(query + text * query_text + head * query_head + d[None, :], (row < GROUP) & (d < KEY)[None, :], 0)
    first = which.to(tl.int64) * tokens
    highest = tl.full((ROWS,), float("-inf"), tl.float32)
    weights = tl.zeros((ROWS,), tl.float32)
    total = tl.zeros((ROWS, E), tl.float32)
    for block in range(BLOCKS):
        token = (part * BLOCKS + block) * BLOCK + tl.arange(0, BLOCK)
        seen = token < tokens
        if MASKED:
            seen = tl.load(mask + text.to(tl.int64) * mask_text + token, seen, 0) != 0
        at = first + token
        k = tl.load(keys + at[None, :] * KEY + d[:, None], seen[None, :] & (d < KEY)[:, None], 0)
        score = tl.where(seen[None, :], tl.dot(q, k) * (SCALE * 1.4426950408889634), float("-inf"))  # log2(e)
        v = tl.load(values + at[:, None] * VALUE + e[None, :], seen[:, None] & (e < VALUE)[None, :], 0)
        higher = tl.maximum(highest, tl.max(score, axis=1))
        base = tl.where(higher == float("-inf"), 0.0, higher)  # nothing seen yet
        weight = tl.exp2(score - base[:, None])
        shrunk = tl.exp2(highest - base)
        weights = weights * shrunk + tl.sum(weight, axis=1)
        total = tl.dot(weight.to(v.dtype), v, total * shrunk[:, None])
        highest = higher
    to = which * GROUP + row
    if PARTS == 1:
        result = total / tl.maximum(weights, 1.0)[:, None]  # the highest score's weight alone is 1
        tl.store(out + to * VALUE + e[None, :], result, (row < GROUP) & (e < VALUE)[None, :])
    else:
        at = sums + (to * PARTS + part) * (E + 2)
        tl.store(at + e[None, :], total, row < GROUP)
        tl.store(at + E, highest[:, None], row < GROUP)
        tl.store(at + E + 1, weights[:, None], row < GROUP)


@triton.jit
def attend_parts_kernel(
    out, sums, VALUE: tl.constexpr, E: tl.constexpr, PARTS: tl.constexpr, MOST: tl.constexpr, OVERLAPS: tl.constexpr
):
    """Program i: head i of out. MOST: the power of two from PARTS on."""
    part = tl.arange(0, MOST)
    e = tl.arange(0, E)
    if OVERLAPS:
        wait_for_the_one_ahead()
        let_the_next_begin()
    at = sums + (tl.program_id(0) * PARTS + part) * (E + 2)
    highest = tl.load(at + E, part < PARTS, float("-inf"))
    weights = tl.load(at + E + 1, part < PARTS, 0)
    total = tl.load(at[:, None] + e[None, :], (part < PARTS)[:, None], 0)
    top = tl.max(highest, axis=0)
    factor = tl.exp2(highest - tl.where(top == float("-inf"), 0.0, top))
    result = tl.sum(total * factor[:, None], axis=0) / tl.maximum(tl.sum(weights * factor, axis=0), 1.0)
    tl.store(out + tl.program_id(0) * VALUE + e, result, e < VALUE)


def takes(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> bool:
    """Whether `attend` is for them: one token of each text, on a GPU that computes in their dtype."""
    if {query.dim(), keys.dim(), values.dim()} != {4} or query.shape[2] != 1 or query.dtype not in DTYPES:
        return False
    texts, heads, _, size = query.shape
    shared = max(1, keys.shape[1])
    return (
        {keys.dtype, values.dtype} == {query.dtype}
        and {keys.device, values.device, query.device if mask is None else mask.device} == {query.device}
        and _computes(properties_of(query.get_device()), query.dtype)
        and keys.shape[:3] == values.shape[:3]
        and keys.shape[0] == texts
        and keys.shape[3] == size <= MOST_HEAD
        and 0 < values.shape[3] <= MOST_HEAD
        and heads % shared == 0
        and 0 < heads <= MOST_GROUP * shared
        and texts * keys.shape[2] > 0
        and keys.is_contiguous()
        and values.is_contiguous()
        and query.stride(3) == 1
        and (mask is None or (mask.dtype is torch.bool and _is_of(mask, texts, keys.shape[2])))
    )


def _computes(properties: DeviceProperties, dtype: torch.dtype) -> bool:
    return properties.kind != "cuda" or properties.capability >= (80 if dtype is torch.bfloat16 else 75)


def _is_of(mask: Tensor, texts: int, tokens: int) -> bool:
    shape = mask.shape
    return len(shape) == 4 and shape[0] in (1, texts) and shape[1:] == (1, 1, tokens) and mask.stride(3) == 1


def attend(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float, plan: AttentionPlan | None = None
) -> Tensor:
    """softmax(query keysᵀ · scale) values, where the mask is true, in fp32 but for products of 16-bit numbers.

    query: [texts, heads, 1, size]. keys, values: [texts, heads that share keys, tokens, size]. mask: bool, [texts or 1,
    1, 1, tokens]. Such that `takes` says yes, on the current device. Returns [texts, 1, heads, size of values]; zeros
    for a text that sees no token.
    """
    texts, heads, _, size = query.shape
    shared, tokens, value = keys.shape[1], keys.shape[2], values.shape[3]
    index, group = query.get_device(), heads // shared
    plan = plan or plan_for(properties_of(index), texts * shared, tokens, max(size, value))
    d, e = max(16, triton.next_power_of_2(size)), max(16, triton.next_power_of_2(value))
    out = query.new_empty((texts, 1, heads, value))
    parts = plan.parts
    sums = out if parts == 1 else torch.empty(texts * heads * parts * (e + 2), dtype=torch.float32, device=out.device)

    def configure(properties: DeviceProperties) -> tuple[int, dict[str, Any]]:
        constants = {
            "SCALE": scale, "GROUP": group, "ROWS": max(LEAST_ROWS, triton.next_power_of_2(group)), "KEY": size,
            "VALUE": value, "D": d, "E": e, "BLOCK": plan.block, "BLOCKS": plan.blocks, "PARTS": parts,
            "MASKED": mask is not None, "OVERLAPS": properties.ptx >= SINCE,
        }  # fmt: skip
        return texts * shared * parts, constants | {"num_warps": plan.warps, "num_stages": plan.stages}

    seen = query if mask is None else mask.view(torch.uint8)
    mask_text = 0 if mask is None or len(mask) == 1 else mask.stride(0)
    arguments = (query, keys, values, seen, out, sums, tokens, shared, query.stride(0), query.stride(1), mask_text)
    key = (query.dtype, scale, group, size, value, plan, mask is None, texts * shared)
    launch(attend_kernel, index, arguments, key, configure)
    if parts > 1:

        def add_up(properties: DeviceProperties) -> tuple[int, dict[str, Any]]:
            most = triton.next_power_of_2(parts)
            constants = {"VALUE": value, "E": e, "PARTS": parts, "MOST": most, "OVERLAPS": properties.ptx >= SINCE}
            return texts * heads, constants | {"num_warps": 4}

        launch(attend_parts_kernel, index, (out, sums), (query.dtype, value, e, parts, texts * heads), add_up)
    return out
