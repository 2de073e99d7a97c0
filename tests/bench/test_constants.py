"""benchmarks/constants.py: settings, what is forgotten between them, and the table that it prints."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from gpus import H200

from halfbyte.kernels.linear.problem import Problem
from halfbyte.kernels.linear.sm90_streamk.plan import streamk_plan
from halfbyte.kernels.linear.tune import h200

from .conftest import load_script


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return load_script("constants", monkeypatch)


def test_settings_are_all_combinations(script: ModuleType) -> None:
    found = script.settings(["ROUTED_TEAMS=1,2", "STREAMK_PAIRS=False,True"])
    assert found[0] == {"ROUTED_TEAMS": 1, "STREAMK_PAIRS": False}
    assert found[-1] == {"ROUTED_TEAMS": 2, "STREAMK_PAIRS": True}
    assert len(found) == 4


def test_a_setting_is_in_force_while_its_work_is_made_and_no_longer(script: ModuleType) -> None:
    """What was planned before is forgotten, and so is what was planned under it."""
    problem = Problem(torch.bfloat16, 4096, 4096, "nf4", 64, torch.uint8, 256)

    def permuted() -> int:
        plan = streamk_plan(48, problem, H200, False)
        assert plan is not None
        return plan.permuted

    seen = [permuted()]

    def work() -> torch.Tensor:
        seen.append(permuted())
        return torch.tensor(seen)

    _, first = script.captured([work], {"STREAMK_PERMUTED": 1})
    assert first.tolist() == [h200.STREAMK_PERMUTED, 1]
    assert permuted() == h200.STREAMK_PERMUTED == 0


def test_a_table(script: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    script.main(["ROUTED_TEAMS=1,2", "--models", "small", "--only", "small, down, T = 1", "--rounds", "1"])
    printed = capsys.readouterr().out
    assert "ROUTED_TEAMS=2" in printed
    assert [line.split("│")[1].strip() for line in printed.splitlines() if "small" in line] == [
        "small, down, T = 1", "small, down, T = 16", "small, down, T = 1024",
    ]  # fmt: skip
    assert "±" not in printed


@pytest.mark.parametrize("text", ["NOTHING=1", "ROUTED_TEAMS", "ROUTED_TEAMS="])
def test_what_is_no_setting_ends_with_a_line(script: ModuleType, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        script.main([text])
    assert "NAME=VALUE,VALUE" in capsys.readouterr().err
