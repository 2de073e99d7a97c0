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
    found = script.settings(["ROUTED_STAGES=4,3", "POINTWISE=2.0,0.5"])
    assert found[0] == {"ROUTED_STAGES": 4, "POINTWISE": 2.0}
    assert found[-1] == {"ROUTED_STAGES": 3, "POINTWISE": 0.5}
    assert len(found) == 4


def test_a_setting_is_in_force_while_its_work_is_made_and_no_longer(script: ModuleType) -> None:
    """What was planned before is forgotten, and so is what was planned under it."""
    problem = Problem(torch.bfloat16, 4096, 4096, "nf4", 64, torch.uint8, 256)

    def warpgroups() -> int:
        plan = streamk_plan(48, problem, H200, True)
        assert plan is not None
        return plan.warpgroups

    seen = [warpgroups()]

    def work() -> torch.Tensor:
        seen.append(warpgroups())
        return torch.tensor(seen)

    _, first = script.captured([work], {"INVARIANT_WARPGROUPS": 2})
    assert first.tolist() == [h200.INVARIANT_WARPGROUPS, 2]
    assert warpgroups() == h200.INVARIANT_WARPGROUPS == 3


def test_a_table(script: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    script.main(["ROUTED_STAGES=4,3", "--models", "small", "--only", "small, down, T = 1", "--rounds", "1"])
    printed = capsys.readouterr().out
    assert "ROUTED_STAGES=3" in printed
    assert [line.split("│")[1].strip() for line in printed.splitlines() if "small" in line] == [
        "small, down, T = 1", "small, down, T = 16", "small, down, T = 1024",
    ]  # fmt: skip
    assert "±" not in printed


@pytest.mark.parametrize("text", ["NOTHING=1", "ROUTED_STAGES", "ROUTED_STAGES="])
def test_what_is_no_setting_ends_with_a_line(script: ModuleType, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        script.main([text])
    assert "NAME=VALUE,VALUE" in capsys.readouterr().err
