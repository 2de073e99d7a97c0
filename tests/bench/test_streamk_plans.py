"""benchmarks/streamk_plans.py: what it would measure on a GPU, with a stand-in for the clock, and what it fits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from halfbyte.bench.predictions import problem, properties_named
from halfbyte.kernels.linear.laid_out import span_of
from halfbyte.kernels.linear.sm90_streamk.plan import streamk_plan
from halfbyte.kernels.linear.sm90_streamk.shape import StreamKPlan, is_valid
from halfbyte.kernels.linear.tune import h200
from halfbyte.measure.timing import Timing

from .conftest import BENCHMARKS, rows_of, script_of_planner

RECORD = BENCHMARKS / "results/h200/streamk-plans.csv"
H100 = "NVIDIA H100 80GB HBM3"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    yield from script_of_planner("streamk_plans", streamk_plan, monkeypatch)


def test_constants_are_those_of_the_record(script: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    constants = [
        *script.constants_with_x(),
        *(one for tile_m in h200.STREAMK_CUT for one in script.constants_of_tile(tile_m)),
    ]
    before = {constant: constant.value for constant in constants}
    script.fit(RECORD)
    for constant, value in before.items():
        assert constant.value == pytest.approx(value, rel=0.02, abs=0.02), str(constant)
    told = capsys.readouterr().out
    assert told.count("mean 1.00") == 2  # what choices lose, before and after
    assert "STREAMK_TIMES[8, False].start = " in told
    assert "STREAMK_TILES[80, 3][1] = " in told
    assert "FIX_UP = " in told


def test_a_fit_finds_what_was_lost(script: ModuleType) -> None:
    rows = [row for row in rows_of(script, RECORD) if row.tile_m == 80 and not row.resident][::3]
    stages, right = h200.STREAMK_TILES[80, 2]
    h200.STREAMK_TILES[80, 2] = stages, 3.0
    h200.STREAMK_RUN[80] = 0.5
    properties = properties_named(H100)
    told = script.fit_to(
        script.constants_of_tile(80), rows, lambda row: script.estimate(row.plan, row.m, row.problem, properties)
    )
    before, after = (float(part.rstrip("%")) for part in told.removeprefix("rms error ").split(" -> "))
    assert before > 20 > 7 > after
    assert h200.STREAMK_TILES[80, 2][1] == pytest.approx(right, rel=0.05)


@pytest.mark.parametrize("m", [1, 16, 33, 100, 500])
def test_plans_fit(m: int, script: ModuleType) -> None:
    o, properties = problem("nf4", 64, True, 2048, 2048), properties_named(H100)
    found = list(script.plans(m, o, properties))
    assert len(found) == len(set(found))
    assert all(is_valid(plan, m, o.n, o.k, span_of(o), properties) for plan in found)
    assert any(plan.resident for plan in found) is (m <= 100)
    chosen = streamk_plan(m, o, properties, False)
    assert (chosen.tile_m, chosen.warpgroups) in {(plan.tile_m, plan.warpgroups) for plan in found}


def test_measure(script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[StreamKPlan, int]] = []

    def time_all(providers: Mapping[str, Any], sets: int, device: torch.device, rounds: int) -> dict[str, Timing]:
        for provider in providers.values():
            provider(0)
        return {name: Timing(1.25, 1.0, 1.5, rounds, "gpu") for name in providers}

    def run(kernel: Any, x: torch.Tensor, q: Any, bias: None, out: torch.Tensor, plan: StreamKPlan) -> None:
        assert out.shape == (len(x), q.shape[0])
        seen.append((plan, len(x)))

    for name, value in {"time_all": time_all, "run": run, "SHAPES": ((192, 512),), "ROWS": (8, 48)}.items():
        monkeypatch.setattr(script, name, value)
    monkeypatch.setattr(script, "input_sets", lambda nbytes, device: 1)
    monkeypatch.setattr(script, "device_name", lambda device: H100)
    monkeypatch.setattr("halfbyte.kernels.common.nvrtc.cubin", lambda variant: b"")
    path = tmp_path / "streamk-plans.csv"
    script.measure(path, torch.device("cpu"), properties_named(H100))
    rows = rows_of(script, path)
    assert [(row.plan, row.m) for row in rows] == seen
    assert {(row.device, row.n, row.k, row.microseconds) for row in rows} == {(H100, 192, 512, 1.25)}
    assert {row.m for row in rows} == {8, 48}


def test_files_of_another_form_are_refused(script: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "streamk-plans.csv"
    path.write_text("n,k\n1,2\n")
    with pytest.raises(ValueError, match="has the columns n,k instead of device,n,k,m"):
        script.read(path, script.read_row, script.Row._fields)
    line = ",64,256,8,8,2,2,1,0,1,1,2.5\n"
    path.write_text(",".join(script.Row._fields) + f"\n{H100}{line}NVIDIA H200{line}")
    with pytest.raises(ValueError, match="has rows of 2 devices instead of one"):
        script.read(path, script.read_row, script.Row._fields)
