"""Predictions for known GPUs: the kept record is what planners say, and measured times tell how far they are off."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from typer.testing import CliRunner

from halfbyte import figures
from halfbyte.bench import predictions, predictions_report
from halfbyte.bench.predictions import DENSE, FIELDS, FITTED, Cell, errors, errors_of, estimates, parts_of, read_cells
from halfbyte.cli import app
from halfbyte.kernels.common.gpus import GPUS
from halfbyte.measure import records

RECORD = Path(__file__).parents[2] / "benchmarks/results/predictions.json"
H100 = "NVIDIA H100 80GB HBM3"
CELL = Cell(H100, 132, "nf4", 64, True, 4096, 4096, 16)


def test_the_record_is_what_planners_say() -> None:
    kept = records.read(RECORD)
    now = list(predictions.rows())
    assert kept["fitted"] == FITTED
    assert len(now) == len(GPUS) * len(predictions.WEIGHTS) * len(predictions.SHAPES) * len(predictions.ROWS)
    mend = "the planners have changed; run: halfbyte bench predict --out benchmarks/results, and make figures"
    assert len(kept["rows"]) == len(now), mend
    for told, row in zip(kept["rows"], now, strict=True):
        numbers = {name for name, value in row.items() if isinstance(value, float)}
        assert all(told[name] == pytest.approx(row[name], rel=1e-2) for name in numbers), mend
        assert all(told[name] == row[name] for name in row.keys() - numbers), mend


def test_no_prediction_is_faster_than_memory() -> None:
    for row in predictions.rows():
        assert 0 < row["of_bandwidth"] < 1, row
        made_for = {"sm_75": {"sm75"}, "sm_90": {"sm90_decode", "sm90_streamk", "sm90_gemm"}}
        assert row["kernel"] in made_for.get(row["target"], {"sm80", "sm80_gemm", "sm90_decode", DENSE})


def write(path: Path, fields: tuple[str, ...], *rows: tuple[object, ...]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([fields, *rows])
    return path


def test_a_file_without_devices_is_of_the_gpu_of_the_constants(tmp_path: Path) -> None:
    path = write(tmp_path / "h200/estimates.csv", FIELDS[2:], ("int4", 128, False, 1024, 4096, 8, "sm90_decode", 3.1))
    assert read_cells(path) == {Cell(FITTED, 132, "int4", 128, False, 1024, 4096, 8): {"sm90_decode": 3.1}}


def test_errors_are_medians_by_device_multiprocessors_and_kernel(tmp_path: Path) -> None:
    names = ["sm90_streamk", "sm80", DENSE]
    whole, few = estimates(CELL, names), estimates(CELL._replace(sms=36), names)
    assert set(whole) == set(names)
    assert few["sm80"] > 1.5 * whole["sm80"]
    assert few[DENSE] == whole[DENSE]  # torch keeps to no number of multiprocessors
    assert estimates(CELL._replace(n=4095), ["sm90_decode"]) == {}
    rows = [(*CELL, "sm80", whole["sm80"] / 0.9), (*CELL._replace(m=17), "unknown", 1.0)]
    rows += [(*CELL._replace(sms=36), "sm80", few["sm80"] / ratio) for ratio in (1.2,)]
    rows += [(*CELL._replace(m=m), DENSE, estimates(CELL._replace(m=m), [DENSE])[DENSE] / m) for m in (1, 2, 4)]
    write(tmp_path / "h100/estimates.csv", FIELDS, *rows)
    found = {(row["device"], row["sms"], row["kernel"]): row for row in errors_of(tmp_path)}
    assert set(found) == {(H100, 132, "sm80"), (H100, 36, "sm80"), (H100, 132, DENSE)}
    assert found[H100, 132, "sm80"]["median_ratio"] == pytest.approx(0.9)
    assert found[H100, 36, "sm80"]["median_error"] == pytest.approx(0.2)
    dense = found[H100, 132, DENSE]
    assert (dense["products"], dense["median_ratio"], dense["median_error"]) == (3, 2.0, 1.0)


def test_parts_of_a_gpu_are_those_measured_on_every_number_of_multiprocessors(tmp_path: Path) -> None:
    few, other = CELL._replace(sms=40), CELL._replace(m=64)
    unshown = CELL._replace(n=512)
    rows = [(CELL, 20.0), (few, 40.0), (other, 30.0), (unshown, 5.0), (unshown._replace(sms=40), 5.0)]
    write(tmp_path / "h100/estimates.csv", FIELDS, *((*cell, "sm80", time) for cell, time in rows))
    (row,) = parts_of(tmp_path)
    assert (row["device"], row["case"], row["m"], row["sms"]) == (H100, "4096×4096", 16, [40, 132])
    weight = 4096 * 4096 * (1 / 2 + 1 / 64)  # nibbles, and a byte of scale for each 64; scales of those are few
    expected = [(weight + 2 * 2 * 16 * 4096) / 1e3 / time / sms for sms, time in ((40, 40), (132, 20))]
    assert row["gigabytes_per_s"] == pytest.approx(expected, rel=1e-2)


def test_an_unknown_gpu_says_how_to_mend_it() -> None:
    with pytest.raises(ValueError, match="no known GPU is called 'NVIDIA X'; give it a row in halfbyte/kernels"):
        errors({CELL._replace(device="NVIDIA X"): {"sm80": 1.0}})


def test_the_command(tmp_path: Path) -> None:
    write(tmp_path / "h100/estimates.csv", FIELDS, (*CELL, "sm80", 10.0), (*CELL._replace(sms=40), "sm80", 20.0))
    command = ["bench", "predict", "--results", str(tmp_path), "--out", str(tmp_path)]
    result = CliRunner(env={"COLUMNS": "200"}).invoke(app, command)
    assert result.exit_code == 0, result.output
    assert "RTX 4070 Laptop" in result.output
    record = records.read(tmp_path / "predictions.json")
    assert [(row["device"], row["sms"]) for row in record["errors"]] == [(H100, 132), (H100, 40)]
    blocks = predictions_report.blocks(record)
    assert blocks == figures._predictions(tmp_path / "predictions.json")
    assert set(blocks) == {f"predictions/{name}" for name in ("nf4", "int4", "dense", "errors", "parts")}
    signs = {"errors": "Predicted times over", "parts": "Measured; "}
    for name, text in blocks.items():
        assert f"<sub>{signs.get(name.removeprefix('predictions/'), 'Predicted, not measured')}" in text
    assert "| RTX 4090 | 4096×4096 | sm80, sm80_gemm | " in blocks["predictions/nf4"]
    assert "| H100 80GB HBM3 | 132 | sm80 | 1 | " in blocks["predictions/errors"]
    assert "| measured on | weight | M |" in blocks["predictions/parts"]
    assert figures._predictions(tmp_path / "nowhere.json") == {}
