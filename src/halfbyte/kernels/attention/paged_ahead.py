"""Attention over pages, compiled before a server's first batch asks for it: each kernel takes Triton half a second."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from halfbyte.kernels.attention.paged import FEW_REQUESTS, SOME_REQUESTS, launches_of
from halfbyte.kernels.attention.pages import FEW_TOKENS, Pages, plan_pages
from halfbyte.kernels.common.device import DeviceProperties
from halfbyte.kernels.common.patience import compiling

PADDING = 64  # to which transformers rounds the tokens of a batch up, where it captures steps


def compile_ahead(
    properties: DeviceProperties,
    dtype: torch.dtype,
    heads: int,
    shared: int,
    size: int,
    scale: float,
    page: int,
    most_requests: int,
    most_new: int,
    most_tokens: int,
    *,
    softcap: float | None = None,
    sinks: torch.dtype | None = None,
    window: int = 0,
) -> int:
    """Compile for the current device what a server's batches will ask `attend_pages` for. Returns how many kernels.

    page: tokens of a page, in batches of requests that decode; 0 where these have no tables of pages. most_requests: of
    a batch. most_new: tokens of a batch. most_tokens: of a request. sinks: their dtype. Others as `attend_pages` has
    them.
    """

    def empty(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    group, width, compiled = heads // shared, size * dtype.itemsize // 2, set()
    of_heads = None if sinks is None else empty(heads, dtype=sinks)
    cached = empty(16, shared, size)
    for tokens, requests, new, longest in _batches(most_requests if page else 0, most_new, most_tokens):
        plan = plan_pages(properties, tokens, new, longest, group, shared, width)
        table = empty(requests, 16, dtype=torch.int32) if new == 1 else empty(tokens, dtype=torch.int64)
        pages, ends = Pages(cached, cached, table, page if new == 1 else 0), empty(requests + 1, dtype=torch.int32)
        query, fresh = empty(tokens, heads, size), empty(tokens, shared, size)
        for one in launches_of(query, fresh, fresh, pages, ends, ends, query, plan, scale, softcap, of_heads, window):
            constants = one.configure(properties)[1]
            kind = one.kernel, tuple(constants.items())
            if kind not in compiled:
                compiled.add(kind)
                with compiling():
                    one.kernel.warmup(*one.arguments, grid=(1,), **constants)
    return len(compiled)


def _batches(most_requests: int, most_new: int, most_tokens: int) -> Iterator[tuple[int, int, int, int]]:
    """Tokens, requests, new tokens of a request at most, tokens of one at most: of the batches of a server, such that
    plans for all others are among theirs."""
    longest = [1 << bit for bit in range(10, max(10, (most_tokens - 1).bit_length()) + 1)]
    requests = 1
    while requests <= most_requests:
        yield from ((requests, requests, 1, tokens) for tokens in longest)
        requests *= 2
    padded = (*range(PADDING, FEW_TOKENS + PADDING + 1, PADDING), *(FEW_TOKENS << bit for bit in range(1, 8)))
    for new in sorted({min(most_new, tokens) for tokens in padded}):
        yield from ((new, of, new, tokens) for of in (FEW_REQUESTS, SOME_REQUESTS) for tokens in longest)
