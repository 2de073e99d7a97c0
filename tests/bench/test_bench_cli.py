"""`halfbyte bench`: the whole way on a CPU, and what it refuses."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from halfbyte.cli import app

runner = CliRunner(env={"COLUMNS": "120", "TERM": "dumb"})


def bench(code: int, *arguments: object) -> tuple[str, str]:
    """Run `halfbyte bench`; what it says on stdout and stderr."""
    result = runner.invoke(app, ["bench", *map(str, arguments)])
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.stderr
    return result.stdout, result.stderr


def fails(code: int, *arguments: object) -> str:
    stdout, stderr = bench(code, *arguments)
    last = stderr.splitlines()[-1]
    assert stdout == ""
    assert last.startswith("halfbyte: ")
    return last


@pytest.fixture
def _with_peers(_with_bitsandbytes: None) -> None:
    pytest.importorskip("peft")


@pytest.mark.slow
@pytest.mark.usefixtures("_with_peers")
@pytest.mark.parametrize("name", ["dequantize", "quantize"])
def test_whole(name: str, tmp_path: Path) -> None:
    providers = ["halfbyte", "bitsandbytes", "peft"] if name == "dequantize" else ["halfbyte", "bitsandbytes"]
    arguments = (name, "--device", "cpu", "--shapes", "256x256,128x64", "--rounds", 3, "--out", tmp_path)
    stdout, stderr = bench(0, *arguments)
    assert all(f"{provider}" in stdout for provider in ("256×256", "128×64", *providers))
    assert f"{name} 256×256 ..." in stderr
    [path] = tmp_path.glob(f"cpu*/{name}.json")
    record = json.loads(path.read_text(encoding="utf-8"))
    assert [(row["case"], row["provider"]) for row in record["rows"]] == [
        (case, provider) for case in ("256×256", "128×64") for provider in providers
    ]
    assert all(row["samples"] == 3 and row["median_us"] > 0 for row in record["rows"])
    numel = 256 * 256
    assert name == "quantize" or record["rows"][0]["bytes"] == numel // 2 + numel // 64 + 4 * 4 + 2 * numel


@pytest.mark.slow
def test_nearest_over_two_processes(tmp_path: Path) -> None:
    stdout, _ = bench(0, "nearest", "--device", "cpu", "--shape", "3000x64", "--k", 3, "--rounds", 3, "--out", tmp_path)
    assert all(words in stdout for words in ("3000×64 bfloat16, k = 3", "1 process", "2 processes"))
    [path] = tmp_path.glob("cpu*/nearest.json")
    record = json.loads(path.read_text(encoding="utf-8"))
    assert [row["samples"] for row in record["rows"]] == [3, 3]
    assert "is not one shape" in fails(2, "nearest", "--device", "cpu", "--shape", "64x64,64x64")


@pytest.mark.usefixtures("_with_peers")
def test_a_wrong_result_is_not_timed_and_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("halfbyte.ops.dequantize", lambda q: torch.zeros(q.shape, dtype=q.dtype))
    stdout, stderr = bench(1, "dequantize", "--device", "cpu", "--shapes", "64x64", "--rounds", 3)
    assert re.search(r"wrong: \d+ of 4096 values\s+differ", stdout)
    assert "wrong, and so not timed: 1 of 3 results; see the table" in stderr


def test_wrong_usage_is_2() -> None:
    for shapes in ("", "64", "64x", "64x64x64", "axb", "-64x64", "64x64,", "0x64", "1e3x64"):
        assert "is not a shape; write 4096x4096" in fails(2, "dequantize", "--device", "cpu", "--shapes", shapes)
    assert "odd number of weights" in fails(2, "dequantize", "--device", "cpu", "--shapes", "3x3")
    for name in ("dequantize", "search"):
        assert "dtype 'int8' is not float16, bfloat16 or float32" in fails(2, name, "--dtype", "int8")
    assert "format 'int4' is not nf4 or fp4" in fails(2, "quantize", "--format", "int4")
    for name, given, told in (
        ("--models", "llama", "'llama' cannot be measured; write one of llama-3-8b, "),
        ("--models", "32x8", "'32x8' cannot be measured"),
        ("--models", "5x2x64", "5x2x64: 5 heads cannot share 2 heads of keys evenly"),
        ("--loads", "8x512", "'8x512' cannot be measured; write 8x32768x16384 or"),
        ("--loads", "8x512x513", "8 × 513 of 512 tokens: a cache holds"),
        ("--loads", "8x512x3x4", "8 × 3 of 512 tokens, 4 new: a cache holds"),
        ("--dtype", "float32", "dtype 'float32' is not float16 or bfloat16"),
    ):
        assert told in fails(2, "attention", "--device", "cpu", name, given)
    for name, given, told in (
        ("--models", "llama", "'llama' is none of llama-3-8b, "),
        ("--batches", "8", "'8' is no batch; write 8x300"),
        ("--batches", "8x300x200000", "131072 tokens are the most"),
        ("--dtype", "float32", "dtype 'float32' is not float16 or bfloat16"),
    ):
        assert told in fails(2, "pages", "--device", "cpu", name, given)
    assert "the bench runs on cpu and cuda, not on meta" in fails(2, "dequantize", "--device", "meta")
    assert "device 'toaster' is none; write cpu, cuda or cuda:1" in fails(2, "dequantize", "--device", "toaster")
    assert "Invalid value for '--rounds'" in fails(2, "dequantize", "--rounds", 0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu() -> None:
    """One clear line each."""
    assert "the puzzle needs an NVIDIA GPU" in fails(1, "puzzle")
    assert "attention is a Triton kernel for GPUs, and cannot be measured on cpu" in fails(1, "attention")
    assert "attention over vLLM's pages is for Hopper and later GPUs" in fails(1, "pages", "--device", "cpu")
    assert "there is no CUDA device here; --device cpu always works" in fails(2, "dequantize", "--device", "cuda")
