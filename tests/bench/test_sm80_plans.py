"""benchmarks/sm80_plans.py: what it would measure on a GPU, with a stand-in for the clock, and what it fits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from halfbyte.bench.predictions import properties_named
from halfbyte.kernels.linear.sm80.plan import Sm80Plan, is_valid, sm80_plan
from halfbyte.kernels.linear.tune import h200
from halfbyte.measure.timing import Timing

from .conftest import BENCHMARKS, rows_of, script_of_planner

RECORD = BENCHMARKS / "results/h200/sm80-plans.csv"
H200 = "NVIDIA H200"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    yield from script_of_planner("sm80_plans", None, monkeypatch)


@pytest.mark.parametrize("format", ["nf4", "int4"])
@pytest.mark.parametrize("m", [1, 16, 48, 128])
def test_plans_fit(format: str, m: int, script: ModuleType) -> None:
    """What the planner chooses is among them, and so are shapes that it does not have."""
    o, properties = script.problem_of(format, 4096, 4096), properties_named(H200)
    found = script.plans(m, o, properties)
    assert all(script.shape_of(plan) == shape for shape, plan in found.items())
    assert all(is_valid(plan, m, o, properties) for plan in found.values())
    chosen = sm80_plan(m, o, properties)
    assert chosen is not None
    assert found[script.shape_of(chosen)] == chosen
    assert set(found) - set(h200.SM80_SHAPES[chosen.columns])


def test_constants_are_those_of_the_record(script: ModuleType) -> None:
    """What they choose is among the fastest that were measured."""
    rows = [row for row in rows_of(script, RECORD) if row.local == 0]
    told = script._lost(rows, properties_named(rows[0].device))
    assert float(told.split("mean ")[1].split(",")[0]) < 1.02


def test_measure_and_fit(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With times that are what a planner of other constants would estimate: a fit finds these. Of shapes that spill
    nothing is told."""
    properties = properties_named(H200)
    seen: list[tuple[Sm80Plan, torch.Tensor]] = []

    def time_all(providers: Mapping[Any, Any], sets: int, device: torch.device, rounds: int) -> dict[Any, Timing]:
        times = {}
        for shape, provider in providers.items():
            provider(0)
            plan, x = seen[-1]
            value = script.estimate(plan, len(x), script.problem_of("nf4", x.shape[1], x.shape[1]), properties)
            times[shape] = Timing(value, 1.0, 1.5, rounds, "gpu")
        return times

    def run(kernel: Any, x: torch.Tensor, q: Any, bias: None, out: torch.Tensor, plan: Sm80Plan) -> None:
        assert out.shape == (len(x), q.shape[0])
        assert x.dtype is torch.float16
        seen.append((plan, x))

    values: dict[str, Any] = {
        "time_all": time_all, "run": run, "WEIGHTS": ((512, 512), (1024, 1024)), "ROWS": (8, 16),
        "FORMATS": {"nf4": (64, True)}, "input_sets": lambda nbytes, device: 1, "device_name": lambda device: H200,
        "local_bytes": lambda variant, device: 8 * (dict(variant.constants)["n_warps"] == 8),
    }  # fmt: skip
    for name, value in values.items():
        monkeypatch.setattr(script, name, value)
    monkeypatch.setattr("halfbyte.kernels.common.nvrtc.cubin", lambda variant: b"")
    monkeypatch.setattr(h200, "SM80_LATENCY", 500.0)
    path = tmp_path / "sm80-plans.csv"
    script.measure(path, torch.device("cpu"), properties)
    rows = rows_of(script, path)
    assert {row.product for row in rows} == {("nf4", n, n, m) for n in (512, 1024) for m in (8, 16)}
    assert {row.local for row in rows} == {0, 8}
    monkeypatch.setattr(h200, "SM80_LATENCY", 281.0)
    script.fit(path)
    told = capsys.readouterr().out
    before, after = told.split("rms error ")[1].split("\n")[0].split(" -> ")
    assert float(after.rstrip("%")) < 1 < float(before.rstrip("%"))
    assert told.count("chosen / fastest") == 2
    assert "tiles of 16, 2 products:" in told
    assert ", which the planner lacks: " in told
    assert "(2, 8, " not in told
