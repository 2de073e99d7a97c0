"""All tokens of a prompt normed, rotated and put into the cache in one launch, ahead of torch's attention.

transformers norms, turns and copies them in some thirty launches, each of which reads and writes them once more.

Bytes: queries, keys and values, read once and written once. What a head's numbers turn with is read a second time, from
the L1 cache.
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

NUMBERS_OF_A_WARP = 1024  # that 32 threads hold without spilling, once as they are and once as what they turn with


# A prompt may have any number of tokens: no length must ask for a kernel of its own.
@triton.jit(do_not_specialize=["new"])  # type: ignore[untyped-decorator]
def turn_kernel(  # type: ignore[no-untyped-def]
    query, keys, values, out, new_keys, new_values, cos, sin, query_norm, key_norm,
    new, query_text, query_head, query_new, key_text, key_head, key_new, value_text, value_head, value_new,
    new_key_text, new_key_head, new_key_new, new_value_text, new_value_head, new_value_new, cos_text, cos_new,
    HEADS: tl.constexpr, SHARED: tl.constexpr, ROWS: tl.constexpr, SHARED_ROWS: tl.constexpr,
    KEY: tl.constexpr, VALUE: tl.constexpr, D: tl.constexpr, E: tl.constexpr, ROTARY: tl.constexpr,
    QUERY_NORM: tl.constexpr, KEY_NORM: tl.constexpr, QUERY_EPSILON: tl.constexpr, KEY_EPSILON: tl.constexpr,
    OFFSET: tl.constexpr, HALVES: tl.constexpr,
):  # fmt: skip
    """Program i: all heads of token i % new of a text."""
    token = (tl.program_id(0) % new).to(tl.int64)
    text = (tl.program_id(0) // new).to(tl.int64)
    d = tl.arange(0, D)
    e = tl.arange(0, E)
    angle = text * cos_text + token * cos_new
    c, s = angles(cos + angle, sin + angle, D, ROTARY, HALVES)
    head = tl.arange(0, ROWS)
    inside = head < HEADS
    x, y = loaded(query + text * query_text + token * query_new + head * query_head, inside, KEY, D, ROTARY)
    turned = rotated(x, y, c, s, query_norm, KEY, D, ROTARY, QUERY_NORM, QUERY_EPSILON, OFFSET)
    at = out + ((text * new + token) * HEADS + head) * KEY
    tl.store(at[:, None] + d[None, :], turned, inside[:, None] & (d < KEY)[None, :])
    head = tl.arange(0, SHARED_ROWS).to(tl.int64)
    inside = head < SHARED
    x, y = loaded(new_keys + text * new_key_text + token * new_key_new + head * new_key_head, inside, KEY, D, ROTARY)
    turned = rotated(x, y, c, s, key_norm, KEY, D, ROTARY, KEY_NORM, KEY_EPSILON, OFFSET)
    at = keys + text * key_text + token * key_new + head * key_head
    tl.store(at[:, None] + d[None, :], turned, inside[:, None] & (d < KEY)[None, :])
    there = inside[:, None] & (e < VALUE)[None, :]
    at = new_values + text * new_value_text + token * new_value_new + head * new_value_head
    value = tl.load(at[:, None] + e[None, :], there, 0)
    at = values + text * value_text + token * value_new + head * value_head
    tl.store(at[:, None] + e[None, :], value, there)


def turn(query: Tensor, keys: Tensor, values: Tensor, fresh: Fresh) -> Tensor:
    """The queries, normed and rotated. The new keys, likewise, and the new values are written to `keys` and `values`.

    query: [texts, heads, tokens, size]; keys, values: [texts, heads that share keys, tokens, size]; all of one dtype,
    on the current device, their last dimension contiguous. fresh: without a slot. Returns [texts, heads, tokens, size],
    of which the heads of a token lie side by side.
    """
    texts, heads, new, size = query.shape
    shared, value = keys.shape[1], values.shape[3]
    out = query.new_empty((texts, new, heads, size))
    rows, shared_rows = triton.next_power_of_2(heads), triton.next_power_of_2(shared)
    d = max(16, triton.next_power_of_2(size))

    def configure(properties: DeviceProperties) -> tuple[int, dict[str, Any]]:
        constants = {
            "HEADS": heads, "SHARED": shared, "ROWS": rows, "SHARED_ROWS": shared_rows, "KEY": size, "VALUE": value,
            "D": d, "E": max(16, triton.next_power_of_2(value)), **fresh.constants,
            "num_warps": min(16, max(1, rows * d // NUMBERS_OF_A_WARP)),
        }  # fmt: skip
        return texts * new, constants

    arguments = (
        query, keys, values, out, *fresh.tensors(query), new, *query.stride()[:3], *keys.stride()[:3],
        *values.stride()[:3], *fresh.keys.stride()[:3], *fresh.values.stride()[:3], fresh.cos_text,
        fresh.cos.stride(1),
    )  # fmt: skip
    key = (query.dtype, texts, heads, shared, size, value, *fresh.constants.values())
    launch(turn_kernel, query.get_device(), arguments, key, configure)
    return out.transpose(1, 2)
