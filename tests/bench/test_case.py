"""That nothing wrong is ever timed, what a record of cases holds, and the copy ceiling."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from halfbyte.bench import runs
from halfbyte.bench.case import Case, run, same_bits
from halfbyte.bench.ceiling import copy_bandwidth
from halfbyte.measure import records, timing
from halfbyte.terminal import Table

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("result", "words"),
    [
        (torch.zeros(6), None),
        (torch.tensor([0.0, 0, 0, 1, 1, 0]), "2 of 6 values differ"),
        (-torch.zeros(6), "6 of 6 values differ"),
        (torch.zeros(6).half(), r"\[6\] torch.float16 instead of \[6\] torch.float32"),
        (torch.zeros(2, 3), r"\[2, 3\] torch.float32 instead of \[6\]"),
    ],
)
def test_same_bits(result: torch.Tensor, words: str | None) -> None:
    error = same_bits(result, torch.zeros(6))
    assert error is None if words is None else error is not None and re.search(words, error)


def test_same_bits_of_nan() -> None:
    assert same_bits(torch.full((3,), torch.nan), torch.full((3,), torch.nan)) is None


def test_what_is_wrong_is_never_timed(case: Callable[..., Case]) -> None:
    """Wrong on one input of two is wrong; what follows is timed all the same."""
    calls: list[str] = []

    def wrong(index: int) -> Any:
        calls.append("wrong")
        return torch.full((6,), 0.0)

    def right(index: int) -> Any:
        calls.append("right")
        return torch.full((6,), float(index))

    rows = {row.provider: row for row in run(case(wrong=wrong, right=right), rounds=5)}
    assert list(rows) == ["wrong", "right", "bitsandbytes"]
    assert (rows["wrong"].timing, rows["wrong"].gigabytes_per_second) == (None, None)
    assert rows["wrong"].error == "6 of 6 values differ"
    assert calls.count("wrong") == 2
    assert calls.count("right") == 2 + 1 + 5
    for name in ("right", "bitsandbytes"):
        row = rows[name]
        assert row.error is None
        assert row.timing is not None
        assert row.timing.samples == 5
        assert row.gigabytes_per_second == pytest.approx(6000 / row.timing.median / 1e3)


def test_what_a_record_holds(record: dict[str, Any]) -> None:
    assert (record["bench"], record["copy_gb_per_s"], len(record["rows"])) == ("dequantize", 10.0, 6)
    row = record["rows"][0]
    assert (row["case"], row["provider"], row["shape"], row["bytes"]) == ("2×3", "halfbyte", [2, 3], 6000)
    assert row["p20_us"] <= row["median_us"] <= row["p80_us"]
    assert row["of_copy"] == pytest.approx(row["gb_per_s"] / 10, abs=0.01)
    assert (row["samples"], row["clock"]) == (3, "wall")


def test_a_wrong_result_has_an_error_and_no_time(record: dict[str, Any]) -> None:
    wrong = [row for row in record["rows"] if "error" in row]
    assert [(row["case"], row["provider"], row["error"]) for row in wrong] == [("4×6", "peft", "6 of 6 values differ")]
    assert not any(name.endswith("_us") or name in ("gb_per_s", "of_copy") for name in wrong[0])


def test_the_copy_ceiling(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes read and written, over the median."""
    seconds = timing.Timing(1000.0, 900.0, 1100.0, 3, "wall")
    monkeypatch.setattr("halfbyte.bench.ceiling.time_all", lambda *_: {"copy": seconds})
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda numel, **keywords: empty(numel // 2**16, **keywords))
    speed, result = copy_bandwidth(CPU, rounds=3)
    assert result is seconds
    assert speed == 2 * 4 * 2**10 / 1000 / 1e3


def test_what_was_measured_before_ctrl_c_is_kept(
    case: Callable[..., Case], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """In the bench's own file, whatever peers are left out."""
    monkeypatch.setattr(runs.ceiling, "copy_bandwidth", lambda device: (10.0, None))

    def cases(before: int) -> Iterator[Case]:
        for number in range(before):
            made = case(f"{number + 2}×3", halfbyte=lambda index: torch.full((6,), float(index)))
            yield replace(made, left_out={"peft": "it is not here"})
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        runs.run_cases("dequantize", cases(0), CPU, 1, tmp_path)
    assert not list(tmp_path.rglob("*"))
    with pytest.raises(KeyboardInterrupt):
        runs.run_cases("dequantize", cases(2), CPU, 1, tmp_path)
    (kept,) = tmp_path.rglob("*.json")
    assert kept.name == "dequantize.json"
    first = records.read(kept)
    assert [row["case"] for row in first["rows"]] == ["2×3", "2×3", "3×3", "3×3"]
    # A later run that ends earlier takes nothing away.
    monkeypatch.setattr(records, "_commit", lambda: "later")
    with pytest.raises(KeyboardInterrupt):
        runs.run_cases("dequantize", cases(1), CPU, 1, tmp_path)
    second = records.read(kept)
    assert [row["case"] for row in second["rows"]] == ["2×3", "2×3", "3×3", "3×3"]
    assert [row.get("commit") for row in second["rows"]] == [None, None, *2 * [first["environment"]["commit"]]]
    assert second["environment"]["commit"] == "later"


def test_rows_of_another_machine_go(
    case: Callable[..., Case], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """And that is said."""
    monkeypatch.setattr(runs.ceiling, "copy_bandwidth", lambda device: (10.0, None))

    def measured(name: str) -> list[str]:
        made = case(name, halfbyte=lambda index: torch.full((6,), float(index)))
        runs.run_cases("dequantize", [made], CPU, 1, tmp_path)
        (kept,) = tmp_path.rglob("*.json")
        return list(dict.fromkeys(row["case"] for row in records.read(kept)["rows"]))

    assert measured("2×3") == ["2×3"]
    assert measured("3×3") == ["2×3", "3×3"]
    assert "its rows go" not in capfd.readouterr().err
    (kept,) = tmp_path.rglob("*.json")
    record = records.read(kept)
    record["environment"] |= {"torch": "1.0", "driver": "1"}
    records.write(kept, record)
    assert measured("4×3") == ["4×3"]
    assert "another driver and another torch than on" in capfd.readouterr().err


def test_a_model_that_was_measured_in_part(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its new rows take the place of the same in an earlier run; what it was not asked for stays."""

    def rows(batches: Sequence[int], ms: float, stopped: bool) -> Iterator[dict[str, Any]]:
        for batch in batches:
            yield {"model": "one", "provider": "halfbyte", "mode": "graph", "batch": batch, "median_ms": ms}
        if stopped:
            raise KeyboardInterrupt

    def measured(*given: Any) -> list[tuple[int, float]]:
        def rows_of(name: str) -> Iterator[dict[str, Any]]:
            return rows(*given)

        runs.run_models("decode", "", ["one"], str, rows_of, lambda record: Table(), CPU, tmp_path)
        return kept()

    def kept() -> list[tuple[int, float]]:
        (path,) = tmp_path.rglob("decode.json")
        return [(row["batch"], row["median_ms"]) for row in records.read(path)["rows"]]

    assert measured((1, 8), 1.0, False) == [(1, 1.0), (8, 1.0)]
    with pytest.raises(KeyboardInterrupt):
        measured((8, 32), 2.0, True)
    assert kept() == [(8, 2.0), (32, 2.0), (1, 1.0)]
    assert measured((32,), 3.0, False) == [(32, 3.0), (8, 2.0), (1, 1.0)]
