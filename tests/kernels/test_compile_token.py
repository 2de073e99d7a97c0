"""The kernels between two tokens compile for every target."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gpus import compile_launch, on_targets

pytest.importorskip("triton")

from halfbyte.kernels.token import triton as token

pytestmark = pytest.mark.slow


@on_targets("rows, tokens, dtype", [(1, 128, torch.bfloat16), (32, 9000, torch.float16), (3, 40, torch.float32)])
def test_compiles(
    rows: int, tokens: int, dtype: torch.dtype, target: int | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[tuple[Any, ...]] = []
    monkeypatch.setattr(token, "launch", lambda *launch: kept.append(launch))

    def empty(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    scores, flags = empty(rows, 128256, dtype=dtype), empty(rows, dtype=torch.bool)
    of_rows = {"ids": empty(rows, tokens + 1), "positions": empty(rows, 1), "fed": empty(rows, 1)}
    of_rows |= {"unfinished": flags, "real": flags, "report": empty(rows + 1), "length": empty(), "pad": empty()}
    noise, broken = (scores, (flags, -1)) if dtype is torch.float32 else (None, None)
    token.put_argmax(scores, SimpleNamespace(**of_rows), empty(2) if rows > 1 else None, noise, broken)
    masks = [empty(rows, size, dtype=torch.bool) for size in (tokens, 1024)]
    layers = empty(28)
    token.step_masks(
        empty(28, 2)[:, 0], [masks[0], masks[1] if rows > 1 else None], empty(), empty(), layers, layers, masks[0]
    )
    token.angles(empty(rows, 8), empty(64, dtype=torch.float32), 1.5, 128, dtype)
    token.embedding(empty(rows, 1), empty(128256, 4096, dtype=dtype))
    blocks = -(-tokens // token.BLOCK)
    for launch, wanted in zip(kept, (rows * 32, 1, rows * blocks, rows * 8, rows * 4), strict=True):
        grid, compiled = compile_launch(launch, target)
        assert grid == wanted
        if isinstance(target, int):
            assert ("griddepcontrol.wait" in compiled.asm["ptx"]) == (target >= 90)
            if launch[0] is token.put_argmax_kernel:  # the length is read by all before one writes it
                assert "bar.sync" in compiled.asm["ptx"]
