"""`halfbyte profile` from end to end on a CPU: what it prints and writes, and that it leaves nothing half-done."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from synthetic import limits
from typer.testing import CliRunner, Result

from halfbyte.cli import app
from halfbyte.roofline import ceilings, markdown, output, record, render, run
from halfbyte.roofline.analysis import Roofs, rows

pytestmark = pytest.mark.slow

pytest.importorskip("transformers")
pytest.importorskip("bitsandbytes")
FILES = {"profile.json", "profile.csv", "profile.html", "profile.png"}
ROLES = ["q", "k", "v", "o", "gate", "up", "down", "lm_head"]


def invoke(*arguments: str) -> Result:
    return CliRunner(env={"COLUMNS": "80", "TERM": "dumb"}).invoke(app, ["profile", *arguments])


def said(result: Result) -> str:
    return " ".join(f"{result.output} {result.exception}".split())


@pytest.fixture
def profile(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Result]:
    """Profiles the smallest model, with ceilings that need no time."""
    monkeypatch.setattr(ceilings, "measure", lambda device: limits())
    monkeypatch.setenv("HALFBYTE_CACHE", str(tmp_path / "cache"))

    def profile(*arguments: str) -> Result:
        small = ("--model", "tiny", "--context", "8", "--rounds", "3", "--device", "cpu", "--batch", "1")
        return invoke(*small, *arguments)

    return profile


def test_files(report: Path) -> None:
    pytest.importorskip("matplotlib")
    assert {path.name for path in report.iterdir()} == FILES
    assert (report / "profile.png").read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in report.parent.iterdir() if path.name.startswith(".")] == []


def test_record(report: Path) -> None:
    found = record.read(report)
    keys = {(kept["provider"], kept["mode"], kept["batch"]) for kept in found["runs"]}
    assert keys == {(p, m, b) for p in run.PROVIDERS for m in ("eager", "prefill") for b in (1, 2)}
    assert found["environment"]["torch"]
    assert found["environment"]["date"]
    for kept in found["runs"]:
        names = [entry["class"] for entry in kept["classes"]]
        assert names[: len(ROLES)] == ROLES
        assert {"attention", "norms", "elementwise", "sampling", "copies", "gaps"} <= set(names)
        total = sum(entry["ms"] for entry in kept["classes"])
        assert total == pytest.approx(kept["sum_ms"], rel=1e-3)
        assert total == pytest.approx(kept["profiled_ms"], rel=0.03, abs=0.05)
        assert kept["step_ms"] > 0
        assert kept["relative_error"] < run.MOST_APART
        calls = {entry["class"]: entry["kernels"] for entry in kept["classes"]}
        assert [calls[role] for role in ROLES] == [2] * 7 + [1]
    assert (report / "profile.json").stat().st_size < 100_000


def test_work_of_a_known_shape(report: Path) -> None:
    """`tiny` has hidden size 256 and 512 in its MLP; bf16 has no scales."""
    found = record.read(report)
    for kept in found["runs"]:
        if (kept["provider"], kept["mode"]) == ("bf16", "eager"):
            batch, layers = kept["batch"], 2
            gate = next(entry for entry in kept["classes"] if entry["class"] == "gate")
            assert gate["bytes"] == layers * 2 * (256 * 512 + batch * (256 + 512))
            assert gate["flops"] == layers * 2 * batch * 256 * 512
            head = next(entry for entry in kept["classes"] if entry["class"] == "lm_head")
            assert head["flops"] == 2 * batch * 256 * 1024


def test_table(report: Path) -> None:
    found = list(csv.DictReader((report / "profile.csv").open(encoding="utf-8")))
    assert tuple(found[0]) == record.COLUMNS
    kept = record.read(report)
    assert len(found) == sum(len(of["classes"]) for of in kept["runs"])
    row = rows(kept["runs"][0], Roofs.of(kept["ceilings"]))[0]
    assert float(found[0]["of_roof"]) == pytest.approx(row.of_roof, rel=1e-3)
    assert float(found[0]["gb_per_s"]) == pytest.approx(row.bytes / row.ms / 1e6, rel=1e-3)
    assert {line["bytes_are"] for line in found} == {"computed"}


def test_printed(report: Path) -> None:
    text = (report.parent / "printed.txt").read_text(encoding="utf-8")
    lines = [line.rstrip() for line in text.splitlines()]
    assert max(map(len, lines[:-1])) <= 80  # the last line has a path
    assert "…" not in text
    assert "computed from shapes: counters are read through ncu, which needs an NVIDIA GPU" in " ".join(text.split())
    assert "most to gain in eager" in text


def test_markdown(report: Path) -> None:
    text = markdown.markdown(record.read(report))
    assert text.count("| eager | halfbyte |") == 2
    assert "| lm_head |" in text
    assert text.rstrip().endswith("</sub>")


class Page(HTMLParser):
    """Every tag is closed where it should be; what refers elsewhere is noted."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.refers: list[str] = []
        self.data = ""

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        if tag not in ("meta", "input", "br", "link"):
            self.open.append(tag)
        self.refers += [f"{tag} {name}" for name, _ in attributes if name in ("src", "href", "srcset")]
        self.reading = dict(attributes).get("id") == "data"

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script" and self.reading:
            self.data += data


def test_page_is_whole_and_alone(report: Path) -> None:
    text = (report / "profile.html").read_text(encoding="utf-8")
    page = Page()
    page.feed(text)
    assert page.open == []
    assert page.refers == []
    assert "url(" not in text
    assert "@import" not in text
    shown = json.loads(page.data)
    assert len(shown["runs"]) == 12
    for kept in shown["runs"]:
        assert len(kept["events"]) > 20
        assert all(place < len(kept["names"]) for *_, place in kept["events"])


def test_compare(report: Path) -> None:
    result = invoke("--compare", f"{report}:bitsandbytes", f"{report}:halfbyte")
    assert result.exit_code == 0, result.output
    assert "batch 2, prefill: bitsandbytes, halfbyte" in result.output
    assert "lm_head" in result.output


def leftovers(folder: Path) -> list[str]:
    return [str(path.relative_to(folder)) for path in folder.rglob("*") if "cache" not in path.parts]


def test_a_model_that_fails_half_way_leaves_nothing(
    profile: Callable[..., Result], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    attribute = run.attribute_cpu
    calls: list[int] = []

    def fails(*arguments: Any, **named: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            raise ValueError("half-way")
        return attribute(*arguments, **named)

    monkeypatch.setattr(run, "attribute_cpu", fails)
    result = profile("--out", str(tmp_path / "deep" / "report"))
    assert result.exit_code != 0
    assert "half-way" in said(result)
    assert result.stdout == ""
    assert [name for name in leftovers(tmp_path) if not name.startswith("cache")] == []


def test_a_report_that_fails_while_it_is_written_leaves_the_old_one(
    profile: Callable[..., Result], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    out = tmp_path / "report"
    out.mkdir()
    (out / "profile.json").write_text("old")

    def fails(*_: Any) -> str:
        raise OSError("no")

    monkeypatch.setattr(output.page, "html", fails)
    result = profile("--out", str(out), "--provider", "halfbyte", "--mode", "eager", "--overwrite")
    assert result.exit_code != 0
    assert (out / "profile.json").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir() if path.name != "cache"] == ["report"]


def test_wrong_logits_are_not_reported(
    profile: Callable[..., Result], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(run, "MOST_APART", 0.0)
    result = profile("--out", str(tmp_path / "report"))
    assert "from those in fp32: nothing is reported" in said(result)
    assert (result.exit_code != 0, result.stdout) == (True, "")
    monkeypatch.setattr(
        run, "errors_against_fp32", lambda *_: {("bitsandbytes", "eager"): 0.0, ("halfbyte", "eager"): 0.0}
    )
    result = profile("--out", str(tmp_path / "report"))
    assert "logits of halfbyte, eager, are" in said(result)
    assert (result.exit_code != 0, result.stdout) == (True, "")
    assert not (tmp_path / "report").exists()


def test_providers_and_modes_can_be_chosen(profile: Callable[..., Result], tmp_path: Path) -> None:
    result = profile("--provider", "halfbyte", "--mode", "prefill", "--out", str(tmp_path / "report"))
    assert result.exit_code == 0, said(result)
    (kept,) = record.read(tmp_path / "report")["runs"]
    assert (kept["provider"], kept["mode"]) == ("halfbyte", "prefill")
    again = profile("--provider", "halfbyte", "--mode", "prefill", "--out", str(tmp_path / "report"))
    assert "is not empty; give another name, or say that it may be replaced: --overwrite" in said(again)


def test_a_checkpoint(profile: Callable[..., Result], tmp_path: Path) -> None:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    sides = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3, "vocab_size": 300}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    model = Qwen3ForCausalLM(Qwen3Config(**sides, **heads, tie_word_embeddings=True)).bfloat16()
    model.save_pretrained(tmp_path / "model")
    out = tmp_path / "report"
    result = profile("--model", str(tmp_path / "model"), "--mode", "eager", "--out", str(out))
    assert result.exit_code == 0, said(result)
    found = record.read(out)
    assert found["layers"] == 3
    for kept in found["runs"]:
        calls = {entry["class"]: entry["kernels"] for entry in kept["classes"]}
        assert [calls[role] for role in ROLES] == [3] * 7 + [1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("--model", "gpt-9", "--device", "cpu"),
            "'gpt-9' is none: it is neither a folder here nor one of the shapes tiny",
        ),
        (("--batch", "0"), "'0' are not numbers; write 1,16,64"),
        (("--provider", "vllm", "--device", "cpu"), "provider 'vllm' is not one of bitsandbytes, halfbyte, bf16"),
        (("--mode", "graph", "--device", "cpu"), "mode 'graph' is not one of eager, prefill, which this device has"),
        (("--device", "tpu"), "write cpu, cuda or cuda:1"),
        (("--compare", "nowhere", "elsewhere"), "nowhere is no report of `halfbyte profile`"),
    ],
)
def test_bad_input(arguments: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(ceilings, "measure", lambda device: limits())
    monkeypatch.setenv("HALFBYTE_CACHE", str(tmp_path))
    result = invoke(*arguments)
    assert result.exit_code != 0
    assert message in said(result).replace("│ ", "").replace(" │", "")


def test_places_that_a_report_may_not_take(profile: Callable[..., Result], tmp_path: Path) -> None:
    file, folder = tmp_path / "file", tmp_path / "folder"
    file.touch()
    folder.mkdir()
    (folder / "thesis.tex").touch()
    assert "is a file; a report needs a folder" in said(profile("--out", str(file)))
    assert "is not empty" in said(profile("--out", str(folder)))
    assert "holds thesis.tex, which no report does" in said(profile("--out", str(folder), "--overwrite"))
    assert (folder / "thesis.tex").exists()


@pytest.mark.parametrize("ms", [0.0, 0.0004, 9.9996, 37.845, 99.996, 999.96, 12345.6])
def test_a_time_takes_five_characters(ms: float) -> None:
    text = render._five(ms)
    assert len(text) <= 5
    assert float(text) == pytest.approx(ms, rel=1e-3, abs=1e-3)
