"""Several new tokens normed, rotated and put into the cache in one launch, ahead of the attention that sees them all.

Of a single new token `attend` in triton.py does this itself (rotate.py). Several see one another through the cache,
which must have all of them before anybody reads it.

Bytes: the new tokens' queries twice, their keys and values once read and once written; a few hundred kB at most.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from halfbyte.kernels.attention.fresh import Fresh
from halfbyte.kernels.attention.rotate import angles, loaded, rotated
from halfbyte.kernels.common.device import DeviceProperties
from halfbyte.kernels.common.launch import launch
from halfbyte.kernels.common.overlap import SINCE, let_the_next_begin, wait_for_the_one_ahead


@triton.jit
def put_kernel(
    query, keys, values, out, new_keys, new_values, cos, sin, slot, query_norm, key_norm,
    tokens, heads, query_text, query_head, query_new, key_text, key_head, value_text, value_head,
    new_key_text, new_key_head, new_key_new, new_value_text, new_value_head, new_value_new, cos_text, cos_new,
    GROUP: tl.constexpr, NEW: tl.constexpr, ROWS: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr,
    D: tl.constexpr, E: tl.constexpr, ROTARY: tl.constexpr, QUERY_NORM: tl.constexpr, KEY_NORM: tl.constexpr,
    QUERY_EPSILON: tl.constexpr, KEY_EPSILON: tl.constexpr, OFFSET: tl.constexpr, HALVES: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Program i: new token i % NEW of a text, for a head of keys and the GROUP heads of queries that share it."""
    if OVERLAPS:
        wait_for_the_one_ahead()
        let_the_next_begin()
    new = tl.program_id(0) % NEW
    owner = tl.program_id(0) // NEW
    text = (owner // heads).to(tl.int64)
    shared = owner % heads
    d = tl.arange(0, D)
    e = tl.arange(0, E)
    angle = text * cos_text + new * cos_new
    c, s = angles(cos + angle, sin + angle, D, ROTARY, HALVES)
    row = tl.arange(0, ROWS)
    inside = row < GROUP
    head = shared * GROUP + row
    x, y = loaded(query + text * query_text + head * query_head + new * query_new, inside, KEY, D, ROTARY)
    turned = rotated(x, y, c, s, query_norm, KEY, D, ROTARY, QUERY_NORM, QUERY_EPSILON, OFFSET)
    at = out + ((text * heads * GROUP + head) * NEW + new) * KEY
    tl.store(at[:, None] + d[None, :], turned, inside[:, None] & (d < KEY)[None, :])
    place = tl.load(slot) + new
    there = place < tokens
    one = tl.arange(0, 1)
    new_at = new_keys + text * new_key_text + shared * new_key_head + new * new_key_new + one
    x, y = loaded(new_at, one == 0, KEY, D, ROTARY)
    turned = rotated(x, y, c, s, key_norm, KEY, D, ROTARY, KEY_NORM, KEY_EPSILON, OFFSET)
    at = keys + text * key_text + shared * key_head + place * KEY
    tl.store(at + d[None, :], turned, (d < KEY)[None, :] & there)
    value = tl.load(new_values + text * new_value_text + shared * new_value_head + new * new_value_new + e, e < VALUE)
    tl.store(values + text * value_text + shared * value_head + place * VALUE + e, value, (e < VALUE) & there)


def put(query: Tensor, keys: Tensor, values: Tensor, fresh: Fresh) -> Tensor:
    """The queries, normed and rotated. The new keys, likewise, and values go into the cache, from the slot on; nothing
    is written past its end.

    Arguments as for `attend`, on the current device. Returns [texts, heads, new tokens, size], contiguous.
    """
    texts, heads, new, size = query.shape
    shared, tokens, value = keys.shape[1], keys.shape[2], values.shape[3]
    group = heads // shared
    out = query.new_empty(query.shape)

    def configure(properties: DeviceProperties) -> tuple[int, dict[str, Any]]:
        constants = {
            "GROUP": group, "NEW": new, "ROWS": triton.next_power_of_2(group), "KEY": size, "VALUE": value,
            "D": max(16, triton.next_power_of_2(size)), "E": max(16, triton.next_power_of_2(value)),
            **fresh.constants, "OVERLAPS": properties.ptx >= SINCE, "num_warps": 4,
        }  # fmt: skip
        return texts * shared * new, constants

    arguments = (
        query, keys, values, out, *fresh.tensors(query), tokens, shared, *query.stride()[:3], *keys.stride()[:2],
        *values.stride()[:2], *fresh.keys.stride()[:3], *fresh.values.stride()[:3], fresh.cos_text,
        fresh.cos.stride(1),
    )  # fmt: skip
    key = (query.dtype, texts, group, new, size, value, *fresh.constants.values())
    launch(put_kernel, query.get_device(), arguments, key, configure)
    return out
