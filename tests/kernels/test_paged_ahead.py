"""What a server compiles ahead is what its batches ask for, whatever they are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gpus import A100, H200

pytest.importorskip("triton")

from halfbyte.kernels.attention import paged
from halfbyte.kernels.attention.paged_ahead import compile_ahead
from halfbyte.kernels.attention.pages import Pages

BF16 = torch.bfloat16


def empty(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


@pytest.mark.parametrize("properties", [H200, A100])
@pytest.mark.parametrize(("heads", "shared", "size", "page"), [(32, 8, 128, 256), (28, 4, 128, 256), (16, 8, 256, 0)])
def test_every_batch(
    heads: int, shared: int, size: int, page: int, properties: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[tuple[Any, Any]] = []
    for kernel in (paged.attend_pages_kernel, paged.add_pages_kernel):
        monkeypatch.setattr(
            kernel, "warmup", lambda *arguments, kernel=kernel, grid, **constants: compiled.append((kernel, constants))
        )
    count = compile_ahead(properties, BF16, heads, shared, size, 0.09, page, 256, 4096, 1 << 15)
    assert count == len(compiled) <= 40

    asked: list[tuple[Any, Any]] = []
    monkeypatch.setattr(paged, "properties_of", lambda _: properties)
    monkeypatch.setattr(
        paged, "launch", lambda kernel, _, arguments, known, configure: asked.append((kernel, configure(properties)[1]))
    )
    cached = empty(9000, shared, size)
    loads = [(tokens, min(tokens, 1024), tokens, 0) for tokens in (64, 128, 192, 256, 320, 1024, 2048, 4096)]
    loads += [(requests, requests, 1, page) for requests in (1, 2, 3, 8, 100, 256) if page]
    for tokens, requests, new, of_page in loads:
        for most_tokens in (1024, 2048, 8192, 1 << 15):
            table = empty(requests, 32, dtype=torch.int32) if of_page else empty(tokens + 512, dtype=torch.int64)
            ends = empty(requests + 1, dtype=torch.int32)
            given = empty(tokens, heads, size), empty(tokens, shared, size), empty(tokens, shared, size)
            paged.attend_pages(
                *given, Pages(cached, cached, table, of_page), ends, ends, 0.09, most_new=new, most_tokens=most_tokens
            )
    assert asked
    assert [one for one in asked if one not in compiled] == []
