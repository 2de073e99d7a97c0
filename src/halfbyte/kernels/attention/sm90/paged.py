"""The same kernel over a cache in pages, as vLLM keeps it: one new token of each text, which is the last of its tokens.

Its key and value are put into the cache on the way, as they are: whoever made them has normed and turned them.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from halfbyte.kernels.attention.sm90.launch import (
    LAYOUT,
    is_aligned,
    launch_of,
    launches,
    sinks_kind,
    turning_of,
    variant,
)
from halfbyte.kernels.attention.sm90.plan import BLOCK, ClusterPlan, pages_plan
from halfbyte.kernels.attention.triton import DTYPES
from halfbyte.kernels.common import compiler
from halfbyte.kernels.common.device import DeviceProperties, properties_of
from halfbyte.kernels.common.driver import Arguments, Launch, driver
from halfbyte.kernels.common.nvrtc import Variant, compile_ahead


class PagedCache(NamedTuple):
    """keys, values: [pages, tokens of a page, heads that share keys, size], with the same strides, the last one 1.
    table: int32 [texts, pages of a text], the pages of each; what lies behind a text's tokens may be anything. lengths:
    int32 [texts], the tokens of each with its new one; a text of none is padding. slots: int64 [texts], where each new
    token goes: its page times a page's tokens, and its place in the page; below 0 of one that is not kept.
    """

    keys: Tensor
    values: Tensor
    table: Tensor
    lengths: Tensor
    slots: Tensor

    @property
    def page(self) -> int:
        """Tokens of one."""
        return self.keys.shape[1]

    @property
    def tokens(self) -> int:
        """The most that a text can have."""
        return self.table.shape[1] * self.page


class Kind(NamedTuple):
    """What the kernel is compiled for, beside a plan. heads: of the model; shared: of keys. sinks: their dtype."""

    dtype: torch.dtype
    heads: int
    shared: int
    size: int
    page: int
    capped: bool = False
    sinks: torch.dtype | None = None

    @property
    def group(self) -> int:
        """Heads that share keys."""
        return self.heads // self.shared

    def plan(self, properties: DeviceProperties, texts: int, tokens: int) -> ClusterPlan | None:
        """For texts of up to so many tokens; None where this kernel is not for them."""
        if self.dtype not in DTYPES or self.page % BLOCK or self.heads % self.shared or texts < 1:
            return None
        return pages_plan(properties, texts * self.shared, tokens, self.size, self.group)

    def variant(self, properties: DeviceProperties, plan: ClusterPlan, *, overlaps: bool = True) -> Variant:
        return variant(
            properties, self.group, 1, self.size, plan, True, self.dtype, 0, sinks_kind(self.sinks), True, self.capped,
            True, turning_of(None), page=self.page, overlaps=overlaps,
        )  # fmt: skip


def can_compile(kind: Kind, properties: DeviceProperties) -> bool:
    """Whether the kernel is for such a model on such a GPU, and can be had there."""
    return kind.plan(properties, 1, kind.page) is not None and driver() is not None and compiler.find() is not None


def is_readable(query: Tensor, key: Tensor, value: Tensor, cache: PagedCache) -> bool:
    """Whether the kernel reads such as these: 16 bytes at once of what is attended to, and numbers of these dtypes."""
    tensors, numbers = (query, key, value, cache.keys, cache.values), (cache.table, cache.lengths, cache.slots)
    return (
        cache.keys.stride() == cache.values.stride()
        and all(tensor.dtype is query.dtype and is_aligned(tensor) for tensor in tensors)
        and [number.dtype for number in numbers] == [torch.int32, torch.int32, torch.int64]
        and all(tensor.stride(-1) == 1 for tensor in (*tensors, *numbers))
    )


def attend_pages(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cache: PagedCache,
    counters: Tensor,
    scale: float,
    out: Tensor,
    *,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    window: int = 0,
    plan: ClusterPlan | None = None,
) -> None:
    """softmax(query keysᵀ · scale) values of each text's new token, which goes into the cache; in fp32 but for products
    of 16-bit numbers.

    query: [texts, heads, size]. key, value: [texts, heads that share keys, size]. out: like query, contiguous; zeros of
    a text without tokens. counters: int32, a zero for each text and head of keys, zeros again when the launch ends.
    softcap, sinks: as for `attend`; softcap 0 is none. window: how many tokens one sees, itself included; 0 is all.

    Such that `can_compile` and `is_readable` say yes, on the current device. No kernel just ahead in the stream writes
    the cache, its table, lengths or slots.
    """
    texts, heads, size = query.shape
    shared, index = key.shape[1], query.get_device()
    kind = Kind(query.dtype, heads, shared, size, cache.page, softcap > 0, None if sinks is None else sinks.dtype)
    plan = plan or kind.plan(properties_of(index), texts, cache.tokens)
    if plan is None:
        raise ValueError(f"heads of {size} numbers in {query.dtype}, {heads} of {shared}, are not for this kernel")

    def make() -> tuple[Launch, Arguments]:
        compiled = kind.variant(properties_of(index), plan)
        compile_ahead([compiled])
        return launch_of(index, compiled, texts * shared, kind.group, plan), Arguments(LAYOUT, (), ())

    key_of: Hashable = (index, texts, kind, plan)
    launch, told = launches.get(key_of, make)
    sums = query.new_empty(plan.sums(texts * shared, kind.group, size), dtype=torch.float32)
    told.set(*arguments(query, key, value, cache, sinks, sums, counters, out, scale, softcap, window))
    launch(torch._C._cuda_getCurrentRawStream(index), told.parameters)


def arguments(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cache: PagedCache,
    sinks: Tensor | None,
    sums: Tensor,
    counters: Tensor,
    out: Tensor,
    scale: float,
    softcap: float,
    window: int,
) -> tuple[Any, ...]:
    """What work.cuh's Arguments hold. The query stands for tensors that there are not, and is not read as such."""
    keys, values, table, lengths, slots = cache
    page_step, token_step, head_step, _ = keys.stride()
    tensors = (
        query, key, value, query, query, query, query, slots, keys, values, query, lengths, table,
        query if sinks is None else sinks,
    )  # fmt: skip
    return (
        *(tensor.data_ptr() for tensor in tensors), sums.data_ptr(), 0, counters.data_ptr(), out.data_ptr(),
        *query.stride()[:2], 0, 0, head_step, 0, head_step, 0, 0, *key.stride()[:2], 0, *value.stride()[:2], 0, 0, 0,
        table.stride(0), page_step, token_step, 0,
        cache.tokens, key.shape[1], 0, window, scale, softcap, 0.0, 0.0, 0.0, 0.0,
    )  # fmt: skip
