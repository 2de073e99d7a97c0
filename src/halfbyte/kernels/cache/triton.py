"""New tokens' keys and values put into a static cache, and its length counted up where wanted, in one launch.

transformers does it in five: a range, its sum with the length, two copies, the new length. Few bytes move (4 KB for a
token of a text of 8 heads), so one program does it all, and knows when everybody has read the length.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from halfbyte.kernels.common.device import DeviceProperties
from halfbyte.kernels.common.launch import launch
from halfbyte.kernels.common.overlap import SINCE, let_the_next_begin, wait_for_the_one_ahead

MOST = 1 << 17  # numbers that one program is quick enough for
MOST_NEW = 8  # tokens of a text
TILE = 4096  # numbers at once


@triton.jit
def _put(
    cache, new, length, tokens, rows, heads, per_text, per_head, per_token,
    NEW: tl.constexpr, HEAD: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, D)[None, :]
    for first in range(0, rows, ROWS):
        row = first + tl.arange(0, ROWS)[:, None]
        owner = row // NEW
        place = length + row % NEW
        inside = (row < rows) & (column < HEAD) & (place < tokens)
        at = owner // heads * per_text + owner % heads * per_head + row % NEW * per_token
        values = tl.load(new + at + column, mask=inside)
        tl.store(cache + (owner.to(tl.int64) * tokens + place) * HEAD + column, values, mask=inside)


@triton.jit
def append_kernel(
    keys, values, new_keys, new_values, length, tokens, rows, heads, key_text, key_head, key_token, value_text,
    value_head, value_token,
    NEW: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr,
    COUNTS: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """keys, values: [rows / NEW, tokens, KEY or VALUE]. new_keys, new_values: rows at the strides of texts, heads and
    tokens."""
    if OVERLAPS:
        wait_for_the_one_ahead()
        let_the_next_begin()
    place = tl.load(length)
    _put(keys, new_keys, place, tokens, rows, heads, key_text, key_head, key_token, NEW, KEY, ROWS, D)
    _put(values, new_values, place, tokens, rows, heads, value_text, value_head, value_token, NEW, VALUE, ROWS, D)
    if COUNTS:
        tl.debug_barrier()  # every warp has read the length
        tl.store(length, place + NEW)


def supports(
    keys: Tensor, values: Tensor, new_keys: Tensor, new_values: Tensor, length: Tensor, most_new: int = 1
) -> bool:
    """Whether `append` is for them: few new tokens of each text, of few enough, beside it in the cache's dtypes.

    most_new: new tokens of a text, for which the caller has counted that there is room; up to MOST_NEW.
    """
    return (
        0 < new_keys.shape[2] == new_values.shape[2] <= min(most_new, MOST_NEW)
        and new_keys.shape[:2] == new_values.shape[:2] == keys.shape[:2] == values.shape[:2]
        and (new_keys.shape[3], new_values.shape[3]) == (keys.shape[3], values.shape[3])
        and (new_keys.dtype, new_values.dtype) == (keys.dtype, values.dtype)
        and new_keys.stride(3) == new_values.stride(3) == 1
        and keys.is_contiguous()
        and values.is_contiguous()
        and {t.device for t in (values, new_keys, new_values, length)} == {keys.device}
        and 0 < max(new_keys.numel(), new_values.numel()) <= MOST
    )


def append(
    keys: Tensor, values: Tensor, new_keys: Tensor, new_values: Tensor, length: Tensor, *, counts: bool = True
) -> None:
    """keys[:, :, length : length + new] = new_keys, values likewise; length += new, if it counts.

    keys, values: [texts, heads, tokens, head size]. new_keys, new_values: [texts, heads, new, head size]. length: int64
    without dimensions. All on the current device, and such that `supports` says yes. Nothing is written past the end.
    Who subtracts from the length takes tokens back: the next ones are written over them.
    """
    texts, heads, tokens, head = keys.shape
    columns = triton.next_power_of_2(max(head, values.shape[3]))
    new = new_keys.shape[2]
    rows = min(triton.next_power_of_2(texts * heads * new), max(1, TILE // columns))

    def configure(properties: DeviceProperties) -> tuple[int, dict[str, Any]]:
        constants = {"NEW": new, "KEY": head, "VALUE": values.shape[3], "ROWS": rows, "D": columns, "COUNTS": counts}
        return 1, constants | {"OVERLAPS": properties.ptx >= SINCE, "num_warps": 4 if rows * columns < TILE else 16}

    strides = [*new_keys.stride()[:3], *new_values.stride()[:3]]
    if new == 1:  # one compiled kernel, whatever these are
        strides[2] = strides[5] = 0
    arguments = (keys, values, new_keys, new_values, length, tokens, texts * heads * new, heads, *strides)
    key = (keys.dtype, values.dtype, new, head, values.shape[3], rows, counts)
    launch(append_kernel, keys.get_device(), arguments, key, configure)
