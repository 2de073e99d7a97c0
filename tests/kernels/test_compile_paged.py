"""The kernels of attention over pages compile for every target."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gpus import compile_launch, gpu_of, on_targets

pytest.importorskip("triton")

from halfbyte.kernels.attention import paged
from halfbyte.kernels.attention.pages import Pages, PagesPlan

pytestmark = pytest.mark.slow


@on_targets(
    "requests, heads, shared, tokens, size, dtype, kind",
    [
        (64, 32, 8, 64, 128, torch.float16, "table, cap"),
        (3, 16, 8, 700, 256, torch.bfloat16, "window, sinks"),
        (9, 6, 2, 9, 96, torch.float32, "window"),
    ],
)
def test_compiles(
    requests: int,
    heads: int,
    shared: int,
    tokens: int,
    size: int,
    dtype: torch.dtype,
    kind: str,
    target: int | str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    properties = gpu_of(target)
    kept: list[tuple[Any, ...]] = []
    monkeypatch.setattr(paged, "launch", lambda *launch: kept.append(launch))
    monkeypatch.setattr(paged, "properties_of", lambda _: properties)
    taken = paged.supports(dtype, size, heads, shared, properties.capability if isinstance(target, int) else 0)
    assert taken == (target != 75 or dtype is torch.float16)
    if not taken:
        return

    def empty(*shape: int, of: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=of, device="meta")

    alone = "table" in kind
    places = empty(requests, 32, of=torch.int32) if alone else empty(tokens + 4096, of=torch.int64)
    pages = Pages(empty(9000, shared, size), empty(9000, shared, size), places, 256 if alone else 0)
    ends = empty(requests + 1, of=torch.int32)
    given = (empty(tokens, heads, size), empty(tokens, shared, size), empty(tokens, shared, size), pages, ends, ends)
    options = {"window": 128 if "window" in kind else 0, "softcap": 30.0 if "cap" in kind else None}
    sinks = empty(heads) if "sinks" in kind else None
    most = {"most_new": 1 if alone else tokens, "most_tokens": 8192}
    plan = paged.plan_pages(properties, tokens, *most.values(), heads // shared, shared, size * dtype.itemsize // 2)
    several = PagesPlan(plan.block, plan.fresh, 8, plan.rows, plan.new, plan.warps, plan.stages)
    paged.attend_pages(*given, size**-0.5, **most, **options, sinks=sinks, plan=several)
    assert [launch[0] for launch in kept] == [paged.attend_pages_kernel, paged.add_pages_kernel]
    for launch in kept:
        kernel, (_, compiled) = launch[0], compile_launch(launch, target)
        if isinstance(target, int):
            assert compiled.metadata.shared <= properties.shared_memory
        if kernel is paged.attend_pages_kernel and isinstance(target, int) and target >= 80:
            copies = [line for line in compiled.asm["ptx"].splitlines() if "cp.async.c" in line and "shared" in line]
            assert any(", 0x10, " in line for line in copies)  # keys and values, 16 bytes each
