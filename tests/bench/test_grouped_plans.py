"""benchmarks/grouped_plans.py: what it would measure on a GPU, with a stand-in for the clock, and what it fits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import chain, groupby
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from halfbyte.bench.mixtures import Mixture
from halfbyte.bench.predictions import properties_named
from halfbyte.kernels.linear.grouped import Plan
from halfbyte.kernels.linear.tune import h200
from halfbyte.measure.timing import Timing

from .conftest import BENCHMARKS, check_constants, rows_of, script_of_planner

RECORD = BENCHMARKS / "results/h200/grouped-plans.csv"
H100 = "NVIDIA H100 80GB HBM3"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    yield from script_of_planner("grouped_plans", None, monkeypatch)


def test_constants_are_those_of_the_record(script: ModuleType) -> None:
    check_constants(script, RECORD, {0: script.constants_forward(), 1: script.constants_back()}, every=8)


def test_a_fit_finds_what_was_lost(script: ModuleType) -> None:
    rows = rows_of(script, RECORD)
    properties, before = properties_named(rows[0].device), h200.GROUPED_TIMES[160].unit
    of_tile = [row for row in rows if row.tile_m == 160 and not row.back]
    h200.GROUPED_TIMES[160] = h200.GROUPED_TIMES[160]._replace(unit=5.0)
    constants = [script.Constant("GROUPED_TIMES", 160, "unit")]
    script.fit_to(constants, of_tile, lambda row: script._estimate(row, properties))
    assert constants[0].value == pytest.approx(before, rel=0.05)


def test_fit_tells_all_constants(script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "grouped-plans.csv"
    first, *lines = RECORD.read_text().splitlines()
    by_product = [list(each) for _, each in groupby(lines, lambda line: line.split(",")[:6])]
    path.write_text("\n".join([first, *chain.from_iterable(by_product[::20])]))
    script.fit(path)
    told = capsys.readouterr().out
    assert "GROUPED_STREAMK[8, 4].unit = " in told
    assert "GROUPED_BACK_TIMES[256].tile = " in told
    assert told.count("chosen / fastest") == 2


def test_measure(script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[Plan, int, int]] = []
    mixture = Mixture(4, 2, 256, 128)

    def time_all(providers: Mapping[Any, Any], sets: int, device: torch.device, rounds: int) -> dict[Any, Timing]:
        for provider in providers.values():
            provider(0)
        return {name: Timing(1.25, 1.0, 1.5, rounds, "gpu") for name in providers}

    def bind(device: torch.device, problem: Any, weight: Any, grouping: Any, plan: Plan) -> Callable[..., None]:
        assert grouping.experts == mixture.experts
        return lambda stream, x, routes, bias, out, rows, per_row: seen.append((plan, rows, per_row))

    def sort(ids: torch.Tensor, experts: int, tile_m: int, tiles: int) -> SimpleNamespace:
        assert experts == mixture.experts
        return SimpleNamespace(table=ids)

    for name, value in {"time_all": time_all, "sort": sort, "MODELS": {"tiny": mixture}}.items():
        monkeypatch.setattr(script, name, value)
    monkeypatch.setattr(script, "STACKS", (("tiny", "nf4"), ("tiny", "mxfp4")))
    monkeypatch.setattr(script, "TOKENS", (32, 600))
    monkeypatch.setattr(script, "device_name", lambda device: H100)
    monkeypatch.setattr(script.grouped, "bind", bind)
    monkeypatch.setattr("halfbyte.kernels.common.nvrtc.cubin", lambda variant: b"")
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0, raising=False)
    path = tmp_path / "grouped-plans.csv"
    script.measure(path, torch.device("cpu"), properties_named(H100))
    rows = rows_of(script, path)
    assert {row.microseconds for row in rows} == {1.25}
    assert {(row.format, row.part, row.back, row.tokens) for row in rows} == {
        (format, part, back, tokens)
        for format in ("nf4", "mxfp4")
        for part in ("gate_up", "down")
        for back in (0, 1)
        for tokens in (32, 600)
    }
    assert [(row.shape, row.back) for row in rows] == [(script.shape_of(plan), plan.back) for plan, _, _ in seen]
    for row, (_, given, per_row) in zip(rows, seen, strict=True):
        of_tokens = row.part == "gate_up" and not row.back
        assert (given, per_row) == ((row.tokens, 2) if of_tokens else (2 * row.tokens, 1))
    assert all(script._estimate(row, properties_named(H100)) > 0 for row in rows)
