"""benchmarks/attention_plans.py: what it would measure on a GPU, with a stand-in for the clock, and what it fits."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from halfbyte.bench.predictions import properties_named
from halfbyte.kernels.attention.sm90 import plan
from halfbyte.kernels.attention.sm90.plan import ClusterPlan, cluster_plan
from halfbyte.measure.timing import Timing

from .conftest import BENCHMARKS, load_script, rows_of

RECORD = BENCHMARKS / "results/h200/attention-plans.csv"
H100 = "NVIDIA H100 80GB HBM3"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setattr(plan, "TIMES", dict(plan.TIMES))
    return load_script("attention_plans", monkeypatch)


def test_constants_are_those_of_the_record(script: ModuleType) -> None:
    """What they choose is among the fastest that were measured, and it is what attention is launched with."""
    rows = rows_of(script, RECORD)
    properties = properties_named(rows[0].device)
    assert float(script._lost(rows, properties).split("mean ")[1].split(",")[0]) < 1.015
    for heads, shared, size, texts, tokens in {row.load for row in rows}:
        every = script.plans((heads, shared, size, texts, tokens), properties)
        chosen = cluster_plan(properties, texts * shared, tokens, size, heads // shared)
        if chosen is None:  # a small cache, which is Triton's
            assert (size, heads // shared) == (256, 2)
            continue
        assert every[script.shape_of(chosen)][0] == min(estimate for estimate, _ in every.values())


def test_a_fit_finds_what_was_lost(script: ModuleType) -> None:
    rows = [row for row in rows_of(script, RECORD) if row.size == 64]
    properties = properties_named(rows[0].device).as_fitted
    plan.TIMES[64] = plan.TIMES[64]._replace(meeting=0.0001, part=0.6)
    before = script._lost(rows, properties)
    error = script.descend(64, rows, properties, steps=600)
    assert error < 0.15
    assert script._lost(rows, properties) < before


def test_fit_tells_all_constants(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "attention-plans.csv"
    first, *lines = RECORD.read_text().splitlines()
    path.write_text("\n".join([first, *lines[::9]]))
    monkeypatch.setattr(script, "STEPS", 5)
    script.fit(path)
    told = capsys.readouterr().out
    assert told.count("Times(start=") == len(plan.TIMES)
    assert told.count("chosen / fastest") == 2


def test_measure(script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan's time is that of the chain less that of the products alone."""
    seen: list[tuple[ClusterPlan, tuple[int, ...]]] = []

    def time_all(providers: Mapping[Any, Any], sets: int, device: torch.device, rounds: int) -> dict[Any, Timing]:
        times = {}
        for number, (shape, provider) in enumerate(providers.items()):
            assert provider(0).shape[1] == script.HIDDEN
            times[shape] = Timing(2.0 + number, 1.0, 1.5, rounds, "gpu")
        return times

    def attend(query: torch.Tensor, keys: torch.Tensor, *others: Any) -> torch.Tensor:
        seen.append((others[-1], tuple(keys.shape)))
        return query.transpose(1, 2)

    values = {"time_all": time_all, "HEADS": ((8, 2, 64),), "CACHES": ((1, 40), (2, 300)), "HIDDEN": 64}
    for name, value in values.items():
        monkeypatch.setattr(script, name, value)
    monkeypatch.setattr(script, "device_name", lambda device: H100)
    monkeypatch.setattr(script, "spans_of", lambda mask, texts: None)
    monkeypatch.setattr(script.launch, "attend", attend)
    monkeypatch.setattr("halfbyte.kernels.common.nvrtc.cubin", lambda variant: b"")
    path = tmp_path / "attention-plans.csv"
    script.measure(path, torch.device("cpu"), properties_named(H100))
    rows = rows_of(script, path)
    assert {row.load for row in rows} == {(8, 2, 64, 1, 40), (8, 2, 64, 2, 300)}
    assert [(row.shape, row.texts, row.tokens) for row in rows] == [
        (script.shape_of(one), texts, tokens) for one, (texts, _, tokens, _) in seen
    ]
    first = [row for row in rows if row.texts == 1]
    assert [row.microseconds for row in first] == list(range(1, len(first) + 1))
