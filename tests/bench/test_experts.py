"""`halfbyte bench experts`: which experts tokens choose, errors against fp64, bytes, flops, what humming is given."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from halfbyte.bench import experts as bench
from halfbyte.bench import experts_report, humming, mixtures
from halfbyte.bench.case import Case, run
from halfbyte.bench.mixtures import Mixture
from halfbyte.cli import app

pytest.importorskip("transformers", minversion="5.10")

CPU = torch.device("cpu")
SMALL = Mixture(8, 2, 256, 128)
OF_GPT_OSS = Mixture(8, 2, 192, 96, "swiglu_oai", "mxfp4", before=False, bias=True)
runner = CliRunner(env={"COLUMNS": "160", "TERM": "dumb"})


@pytest.fixture(autouse=True)
def _seeded(_quick: None) -> None:
    torch.manual_seed(0)


def cases(mixture: Mixture = SMALL, tokens: tuple[int, ...] = (5,), *formats: str) -> Iterator[Case]:
    return bench.experts_cases(CPU, {"small": mixture}, tokens, formats)


@pytest.mark.parametrize("format", ["nf4", "int4", "mxfp4"])
def test_cases(format: str) -> None:
    per_weight = {"nf4": 0.5 + 4 / 64, "int4": 0.5 + 2 / 128, "mxfp4": 0.5 + 1 / 32}[format]
    found = list(cases(SMALL, (5,), format))
    assert [case.name for case in found] == [f"small {format}, {part}, T = 5" for part in ("gate_up", "down", "block")]
    pairs, hidden, inner = 10, 256, 128
    numbers = (2 * inner * hidden, inner * hidden, 3 * inner * hidden)
    ends = (5 * hidden + pairs * 2 * inner, pairs * inner + pairs * hidden, 2 * 5 * hidden + 8 * hidden)
    for case, weights, values in zip(found, numbers, ends, strict=True):
        rows = {row.provider: row for row in run(case, 3)}
        assert {name: row.error for name, row in rows.items()} == {"halfbyte": None, "bf16": None}
        ours = rows["halfbyte"].facts
        wanted = ours["wanted"]
        assert 2 <= wanted <= 8
        assert case.bytes_of("bf16") == 2 * values + 2 * wanted * weights
        assert case.bytes_of("halfbyte") == 2 * values + per_weight * wanted * weights
        router = 2 * 5 * 8 * hidden if ours["part"] == "block" else 0
        assert ours["flops"] == 2 * pairs * weights + router
        errors = {name: row.facts["relative_error"] for name, row in rows.items()}
        assert all(0 < error <= bench.BOUND[ours["part"]] for error in errors.values())
        assert ours["part"] != "block" or errors["halfbyte"] <= errors["bf16"]


def test_blocks_as_gpt_oss_has_them() -> None:
    """Interleaved gate and up, biases, softmax over the best, and K that is no multiple of int4's group."""
    for format in ("mxfp4", "int4"):
        *_, block = cases(OF_GPT_OSS, (7,), format)
        assert [row.error for row in run(block, 3)] == [None, None]
    with pytest.raises(ValueError, match="K = 40 cannot be cut into blocks of mxfp4: 32"):
        next(cases(Mixture(4, 2, 40, 32), (1,), "mxfp4"))


def test_a_wrong_result_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    gate_up, _, block = cases()
    monkeypatch.setattr("halfbyte.experts.grouped_linear", lambda x, q, expert: x.new_zeros(len(x), q.shape[1]))
    monkeypatch.setattr("halfbyte.experts.moe", lambda x, *rest: x)
    for case in (gate_up, block):
        ours, theirs = run(case, 3)
        assert (ours.timing, theirs.error) == (None, None)
        assert "more than" in str(ours.error)
    monkeypatch.setattr("halfbyte.experts.moe", lambda x, *rest: x[:1])
    assert run(block, 3)[0].error == "shape [1, 256] instead of [5, 256]"


def test_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of all inputs; a provider whose capture CUDA refuses runs as it is, and that is told."""
    replays = []

    class Graph:
        def __init__(self, function: Any, device: object) -> None:
            self.outputs = function()
            if self.outputs[0] > 10:
                raise RuntimeError("operation not permitted\nwhen stream is capturing")

        def replay(self) -> Any:
            replays.append(1)
            return self.outputs

    monkeypatch.setattr(bench, "Captured", Graph)
    monkeypatch.setattr(bench, "current", lambda device: contextlib.nullcontext())
    left_out: dict[str, str] = {}
    gpu: Any = SimpleNamespace(type="cuda")
    small: Any = lambda index: index + 1  # noqa: E731
    large: Any = lambda index: index + 11  # noqa: E731
    captured = bench._in_a_graph("halfbyte", small, 3, gpu, left_out)
    assert captured is not small
    assert [captured(index) for _ in range(2) for index in range(3)] == [1, 2, 3] * 2
    assert len(replays) == 2
    assert not left_out
    assert bench._in_a_graph("bf16", large, 3, gpu, left_out) is large
    assert left_out == {"a CUDA graph of bf16": "RuntimeError: operation not permitted"}
    assert bench._in_a_graph("bf16", small, 3, CPU, left_out) is small


@pytest.mark.parametrize(("tokens", "copies"), [(1, 1), (1, 3), (3, 2), (40, 2)])
def test_experts_are_those_that_were_read_longest_ago(
    tokens: int, copies: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("halfbyte.bench.dequantize.MOST_SETS", 12)
    mixture = Mixture(32, 4, 64, 32)
    chosen = mixtures.choices(mixture, tokens, copies, 1, CPU)
    assert len(chosen) == 12
    for copy in range(copies):
        last_read = [-1] * 32
        for turn, choice in enumerate(chosen[copy::copies]):
            assert choice.weights.float().sum(1).allclose(torch.ones(tokens), atol=0.02)
            scores = choice.x @ choice.router.T
            assert choice.ids.equal(scores.topk(4).indices)
            assert (scores.topk(5).values[:, 3:].diff(dim=1) < 0).all()  # no tie for the last place
            others = [last_read[expert] for expert in range(32) if expert not in choice.experts]
            assert max(last_read[expert] for expert in choice.experts) <= min(others, default=turn)
            for expert in choice.experts:
                last_read[expert] = turn


@pytest.mark.parametrize("tile", [1, 4, 16])
def test_the_order_that_humming_takes(tile: int) -> None:
    expert = torch.tensor([3, 0, 3, 5, 3, 0, 3, 3])
    places, experts = humming.padded_order(expert, 7, tile)
    assert places.dtype == experts.dtype == torch.int32
    tiles = places.view(-1, tile).tolist()
    assert len(tiles) == len(experts)
    found: dict[int, list[int]] = {}
    for one, rows in zip(experts.tolist(), tiles, strict=True):
        inside = [row for row in rows if row != 8]
        assert rows == inside + [8] * (tile - len(inside))
        found.setdefault(one, []).extend(inside)
    assert found == {0: [1, 5], 3: [0, 2, 4, 6, 7], 5: [3]}
    assert all(8 not in rows for rows in tiles[:-1] if tile == 1)


@pytest.mark.usefixtures("_humming")
@pytest.mark.parametrize("mixture", [SMALL, OF_GPT_OSS], ids=["whole groups", "padded"])
def test_humming(mixture: Mixture) -> None:
    gate_up, down, block = cases(mixture, (3,))
    assert bench.HUMMING not in block.providers
    for case in (gate_up, down):
        rows = {row.provider: row for row in run(case, 3)}
        assert rows[bench.HUMMING].error is None
        assert 0 < rows[bench.HUMMING].facts["relative_error"] <= bench.BOUND["down"]


@pytest.mark.usefixtures("_humming")
def test_what_humming_cannot_take_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise RuntimeError("no compiler\nanywhere")

    monkeypatch.setattr(sys.modules["humming.forward"], "humming_forward", fails)
    gate_up, *_ = cases(SMALL, (3,))
    assert bench.HUMMING not in gate_up.providers
    assert gate_up.left_out == {"humming": "it cannot multiply 6 pairs: RuntimeError: no compiler"}
    monkeypatch.setattr(sys.modules["humming.layer"], "HummingLayer", fails)
    gate_up, *_ = cases(SMALL, (3,))
    assert gate_up.left_out == {"humming": "it cannot take [8, 256, 256]: RuntimeError: no compiler"}


def test_whole(tmp_path: Path) -> None:
    arguments = ["--device", "cpu", "--models", "8x2x256x128", "--tokens", "1,3", "--rounds", "3"]
    result = runner.invoke(app, ["bench", "experts", *arguments, "--formats", "nf4,mxfp4", "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert "8x2x256x128 mxfp4, block, T = 3" in result.stdout
    [path] = tmp_path.glob("cpu*/experts.json")
    record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    assert [(row["weights"], row["part"], row["tokens"], row["provider"]) for row in record["rows"]] == [
        (format, part, tokens, provider)
        for format in ("nf4", "mxfp4")
        for part in ("gate_up", "down", "block")
        for tokens in (1, 3)
        for provider in ("halfbyte", "bf16")
    ]
    lines = experts_report.markdown(record).splitlines()
    assert lines[0] == "| experts | halfbyte, µs | bf16, µs | GB/s | of copy | TFLOP/s | × bf16 | error |"
    assert len([text for text in lines if text.startswith("| 8x2x256x128")]) == 12
    ours, theirs = record["rows"][:2]
    assert f"| **{theirs['median_us'] / ours['median_us']:.2f}** |" in lines[2]
    ours.pop("median_us")
    experts_report.plot(record, tmp_path / "figures" / "experts.png")  # one that is wrong has no place in it
    assert (tmp_path / "figures" / "experts.png").stat().st_size > 10_000
    assert experts_report.markdown(record).splitlines()[2].startswith("| 8x2x256x128 nf4, gate_up, T = 1 | wrong |")


def test_what_is_known_of_others_stays(tmp_path: Path) -> None:
    def run_bench(tokens: str) -> list[tuple[int, str, float]]:
        arguments = ["--device", "cpu", "--models", "4x2x64x32", "--tokens", tokens, "--rounds", "3"]
        result = runner.invoke(app, ["bench", "experts", *arguments, "--formats", "nf4", "--out", str(tmp_path)])
        assert result.exit_code == 0, result.output
        [path] = tmp_path.glob("cpu*/experts.json")
        rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
        return [(row["tokens"], row["part"], row["median_us"]) for row in rows if row["provider"] == "halfbyte"]

    first, second = run_bench("1,2"), run_bench("2,3")
    assert sorted({tokens for tokens, *_ in second}) == [1, 2, 3]
    assert [row for row in second if row[0] == 1] == [row for row in first if row[0] == 1]
    assert len(second) == 9
    assert not {time for tokens, _, time in first if tokens == 2} & {time for *_, time in second}


def test_wrong_usage_is_2() -> None:
    for arguments, words in (
        (["--models", "gpt-9"], "'gpt-9' cannot be measured; write one of qwen3-30b-a3b, "),
        (["--models", "8x2x64"], "'8x2x64' cannot be measured"),
        (["--models", "2x8x64x64"], "2x8x64x64: a token cannot have 8 of 2 experts"),
        (["--formats", "nf5"], "format 'nf5' is none of nf4, "),
        (["--tokens", "0"], "'0' are not numbers"),
    ):
        result = runner.invoke(app, ["bench", "experts", "--device", "cpu", *arguments])
        assert result.exit_code == 2
        assert words in result.stderr
