"""benchmarks/gemm_plans.py: what it would measure on a GPU, with a stand-in for the clock, and what it fits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from halfbyte.bench.predictions import problem, properties_named
from halfbyte.kernels.linear.laid_out import span_of
from halfbyte.kernels.linear.sm90_gemm.plan import gemm_plan
from halfbyte.kernels.linear.sm90_gemm.shape import GemmPlan, is_valid
from halfbyte.kernels.linear.tune import h200
from halfbyte.measure.timing import Timing

from .conftest import BENCHMARKS, check_constants, rows_of, script_of_planner

RECORD = BENCHMARKS / "results/h200/gemm-plans.csv"
H100 = "NVIDIA H100 80GB HBM3"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    yield from script_of_planner("gemm_plans", gemm_plan, monkeypatch)


def test_constants_are_those_of_the_record(script: ModuleType) -> None:
    check_constants(script, RECORD, {0: script.constants_forward(), 1: script.constants_back()}, every=40)


def test_a_fit_finds_what_was_lost(script: ModuleType) -> None:
    rows = rows_of(script, RECORD)
    properties, before = properties_named(rows[0].device), h200.GEMM_COMPUTED_UNIT[128]
    of_tile = [row for row in rows if row.tile_m == 128 and not row.back and row.format == "int4"][::5]
    h200.GEMM_COMPUTED_UNIT[128] = 4.0
    constants = [script.Constant("GEMM_COMPUTED_UNIT", 128)]
    script.fit_to(constants, of_tile, lambda row: script._estimate(row, properties))
    assert constants[0].value == pytest.approx(before, rel=0.05)


def test_fit_tells_all_constants(
    script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "gemm-plans.csv"
    first, *lines = RECORD.read_text().splitlines()
    path.write_text("\n".join([first, *lines[::60]]))
    script.fit(path)
    told = capsys.readouterr().out
    assert "GEMM_START = " in told
    assert "BACK_COMPUTED_UNIT[256] = " in told
    assert told.count("chosen / fastest") == 2


@pytest.mark.parametrize("back", [False, True])
@pytest.mark.parametrize("m", [16, 100, 500, 3000])
def test_plans_fit(m: int, back: bool, script: ModuleType) -> None:
    for weight in script.WEIGHTS.values():
        o, properties = problem(*weight, 2048, 4096), properties_named(H100)
        n, k = (o.k, o.n) if back else (o.n, o.k)
        found = list(script.candidates(m, o, back, properties))
        assert all(is_valid(plan, m, n, k, span_of(o), properties) for plan in found)
        assert all(plan.tile_m * plan.x_tiles(m) < 1.45 * m for plan in found)
        assert {plan.back for plan in found} <= {back}


def test_measure(script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[GemmPlan, int]] = []

    def time_all(providers: Mapping[Any, Any], sets: int, device: torch.device, rounds: int) -> dict[Any, Timing]:
        for provider in providers.values():
            provider(0)
        return {name: Timing(1.25, 1.0, 1.5, rounds, "gpu") for name in providers}

    def run(kernel: Any, x: torch.Tensor, q: Any, bias: None, out: torch.Tensor, plan: GemmPlan) -> None:
        assert (x.shape[1], out.shape[1]) == (q.shape if plan.back else q.shape[::-1])
        seen.append((plan, len(x)))

    for name, value in {"time_all": time_all, "run": run, "SHAPES": ((256, 512),), "ROWS": (128, 300)}.items():
        monkeypatch.setattr(script, name, value)
    monkeypatch.setattr(script, "input_sets", lambda nbytes, device: 1)
    monkeypatch.setattr(script, "device_name", lambda device: H100)
    monkeypatch.setattr("halfbyte.kernels.common.nvrtc.cubin", lambda variant: b"")
    path = tmp_path / "gemm-plans.csv"
    script.measure(path, torch.device("cpu"), properties_named(H100))
    rows = rows_of(script, path)
    assert [(row.shape, row.m, bool(row.back)) for row in rows] == [
        (script.shape_of(plan), m, plan.back) for plan, m in seen
    ]
    assert {(row.device, row.n, row.k, row.microseconds) for row in rows} == {(H100, 256, 512, 1.25)}
    assert {row.format for row in rows} == {"nf4", "int4"}
    properties = properties_named(H100)
    assert all(script._estimate(row, properties) > 0 for row in rows)
