"""The benches of whole models, run on a tiny one; and what is made of their records."""

from pathlib import Path
from typing import Any

import pytest
import torch
from rich.table import Table
from typer.testing import CliRunner

from halfbyte.bench import decode, runs, train, whole_models
from halfbyte.cli import app
from halfbyte.kernels.common import slow
from halfbyte.measure import decoder, records
from halfbyte.measure.report import provenance
from halfbyte.models import attention, caches, fused, regions

pytest.importorskip("transformers")
pytest.importorskip("bitsandbytes")
pytest.importorskip("peft")


def run(out: Path, bench: str, *options: str) -> dict[str, object]:
    result = CliRunner().invoke(
        app, ["bench", bench, "--model", "tiny", "--device", "cpu", "--rounds", "3", "--out", str(out), *options]
    )
    assert result.exit_code == 0, result.output
    (path,) = out.glob(f"*/{bench}.json")
    return records.read(path)


@pytest.mark.slow
def test_decode(tmp_path: Path) -> None:
    record = run(tmp_path, "decode", "--batch", "1,2", "--context", "16", "--new-tokens", "4")
    rows = record["rows"]
    assert isinstance(rows, list)
    found = {(row["batch"], row["mode"], row["provider"]) for row in rows}
    assert found == {
        (batch, mode, provider)
        for batch in (1, 2)
        for mode in ("eager", "prefill", "generate")
        for provider in ("bitsandbytes", "halfbyte")
    }
    assert all(row["median_ms"] > 0 and 0 < row["relative_error"] < 0.05 for row in rows)
    assert whole_models.markdown(record).count("| tiny |") == 6
    speeds = {row["provider"]: row["tokens_per_s"] for row in rows if (row["batch"], row["mode"]) == (1, "generate")}
    assert f"`generate` with tiny makes {speeds['halfbyte']:.1f} tokens a second with halfbyte" in whole_models.summary(
        record
    )
    facts = record["environment"]
    assert isinstance(facts, dict)
    on_a_gpu = {key: value for key, value in facts.items() if key != "threads"} | {"driver": "1"}
    table = whole_models.summary(record | {"environment": on_a_gpu}).splitlines()
    assert table[0] == "| model | texts at once | bitsandbytes, tokens/s | halfbyte, tokens/s | speed-up |"
    assert [line[:12] for line in table[2:4]] == ["| tiny | 1 |", "| tiny | 2 |"]


@pytest.mark.slow
def test_errors_are_of_the_steps_that_graphs_make(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each mode in its own way, to the logits of a plain step; here nothing is compiled."""
    for module in (caches, attention, slow):
        monkeypatch.setattr(module, "has_triton", lambda: False)
    monkeypatch.setattr(regions, "_compiled", lambda function: lambda *given, **named: function(*given, **named))
    monkeypatch.setattr(decoder, "modes_of", lambda device: decoder.MODES)
    entered: list[bool] = []
    layers: list[int] = []
    compute = fused._Layer._attend
    monkeypatch.setattr(fused._Layer, "_attend", lambda *given, **named: layers.append(1) or compute(*given, **named))
    capturable = decoder.capturable
    monkeypatch.setattr(decoder, "capturable", lambda cache, ours: entered.append(ours) or capturable(cache, ours))
    errors = decoder.errors_against_fp32("tiny", torch.device("cpu"), torch.bfloat16)
    assert set(errors) == {(name, mode) for name in ("bitsandbytes", "halfbyte") for mode in decoder.MODES}
    for name in ("bitsandbytes", "halfbyte"):
        assert errors[name, "eager"] == pytest.approx(errors[name, "graph"], rel=0.02)
    assert errors["bitsandbytes", "graph"] == errors["bitsandbytes", "fused graph"] > 0
    assert 0 < errors["halfbyte", "fused graph"] <= 1.02 * errors["halfbyte", "graph"]
    steps = 2 * 16  # texts of 4 and of 1, tokens
    assert (entered.count(False), entered.count(True)) == (2 * steps, steps)
    assert len(layers) == steps * decoder.CHECKED_LAYERS


@pytest.mark.slow
def test_train(tmp_path: Path) -> None:
    record = run(tmp_path, "train", "--tokens", "16")
    rows = record["rows"]
    assert isinstance(rows, list)
    assert [row["provider"] for row in rows] == ["bitsandbytes", "halfbyte"]
    assert rows[1]["gradients_apart"] < train.MOST_APART
    assert whole_models.markdown(record, "tokens").count("| tiny |") == 1
    rows = [row | {"peak_gb": 1.5} for row in rows]
    short = whole_models.training_summary(record | {"rows": rows}).splitlines()
    assert short[0].startswith("| model | tokens a step | bitsandbytes, ms a step | halfbyte, ms a step | speed-up")
    assert short[2].startswith("| tiny | 16 |")
    assert short[2].endswith("×** | 1.5 | 1.5 |")


@pytest.mark.slow
def test_experts_run_in_4_bits_and_then_dense(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Never both at once: bitsandbytes' turn comes when halfbyte's is over, with what the same bytes stand for."""
    options = ("--model", "tiny-moe", "--batch", "2", "--context", "16", "--new-tokens", "4")
    rows = run(tmp_path, "decode", *options)["rows"]
    assert isinstance(rows, list)
    modes = ("eager", "prefill", "generate")
    assert [(row["provider"], row["mode"]) for row in rows] == [
        (provider, mode) for provider in ("halfbyte", "bitsandbytes") for mode in modes
    ]
    assert all(row["median_ms"] > 0 and 0 < row["relative_error"] < decode.MOST_APART_OF_EXPERTS for row in rows)
    record = run(tmp_path, "train", "--model", "tiny-moe", "--tokens", "16")
    rows = record["rows"]
    assert isinstance(rows, list)
    assert [row["provider"] for row in rows] == ["halfbyte", "bitsandbytes"]
    assert 0 < rows[0]["gradients_apart"] < train.MOST_APART_OF_EXPERTS
    alone = record | {"rows": rows[:1]}  # as where there is no memory for dense experts
    assert whole_models.markdown(alone, "tokens").count("| tiny-moe |") == 1
    assert "tiny-moe" not in whole_models.training_summary(alone)


@pytest.mark.slow
@pytest.mark.parametrize(("bench", "module"), [("decode", decode), ("train", train)])
def test_wrong_numbers_are_not_timed(
    bench: str, module: object, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(module, "MOST_APART", 0.0)
    result = CliRunner().invoke(
        app, ["bench", bench, "--model", "tiny", "--device", "cpu", "--rounds", "3", "--out", str(tmp_path)]
    )
    assert result.exit_code != 0
    assert not list(tmp_path.rglob("*.json"))


@pytest.mark.parametrize("command", [["bench", "decode"], ["bench", "train"], ["profile"]], ids=" ".join)
@pytest.mark.parametrize("name", ["gpt-9", "tiny,gpt-9", "empty"])
def test_a_model_that_is_none(command: list[str], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One line, before anything is printed or measured, that says what would be taken."""
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, [*command, "--model", name, "--device", "cpu"])
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1
    if name == "empty":
        assert "has no config.json" in result.stderr
    else:
        assert "gpt-9' is none: it is neither a folder here nor one of the shapes tiny" in result.stderr
        assert all(told in result.stderr for told in ("llama-3-8b", "path", "org/name"))


def test_models_that_ran_before_stay_in_the_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In their places, each with the commit that it is of, and only beside what ran on the same libraries."""
    cpu, turn = torch.device("cpu"), iter(range(9))

    def rows_of(name: str) -> list[dict[str, Any]]:
        return [{"model": name, "batch": 1, "provider": "halfbyte", "mode": "eager", "turn": next(turn)}]

    facts_of_this = records.environment(cpu)

    def run(names: str, commit: str, **facts: str) -> dict[str, Any]:
        monkeypatch.setattr(records, "environment", lambda device: facts_of_this | {"commit": commit, **facts})
        runs.run_models(
            "decode", "by hand", names.replace(" ", "").split(","), rows_of, lambda record: Table(), cpu, tmp_path
        )
        (path,) = tmp_path.glob("*/decode.json")
        return records.read(path)

    run("a,b", "old")
    found = run("b,c", "new")
    assert [(row["model"], row["commit"], row["turn"]) for row in found["rows"]] == [
        ("a", "old", 0), ("b", "new", 2), ("c", "new", 3)
    ]  # fmt: skip
    assert provenance(found).endswith("; commit new; a: commit old.</sub>")
    found = run("c", "newer", torch="0.1")
    assert [row["model"] for row in found["rows"]] == ["c"]
    assert provenance(found).endswith("; commit newer.</sub>")
