"""Attention of one to eight new tokens of each text to the keys and values of a static cache.

The heads that share keys, and the new tokens, are the rows of one product, so every key and value is read once. What
lies outside of the span that a text sees (spans.py) is not read, and costs no turn of the loop. The tokens of a span
are cut evenly into parts, so that all of the GPU reads, however little of the cache is filled: each part keeps its sum,
its highest score and the sum of its weights, as in flash decoding (arXiv:2311.01282). The last part of a head to end
adds them up, or a second kernel does, always in the same order.

Bytes: the keys and values of the spans, once. Flops: 2 · rows · (size of keys + of values) a token and head of keys,
of which at 16 rows tensor cores have ten times as many as the memory has bytes.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from halfbyte.kernels.attention.fresh import Fresh
from halfbyte.kernels.attention.merge import added, attend_merge_kernel, cut, store_rows
from halfbyte.kernels.attention.plan import FEW_PARTS, MOST_NEW, MOST_PARTS, AttentionPlan, plan_for
from halfbyte.kernels.attention.put import put
from halfbyte.kernels.attention.rotate import angles, loaded, rotated
from halfbyte.kernels.attention.spans import COUNTERS, WIDTH, lowest, spans_of
from halfbyte.kernels.common.device import DeviceProperties, properties_of
from halfbyte.kernels.common.launch import launch
from halfbyte.kernels.common.overlap import SINCE, let_the_next_begin, wait_for_the_one_ahead

DTYPES = (torch.float16, torch.bfloat16)
MOST_QUERIES = 256  # heads that share keys, times new tokens
MOST_HEAD = 256  # the size of a head


@triton.jit
def _mask_of(mask, token, known, NEW: tl.constexpr, LOWEST: tl.constexpr):
    """Of one row for all, [1, tokens], or of each row: mask is a pointer or a column of them."""
    if NEW == 1:
        found = tl.load(mask + token, known, LOWEST)[None, :]
    else:
        found = tl.load(mask + token[None, :], known[None, :], LOWEST)
    return found


@triton.jit
def _fetch_lines(rows, token, end, SIZE: tl.constexpr, WIDTH: tl.constexpr):
    """Brings rows [token, SIZE] of 16 bits that are ahead of `end` to L2. WIDTH: SIZE, rounded up to a power of two."""
    line = tl.arange(0, WIDTH // 64 if WIDTH > 64 else 1)
    row = tl.maximum(tl.minimum(token, end - 1), 0)
    at = rows + (row * SIZE)[:, None] + tl.minimum(64 * line, SIZE - 1)[None, :]
    tl.inline_asm_elementwise("prefetch.global.L2 [$1]; // $0", "=r,l", [at], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def scored(product, SCALE: tl.constexpr, CAP: tl.constexpr):
    """Such that exp2 makes weights of it; CAP * tanh(score / CAP) where there is a cap."""
    LOG2E: tl.constexpr = 1.4426950408889634
    if CAP == 0:
        score = product * (SCALE * LOG2E)
    else:
        score = (CAP * LOG2E) - (2 * CAP * LOG2E) / (tl.exp2(product * (2 * SCALE * LOG2E / CAP)) + 1)
    return score


@triton.jit
def attend_kernel(
    query, keys, values, mask, spans, sinks, out, sums, statistics, new_keys, new_values, cos, sin, slot, query_norm,
    key_norm, tokens, heads, parts, query_text, query_head, query_new, key_text, key_head, value_text, value_head,
    mask_text, mask_new, new_key_text, new_key_head, new_value_text, new_value_head, cos_text,
    SCALE: tl.constexpr, CAP: tl.constexpr, GROUP: tl.constexpr, NEW: tl.constexpr, ROWS: tl.constexpr,
    HELD: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BLOCK: tl.constexpr,
    LEAST: tl.constexpr, MOST: tl.constexpr, CHUNK: tl.constexpr, MASK: tl.constexpr, LOWEST: tl.constexpr,
    SPANS: tl.constexpr, WIDTH: tl.constexpr, SINKS: tl.constexpr, SPLIT: tl.constexpr, MERGES: tl.constexpr,
    FRESH: tl.constexpr, ROTARY: tl.constexpr, QUERY_NORM: tl.constexpr, KEY_NORM: tl.constexpr,
    QUERY_EPSILON: tl.constexpr, KEY_EPSILON: tl.constexpr, OFFSET: tl.constexpr, HALVES: tl.constexpr,
    OVERLAPS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Program i: the i % parts-th part of the tokens of a text, for ROWS of the GROUP * NEW rows (heads first) of a
    head of keys, of which there are `heads` a text.

    MASK: 0 none, 1 bytes, 2 numbers to be added. Without SPANS a text sees all tokens. sums: [programs, HELD, E],
    statistics: [programs, 2, HELD], the highest scores and the weights. SPLIT: there are several parts. MERGES: they
    are added up here, counted by what lies behind the spans. FRESH: NEW is 1, and the new token's query, key and value
    are as in fresh.py (rotate.py says how); else what concerns them is not read. EARLY: only query and what is new are
    written by the kernel ahead.
    """
    LOG2E: tl.constexpr = 1.4426950408889634
    TILES: tl.constexpr = (GROUP * NEW + ROWS - 1) // ROWS
    # Up to 32 rows are shared by warps, which meet for every sum over tokens: so weights are summed place by place in a
    # block, and over its places at the end. From 64 rows on a warp has rows of its own (wgmma), and few registers left.
    PLACES: tl.constexpr = BLOCK if ROWS < 64 else 1
    part = tl.program_id(0) % parts
    which = tl.program_id(0) // parts
    owner = which // TILES
    text = (owner // heads).to(tl.int64)
    shared = owner % heads
    row = which % TILES * ROWS + tl.arange(0, ROWS)
    inside = row < GROUP * NEW
    head = shared * GROUP + row // NEW
    d = tl.arange(0, D)
    e = tl.arange(0, E)
    if OVERLAPS and not EARLY:
        wait_for_the_one_ahead()
        let_the_next_begin()
    first, end, begin, blocks, used = cut(spans, text, tokens, parts, WIDTH, BLOCK, LEAST, SPANS)
    if not SPLIT:
        used = 1
    keys += text * key_text + shared * key_head
    values += text * value_text + shared * value_head
    start = begin + part * blocks // used
    stop = begin + (part + 1) * blocks // used
    token = start * BLOCK + tl.arange(0, BLOCK)
    own = -1  # the new token's slot, which is not read
    if FRESH:
        own = tl.load(slot)
        c, s = angles(cos + text * cos_text, sin + text * cos_text, D, ROTARY, HALVES)
    if MASK:
        mask += text * mask_text
        if NEW > 1:
            mask += (row % NEW * mask_new)[:, None]
        ahead = _mask_of(mask, token, (token >= first) & (token < end) & (part < used), NEW, LOWEST)
    if EARLY:
        _fetch_lines(keys, token, end, KEY, D)
        _fetch_lines(values, token, end, VALUE, E)
        wait_for_the_one_ahead()
        let_the_next_begin()
    if SPLIT:  # noqa: SIM102 - a constant, and what is not
        if part >= used:
            return
    at = query + text * query_text + head * query_head + row % NEW * query_new
    if FRESH:
        one = tl.arange(0, 1)
        ours = (one == 0) & (part == 0)
        new_at = new_keys + text * new_key_text + shared * new_key_head + one
        new_key, new_other = loaded(new_at, ours, KEY, D, ROTARY)
        new_at = new_values + text * new_value_text + shared * new_value_head
        new_value = tl.load(new_at + e, (e < VALUE) & (part == 0), 0)
        x, y = loaded(at, inside, KEY, D, ROTARY)
        turned = rotated(x, y, c, s, query_norm, KEY, D, ROTARY, QUERY_NORM, QUERY_EPSILON, OFFSET)
        q = turned.to(keys.dtype.element_ty)
    else:
        q = tl.load(at[:, None] + d[None, :], inside[:, None] & (d < KEY)[None, :], 0)
    highest = tl.full((ROWS,), float("-inf"), tl.float32)
    weights = tl.zeros((ROWS, PLACES), tl.float32)
    if SINKS:  # of the first part: a score that has no value
        highest = tl.load(sinks + head, inside & (part == 0), float("-inf")).to(tl.float32) * LOG2E
        weights += tl.where((part == 0) & (tl.arange(0, PLACES) == 0), 1.0, 0.0)[None, :]
    total = tl.zeros((ROWS, E), tl.float32)
    for _ in range(start, stop):
        known = (token >= first) & (token < end)
        if FRESH:
            known = known & (token != own)
        k = tl.load(keys + token[None, :] * KEY + d[:, None], known[None, :] & (d < KEY)[:, None], 0)
        v = tl.load(values + token[:, None] * VALUE + e[None, :], known[:, None] & (e < VALUE)[None, :], 0)
        score = scored(tl.dot(q, k), SCALE, CAP)
        seen = known[None, :]
        token += BLOCK
        if MASK:
            seen = seen & (ahead > LOWEST)
            if MASK == 2:
                score += ahead.to(tl.float32) * LOG2E
            ahead = _mask_of(mask, token, (token >= first) & (token < end), NEW, LOWEST)  # the next block's
        score = tl.where(seen, score, float("-inf"))
        higher = tl.maximum(highest, tl.max(score, axis=1))
        base = tl.where(higher == float("-inf"), 0.0, higher)  # nothing seen yet
        weight = tl.exp2(score - base[:, None])
        shrunk = tl.exp2(highest - base)
        weights = weights * shrunk[:, None] + (weight if PLACES > 1 else tl.sum(weight, axis=1)[:, None])
        total = tl.dot(weight.to(v.dtype), v, total * shrunk[:, None])
        highest = higher
    sum_of_weights = tl.sum(weights, axis=1)
    if FRESH:  # noqa: SIM102 - a constant, and what is not
        if part == 0:
            own_key = rotated(new_key, new_other, c, s, key_norm, KEY, D, ROTARY, KEY_NORM, KEY_EPSILON, OFFSET)
            key = own_key.to(keys.dtype.element_ty)
            if which % TILES == 0:
                tl.store(keys + own * KEY + d[None, :], key, (d < KEY)[None, :])
                tl.store(values + own * VALUE + e, new_value, e < VALUE)
            score = scored(tl.sum(q.to(tl.float32) * key.to(tl.float32), axis=1), SCALE, CAP)
            if MASK:
                numbers = tl.load(mask + own)
                if MASK == 2:
                    score += numbers.to(tl.float32) * LOG2E
                score = tl.where(numbers > LOWEST, score, float("-inf"))
            higher = tl.maximum(highest, score)
            base = tl.where(higher == float("-inf"), 0.0, higher)
            weight = tl.exp2(score - base)
            shrunk = tl.exp2(highest - base)
            sum_of_weights = sum_of_weights * shrunk + weight
            total = total * shrunk[:, None] + weight[:, None] * new_value.to(tl.float32)[None, :]
            highest = higher
    out += text * heads * GROUP * NEW * VALUE  # of this text: [new, heads, VALUE]
    if used == 1:
        alone = total / tl.maximum(sum_of_weights, 1.0)[:, None]  # the highest score's weight alone is 1
        store_rows(out, alone, row, inside, shared, heads, GROUP, NEW, VALUE, E)
    else:
        held = tl.arange(0, ROWS)  # HELD of them are inside, at most
        place = (which * parts + part).to(tl.int64)
        tl.store(sums + (place * HELD + held[:, None]) * E + e[None, :], total, inside[:, None])
        tl.store(statistics + place * 2 * HELD + held, highest, inside)
        tl.store(statistics + place * 2 * HELD + HELD + held, sum_of_weights, inside)
        if MERGES:
            tl.debug_barrier()  # every warp has stored
            counter = spans + text * WIDTH + 2 + shared * TILES + which % TILES
            if tl.atomic_add(counter, 1, sem="acq_rel") == used - 1:
                few = tl.arange(0, HELD)
                of = which % TILES * ROWS + few
                result = added(sums, statistics, which * parts, used, few, of < GROUP * NEW, HELD, E, MOST, CHUNK)
                store_rows(out, result, of, of < GROUP * NEW, shared, heads, GROUP, NEW, VALUE, E)
                tl.store(counter, 0)


def _described(fresh: Fresh | None, query: Tensor) -> tuple[dict[str, Any], tuple[Tensor, ...], tuple[int, ...]]:
    """What the kernel takes of a new token: constants, tensors and strides."""
    if fresh is None:
        names = ("ROTARY", "QUERY_NORM", "KEY_NORM", "QUERY_EPSILON", "KEY_EPSILON", "OFFSET", "HALVES")
        return {"FRESH": False, **dict.fromkeys(names, 0)}, (query,) * 7, (0,) * 5
    strides = (*fresh.keys.stride()[:2], *fresh.values.stride()[:2], fresh.cos_text)
    return {"FRESH": True, **fresh.constants}, fresh.tensors(query), strides


def supports(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, sinks: Tensor | None = None) -> bool:
    """Whether `attend` is for them: few new tokens of each text, on a GPU that computes in their dtype."""
    if {query.dim(), keys.dim(), values.dim()} != {4} or query.dtype not in DTYPES:
        return False
    texts, heads, new, size = query.shape
    shared, tokens = max(1, keys.shape[1]), keys.shape[2]
    others = [tensor.device for tensor in (keys, values, mask, sinks) if tensor is not None]
    return (
        {keys.dtype, values.dtype} == {query.dtype}
        and {*others} == {query.device}
        and _computes(properties_of(query.get_device()), query.dtype)
        and keys.shape[:3] == values.shape[:3]
        and keys.shape[0] == texts
        and keys.shape[3] == size <= MOST_HEAD
        and 0 < values.shape[3] <= MOST_HEAD
        and 0 < new <= MOST_NEW
        and heads % shared == 0
        and 0 < heads * new <= MOST_QUERIES * shared
        and texts * tokens > 0
        and tokens * MOST_HEAD < 1 << 31
        and all(tensor.stride()[2:] == (tensor.shape[3], 1) for tensor in (keys, values))
        and query.stride(3) == 1
        and (mask is None or (mask.dtype in (torch.bool, query.dtype) and _is_of(mask, texts, new, tokens)))
        and (sinks is None or (sinks.shape == (heads,) and sinks.stride(0) == 1))
    )


def _computes(properties: DeviceProperties, dtype: torch.dtype) -> bool:
    return properties.kind != "cuda" or properties.capability >= (80 if dtype is torch.bfloat16 else 75)


def _is_of(mask: Tensor, texts: int, new: int, tokens: int) -> bool:
    shape = mask.shape
    return len(shape) == 4 and shape[0] in (1, texts) and shape[1:] == (1, new, tokens) and mask.stride(3) == 1


def attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    scale: float,
    *,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    spans: Tensor | None = None,
    fresh: Fresh | None = None,
    settled: bool = False,
    plan: AttentionPlan | None = None,
) -> Tensor:
    """As `attend` in attend.py, by this kernel, whatever the GPU. Of several fresh tokens a launch of its own puts them
    into the cache first. plan: another than the one that is found.
    """
    texts, heads, new, size = query.shape
    shared, tokens, value = keys.shape[1], keys.shape[2], values.shape[3]
    index, group = query.get_device(), heads // shared
    if fresh is not None and new > 1:
        query, fresh, settled = put(query, keys, values, fresh), None, False
    plan = plan or plan_for(properties_of(index), texts * shared, tokens, max(size, value), group * new)
    if spans is None and mask is not None:
        spans = spans_of(mask, texts)
    tiles, parts = plan.tiles(group * new), plan.parts
    held, e = min(plan.rows, triton.next_power_of_2(group * new)), max(16, triton.next_power_of_2(value))
    split = parts > 1
    merges = split and plan.one_launch and spans is not None and shared * tiles <= COUNTERS
    out = query.new_empty((texts, new, heads, value))
    sums = statistics = out
    if split:
        places = texts * shared * tiles * parts * held
        memory = torch.empty(places * (e + 2), dtype=torch.float32, device=out.device)
        sums, statistics = memory[: places * e], memory[places * e :]
    most = FEW_PARTS if parts <= FEW_PARTS else MOST_PARTS  # two compiled kernels, not one for each number

    def constants_of(properties: DeviceProperties, rows: int, warps: int) -> dict[str, Any]:
        """rows: that one program adds up."""
        return {
            "GROUP": group, "NEW": new, "ROWS": plan.rows, "HELD": held, "VALUE": value, "E": e, "BLOCK": plan.block,
            "LEAST": plan.least, "MOST": most, "CHUNK": max(1, min(most, 2048 * warps // (rows * e))),
            "SPANS": spans is not None, "WIDTH": WIDTH, "OVERLAPS": properties.ptx >= SINCE, "num_warps": warps,
        }  # fmt: skip

    def configure(properties: DeviceProperties) -> tuple[int, dict[str, Any]]:
        constants = constants_of(properties, held, plan.warps) | {
            "SCALE": scale, "CAP": softcap or 0, "KEY": size, "D": max(16, triton.next_power_of_2(size)),
            "MASK": 0 if mask is None else 1 if mask.dtype is torch.bool else 2,
            "LOWEST": 0 if mask is None else lowest(mask), "SINKS": sinks is not None, "SPLIT": split,
            "MERGES": merges, "num_stages": plan.stages, "EARLY": settled and properties.ptx >= SINCE, **of_fresh,
        }  # fmt: skip
        return texts * shared * tiles * parts, constants

    def configure_merge(properties: DeviceProperties) -> tuple[int, dict[str, Any]]:
        return texts * shared * tiles * held, constants_of(properties, 1, 4)

    ahead = query if spans is None else spans
    seen = query if mask is None else mask.view(torch.uint8) if mask.dtype is torch.bool else mask
    mask_text = 0 if mask is None or len(mask) == 1 else mask.stride(0)
    mask_new = 0 if mask is None or new == 1 else mask.stride(2)
    of_fresh, new_tensors, new_strides = _described(fresh, query)
    arguments = (
        query, keys, values, seen, ahead, query if sinks is None else sinks, out, sums, statistics, *new_tensors,
        tokens, shared, parts, query.stride(0), query.stride(1), 0 if new == 1 else query.stride(2),
        *keys.stride()[:2], *values.stride()[:2], mask_text, mask_new, *new_strides,
    )  # fmt: skip
    kinds = query.dtype, None if mask is None else mask.dtype, None if sinks is None else sinks.dtype, spans is None
    key = (kinds, scale, softcap, texts, group, new, size, value, plan, merges, settled, *of_fresh.values())
    launch(attend_kernel, index, arguments, key, configure)
    if split and not merges:
        arguments = (ahead, out, sums, statistics, tokens, shared, parts)
        launch(attend_merge_kernel, index, arguments, key, configure_merge)
    return out
