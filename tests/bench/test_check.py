"""`halfbyte bench check` on a CPU: what it makes of records. What it measures needs a GPU (`make bench-check`)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from halfbyte.bench import check, runs
from halfbyte.bench.case import make_record, run
from halfbyte.bench.linear import linear_cases
from halfbyte.measure import records

CPU = torch.device("cpu")


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A record of one small case on this CPU, which alone is checked again."""

    def cases(device: torch.device) -> dict[str, Any]:
        return {"linear": linear_cases(device, ((64, 128),), torch.bfloat16, "nf4", True, (1,), alone=True)}

    monkeypatch.setattr(check, "_cases", cases)
    monkeypatch.setattr(check, "_steps", lambda *_: ())
    rows = [row for case in cases(CPU)["linear"] for row in run(case, 3)]
    path = tmp_path / records.folder_of(CPU) / "linear.json"
    records.write(path, make_record("linear", CPU, rows, 1.0))
    records.write(path.with_name("decode.json"), {"bench": "decode", "rows": []})
    return tmp_path


def change(results: Path, fact: str, factor: float) -> None:
    path = results / records.folder_of(CPU) / "linear.json"
    record = json.loads(path.read_text())
    for row in record["rows"]:
        row[fact] *= factor
    records.write(path, record)


@pytest.mark.slow
def test_as_fast_as_recorded(results: Path) -> None:
    change(results, "median_us", 100)
    change(results, "relative_error", 1.5)
    cells = check.check_cells(CPU, results, print)
    assert {cell.provider for cell in cells} == {"halfbyte", "halfbyte int4"}
    runs.run_check(CPU, results)


@pytest.mark.parametrize(("fact", "factor"), [("median_us", 1e-3), ("relative_error", 0.5)])
def test_slower_or_less_exact(results: Path, fact: str, factor: float, capsys: pytest.CaptureFixture[str]) -> None:
    change(results, "median_us", 100)
    change(results, fact, factor if fact == "relative_error" else factor / 100)
    with pytest.raises(ValueError, match="2 of 2 cells became slower or less exact"):
        runs.run_check(CPU, results)
    assert ("slower" if fact == "median_us" else "less") in capsys.readouterr().out


def test_a_record_that_lacks_what_is_compared(results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows or times of them. Nothing is measured that has nothing to be compared with."""
    monkeypatch.setattr(check, "run", lambda *_: pytest.fail("it was measured"))
    path = results / records.folder_of(CPU) / "linear.json"
    record = json.loads(path.read_text())
    wrong = [{"case": row["case"], "provider": row["provider"], "error": "all zeros"} for row in record["rows"]]
    for rows in (wrong, []):
        records.write(path, record | {"rows": rows})
        with pytest.raises(ValueError, match="the record of linear has no time of case 64×128, M = 1, provider half"):
            check.check_cells(CPU, results, print)


def test_a_record_without_the_step_that_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "errors_against_fp32", lambda *_: {("halfbyte", check.MODE): 0.0})
    monkeypatch.setattr(check.models, "load", lambda *_: None)
    monkeypatch.setattr(check, "ABRun", lambda _: None)
    with pytest.raises(ValueError, match="the record of decode has no time of model llama-3-8b, provider halfbyte"):
        list(check._steps(CPU, [{"model": "llama-3-8b", "provider": "halfbyte", "batch": 1}], print))


def test_no_records(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="holds no records of this device"):
        check.check_cells(CPU, tmp_path, print)
