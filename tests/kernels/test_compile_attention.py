"""The kernels of attention compile for every target."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gpus import compile_launch, gpu_of, on_targets

from halfbyte.kernels.common.norm import Norm

pytest.importorskip("triton")

from halfbyte.kernels.attention import merge, put, rotary, spans, turn
from halfbyte.kernels.attention import triton as attention
from halfbyte.kernels.attention.fresh import Fresh
from halfbyte.kernels.attention.fresh import supports as supports_fresh
from halfbyte.kernels.attention.plan import AttentionPlan, plan_for

pytestmark = pytest.mark.slow


@on_targets(
    "texts, heads, shared, new, tokens, size, dtype, kind",
    [
        (1, 32, 8, 1, 320, 128, torch.float16, "mask"),
        (1, 64, 8, 8, 4099, 80, torch.bfloat16, "mask"),
        (32, 16, 16, 1, 4099, 256, torch.float16, "cap"),
        (8, 16, 4, 4, 32768, 256, torch.float16, "two launches"),
        (2, 64, 8, 8, 8192, 192, torch.bfloat16, "no mask"),
        (128, 32, 1, 1, 8, 64, torch.bfloat16, "sinks"),
        (1, 32, 8, 1, 4096, 128, torch.bfloat16, "new token"),
        (8, 48, 2, 1, 4096, 80, torch.float16, "new token, norms"),
        (1, 32, 8, 8, 4096, 128, torch.bfloat16, "new tokens"),
        (2, 48, 2, 4, 4096, 80, torch.float16, "new tokens, norms"),
    ],
)
def test_compiles(
    texts: int,
    heads: int,
    shared: int,
    new: int,
    tokens: int,
    size: int,
    dtype: torch.dtype,
    kind: str,
    target: int | str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    properties = gpu_of(target)
    kept: list[tuple[Any, ...]] = []
    for module in (attention, put, spans):
        monkeypatch.setattr(module, "launch", lambda *launch: kept.append(launch))
    monkeypatch.setattr(attention, "properties_of", lambda _: properties)
    query = torch.empty(texts, heads, new, size, dtype=dtype, device="meta")
    keys = torch.empty(texts, shared, tokens, size, dtype=dtype, device="meta")
    mask = torch.empty(texts, 1, new, tokens, dtype=dtype if kind == "cap" else torch.bool, device="meta")
    seen = None if kind == "no mask" else mask
    sinks = torch.empty(heads, dtype=dtype, device="meta") if kind == "sinks" else None
    taken = attention.supports(query, keys, keys, seen, sinks)
    assert taken == (target != 75 or dtype is torch.float16)  # Turing's tensor cores do not know bf16
    if not taken:
        return
    rows = heads // shared * new
    plan = plan_for(properties, texts * shared, tokens, size, rows)
    if kind == "two launches":
        plan = AttentionPlan(plan.block, plan.parts, plan.rows, plan.warps, plan.stages, one_launch=False)
    cap = 50.0 if kind == "cap" else None
    fresh = None
    if "new token" in kind:
        new_keys = torch.empty(texts, shared, new, size, dtype=dtype, device="meta")
        angles = torch.empty(1, new, size // 2, dtype=dtype, device="meta")
        norm = Norm(torch.empty(size, dtype=dtype, device="meta"), 1e-6, 1.0) if "norms" in kind else None
        slot = torch.empty((), dtype=torch.int64, device="meta")
        fresh = Fresh(new_keys, new_keys, angles, angles, slot, norm, norm)
        assert supports_fresh(fresh, query, keys, keys)
    attention.attend(query, keys, keys, seen, size**-0.5, softcap=cap, sinks=sinks, fresh=fresh, plan=plan)
    merges = [merge.attend_merge_kernel] * (plan.parts > 1 and kind in ("two launches", "no mask"))
    first = [put.put_kernel] * ("new tokens" in kind) + [spans.attend_spans_kernel] * (seen is not None)
    assert [launch[0] for launch in kept] == [*first, attention.attend_kernel, *merges]
    for launch in kept:
        kernel, (grid, compiled) = launch[0], compile_launch(launch, target)
        if kernel is attention.attend_kernel:
            assert grid == texts * shared * plan.tiles(rows) * plan.parts
        if isinstance(target, int):
            assert compiled.metadata.shared <= properties.shared_memory
        if kernel is attention.attend_kernel and isinstance(target, int) and target >= 80:
            copies = [line for line in compiled.asm["ptx"].splitlines() if "cp.async.c" in line and "shared" in line]
            assert copies  # of keys and values, on their way while others are computed with
            assert all(", 0x10, " in line for line in copies)  # 16 bytes each


@on_targets(
    "texts, heads, shared, size, dtype, kind",
    [
        (1, 32, 8, 128, torch.bfloat16, ""),
        (2, 64, 8, 64, torch.float16, "halves"),
        (1, 128, 16, 128, torch.bfloat16, "norms"),
        (4, 40, 10, 96, torch.float16, "norms"),
        (1, 16, 8, 256, torch.bfloat16, "norms"),
    ],
)
@pytest.mark.parametrize("new", [250, 1])
def test_turn_compiles(
    texts: int, heads: int, shared: int, size: int, dtype: torch.dtype, kind: str, target: Any, new: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    kept: list[tuple[Any, ...]] = []
    monkeypatch.setattr(turn, "launch", lambda *launch: kept.append(launch))
    query = torch.empty(texts, new, heads, size, dtype=dtype, device="meta").transpose(1, 2)
    keys = torch.empty(texts, shared, new, size, dtype=dtype, device="meta")
    angles = torch.empty(1, new, size // (2 if kind == "halves" else 1), dtype=dtype, device="meta")
    norm = Norm(torch.empty(size, dtype=dtype, device="meta"), 1e-6, 1.0) if kind == "norms" else None
    fresh = Fresh(keys, keys, angles, angles, None, norm, norm, kind == "halves")
    assert supports_fresh(fresh, query, keys, keys)
    assert turn.turn(query, keys, keys, fresh).shape == query.shape
    grid, _ = compile_launch(kept[-1], target)
    assert grid == texts * new


@on_targets(
    "texts, heads, shared, size, dtype, back",
    [
        (1, 32, 8, 128, torch.bfloat16, False),
        (2, 64, 8, 64, torch.float16, True),
        (1, 40, 40, 80, torch.bfloat16, True),
        (4, 16, 8, 256, torch.float16, False),
    ],
)
@pytest.mark.parametrize("new", [250, 1])
def test_rotate_compiles(
    texts: int, heads: int, shared: int, size: int, dtype: torch.dtype, back: bool, target: Any, new: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    kept: list[tuple[Any, ...]] = []
    monkeypatch.setattr(rotary, "launch", lambda *launch: kept.append(launch))
    query, key = (torch.empty(texts, new, n, size, dtype=dtype, device="meta").transpose(1, 2) for n in (heads, shared))
    angles = torch.empty(1, new, size, dtype=dtype, device="meta")
    assert rotary.supports(query, key, angles, angles)
    assert rotary.rotate(query, key, angles, angles, back)[0].stride() == torch.empty_like(query).stride()
    grid, _ = compile_launch(kept[-1], target)
    assert grid == texts * new
