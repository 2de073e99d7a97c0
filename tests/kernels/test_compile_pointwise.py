"""Norms, gates and routers compile for every target."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gpus import compile_launch, on_targets

pytest.importorskip("triton")

from halfbyte.kernels.experts import combine, router
from halfbyte.kernels.pointwise import triton as pointwise

pytestmark = pytest.mark.slow


@on_targets("rows, columns, dtype", [(1, 4096, torch.bfloat16), (64, 1000, torch.float16)])
def test_compiles(
    rows: int, columns: int, dtype: torch.dtype, target: int | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[tuple[Any, ...]] = []
    for module in (pointwise, router, combine):
        monkeypatch.setattr(module, "launch", lambda *launch: kept.append(launch))
    x, weight = (torch.empty(*shape, dtype=dtype, device="meta") for shape in ((rows, columns), (columns,)))
    pointwise.rms_norm(x, weight, 1e-6, 0.0)
    pointwise.rms_norm(x, weight, 1e-6, 1.0, x)
    pointwise.gated(x, x, "silu" if rows == 1 else "gelu_tanh")
    router.route(x, 8, rows == 1, True, torch.float32)
    pairs = torch.empty(rows, 8, dtype=torch.int64, device="meta")
    wide = x.new_empty((rows * 8, columns), dtype=torch.float32)
    combine.combine(wide, pairs, pairs.float(), x, 64)
    combine.combine_sorted(wide, pairs.int().view(-1), pairs.float(), x)
    assert len(kept) == 6
    grids = {pointwise.gated_kernel: -(-rows * columns // pointwise.BLOCK)}
    grids[combine.combine_kernel] = rows * -(-columns // combine.BLOCK)
    for launch in kept:
        grid, compiled = compile_launch(launch, target)
        assert grid == grids.get(launch[0], rows)
        if isinstance(target, int):
            overlaps = "griddepcontrol.wait" in compiled.asm["ptx"]
            assert overlaps == (target >= 90)
