"""`halfbyte bench generate`: its rows and tables, and that a wrong token stops it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from halfbyte.bench import calls
from halfbyte.cli import app
from halfbyte.measure import models, records
from halfbyte.models.accelerate import is_accelerated


@pytest.mark.slow
def test_every_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "PROCESSES", 1)
    options = ["--model", "tiny", "--device", "cpu", "--layers", "1", "--prompt", "64", "--new-tokens", "8"]
    result = CliRunner().invoke(app, ["bench", "generate", *options, "--rounds", "3", "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    (path,) = tmp_path.glob("*/generate.json")
    rows = records.read(path)["rows"]
    assert {row["model"] for row in rows} == {"tiny, 1 layer, 64 prompt tokens, 8 new tokens"}
    of_calls = [row["call"] for row in rows if "call" in row]
    assert of_calls == [
        "step of a running call", "a cache's first", "a new prompt length", "a repeated one", "first of a process",
    ]  # fmt: skip
    speeds = {(row["text"], row["provider"], row["way"]): row["tokens_per_s"] for row in rows if "way" in row}
    assert len(speeds) == 2 * 2 * 2
    assert all(speed > 0 for speed in speeds.values())
    assert "prompt look-up" in calls.markdown(records.read(path))


@pytest.mark.parametrize("cycle", [3, 61, 1000])
def test_a_permutation_in_cycles(cycle: int) -> None:
    follows = calls._permutation(1000, cycle)
    assert torch.equal(follows.sort().values, torch.arange(1000))
    text = calls._run(follows, 2 * cycle)
    assert torch.equal(text[:cycle], text[cycle:])
    assert len(set(text.tolist())) in (cycle, 1000 % cycle)


def test_a_wrong_token_stops_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "LOUD", 1e-3)  # then layers say what follows
    model = models.load("tiny", torch.device("cpu"), torch.bfloat16)
    with pytest.raises(ValueError, match="is not what follows"):
        list(calls._speculation(model, torch.device("cpu"), calls.Settings(prompt=64, tokens=8)))
    assert not is_accelerated(model)


def test_more_rounds_than_shorter_prompts() -> None:
    result = CliRunner().invoke(app, ["bench", "generate", "--model", "tiny", "--prompt", "32", "--rounds", "32"])
    assert result.exit_code == 2
    assert "shorter" in result.output
