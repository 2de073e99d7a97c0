"""The kernel that appends to a static cache compiles for every target."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gpus import compile_launch

from halfbyte.kernels.common.targets import CUDA_TARGETS, HIP_TARGETS

pytest.importorskip("triton")

from halfbyte.kernels.cache import triton as cache


@pytest.mark.parametrize("target", [*CUDA_TARGETS, *HIP_TARGETS])
@pytest.mark.parametrize(
    ("texts", "count", "dtype"), [(1, 1, torch.bfloat16), (32, 1, torch.float16), (3, 5, torch.float32)]
)
def test_compiles(
    target: int | str, texts: int, count: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[tuple[Any, ...]] = []
    monkeypatch.setattr(cache, "launch", lambda *launch: kept.append(launch))
    keys, new = (torch.empty(texts, 8, tokens, 128, dtype=dtype, device="meta") for tokens in (320, count))
    length = torch.empty((), dtype=torch.int64, device="meta")
    assert cache.supports(keys, keys, new, new, length, count)
    cache.append(keys, keys, new, new, length)
    (launch,) = kept
    grid, compiled = compile_launch(launch, target)
    assert grid == 1
    if isinstance(target, int):  # the length is read by all before one writes it
        assert "bar.sync" in compiled.asm["ptx"]
