"""`halfbyte bench linear`: errors against fp64, bytes by provider, and the table and plot of a sweep."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import halfbyte as hb
from halfbyte.bench import baselines, runs, sweep
from halfbyte.bench import linear as bench
from halfbyte.bench.case import Case, Row, run
from halfbyte.bench.linear import BOUND, linear_cases
from halfbyte.cli import app
from halfbyte.kernels.common.device import properties_for
from halfbyte.kernels.linear import dispatch
from halfbyte.kernels.linear.problem import problem_of
from halfbyte.measure.error import relative_error

CPU = torch.device("cpu")
runner = CliRunner(env={"COLUMNS": "160", "TERM": "dumb"})


def cases(format: str = "nf4", dtype: torch.dtype = torch.bfloat16, rows: tuple[int, ...] = (1, 3)) -> list[Case]:
    torch.manual_seed(0)
    return list(linear_cases(CPU, [(64, 128)], dtype, format, nested=format != "int4", rows=rows))


@pytest.mark.usefixtures("_with_bitsandbytes")
def test_kernels_are_compiled_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of all cases, before the first: NF4's and INT4's, which wants whole groups."""
    asked: list[Any] = []
    monkeypatch.setattr(bench.reach, "can_compile", lambda device: True)
    monkeypatch.setattr(bench.nvrtc, "compile_ahead", asked.extend)
    shapes, gpu = [(512, 1024), (256, 1088)], properties_for("sm_90", 132)
    next(linear_cases(CPU, shapes, torch.bfloat16, "nf4", True, (1, 400), alone=True, properties=gpu))
    wanted = [
        dispatch.variant_of(m, (problem_of(torch.empty(0, dtype=torch.bfloat16), q, None),), gpu, False)
        for m in (1, 400)
        for q in (
            hb.quantize(torch.zeros(n, k).bfloat16(), format)
            for n, k in shapes
            for format in ("int4", "nf4")
            if format == "nf4" or k % 128 == 0
        )
    ]
    assert len(wanted) == 6
    assert asked == wanted


@pytest.mark.slow
@pytest.mark.usefixtures("_with_bitsandbytes")
@pytest.mark.parametrize("format", ["nf4", "fp4", "int4"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_cases(format: str, dtype: torch.dtype) -> None:
    dense = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}[dtype]
    for m, case in zip((1, 3), cases(format, dtype), strict=True):
        assert case.name == f"64×128, M = {m}"
        wanted = {"halfbyte", dense, "dequantize + linear"} | (
            {"bitsandbytes", "halfbyte int4"} if format != "int4" else set()
        )
        assert wanted <= set(case.providers) <= wanted | {"bitsandbytes repacked", "tinygemm"}
        if format != "int4":  # it takes part, or it is said why not
            assert ("bitsandbytes repacked" in case.providers) != ("bitsandbytes repacked" in case.left_out)
            assert all(case.left_out.values())
        assert ("tinygemm" in case.providers) == (dtype == torch.bfloat16)
        ends = (m * 128 + m * 64) * dtype.itemsize
        packed = 64 * 128 // 2 + (64 * dtype.itemsize if format == "int4" else 128 + 4 + 1024 + 4)
        assert case.bytes_of("halfbyte") == ends + packed
        assert case.bytes_of(dense) == ends + 64 * 128 * dtype.itemsize
        rows = run(case, 3)
        assert {row.provider: row.error for row in rows} == dict.fromkeys(case.providers)
        errors = {row.provider: row.facts["relative_error"] for row in rows}
        assert all(0 < error <= BOUND[dtype] for error in errors.values())
        assert dtype == torch.float32 or errors["halfbyte"] <= errors["dequantize + linear"]
        assert [rows[0].facts[name] for name in ("m", "n", "k")] == [m, 64, 128]


@pytest.mark.parametrize("has", [True, False])
def test_a_peer_that_cannot_take_part_is_named_with_the_reason(has: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    functional = pytest.importorskip("bitsandbytes").functional
    monkeypatch.setattr(functional, "has_avx512bf16", lambda: has)
    bitsandbytes = baselines.Bitsandbytes()
    whole, odd = (hb.quantize(torch.randn(n, 128)) for n in (64, 48))
    reasons = [
        bitsandbytes.why_not_repacked(q, dtype)
        for q, dtype in ((whole, torch.bfloat16), (whole, torch.float32), (odd, torch.bfloat16))
    ]
    if has:
        assert reasons[0] is None
        assert "computes in bf16" in str(reasons[1])
        assert "fails with N = 48" in str(reasons[2])
    else:
        assert all("this CPU has no AVX512-BF16" in str(reason) for reason in reasons)


@pytest.mark.usefixtures("_with_bitsandbytes")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_marlin(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for its package, by its signatures: it is given fp16, [N, K] and scales [N, groups]."""

    class Layer(torch.nn.Module):
        def __init__(self, infeatures: int, outfeatures: int, groupsize: int = -1) -> None:
            super().__init__()
            self.sides = outfeatures, infeatures, groupsize

        def pack(self, linear: torch.nn.Linear, scales: torch.Tensor) -> None:
            n, k, size = self.sides
            assert linear.weight.dtype == scales.dtype == torch.float16
            integers = (linear.weight.view(n, -1, size) / scales.unsqueeze(2)).round().clamp(-8, 7)
            self.weight = (integers.float() * scales.unsqueeze(2).float()).view(n, k)

        def forward(self, A: torch.Tensor) -> torch.Tensor:
            assert A.dtype == torch.float16
            return (A.float() @ self.weight.t()).half()

    monkeypatch.setitem(sys.modules, "marlin", SimpleNamespace(Layer=Layer))
    monkeypatch.setattr(baselines.Marlin, "fits", lambda *_: True)
    [case] = cases("nf4", dtype, rows=(3,))
    rows = {row.provider: row for row in run(case, 3)}
    assert rows["marlin"].error is None
    assert 0 < rows["marlin"].facts["relative_error"] <= BOUND[torch.float16]


@pytest.mark.usefixtures("_with_bitsandbytes", "_humming")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_humming(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    [case] = cases("nf4", dtype, rows=(3,))
    rows = {row.provider: row for row in run(case, 3)}
    assert rows["humming"].error is None
    assert 0 < rows["humming"].facts["relative_error"] <= BOUND[dtype]

    def fails(*_: Any, **__: Any) -> None:
        raise RuntimeError("no compiler\nanywhere")

    monkeypatch.setattr(sys.modules["humming.forward"], "humming_forward", fails)
    [case] = cases("nf4", dtype, rows=(3,))
    assert "humming" not in case.providers
    assert case.left_out["humming"] == "it cannot take [64, 128]: RuntimeError: no compiler"


def test_another_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU that can run its kernels, with no more multiprocessors than there are."""
    result = runner.invoke(app, ["bench", "linear", "--sms", "40"])
    assert result.exit_code == 2
    assert "say which with --target" in result.stderr
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="there is none"):
        bench.another_gpu("sm_80", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(bench, "properties_of", lambda index: properties_for("sm_90"))
    whole, few = (bench.another_gpu("sm_80", sms) for sms in (None, 40))
    assert [(gpu.capability, gpu.sms) for gpu in (whole, few)] == [(80, 132), (80, 40)]
    for target, sms in (("sm_100", None), ("sm_80", 133)):
        with pytest.raises(ValueError, match="this GPU, sm_90 with 132 multiprocessors, cannot be a"):
            bench.another_gpu(target, sms)
    with pytest.raises(ValueError, match="known targets are"):
        bench.another_gpu("sm_81", None)


@pytest.mark.usefixtures("_with_bitsandbytes")
def test_a_wrong_product_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    [case] = cases(rows=(2,))
    right = case.right("halfbyte", 0)
    for wrong in (torch.zeros_like(right), right.roll(1, 0), 1.01 * right, right * torch.nan):
        monkeypatch.setattr("halfbyte.ops.linear", lambda x, q, wrong=wrong: wrong.bfloat16())
        [case] = cases(rows=(2,))
        row = next(row for row in run(case, 3) if row.provider == "halfbyte")
        assert row.timing is None
        assert row.error is not None
        assert "more than 5.9e-03" in row.error


@pytest.mark.usefixtures("_with_bitsandbytes")
@pytest.mark.parametrize("format", ["nf4", "fp4", "int4"])
def test_errors_in_fp32(format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is rounded but sums, in whatever order torch has for this CPU: one result of few numbers says little."""
    monkeypatch.setattr("halfbyte.bench.dequantize.MOST_SETS", 60)
    errors = {
        provider: sum(
            relative_error(case.providers[provider](i), case.right(provider, i))
            for case in cases(format, torch.float32)
            for i in range(case.sets)
        )
        for provider in ("halfbyte", "dequantize + linear")
    }
    assert 0 < errors["halfbyte"] <= errors["dequantize + linear"]


@pytest.mark.usefixtures("_with_bitsandbytes")
def test_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    arguments = [
        "--device",
        "cpu",
        "--shapes",
        "64x128,128x64",
        "--rows",
        "1,2,8",
        "--rounds",
        "3",
        "--out",
        str(tmp_path),
    ]
    result = runner.invoke(app, ["bench", "linear", *arguments])
    assert result.exit_code == 0, result.output
    assert "64×128, M = 8" in result.stdout
    [path] = tmp_path.glob("cpu*/linear.json")
    record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    assert {(row["n"], row["k"], row["m"]) for row in record["rows"]} == {
        (*shape, m) for shape in ((64, 128), (128, 64)) for m in (1, 2, 8)
    }
    ours = record["rows"][0]
    assert sweep.floor(record, ours) == pytest.approx(ours["bytes"] / 10.0 / 1e3)

    lines = sweep.markdown(record).splitlines()
    assert lines[0].startswith("| weight | M | halfbyte, µs | bf16, µs |")
    assert lines[0].endswith("| × floor | × bf16 | × bitsandbytes | error |")
    assert [line.split(" | ")[:2] for line in lines[2:8]] == [
        [f"| {weight}", m] for weight in ("64×128", "128×64") for m in ("1", "2", "8")
    ]
    assert f"**{record['rows'][1]['median_us'] / ours['median_us']:.2f}**" in lines[2]
    monkeypatch.setattr(sweep, "SUMMARY_SHAPES", ((128, 64),))
    short = sweep.summary(record).splitlines()
    assert short[0].startswith("| weight | M | the bytes, µs | halfbyte, µs | bf16, µs |")
    assert len([text for text in short if text.startswith("| 128×64 | 1 |")]) == 1
    assert not any("64×128" in text or "| 2 |" in text for text in short)
    sweep.plot(record, tmp_path / "figures" / "linear.png")
    assert (tmp_path / "figures" / "linear.png").stat().st_size > 10_000


def test_wrong_usage_is_2() -> None:
    for arguments, words in (
        (["--rows", "1,two"], "rows '1,two' are not numbers"),
        (["--rows", "0"], "rows '0' are not numbers"),
        (["--format", "nf5"], "format 'nf5' is not nf4 or fp4 or int4"),
    ):
        result = runner.invoke(app, ["bench", "linear", "--device", "cpu", *arguments])
        assert result.exit_code == 2
        assert words in result.stderr


def measured(times: dict[tuple[str, int, int, int], float], commit: str, dtype: str = "bfloat16") -> dict[str, Any]:
    """A record of ours and bf16, by weight's N, K and rows of x."""
    return {
        "bench": "linear",
        "environment": {"commit": commit, "torch": "2"},
        "rows": [
            {
                "case": f"{n}×{k}, M = {m}", "provider": provider, "n": n, "k": k, "m": m, "dtype": dtype,
                "format": "nf4", "nested": True, "median_us": time,
            }
            for (provider, n, k, m), time in times.items()
        ],
    }  # fmt: skip


def test_products_that_were_measured_before() -> None:
    """Those that were not measured again stay, with their commit, if all else is the same."""
    old = measured({("halfbyte", 64, 128, 3): 9.0, ("halfbyte", 64, 128, 5): 8.5, ("halfbyte", 32, 32, 3): 8.0}, "old")
    new = measured({("halfbyte", 64, 128, 4): 7.0, ("halfbyte", 64, 128, 5): 6.0, ("halfbyte", 96, 32, 4): 5.0}, "new")
    found = runs._beside_other_cases(old, new)
    assert {(row["n"], row["m"]): (row["median_us"], row.get("commit")) for row in found["rows"]} == {
        (64, 3): (9.0, "old"), (64, 4): (7.0, None), (64, 5): (6.0, None), (32, 3): (8.0, "old"), (96, 4): (5.0, None)
    }  # fmt: skip
    assert list(sweep.by_shape(found)[64, 128]["halfbyte"]) == [3, 4, 5]
    assert runs._beside_other_cases(None, new) == new
    assert runs._beside_other_cases(old | {"environment": {"commit": "old", "torch": "1"}}, new) == new
    of_other_transformers = old | {"environment": {"commit": "old", "torch": "2", "transformers": "5"}}
    assert len(runs._beside_other_cases(of_other_transformers, new)["rows"]) == len(found["rows"])


@pytest.mark.usefixtures("_with_bitsandbytes")
def test_ctrl_c_keeps_what_was_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the run did not come to has its earlier times."""

    def run_bench(code: int) -> list[tuple[str, tuple[float, ...]]]:
        options = ["--device", "cpu", "--shapes", "64x128,32x64", "--rows", "1,3", "--rounds", "3"]
        result = runner.invoke(app, ["bench", "linear", *options, "--out", str(tmp_path)])
        assert result.exit_code == code, result.output
        [path] = tmp_path.glob("cpu*/linear.json")
        rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
        times = "median_us", "p20_us", "p80_us"  # one of them may come out alike twice
        return [(row["case"], tuple(map(row.get, times))) for row in rows if row["provider"] == "halfbyte"]

    def interrupted(case: Case, rounds: int) -> list[Row]:
        if case.name == "32×64, M = 3":
            raise KeyboardInterrupt
        return run(case, rounds)

    before = run_bench(0)
    monkeypatch.setattr(runs, "run", interrupted)
    after = run_bench(130)
    assert [case for case, _ in after] == [case for case, _ in before]
    assert [times == earlier for (_, times), (_, earlier) in zip(after, before, strict=True)] == [False] * 3 + [True]


@pytest.mark.parametrize(
    ("bench", "options", "name"),
    [
        ("linear", "", "linear"),
        ("linear", "--dtype float16", "linear-float16"),
        ("linear", "--format fp4 --flat", "linear-fp4-flat"),
        ("linear", "--format int4 --flat", "linear-int4"),
        ("linear", "--target sm_80 --dtype float16", "linear-sm_80-float16"),
        ("linear", "--target sm_80 --sms 108 --format int4", "linear-sm_80-108-sms-bfloat16-int4"),
        ("dequantize", "--dtype float32 --flat", "dequantize-float32-flat"),
        ("quantize", "--format fp4", "quantize-fp4"),
    ],
)
def test_a_record_for_each_way_to_measure(bench: str, options: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that none takes the place of another."""
    names: list[str] = []
    monkeypatch.setattr(runs, "run_cases", lambda *given: names.append(given[5]))
    monkeypatch.setattr("halfbyte.bench.linear.another_gpu", lambda target, sms: None)
    result = runner.invoke(app, ["bench", bench, "--device", "cpu", *options.split()])
    assert result.exit_code == 0, result.output
    assert names == [name]


def test_ratios_to_the_dense_weight() -> None:
    times = {
        ("bf16", 64, 128, 8): 6.0, ("halfbyte", 64, 128, 8): 2.0, ("halfbyte", 64, 128, 1): 1.0,
        ("bf16", 64, 128, 1): 4.0, ("bf16", 32, 32, 8): 1.0, ("halfbyte", 32, 32, 8): 2.0,
        ("bf16", 63, 128, 8): 70.0, ("halfbyte", 63, 128, 8): 2.0,  # N is odd
    }  # fmt: skip
    record = measured(times, "new")
    del record["rows"][4]["median_us"]  # a wrong one
    assert sweep.against_dense(record) == {"halfbyte": {1: [4.0], 8: [3.0]}}


def test_the_plot_of_ratios(tmp_path: Path) -> None:
    """Of numbers of rows that are powers of two, and that are not."""
    pytest.importorskip("matplotlib")
    for m in (3, 8):
        record = measured({("bf16", 64, 128, m): 6.0, ("halfbyte", 64, 128, m): 2.0}, "new")
        record["environment"]["device"] = "A GPU"
        sweep.plot_against_dense(record, tmp_path / f"{m}.png")
        assert (tmp_path / f"{m}.png").stat().st_size > 5_000


def test_an_odd_number_of_rows_of_w(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU bitsandbytes' product would end the process; on a CPU it takes part."""
    pytest.importorskip("bitsandbytes")
    q = hb.quantize(torch.randn(63, 128), "nf4")
    peer = baselines.Bitsandbytes()
    assert peer.why_no_linear(q) is None
    monkeypatch.setattr(hb.QuantizedWeight, "device", property(lambda q: torch.device("cuda")))
    assert "N is odd" in (peer.why_no_linear(q) or "")
    assert peer.why_no_linear(hb.quantize(torch.randn(64, 128), "nf4")) is None
