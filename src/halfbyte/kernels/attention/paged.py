"""Attention of the new tokens of a batch of requests to their keys and values in the pages of one cache.

The new tokens of all requests stand one behind the other, one of each request while it decodes, many of a prompt. A
tile is a few tokens of one request; they and the heads that share keys are the rows of one product. A program finds its
tile's request from where the requests' tokens end, so the number of programs depends on nothing that only the device
knows, and a captured launch serves every batch of its size. Cached tokens are cut into parts as in triton.py, and the
parts are added up in order by a second kernel. The new tokens' own keys and values come from their projections.

Bytes: a request's cached keys and values once a tile, of which a decoding request has one; 4 or 8 of places a token,
or 4 a page. Flops: 4 · heads · size a pair of tokens that see each other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from halfbyte.kernels.attention.merge import added
from halfbyte.kernels.attention.pages import Pages, PagesPlan, plan_pages
from halfbyte.kernels.attention.plan import FEW_PARTS, MOST_PARTS
from halfbyte.kernels.attention.triton import scored
from halfbyte.kernels.common.device import DeviceProperties, properties_of
from halfbyte.kernels.common.launch import launch
from halfbyte.kernels.common.overlap import SINCE, let_the_next_begin, wait_for_the_one_ahead

MOST_BYTES = 512  # of a head
MOST_GROUP = 256  # heads that share keys
MOST_REQUESTS = 1 << 14  # every program looks at where all of them end
FEW_REQUESTS, SOME_REQUESTS = 64, 1024


@triton.jit
def _found(
    tile, query_ends, key_ends, requests, parts, NEW: tl.constexpr, WINDOW: tl.constexpr, BLOCK: tl.constexpr,
    LEAST: tl.constexpr, REQUESTS: tl.constexpr, ALONE: tl.constexpr,
):  # fmt: skip
    """Of a tile: its request, where that one's new tokens and its places begin, how many new and cached tokens it has,
    the tile's first new token, the first block of cached tokens, the number of blocks, and of parts that have one; no
    part where there is no such tile."""
    if ALONE:
        request = tile
    else:  # requests before it have e // NEW + 1 tiles at least, e of all their tokens
        r = tl.arange(0, REQUESTS)
        ends = tl.load(query_ends + 1 + r, r < requests, 0)
        request = tl.sum(((ends // NEW + r < tile) & (r < requests)).to(tl.int32), axis=0)
    there = request < requests
    request = tl.minimum(request, requests - 1)
    begin = tl.load(query_ends + request)
    fresh = tl.load(query_ends + request + 1) - begin
    place = tl.load(key_ends + request)
    cached = tl.load(key_ends + request + 1) - place - fresh
    first = 0 * tile
    if not ALONE:
        first = (tile - (begin // NEW + request)) * NEW
    block = 0 * tile
    if WINDOW:
        block = tl.maximum(cached + first - WINDOW + 1, 0) // BLOCK
    blocks = tl.maximum((cached + BLOCK - 1) // BLOCK - block, 0)
    used = tl.minimum(parts, tl.maximum((blocks + LEAST - 1) // LEAST, 1))
    return request, begin, place, fresh, cached, first, block, blocks, tl.where(there & (first < fresh), used, 0)


@triton.jit
def _row_of(places, token, known, PAGE: tl.constexpr):
    """Where a request's tokens lie in the cache."""
    if PAGE:
        row = tl.load(places + token // PAGE, known, 0).to(tl.int64) * PAGE + token % PAGE
    else:
        row = tl.load(places + token, known, 0).to(tl.int64)
    return row


@triton.jit
def _turn(q, k, v, seen, highest, weights, total, SCALE: tl.constexpr, CAP: tl.constexpr):
    """One block of tokens more."""
    score = scored(tl.dot(q, k, input_precision="ieee"), SCALE, CAP)
    score = tl.where(seen, score, float("-inf"))
    higher = tl.maximum(highest, tl.max(score, axis=1))
    base = tl.where(higher == float("-inf"), 0.0, higher)  # nothing seen yet
    weight = tl.exp2(score - base[:, None])
    shrunk = tl.exp2(highest - base)
    weights = weights * shrunk + tl.sum(weight, axis=1)
    total = tl.dot(weight.to(v.dtype), v, total * shrunk[:, None], input_precision="ieee")
    return higher, weights, total


# A server's batches may have any number of requests: none must ask for a kernel of its own.
@triton.jit(do_not_specialize=["requests", "parts", "request_places"])
def attend_pages_kernel(
    query, new_keys, new_values, keys, values, places, query_ends, key_ends, sinks, out, sums, statistics, requests,
    heads, parts, query_token, query_head, new_key_token, new_key_head, new_value_token, new_value_head, row_size,
    request_places,
    SCALE: tl.constexpr, CAP: tl.constexpr, WINDOW: tl.constexpr, GROUP: tl.constexpr, NEW: tl.constexpr,
    ROWS: tl.constexpr, HELD: tl.constexpr, SIZE: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
    FRESH: tl.constexpr, LEAST: tl.constexpr, REQUESTS: tl.constexpr, PAGE: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """Program i: the i % parts-th part of the cached tokens of a tile, for ROWS of its GROUP * NEW rows (heads first)
    of a head of keys; the first part also has the new tokens. sums: [programs, HELD, D], statistics: [programs, 2,
    HELD], the highest scores and the weights."""
    LOG2E: tl.constexpr = 1.4426950408889634
    TILES: tl.constexpr = (GROUP * NEW + ROWS - 1) // ROWS
    part = tl.program_id(0) % parts
    which = tl.program_id(0) // parts
    shared = which // TILES % heads
    tile = which // TILES // heads
    request, begin, place, fresh, cached, first, block, blocks, used = _found(
        tile, query_ends, key_ends, requests, parts, NEW, WINDOW, BLOCK, LEAST, REQUESTS, PAGE > 0
    )
    if part >= used:
        return
    row = which % TILES * ROWS + tl.arange(0, ROWS)
    new = first + row % NEW
    inside = (row < GROUP * NEW) & (new < fresh)
    head = shared * GROUP + row // NEW
    d = tl.arange(0, D)
    within = d < SIZE
    at = query + (begin + new).to(tl.int64) * query_token + head * query_head
    q = tl.load(at[:, None] + d[None, :], inside[:, None] & within[None, :], 0)
    highest = tl.full((ROWS,), float("-inf"), tl.float32)
    weights = tl.zeros((ROWS,), tl.float32)
    total = tl.zeros((ROWS, D), tl.float32)
    if SINKS:  # of the first part: a score that has no value
        highest = tl.load(sinks + head, inside & (part == 0), float("-inf")).to(tl.float32) * LOG2E
        weights += tl.where(part == 0, 1.0, 0.0)
    keys += shared * SIZE
    values += shared * SIZE
    places += (request if PAGE else place) * request_places
    start = block + part * blocks // used
    stop = block + (part + 1) * blocks // used
    token = start * BLOCK + tl.arange(0, BLOCK)
    ahead = _row_of(places, token, token < cached, PAGE)
    for _ in range(start, stop):
        known = token < cached
        at_row = ahead * row_size
        k = tl.load(keys + at_row[None, :] + d[:, None], known[None, :] & within[:, None], 0)
        v = tl.load(values + at_row[:, None] + d[None, :], known[:, None] & within[None, :], 0)
        seen = known[None, :]
        if WINDOW:
            seen = seen & (token[None, :] > cached + new[:, None] - WINDOW)
        token += BLOCK
        ahead = _row_of(places, token, token < cached, PAGE)  # the next block's
        highest, weights, total = _turn(q, k, v, seen, highest, weights, total, SCALE, CAP)
    if part == 0:
        new_keys += begin.to(tl.int64) * new_key_token + shared * new_key_head
        new_values += begin.to(tl.int64) * new_value_token + shared * new_value_head
        lowest = 0 * first
        if WINDOW:
            lowest = tl.maximum(first - WINDOW + 1, 0) // FRESH
        for turn in range(lowest, (tl.minimum(first + NEW, fresh) + FRESH - 1) // FRESH):
            own = turn * FRESH + tl.arange(0, FRESH)
            known = own < fresh
            far = own.to(tl.int64)
            k = tl.load(new_keys + (far * new_key_token)[None, :] + d[:, None], known[None, :] & within[:, None], 0)
            v = tl.load(new_values + (far * new_value_token)[:, None] + d[None, :], known[:, None] & within[None, :], 0)
            seen = known[None, :] & (own[None, :] <= new[:, None])
            if WINDOW:
                seen = seen & (own[None, :] > new[:, None] - WINDOW)
            highest, weights, total = _turn(q, k, v, seen, highest, weights, total, SCALE, CAP)
        if PAGE:  # noqa: SIM102 - a constant, and what is not
            if which % TILES == 0:  # one of the programs that have this token puts it where nobody reads yet
                at_row = _row_of(places, cached, cached >= 0, PAGE) * row_size
                tl.store(keys + at_row + d, tl.load(new_keys + d, within, 0), within)
                tl.store(values + at_row + d, tl.load(new_values + d, within, 0), within)
    if used == 1:
        result = total / tl.maximum(weights, 1.0)[:, None]  # the highest score's weight alone is 1
        at = out + ((begin + new).to(tl.int64) * heads * GROUP + head) * SIZE
        tl.store(at[:, None] + d[None, :], result, inside[:, None] & within[None, :])
    else:
        held = tl.arange(0, ROWS)  # HELD of them are inside, at most
        at_part = (which * parts + part).to(tl.int64)
        tl.store(sums + (at_part * HELD + held[:, None]) * D + d[None, :], total, (held < HELD)[:, None])
        tl.store(statistics + at_part * 2 * HELD + held, highest, held < HELD)
        tl.store(statistics + at_part * 2 * HELD + HELD + held, weights, held < HELD)


@triton.jit(do_not_specialize=["requests", "parts"])
def add_pages_kernel(
    query_ends, key_ends, out, sums, statistics, requests, heads, parts,
    WINDOW: tl.constexpr, GROUP: tl.constexpr, NEW: tl.constexpr, ROWS: tl.constexpr, HELD: tl.constexpr,
    SIZE: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, LEAST: tl.constexpr, REQUESTS: tl.constexpr,
    PAGE: tl.constexpr, MOST: tl.constexpr, CHUNK: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Program i: row i % HELD of what the programs of a tile and head of keys have stored."""
    TILES: tl.constexpr = (GROUP * NEW + ROWS - 1) // ROWS
    which = tl.program_id(0) // HELD
    shared = which // TILES % heads
    held = tl.program_id(0) % HELD + tl.arange(0, 1)
    row = which % TILES * ROWS + held
    if OVERLAPS:
        wait_for_the_one_ahead()
        let_the_next_begin()
    _, begin, _, fresh, _, first, _, _, used = _found(
        which // TILES // heads, query_ends, key_ends, requests, parts, NEW, WINDOW, BLOCK, LEAST, REQUESTS, PAGE > 0
    )
    if used > 1:  # one alone has stored the result
        new = first + row % NEW
        inside = (row < GROUP * NEW) & (new < fresh)
        result = added(sums, statistics, which.to(tl.int64) * parts, used, held, inside, HELD, D, MOST, CHUNK)
        d = tl.arange(0, D)
        at = out + ((begin + new).to(tl.int64) * heads * GROUP + shared * GROUP + row // NEW) * SIZE
        tl.store(at[:, None] + d[None, :], result, inside[:, None] & (d < SIZE)[None, :])


def supports(dtype: torch.dtype, size: int, heads: int, shared: int, capability: int) -> bool:
    """Whether `attend_pages` is for a model's attention: its dtype, size of a head, heads, those of keys. capability:
    of a CUDA GPU (90 is sm_90), 0 for others."""
    least = {torch.float16: 75, torch.bfloat16: 80, torch.float32: 80}.get(dtype)
    return (
        least is not None
        and (capability == 0 or capability >= least)
        and 0 < size * dtype.itemsize <= MOST_BYTES
        and 0 < shared <= heads <= MOST_GROUP * shared
        and heads % shared == 0
    )


def attend_pages(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pages: Pages,
    query_ends: Tensor,
    key_ends: Tensor,
    scale: float,
    *,
    most_new: int,
    most_tokens: int,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    window: int = 0,
    plan: PagesPlan | None = None,
) -> Tensor:
    """softmax(query keysᵀ · scale) values of each request's new tokens over its own tokens, causal, in fp32 but for
    products of 16-bit numbers.

    query: [tokens, heads, size], key, value: [tokens, heads that share keys, size], of the new tokens of all requests,
    whose last dimension is contiguous. query_ends: int32 [requests + 1], where each one's new tokens begin and end.
    key_ends: likewise, of all of its tokens that it sees, cached ones and the new ones; they count `pages.places`, too.
    What these say is smaller than most_new and most_tokens, or equal, for every request. softcap and sinks: as for
    `attend`. window: how many tokens one sees, itself included; 0 is all.

    Such that `supports` says yes, on the current device. Rows of no request, which batches are padded with, get zeros.
    """
    tokens, heads, size = query.shape
    shared, requests = key.shape[1], len(query_ends) - 1
    out = query.new_zeros((tokens, heads, size))  # no kernel, so the one that follows has none to overlap with
    if not tokens or requests < 1:
        return out
    if requests > MOST_REQUESTS:
        raise ValueError(f"{requests} requests in a batch; {MOST_REQUESTS} are the most. Lower max_requests_per_batch")
    index, width = query.get_device(), size * query.itemsize // 2
    plan = plan or plan_pages(properties_of(index), tokens, most_new, most_tokens, heads // shared, shared, width)
    for one in launches_of(query, key, value, pages, query_ends, key_ends, out, plan, scale, softcap, sinks, window):
        launch(one.kernel, index, one.arguments, one.known, one.configure)
    return out


class Launch(NamedTuple):
    """known: what all constants follow from, beside the device."""

    kernel: Any
    arguments: tuple[Any, ...]
    known: tuple[Any, ...]
    configure: Callable[[DeviceProperties], tuple[int, dict[str, Any]]]


def launches_of(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pages: Pages,
    query_ends: Tensor,
    key_ends: Tensor,
    out: Tensor,
    plan: PagesPlan,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
    window: int,
) -> Iterator[Launch]:
    """What `attend_pages` launches for these, of which sizes, dtypes and strides alone are looked at."""
    tokens, heads, size = query.shape
    shared, requests, alone = key.shape[1], len(query_ends) - 1, pages.page > 0
    group = heads // shared
    rows, parts = group * plan.new, plan.parts
    tiles = plan.tiles(tokens, requests, alone) * shared * -(-rows // plan.rows)
    held, d = min(plan.rows, triton.next_power_of_2(rows)), max(16, triton.next_power_of_2(size))
    sums = statistics = out
    if parts > 1:
        places = tiles * parts * held
        memory = torch.empty(places * (d + 2), dtype=torch.float32, device=out.device)
        sums, statistics = memory[: places * d], memory[places * d :]
    most = FEW_PARTS if parts <= FEW_PARTS else MOST_PARTS
    common = {
        "WINDOW": window, "GROUP": group, "NEW": plan.new, "ROWS": plan.rows, "HELD": held, "SIZE": size, "D": d,
        "BLOCK": plan.block, "LEAST": plan.least, "PAGE": pages.page, "REQUESTS": 1 if alone else _searched(requests),
    }  # fmt: skip

    def configure(_: Any) -> tuple[int, dict[str, Any]]:
        return tiles * parts, common | {
            "SCALE": scale, "CAP": softcap or 0, "FRESH": plan.fresh, "SINKS": sinks is not None,
            "num_warps": plan.warps, "num_stages": plan.stages,
        }  # fmt: skip

    def configure_sum(properties: DeviceProperties) -> tuple[int, dict[str, Any]]:
        chunk = max(1, min(most, 8192 // d))
        return tiles * held, common | {
            "MOST": most, "CHUNK": chunk, "OVERLAPS": properties.ptx >= SINCE, "num_warps": 4
        }  # fmt: skip

    arguments = (
        query, key, value, pages.keys, pages.values, pages.places, query_ends, key_ends,
        query if sinks is None else sinks, out, sums, statistics, requests, shared, parts, *query.stride()[:2],
        *key.stride()[:2], *value.stride()[:2], pages.keys.stride(0), pages.places.stride(0),
    )  # fmt: skip
    kinds = query.dtype, None if sinks is None else sinks.dtype, pages.places.dtype
    known = (kinds, scale, softcap, tiles, plan, *common.values())
    yield Launch(attend_pages_kernel, arguments, known, configure)
    if parts > 1:
        arguments = (query_ends, key_ends, out, sums, statistics, requests, shared, parts)
        yield Launch(add_pages_kernel, arguments, known, configure_sum)


def _searched(requests: int) -> int:
    """Of how many requests a program looks at the ends: few kernels serve all numbers of requests."""
    return int(max(FEW_REQUESTS if requests <= FEW_REQUESTS else SOME_REQUESTS, triton.next_power_of_2(requests)))
