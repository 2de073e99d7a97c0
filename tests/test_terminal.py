"""Every command prints what it is given as it is, brackets and all, and stays readable in a narrow window."""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import typer
from rich.text import Text
from safetensors.torch import save_file
from synthetic import record as profile_record
from typer.testing import CliRunner, Result

from halfbyte import terminal
from halfbyte.bench import predictions
from halfbyte.bench.check import Cell
from halfbyte.cli import app
from halfbyte.info import Device, Info, Package
from halfbyte.measure import records
from halfbyte.recover.result import Calibration, Position, Recovery

SOURCES = Path(terminal.__file__).parent
LABEL, OUT, EXTRA = "my[v1]", "out[bold]x", "pip install 'halfbyte[plots]' :smile: [/]"


def commands(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """(name, command) of each command that does something, those of groups as "group command"."""
    for name, inner in getattr(command, "commands", {}).items():
        if hasattr(inner, "commands"):
            yield from commands(inner, (*path, name))
        else:
            yield " ".join((*path, name)), inner


COMMANDS = dict(commands(typer.main.get_command(app)))


@dataclass(frozen=True)
class Case:
    """arguments: after the command's name. shown: what is printed, wrapped or not. code: the exit code."""

    arguments: tuple[str, ...]
    shown: tuple[str, ...]
    code: int = 0


Patch = pytest.MonkeyPatch
CASES: dict[str, Callable[[Patch], Case]] = {}


def case(name: str) -> Callable[[Callable[[Patch], Case]], Callable[[Patch], Case]]:
    """Register what is done with a command, in a folder of its own."""

    def register(make: Callable[[Patch], Case]) -> Callable[[Patch], Case]:
        CASES[name] = make
        return make

    return register


@case("info")
def _info(patch: Patch) -> Case:
    packages = (Package("matplotlib", None, LABEL, EXTRA, False), Package("torch", "2[b]", "tensors", "", True))
    devices = (Device("cpu[0]", f"a CPU of {LABEL}, 2 cores", "numba[x]", f"install {EXTRA}"),)
    patch.setattr("halfbyte.info.collect", lambda: Info("1[b]", "3 (/usr/[x])", "Linux [y]", devices, packages))
    return Case((), (EXTRA, LABEL, "cpu[0]", "numba[x]", "1[b]", "/usr/[x]", "Linux [y]", "2[b]"))


@case("explain")
def _explain(patch: Patch) -> Case:
    return Case(("0.3[bold]",), ("0.3[bold]",), 2)


def checkpoint() -> None:
    """A model at out[bold]x whose layers have brackets in their names."""
    Path(OUT).mkdir()
    (Path(OUT) / "config.json").write_text("{}")
    names = [f"model.{LABEL}.{i}.self_attn.up[/]_proj.weight" for i in range(2)]
    weights = {name: torch.randn(32, 128) for name in names}
    odd = {f"{LABEL}.odd_proj.weight": torch.randn(32, 33)}
    save_file(weights | odd, Path(OUT) / "model.safetensors")


@case("quantize")
def _quantize(patch: Patch) -> Case:
    checkpoint()
    shown = (f"model.{LABEL}.0.self_attn.up[/]_proj", f"{LABEL}.odd_proj.weight, which", f"written to {OUT}/q")
    return Case((OUT, f"{OUT}/q", "--format", "int4"), shown)


@case("dequantize")
def _dequantize(patch: Patch) -> Case:
    checkpoint()
    assert invoke("quantize", OUT, f"{OUT}.q").exit_code == 0
    return Case((f"{OUT}.q", f"{OUT}/d"), (f"model.{LABEL}.0.self_attn.up[/]_proj", f"written to {OUT}/d"))


@case("warm")
def _warm(patch: Patch) -> Case:
    return Case((OUT, "--target", "sm_90"), (f"{OUT} does not exist",), 1)


@case("serve")
def _serve(patch: Patch) -> Case:
    return Case((OUT, "--engine", LABEL), (f"engine is '{LABEL}'",), 2)


@case("bench serve")
def _bench_serve(patch: Patch) -> Case:
    return Case((OUT, "--engine", LABEL), (f"engine is '{LABEL}'",), 2)


@case("bench engine")
def _bench_engine(patch: Patch) -> Case:
    return Case(("--providers", LABEL), (f"provider '{LABEL}'",), 2)


@case("recover")
def _recover(patch: Patch) -> Case:
    positions = (Position("recovered", 7, 7, 1e-7, 8, 0.5, (), 9, 0.01), Position("not reached"))
    found = Recovery((7,), positions, Calibration(1e-5, False), LABEL, 1, False, 99, 0.01)
    tokenizer = SimpleNamespace(decode=lambda tokens: EXTRA)
    patch.setattr("halfbyte.recover.cli._load", lambda *_, **__: (None, tokenizer))
    patch.setattr("halfbyte.recover.blocks.device_of", lambda model: torch.device("cpu"))
    patch.setattr("halfbyte.recover.search.recover_tokens", lambda *_, **__: found)
    np.save("states.npy", np.zeros((2, 4), dtype=np.float32))
    return Case(("--model", OUT, "--states", "states.npy"), (repr(EXTRA), f"policy {LABEL}"), 1)


@case("profile")
def _profile(patch: Patch) -> Case:
    Path(LABEL).mkdir()
    (Path(LABEL) / "config.json").touch()
    found = profile_record(q=1.5, attention=0.5, gaps=0.1)
    found |= {"model": LABEL}
    found["environment"]["device"] = f"A {LABEL} CPU"
    found["runs"][0]["other"] = [{"name": f"kernel{LABEL}", "ms": 0.1}]
    found["counters"] = {"said": EXTRA}
    patch.setattr("halfbyte.roofline.cli._profile", lambda *_: (found, []))
    patch.setattr("halfbyte.roofline.output.check", lambda *_: None)
    patch.setattr("halfbyte.roofline.output.write", lambda *_: f"no profile.png: {EXTRA}")
    shown = (f"{LABEL}, 8 tokens", f"A {LABEL} CPU", f"kernel{LABEL}", f"no profile.png: {EXTRA}", f"report in {OUT}:")
    return Case(("--model", LABEL, "--device", "cpu", "--out", OUT), shown)


def benches(patch: Patch) -> None:
    """No bench measures anything, and what it is run on has brackets in its name."""
    environment = {"device": f"A {LABEL} CPU", "commit": "abc", "date": "2026-11-22", "threads": 2}
    patch.setattr("halfbyte.measure.records.environment", lambda device: dict(environment))
    patch.setattr("halfbyte.measure.records.folder_of", lambda device: LABEL)
    patch.setattr("halfbyte.bench.ceiling.copy_bandwidth", lambda device: (10.0, None))


def record_of(bench: str, device: torch.device, rows: list[dict[str, Any]], copy: float) -> dict[str, Any]:
    environment = records.environment(device)
    return {"bench": bench, "environment": environment, "method": "by hand", "copy_gb_per_s": copy, "rows": rows}


BENCH_SHOWN = (f"A {LABEL} CPU", f"kept in {OUT}/{LABEL}/")
BENCH_OPTIONS = ("--device", "cpu", "--out", OUT)


def micro_bench(maker: str, *, wrong: bool) -> Callable[[Patch], Case]:
    def make(patch: Patch) -> Case:
        benches(patch)
        row = {"case": f"4096x4096, {LABEL}", "median_us": 150.0, "p20_us": 140.0, "p80_us": 160.0, "gb_per_s": 4.0,
               "of_copy": 0.4, "clock": "gpu"}  # fmt: skip
        rows = [row | {"provider": "halfbyte"}, row | {"provider": f"other{LABEL}"}]
        if wrong:
            rows.append({"case": row["case"], "provider": "third", "error": f"1 of 9 values {EXTRA} differ"})
        left_out = {f"peer{LABEL}": f"it needs {EXTRA}"}
        patch.setattr(maker, lambda *_, **__: [SimpleNamespace(name=LABEL, left_out=left_out)])
        patch.setattr("halfbyte.bench.runs.run", lambda case, rounds: rows)
        patch.setattr("halfbyte.bench.runs.make_record", record_of)
        told = f"without peer{LABEL}: it needs {EXTRA}"
        shown = (*BENCH_SHOWN, row["case"], f"other{LABEL}", told, *((f"values {EXTRA} differ",) if wrong else ()))
        return Case(BENCH_OPTIONS, shown, 1 if wrong else 0)

    return make


case("bench dequantize")(micro_bench("halfbyte.bench.dequantize.dequantize_cases", wrong=True))
case("bench quantize")(micro_bench("halfbyte.bench.dequantize.quantize_cases", wrong=False))
case("bench linear")(micro_bench("halfbyte.bench.linear.linear_cases", wrong=False))
case("bench gradients")(micro_bench("halfbyte.bench.gradients.gradient_cases", wrong=False))
case("bench search")(micro_bench("halfbyte.bench.search.search_cases", wrong=False))
case("bench attention")(micro_bench("halfbyte.bench.attention.attention_cases", wrong=False))
case("bench pages")(micro_bench("halfbyte.bench.pages.pages_cases", wrong=False))
case("bench experts")(micro_bench("halfbyte.bench.experts.experts_cases", wrong=False))


@case("bench nearest")
def _bench_nearest(patch: Patch) -> Case:
    benches(patch)
    row = {"case": f"9x9 {LABEL}", "median_us": 150.0, "p20_us": 140.0, "p80_us": 160.0}
    rows = [row | {"provider": provider} for provider in ("1 GPU", f"2{LABEL}")]
    patch.setattr("halfbyte.bench.nearest.nearest_rows", lambda *_: rows)
    return Case(BENCH_OPTIONS, (f"kept in {OUT}/{LABEL}/", row["case"], f"2{LABEL}"))


def model_bench(maker: str, key: str) -> Callable[[Patch], Case]:
    def make(patch: Patch) -> Case:
        benches(patch)
        Path(LABEL).mkdir()
        (Path(LABEL) / "config.json").touch()

        def rows_of(name: str, **_: Any) -> list[dict[str, Any]]:
            row = {"model": name, key: 8, "mode": "fused graph", "median_ms": 12.5, "tokens_per_s": 80.0}
            return [row | {"provider": provider} for provider in ("bitsandbytes", "halfbyte", f"x{LABEL}")]

        patch.setattr(maker, rows_of)
        return Case(("--model", LABEL, *BENCH_OPTIONS), (*BENCH_SHOWN, f"{LABEL}, {key} 8", f"x{LABEL}, ms"))

    return make


case("bench decode")(model_bench("halfbyte.bench.decode.decode_rows", "batch"))
case("bench train")(model_bench("halfbyte.bench.train.train_rows", "tokens"))


@case("bench generate")
def _bench_generate(patch: Patch) -> Case:
    benches(patch)
    Path(LABEL).mkdir()
    (Path(LABEL) / "config.json").touch()
    call = {"call": f"first {LABEL}", "overhead_ms": 12.5, "samples": 3}
    text = {"text": f"repeats {LABEL}", "way": "greedy", "provider": f"x{LABEL}", "tokens_per_s": 80.0, "samples": 3}
    patch.setattr("halfbyte.bench.calls.call_rows", lambda name, **_: [{"model": name} | row for row in (call, text)])
    return Case(
        ("--model", LABEL, *BENCH_OPTIONS), (*BENCH_SHOWN, call["call"], f"repeats {LABEL}", f"x{LABEL}, greedy")
    )


@case("bench recover")
def _bench_recover(patch: Patch) -> Case:
    benches(patch)
    row = {"case": LABEL, "dtype": "float32", "prompts": 1, "tokens": 6, "provider": "halfbyte, gradient",
           "seconds": 1.5, "tried": 9, "extrapolated": False}  # fmt: skip
    patch.setattr("halfbyte.bench.recover.cases_of", lambda *_: [SimpleNamespace(name=LABEL)])
    wrong = {"provider": f"loop{LABEL}", "error": EXTRA}
    patch.setattr("halfbyte.bench.recover.recover_rows", lambda *_: [row, row | wrong])
    return Case(BENCH_OPTIONS, (*BENCH_SHOWN, f"{LABEL}, float32", f"loop{LABEL}, wrong: {EXTRA}"), 1)


@case("bench check")
def _bench_check(patch: Patch) -> Case:
    cells = [
        Cell(f"linear{LABEL}", f"9x9 {EXTRA}", f"x{LABEL}", 10.0, 11.0, 1e-3, 1e-3),
        Cell("decode", LABEL, "halfbyte", 1.0, 1.0),
    ]
    patch.setattr("halfbyte.bench.check.check_cells", lambda *_: cells)
    told = "1 of 2 cells became slower or less exact"
    return Case(("--device", "cpu", "--results", OUT), (f"linear{LABEL}", f"9x9 {EXTRA}", f"x{LABEL}", told), 1)


@case("bench puzzle")
def _puzzle(patch: Patch) -> Case:
    benches(patch)
    seconds = {"unsloth": [0.4, 0.2], "halfbyte": [0.2, 0.1]}
    result = SimpleNamespace(seconds=seconds, speedup=2.0, points={LABEL: 3}, score=3)
    patch.setattr("halfbyte.bench.puzzle.run_puzzle", lambda *_: result)
    patch.setattr("torch.cuda.current_device", lambda: 0)
    return Case(("--out", OUT), (f"{{'{LABEL}': 3}}", f"kept in {OUT}/{LABEL}/puzzle.json"))


@case("bench predict")
def _bench_predict(patch: Patch) -> Case:
    first = next(predictions.rows())
    patch.setattr(predictions, "rows", lambda: [first | {"gpu": f"A {LABEL} GPU", "case": f"9×9 {LABEL}"}])
    row = {
        "device": f"A {LABEL} GPU",
        "sms": 40,
        "kernel": "sm80",
        "products": 9,
        "median_ratio": 1,
        "median_error": 0.1,
    }
    patch.setattr(predictions, "errors_of", lambda results: [row])
    return Case(("--out", OUT), (f"kept in {OUT}/predictions.json", f"9×9 {LABEL}"))


@case("bench report")
def _report(patch: Patch) -> Case:
    (Path(OUT) / "docs").mkdir(parents=True)
    (Path(OUT) / "README.md").touch()
    return Case(("--results", "none", "--root", OUT), (f"wrote {OUT}/docs/results.md",))


def invoke(*arguments: str, columns: int = 80) -> Result:
    return CliRunner(env={"COLUMNS": str(columns), "TERM": "dumb"}).invoke(app, list(arguments))


def squash(text: str) -> str:
    return "".join(text.split())


@pytest.fixture(autouse=True)
def _folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_every_command_has_a_case() -> None:
    assert CASES.keys() == COMMANDS.keys()


@pytest.mark.parametrize("name", COMMANDS)
def test_brackets_are_printed_as_they_are(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = CASES[name](monkeypatch)
    result = invoke(*name.split(), *found.arguments, columns=200)
    assert result.exit_code == found.code, result.output
    assert "Traceback" not in result.output
    for text in found.shown:
        assert squash(text) in squash(result.output), result.output


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize("columns", [40, 60, 80])
def test_narrow_windows_lose_nothing(name: str, columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every word of every cell and head is there, whole where a line can hold it."""
    told: list[str] = []
    add_row, add_column = terminal.Table.add_row, terminal.Table.add_column

    def row(table: Any, *cells: Any, **options: Any) -> None:
        told.extend(cell.plain if isinstance(cell, Text) else cell for cell in cells)
        add_row(table, *cells, **options)

    def column(table: Any, header: str = "", *rest: Any, **options: Any) -> None:
        told.append(header)
        add_column(table, header, *rest, **options)

    monkeypatch.setattr(terminal.Table, "add_row", row)
    monkeypatch.setattr(terminal.Table, "add_column", column)
    found = CASES[name](monkeypatch)
    told.clear()
    arguments = ("0.347",) if name == "explain" else found.arguments
    result = invoke(*name.split(), *arguments, columns=columns)
    assert result.exit_code == (0 if name == "explain" else found.code), result.output
    assert "…" not in result.stdout
    words = Counter(word.strip(";") for word in result.stdout.split())
    for word, count in Counter(" ".join(told).split()).items():
        if len(word) < columns - 4:
            assert words[word] >= min(count, 1), f"{word!r} is not whole:\n{result.stdout}"
        else:
            assert word in squash(result.stdout)
    folder = (OUT, "/usr/", "report in", "kept in", "no profile.png", "nothing was written")  # are to be copied whole
    for line in result.stdout.splitlines():
        assert len(line.rstrip()) <= columns or any(text in line for text in folder), result.stdout


def test_one_module_prints_through_rich() -> None:
    """So that there is one place that decides what is markup: none."""
    for path in SOURCES.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        if path != Path(terminal.__file__):
            assert not re.search(r"\bConsole\(|rich\.markup|rich\.table|rich\.progress|\[/\]|from_markup", text), path


@pytest.mark.parametrize("name", COMMANDS)
def test_help_loses_no_bracket(name: str) -> None:
    """All that the options say, as it is written."""
    printed = squash(invoke(*name.split(), "--help", columns=100).stdout)
    for parameter in COMMANDS[name].params:
        if parameter.help:
            assert squash(parameter.help) in printed.replace("-\n", "-"), parameter.name


EXAMPLES = [
    line.strip()
    for command in COMMANDS.values()
    for line in (command.help or "").splitlines()
    if line.strip().startswith("halfbyte ")
]


def test_there_are_examples() -> None:
    assert sum(line.startswith("halfbyte explain") for line in EXAMPLES) >= 2


def test_examples_in_help_run() -> None:
    """In their order, in a folder with a model: each is shown on a line of its own, and each works."""
    shown = [
        line.strip()
        for name in COMMANDS
        for line in invoke(*name.split(), "--help", columns=100).stdout.splitlines()
        if line.strip().startswith("halfbyte ")
    ]
    assert shown == EXAMPLES
    Path("model").mkdir()
    (Path("model") / "config.json").write_text("{}")
    weights = {f"layers.0.{name}.weight": torch.randn(32, 128) for name in ("q_proj", "o_proj")}
    save_file(weights, Path("model") / "model.safetensors")
    for line in EXAMPLES:
        if line.startswith("halfbyte serve"):  # which does not end by itself; tests/serving has servers
            continue
        result = invoke(*shlex.split(line)[1:])
        assert result.exit_code == 0, f"{line}\n{result.output}"
