"""`halfbyte bench gradients`: the right products by way of fp64, bytes by provider, and what is made of a record."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import halfbyte as hb
from halfbyte.bench import gradients as bench
from halfbyte.bench import sweep
from halfbyte.bench.case import Case, run
from halfbyte.bench.linear import BOUND
from halfbyte.cli import app
from halfbyte.kernels.common.device import properties_for
from halfbyte.kernels.linear.problem import problem_of

pytestmark = pytest.mark.usefixtures("_with_bitsandbytes")
CPU = torch.device("cpu")
runner = CliRunner(env={"COLUMNS": "160", "TERM": "dumb"})


def cases(format: str = "nf4", dtype: torch.dtype = torch.bfloat16, rows: tuple[int, ...] = (1, 3)) -> list[Case]:
    torch.manual_seed(0)
    return list(bench.gradient_cases(CPU, [(64, 128)], dtype, format, nested=format != "int4", rows=rows))


@pytest.mark.parametrize("format", ["nf4", "int4"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_cases(format: str, dtype: torch.dtype) -> None:
    dense = {torch.bfloat16: "bf16", torch.float32: "fp32"}[dtype]
    for m, case in zip((1, 3), cases(format, dtype), strict=True):
        assert case.name == f"64×128, M = {m}"
        peers = {"bitsandbytes", "halfbyte int4"} if format != "int4" else set()
        assert set(case.providers) == {"halfbyte", dense, "dequantize + matmul"} | peers
        ends = (m * 128 + m * 64) * dtype.itemsize
        packed = 64 * 128 // 2 + (64 * dtype.itemsize if format == "int4" else 128 + 4 + 1024 + 4)
        assert case.bytes_of("halfbyte") == ends + packed
        assert case.bytes_of(dense) == ends + 64 * 128 * dtype.itemsize
        rows = run(case, 3)
        assert {row.provider: row.error for row in rows} == dict.fromkeys(case.providers)
        assert all(0 < row.facts["relative_error"] <= BOUND[dtype] for row in rows)
        assert [rows[0].facts[name] for name in ("m", "n", "k", "format")] == [m, 64, 128, format]


def test_the_right_result_is_that_of_autograd() -> None:
    """Of the dense weight, in fp64: neither of the bench's own products has a part in it."""
    [case] = cases(rows=(3,))
    torch.manual_seed(0)
    weights = [torch.randn(64, 128).bfloat16() for _ in range(case.sets)]
    grad = torch.randn(3, 64).bfloat16()  # the first
    for provider, weight in (
        ("bf16", weights[0]),
        ("halfbyte", hb.dequantize(hb.quantize(weights[0], "nf4", nested=True), torch.float32)),
    ):
        x = torch.zeros(3, 128, dtype=torch.float64, requires_grad=True)
        torch.nn.functional.linear(x, weight.double()).backward(grad.double())
        assert x.grad is not None
        torch.testing.assert_close(case.right(provider, 0), x.grad)


def test_a_wrong_product_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    [case] = cases(rows=(2,))
    right = case.right("halfbyte", 0)
    for wrong in (torch.zeros_like(right), right.roll(1, 0), 1.01 * right, right * torch.nan):
        monkeypatch.setattr(bench, "linear_backward", lambda grad, q, wrong=wrong: wrong.bfloat16())
        [case] = cases(rows=(2,))
        row = next(row for row in run(case, 3) if row.provider == "halfbyte")
        assert row.timing is None
        assert "more than 5.9e-03" in str(row.error)


def test_kernels_are_compiled_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of all cases, before the first, where there is one: NF4's and INT4's."""
    asked: list[Any] = []
    gpu = properties_for("sm_90", 132)
    monkeypatch.setattr(bench.reach, "can_compile", lambda device: True)
    monkeypatch.setattr(bench, "properties_of", lambda index: gpu)
    monkeypatch.setattr(bench.nvrtc, "compile_ahead", asked.extend)
    next(bench.gradient_cases(CPU, [(512, 1024)], torch.bfloat16, "nf4", True, (256,)))
    problems = [
        problem_of(torch.empty(0, dtype=torch.bfloat16), hb.quantize(torch.zeros(512, 1024).bfloat16(), name), None)
        for name in ("int4", "nf4")
    ]
    choices = [bench.dispatch.choose_back(256, problem, gpu) for problem in problems]
    assert asked == [
        choice.variant(problem, gpu) for choice, problem in zip(choices, problems, strict=True) if choice is not None
    ]
    assert len(asked) == 2


def test_whole(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    arguments = ["--device", "cpu", "--shapes", "64x128,128x64", "--rows", "2,8", "--rounds", "3"]
    result = runner.invoke(app, ["bench", "gradients", *arguments, "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert "64×128, M = 8" in result.stdout
    [path] = tmp_path.glob("cpu*/gradients.json")
    record = json.loads(path.read_text(encoding="utf-8"))
    assert {(row["n"], row["k"], row["m"]) for row in record["rows"]} == {
        (*shape, m) for shape in ((64, 128), (128, 64)) for m in (2, 8)
    }
    lines = sweep.markdown(record).splitlines()
    assert lines[0].startswith("| weight | M | halfbyte, µs | bf16, µs | dequantize + matmul, µs |")
    assert len([line for line in lines if line.startswith(("| 64×128 |", "| 128×64 |"))]) == 4
    for plot in (sweep.plot, sweep.plot_against_dense):
        plot(record, tmp_path / "figures" / "gradients.png")
        assert (tmp_path / "figures" / "gradients.png").stat().st_size > 10_000


def test_wrong_usage_is_2() -> None:
    for arguments, words in (
        (["--rows", "0"], "rows '0' are not numbers"),
        (["--format", "nf5"], "format 'nf5' is not nf4 or fp4 or int4"),
    ):
        result = runner.invoke(app, ["bench", "gradients", "--device", "cpu", *arguments])
        assert result.exit_code == 2
        assert words in result.stderr
