"""`halfbyte bench engine` without vLLM: its checkpoints, the processes and their limits, what is compared and kept."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from halfbyte import figures
from halfbyte.bench import engine, engine_models, engine_process, engine_report, engine_trace, runs
from halfbyte.bench.engine_models import Checkpoints
from halfbyte.bench.engine_process import Job
from halfbyte.checkpoints.plan import quantized_names
from halfbyte.checkpoints.reader import open_checkpoint
from halfbyte.cli import app
from halfbyte.formats.bitsandbytes import from_tensors
from halfbyte.measure import models, records
from halfbyte.ops import dequantize
from halfbyte.serving.claims import holds_experts

pytest.importorskip("transformers")

MOE_NAMES = {  # of a layer
    *(f"self_attn.{name}.weight" for name in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")),
    *(f"mlp.experts.{e}.{name}_proj.weight" for e in range(8) for name in ("gate", "up", "down")),
    "mlp.gate.weight", "input_layernorm.weight", "post_attention_layernorm.weight",
}  # fmt: skip


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Little is drawn, and what is written lies where pytest cleans up."""
    monkeypatch.setattr(engine_models, "POOL", 1 << 18)
    monkeypatch.setattr(engine_models, "MEMORY", tmp_path)


@pytest.mark.parametrize("nested", [True, False])
def test_a_checkpoint_is_read_bit_for_bit(nested: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_models, "SHARD", 1 << 18)
    with Checkpoints(0, nested) as checkpoints:
        path = checkpoints.get("tiny-moe", "nf4")
        sizes, found = checkpoints.sizes("tiny-moe"), open_checkpoint(path)
        assert len(found.shards) > 2
        right = list(engine_models._drawn(sizes, nested))
        assert found.entries.keys() == {key for tensors in right for key in tensors}
        for tensors in right:
            for key, tensor in tensors.items():
                assert torch.equal(found.read(key), tensor), key
        packed = quantized_names(found)
        assert set(packed) == sizes.packed
        for name in packed:
            weight = from_tensors(name, found.read)
            assert weight.shape == sizes.shapes[name]
            assert (weight.nested is not None) == (nested and ".experts." not in name)
            spread = models.spread_of(weight.shape[-1], name.removesuffix(".weight"), 2)
            assert dequantize(weight, torch.float32).std().item() == pytest.approx(spread, rel=0.05)
        assert holds_experts(path)
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
        assert config["architectures"] == ["Qwen3MoeForCausalLM"]
        told = config["quantization_config"]
        assert (told["quant_method"], told["bnb_4bit_use_double_quant"]) == ("bitsandbytes", nested)
        assert {"lm_head", "model.layers.1.mlp.gate"} <= set(told["llm_int8_skip_modules"])


def test_names_are_those_of_checkpoints() -> None:
    sizes = engine_models.sizes_of("tiny-moe", layers=1)
    around = {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"}
    assert sizes.shapes.keys() == around | {f"model.layers.0.{name}" for name in MOE_NAMES}
    assert sizes.shapes["model.layers.0.mlp.experts.7.up_proj.weight"] == (128, 256)
    assert sizes.shapes["model.layers.0.mlp.experts.7.down_proj.weight"] == (256, 128)


def test_a_checkpoint_is_loaded_by_transformers() -> None:
    """With nothing missing, and logits of a usual size."""
    from transformers import AutoModelForCausalLM

    from halfbyte.models.quantizer import config_from_bitsandbytes

    with Checkpoints(0, True) as checkpoints:
        path = checkpoints.get("tiny", "nf4")
        model, told = AutoModelForCausalLM.from_pretrained(
            path, config=config_from_bitsandbytes(path), output_loading_info=True
        )
        assert not any(told["missing_keys"])
        assert not any(told["unexpected_keys"])
        with torch.no_grad():
            logits = model(torch.arange(3, 43)[None]).logits.float()
    assert 0.2 < logits.std() < 5


def test_checkpoints_of_one_model_at_a_time() -> None:
    with Checkpoints(1, False) as checkpoints:
        first, config = checkpoints.get("tiny", "nf4"), checkpoints.get("tiny", "int4")
        assert first == checkpoints.get("tiny", "nf4")
        assert os.listdir(config) == ["config.json"]
        told = json.loads((config / "config.json").read_text(encoding="utf-8"))["quantization_config"]
        assert told["quant_method"] == "compressed-tensors"
        second = checkpoints.get("tiny-moe", "dense")
        assert "quantization_config" not in (second / "config.json").read_text(encoding="utf-8")
        assert not first.parent.exists()
    assert not second.parent.exists()


def process(tmp_path: Path, code: str, limit: float = 60) -> Iterator[dict[str, Any]]:
    told = tmp_path / "told"
    told.touch()
    command = [sys.executable, "-c", f"told = open({str(told)!r}, 'a')\n{code}"]
    return engine.lines_of(command, os.environ, tmp_path, told, tmp_path / "log", limit)


def test_what_a_process_tells(tmp_path: Path) -> None:
    assert list(process(tmp_path, 'told.write(\'{"a": 1}\\n{"a": 2}\\n\')')) == [{"a": 1}, {"a": 2}]
    lines = process(tmp_path, "raise ValueError('no such kernel')")
    with pytest.raises(RuntimeError, match=r"^ValueError: no such kernel$"):
        list(lines)


def test_a_process_over_its_limit_keeps_what_it_told(tmp_path: Path) -> None:
    """And is ended, with the processes that it started."""
    code = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        'told.write(\'{"pid": %d}\\n{"pid"\' % child.pid); told.flush(); time.sleep(600)'
    )
    begun, lines = time.monotonic(), process(tmp_path, code, 5)
    pid = next(lines)["pid"]
    os.kill(pid, 0)
    with pytest.raises(TimeoutError, match="over its limit of 5 s"):
        next(lines)
    assert time.monotonic() - begun < 30
    assert is_gone(pid)


def is_gone(pid: int) -> bool:
    """Or will be in a moment: it is nobody's child that would wait for it."""
    for _ in range(100):
        try:
            state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
        except OSError:
            return True
        if state == "Z":
            return True
        time.sleep(0.1)
    return False


def told(requests: int, first: list[list[int]], speed: float = 100.0) -> dict[str, Any]:
    return {
        "requests": requests, "tokens_per_s": speed, "decode_tokens_per_s": 1.2 * speed, "first": first,
    }  # fmt: skip


class Engines:
    """Stands in for processes: what each provider tells, or raises."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **said: Any) -> None:
        self.said: dict[str, Any] = said
        monkeypatch.setattr(engine.Bench, "_told", lambda bench, model, provider: self.tell(provider))
        monkeypatch.setattr("halfbyte.serving.choice.is_installed", lambda name: True)

    def tell(self, provider: str) -> Iterator[dict[str, Any]]:
        for line in self.said[provider.replace("-", "_")]:
            if isinstance(line, BaseException):
                raise line
            yield dict(line)


def rows_of(*providers: str) -> list[dict[str, Any]]:
    with Checkpoints(0, True) as checkpoints:
        bench = engine.Bench(checkpoints, engine.Settings(), lambda step: None)
        return [row for provider in providers for row in bench.rows("tiny", provider)]


def test_first_tokens_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = [told(1, [[1, 2]] * 3), told(2, [[1, 2], [3, 4]])]
    facts = {"start_s": 3, "methods": {"HalfbyteLinearMethod": ["o_proj"]}}
    Engines(monkeypatch, bitsandbytes=theirs, halfbyte=[facts, told(1, [[1, 2]] * 3), told(2, [[1, 5], [3, 4]])])
    rows = rows_of("bitsandbytes", "halfbyte")
    assert [row.get("same_first") for row in rows] == [None, None, 1.0, 0.5]
    assert [row.get("start_s") for row in rows] == [None, None, 3, 3]
    assert not any("first" in row for row in rows)


def test_other_first_tokens_are_an_error_without_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """But one of three, which may be a tie, is none; and without the baseline there is nothing to compare."""
    theirs, ours = [told(1, [[1, 2]] * 3)], [told(1, [[1, 2], [7, 2], [8, 2]]), told(2, [[1, 2]] * 2)]
    Engines(monkeypatch, bitsandbytes=theirs, halfbyte=ours)
    wrong = rows_of("bitsandbytes", "halfbyte")[1:]
    assert [row.get("error") for row in wrong] == ["most answers begin with another token than those of bitsandbytes"]
    assert "tokens_per_s" not in wrong[0]
    assert len(rows_of("halfbyte")) == 2
    ours[0]["first"][1] = [1, 2]
    assert [row.get("same_first") for row in rows_of("bitsandbytes", "halfbyte")] == [None, 0.6667, None]


def test_an_engine_without_the_plugin_gets_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's own bitsandbytes would answer, and rightly."""
    facts = {"methods": {"UnquantizedEmbeddingMethod": ["lm_head"], "BitsAndBytesLinearMethod": ["o_proj"]}}
    lines = [facts, told(1, [[1]])]
    Engines(monkeypatch, bitsandbytes=lines, halfbyte=lines)
    theirs, ours = rows_of("bitsandbytes", "halfbyte")
    assert theirs["tokens_per_s"] == 100.0
    assert "has not loaded halfbyte's plugin" in ours["error"]
    assert "tokens_per_s" not in ours


def test_what_is_left_out_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    failing = RuntimeError("ValueError: no experts")
    Engines(
        monkeypatch, bitsandbytes=[failing], halfbyte=[told(1, [[1]]), TimeoutError("over")], halfbyte_int4=[failing]
    )
    rows = rows_of("bitsandbytes", "halfbyte", "halfbyte-int4")
    over = "over; measured up to 1 at once"
    assert [row.get("left_out") for row in rows] == ["ValueError: no experts", None, over, None]
    assert [row.get("error") for row in rows] == [None, None, None, "ValueError: no experts"]
    assert rows[1]["tokens_per_s"] == 100.0


def bench(out: Path, code: int, *options: str) -> str:
    result = CliRunner().invoke(app, ["bench", "engine", "--model", "tiny", "--out", str(out), *options])
    assert result.exit_code == code, result.output
    return result.output


def test_a_record_keeps_what_others_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are replaced by model and provider, and Ctrl-C loses none."""
    engines = Engines(monkeypatch, bitsandbytes=[told(1, [[1, 2]] * 3), told(8, [[1, 2]] * 8)], bf16=[told(1, [[9]])])
    out = tmp_path / "out"
    bench(out, 0, "--providers", "bf16,bitsandbytes")
    (path,) = out.glob("*/engine.json")
    kept = [(row["provider"], row["requests"]) for row in records.read(path)["rows"]]
    assert kept == [("bitsandbytes", 1), ("bitsandbytes", 8), ("bf16", 1)]
    engines.said |= {"halfbyte": [told(1, [[1, 2]] * 3), KeyboardInterrupt()], "bf16": [told(1, [[9]], 50.0)]}
    result = CliRunner().invoke(
        app, ["bench", "engine", "--model", "tiny", "--out", str(out), "--providers", "bitsandbytes,halfbyte,bf16"]
    )
    assert result.exit_code != 0
    rows = records.read(path)["rows"]
    assert [(row["provider"], row["requests"], row["tokens_per_s"]) for row in rows] == [
        ("bitsandbytes", 1, 100.0), ("bitsandbytes", 8, 100.0), ("bf16", 1, 100.0), ("halfbyte", 1, 100.0),
    ]  # fmt: skip
    assert rows[3]["same_first"] == 1.0
    bench(out, 0, "--providers", "bf16", "--eager")
    names = {(row["model"], row["provider"]) for row in records.read(path)["rows"]}
    assert names == {("tiny", "bitsandbytes"), ("tiny", "bf16"), ("tiny", "halfbyte"), ("tiny, eager", "bf16")}


LLM_THAT_WAITS = """
import os, pathlib, signal, time

class LLM:
    def __init__(self, **options):
        pathlib.Path({told!r}).write_text(str(os.getpid()))
        os.kill(os.getppid(), signal.SIGTERM)
        time.sleep(600)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_sigterm_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither an engine nor a checkpoint, as after Ctrl-C."""
    packages, place, told = tmp_path / "packages", tmp_path / "place", tmp_path / "told"
    for folder in (packages, place):
        folder.mkdir()
    (packages / "vllm.py").write_text(LLM_THAT_WAITS.format(told=str(told)), encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(packages))
    monkeypatch.setattr(engine_models, "_place", lambda sizes: place)
    monkeypatch.setattr("halfbyte.serving.choice.is_installed", lambda name: True)
    before = signal.signal(signal.SIGTERM, lambda *_: pytest.fail("SIGTERM was left as it is"))
    try:
        bench(tmp_path / "out", 130, "--providers", "bf16")
    finally:
        signal.signal(signal.SIGTERM, before)
    assert is_gone(int(told.read_text(encoding="utf-8")))
    assert not list(place.iterdir())


def test_wrong_tokens_fail_once_all_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Engines(monkeypatch, bitsandbytes=[told(1, [[1]])], halfbyte=[told(1, [[2]])], bf16=[told(1, [[9]])])
    output = bench(tmp_path / "out", 1, "--providers", "bitsandbytes,halfbyte,bf16")
    assert "wrong, and so not timed: 1 of 3 results" in output
    (path,) = tmp_path.glob("out/*/engine.json")
    assert len(records.read(path)["rows"]) == 3


def test_other_numbers_of_tokens_are_other_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for tokens in ("32", "16"):
        Engines(monkeypatch, bf16=[told(1, [[1]])])
        bench(tmp_path / "out", 0, "--providers", "bf16", "--new-tokens", tokens)
    (path,) = tmp_path.glob("out/*/engine.json")
    assert [row["new_tokens"] for row in records.read(path)["rows"]] == [32, 16]


def test_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = [told(8, [[1]] * 8, 800.0), told(1, [[1]], 90.0)]
    ours = [told(8, [[1]] * 8, 1600.0), told(1, [[1]], 180.0)]
    Engines(monkeypatch, bitsandbytes=theirs, halfbyte=ours, machete=[RuntimeError("no kernel")])
    bench(tmp_path / "out", 0, "--providers", "bitsandbytes,halfbyte,machete", "--new-tokens", "32")
    (path,) = tmp_path.glob("out/*/engine.json")
    record = records.read(path)
    text = engine_report.markdown(record).splitlines()
    assert text[0] == "| model | requests | bitsandbytes | halfbyte | × bitsandbytes | same first tokens |"
    assert text[2:4] == [
        "| tiny, 128 + 32 tokens | 1 | 90 / 108 | 180 / 216 | 2.00 | 100% |",
        "| tiny, 128 + 32 tokens | 8 | 800 / 960 | 1,600 / 1,920 | 2.00 | 100% |",
    ]
    assert "- tiny, 128 + 32 tokens: machete was not timed: no kernel" in text
    assert text[-1].startswith("<sub>")
    rows = [row | {"error": "no tokens"} if row["provider"] == "machete" else row for row in record["rows"]]
    rows.append(rows[0] | {"left_out": "it was late"})
    del rows[-1]["tokens_per_s"]
    assert list(engine_report.notes(record | {"rows": rows})) == [
        ("tiny, 128 + 32 tokens: machete failed: no tokens", True),
        ("tiny, 128 + 32 tokens: bitsandbytes was not timed any further: it was late", False),
    ]
    blocks = figures._blocks(tmp_path / "out", None)
    machine = path.parent.name
    short = engine_report.summary(record)
    assert blocks == {f"{machine}/engine": engine_report.markdown(record), f"{machine}/engine-summary": short}
    assert "| tiny | 8 | 800 | 1,600 | **2.0×** |" in short
    others = [row | {"commit": "abc"} for row in record["rows"] if row["provider"] == "halfbyte"]
    assert "tiny with halfbyte: commit abc" in engine_report.markdown(record | {"rows": [*record["rows"][:2], *others]})


@pytest.mark.parametrize(
    "options",
    [
        ("--providers", "exllama"),
        ("--model", "gpt-oss-20b"),
        ("--trace", "trace.json", "--providers", "halfbyte"),
        ("--trace", "trace.json", "--requests", "1"),
    ],
)
def test_wrong_usage(options: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "run_engine", lambda *_: pytest.fail("it was run"))
    assert CliRunner().invoke(app, ["bench", "engine", *options]).exit_code == 2


def test_it_needs_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("halfbyte.serving.choice.is_installed", lambda name: False)
    result = CliRunner().invoke(app, ["bench", "engine", "--model", "tiny"])
    assert result.exit_code != 0
    assert "pip install vllm" in result.output


def test_what_makes_a_provider(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", "another")
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setenv("PYTHONPATH", f"/elsewhere{os.pathsep}src")
    monkeypatch.delenv("VLLM_ENABLE_V1_MULTIPROCESSING", raising=False)
    plain = engine.environment("bitsandbytes")
    assert (plain["VLLM_PLUGINS"], plain["HF_HUB_OFFLINE"], plain["TRANSFORMERS_OFFLINE"]) == ("none", "0", "1")
    assert plain["PYTHONPATH"] == f"/elsewhere{os.pathsep}{os.path.abspath('src')}"
    assert not {"VLLM_DISABLED_KERNELS", "VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_CACHE_ROOT"} & plain.keys()
    assert engine.environment("halfbyte")["VLLM_PLUGINS"] == "halfbyte"
    assert engine.environment("halfbyte", in_process=True)["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    without = engine.environment("marlin")["VLLM_DISABLED_KERNELS"].split(",")
    assert "MacheteLinearKernel" in without
    assert "MarlinLinearKernel" not in without


class LLM:
    """Stands in for vLLM's, in which each step is one token of every request."""

    def __init__(self) -> None:
        self.llm_engine = SimpleNamespace(step=lambda: torch.ones(4).cumsum(0))
        self.asked: list[Any] = []

    def generate(self, prompts: list[dict[str, list[int]]], sampling: Any, use_tqdm: bool) -> list[Any]:
        self.asked.append([prompt["prompt_token_ids"] for prompt in prompts])
        for _ in range(sampling.max_tokens):
            self.llm_engine.step()
        answers = [[prompt[0], *range(1, sampling.max_tokens)] for prompt in self.asked[-1]]
        return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=answer)]) for answer in answers]


@pytest.fixture
def llm(monkeypatch: pytest.MonkeyPatch) -> LLM:
    module: Any = SimpleNamespace(SamplingParams=lambda **options: SimpleNamespace(**options))
    monkeypatch.setitem(sys.modules, "vllm", module)
    return LLM()


def test_a_cell(llm: LLM) -> None:
    job = Job({}, 100, (2,), 16, 12, "")
    row = engine_process.cell(llm, job, 2)
    assert (row["requests"], row["calls"], len(row["first"])) == (2, engine_process.CALLS, 2 * engine_process.CALLS)
    assert row["first"][0] == [llm.asked[3][0][0], *range(1, engine_process.FIRST)]
    assert row["tokens_per_s"] > 0
    assert 1 <= row["different_tokens"] <= 13 / 12 + 0.1
    assert all(3 <= token < 100 for asked in llm.asked for prompt in asked for token in prompt)
    again = LLM()
    engine_process.cell(again, job, 2)
    assert again.asked == llm.asked


def test_a_trace_is_of_a_few_steps(llm: LLM, tmp_path: Path) -> None:
    first = engine_trace.first_step(2, 16)
    job = Job({}, 100, (2,), 16, 12, "")
    new = engine_trace.tokens_of(2, 16)
    assert new > first + engine_trace.STEPS
    path = tmp_path / "trace.json"
    engine_trace.trace(llm, str(path), first, lambda: engine_process.ask(llm, job, 2, new, 0))
    found = json.loads(path.read_text(encoding="utf-8"))
    assert sum(name == "aten::cumsum" for name, _, _ in found) == engine_trace.STEPS
    assert found[0][1] == 0
    assert [start for _, start, _ in found] == sorted(start for _, start, _ in found)


def test_two_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its answers are compared with those of one GPU, and it is left alone where there is only one."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert "halfbyte-tp2" not in engine.by_default()
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert engine.by_default() == list(engine.PROVIDERS)
    engines = Engines(monkeypatch, halfbyte=[told(4, [[1, 2]] * 4)], halfbyte_tp2=[told(4, [[1, 2]] * 3 + [[1, 5]])])
    bench(tmp_path, 0, "--providers", "halfbyte,halfbyte-tp2", "--requests", "4")
    (path,) = tmp_path.glob("*/engine.json")
    record = records.read(path)
    assert [row.get("same_first") for row in record["rows"]] == [None, 0.75]
    text = engine_report.markdown(record).splitlines()
    assert text[0].endswith("| halfbyte | halfbyte-tp2 | × bitsandbytes | same first tokens | those of halfbyte-tp2 |")
    assert text[2].endswith("|  |  | 75% |")
    engines.said["halfbyte_tp2"] = [told(4, [[7, 2]] * 4)]
    assert "most answers begin with another token than those of halfbyte" in " ".join(
        bench(tmp_path, 1, "--providers", "halfbyte,halfbyte-tp2", "--requests", "4").split()
    )
