"""benchmarks/estimates.py with a stand-in for the clock: what it would measure on a GPU, and what it reports then."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from halfbyte.bench.predictions import DENSE, estimates, read_cells
from halfbyte.kernels.common.device import properties_like
from halfbyte.kernels.common.gpus import GPUS
from halfbyte.measure.timing import Timing

from .conftest import BENCHMARKS, load_script


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Small, and on a CPU: every provider takes a microsecond for each letter of its label, and none computes anything
    but the dense way."""
    module = load_script("estimates", monkeypatch)

    def time_all(providers: Mapping[str, Any], sets: int, device: torch.device, rounds: int) -> dict[str, Timing]:
        if DENSE in providers:
            assert providers[DENSE](0).shape == (64, 1024)
        return {label: Timing(float(len(label)), 1.0, 1.0, rounds, "gpu") for label in providers}

    for name, value in {"time_all": time_all, "SHAPES": ((1024, 256),), "ROWS": (1, 64)}.items():
        monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(module, "input_sets", lambda nbytes, device: 1)
    monkeypatch.setattr(module, "only", lambda sms, device: nullcontext())
    monkeypatch.setattr(module.nvrtc, "cubin", lambda variant: b"")
    monkeypatch.setattr(module, "run", lambda *arguments: None)
    return module


@pytest.mark.parametrize("name", ["NVIDIA H100 80GB HBM3", "NVIDIA GeForce RTX 4090", "Tesla T4"])
def test_measure_and_report(
    name: str, script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gpu = next(gpu for gpu in GPUS if gpu.name == name)
    properties, path = properties_like(gpu), tmp_path / "estimates.csv"
    monkeypatch.setattr(script, "device_name", lambda device: name)
    script.measure(path, [36, 58, 9999], 1, torch.device("cpu"), properties)
    cells = read_cells(path)
    assert {cell.device for cell in cells} == {name}
    expected = {gpu.sms} if gpu.capability < 80 else {36, 58, gpu.sms}
    assert {cell.sms for cell in cells} == expected
    kernels = {
        "NVIDIA H100 80GB HBM3": {
            "sm90_decode",
            "sm90_streamk",
            "sm90_gemm",
            "sm75",
            "sm80",
            "sm80_gemm",
            "simt",
            DENSE,
        },
        "NVIDIA GeForce RTX 4090": {"sm75", "sm80", "sm80_gemm", "simt", DENSE},
        "Tesla T4": {"sm75", "simt", DENSE},
    }[name]
    for cell, measured in cells.items():
        assert set(measured) <= (kernels if cell.sms == gpu.sms else {"sm80"})
        assert all(kernel == DENSE or us == len(kernel) for kernel, us in measured.items())
        assert set(estimates(cell, list(measured))) == set(measured)
    assert {kernel for measured in cells.values() for kernel in measured} == kernels
    script.main(["report", str(path)])
    told = capsys.readouterr().out
    for sms in expected:
        assert f"{name}, {sms} SMs, " in told
    assert "median error" in told
    assert "all        chosen / fastest" in told


def test_a_measurement_goes_on_where_it_was_left(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    properties, path, device = properties_like(GPUS[0]), tmp_path / "estimates.csv", torch.device("cpu")
    monkeypatch.setattr(script, "device_name", lambda device: GPUS[0].name)
    script.measure(path, [], 1, device, properties)
    whole = path.read_text(encoding="utf-8")
    first = next(script.weights())
    lines = whole.splitlines(keepends=True)
    left = [line for line in lines if line.split(",")[2:7] == [str(value) for value in first]]
    path.write_text("".join([lines[0], *left]), encoding="utf-8")
    script.measure(path, [], 1, device, properties)
    assert path.read_text(encoding="utf-8") == whole
    script.measure(path, [], 1, device, properties)
    assert path.read_text(encoding="utf-8") == whole
    path.write_text("format,m\n", encoding="utf-8")
    with pytest.raises(ValueError, match="has the columns format,m instead of"):
        script.measure(path, [], 1, device, properties)


def test_the_report_of_the_h200(script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A tenth of what was measured there: the medians of estimates are right."""
    lines = (BENCHMARKS / "results/h200/estimates.csv").read_text(encoding="utf-8").splitlines()
    path = tmp_path / "estimates.csv"
    path.write_text("\n".join([lines[0], *lines[1::10]]) + "\n", encoding="utf-8")
    script.main(["report", str(path)])
    told = capsys.readouterr().out
    assert "NVIDIA H200, 132 SMs, sm90_streamk" in told
    for row in script.errors(read_cells(path)):
        assert 0.9 < row["median_ratio"] < 1.1
        assert row["median_error"] < (0.25 if row["kernel"] == "sm75" else 0.1)
