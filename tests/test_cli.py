"""The command line: what it prints, and its exit codes, also when it is interrupted."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from halfbyte import __version__, ops
from halfbyte.cli import app

runner = CliRunner(env={"COLUMNS": "80", "TERM": "dumb"})


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    path.mkdir()
    torch.manual_seed(0)
    tensors = {f"model.layers.{i}.mlp.up_proj.weight": torch.randn(64, 128).bfloat16() for i in range(3)}
    save_file({**tensors, "model.norm.weight": torch.ones(128)}, path / "model.safetensors", {"format": "pt"})
    (path / "config.json").write_text('{"model_type": "llama"}')
    return path


def fails(code: int, *arguments: object) -> str:
    """Run, and return what stderr says: one line, no traceback."""
    result = runner.invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == code, result.output
    assert result.stdout == ""
    assert result.stderr.startswith("halfbyte: ")
    assert result.stderr.count("\n") == 1
    assert "Traceback" not in result.stderr
    return result.stderr


def works(*arguments: object) -> str:
    result = runner.invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == 0, result.output
    assert all(len(line) <= 80 for line in result.stdout.splitlines() if "/" not in line), result.stdout
    return result.stdout


def test_version_and_help() -> None:
    assert works("--version") == f"halfbyte {__version__}\n"
    for text in (works(), works("--help")):
        assert all(command in text for command in ("info", "explain", "quantize", "dequantize", "warm"))
    for command in ("info", "explain", "quantize", "dequantize", "warm"):
        assert "Usage" in works(command, "--help")


def test_info() -> None:
    text = works("info")
    assert f"halfbyte {__version__}" in text
    assert all(name in text for name in ("cpu", "torch", "numba", "safetensors", "bitsandbytes"))


def test_info_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    from importlib import metadata

    def version(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", version)
    monkeypatch.setitem(sys.modules, "torch", None)
    text = works("info")
    assert text.count("missing") == 9
    assert all(f"pip install {name}" in " ".join(text.split()) for name in ("torch", "numba", "'halfbyte[plots]'"))
    assert "cannot be imported" in " ".join(text.split())


def test_explain() -> None:
    text = works("explain", "0.347", "--absmax", "10")
    assert "0.347 / 10 = 0.0347" in text
    assert "nibble 7 = 0111" in text
    assert "bytes 00 00 20 41" in text
    assert "offset and absmax2 are assumed" in text
    assert "assumed" not in works("explain", "0.3", "--offset", "0.9", "--absmax2", "0.2")
    assert "-0.3 / 1" in works("explain", "-0.3", "--format", "fp4")
    assert "6 - 8 = -2" in works("explain", "-.3", "--format", "int4")


def test_there_and_back(model: Path, tmp_path: Path) -> None:
    text = works("quantize", model, tmp_path / "q", "--device", "cpu")
    assert "3 weights converted, 1 tensor copied" in text
    assert "times smaller" in text
    assert all(f"model.layers.{i}.mlp.up_proj " in text for i in range(3))
    assert json.loads((tmp_path / "q" / "config.json").read_text())["quantization_config"]["load_in_4bit"]
    text = works("dequantize", tmp_path / "q", tmp_path / "d", "--dtype", "float32", "--device", "cpu")
    assert "times larger" in text
    before, after = load_file(model / "model.safetensors"), load_file(tmp_path / "d" / "model.safetensors")
    for name, tensor in after.items():
        expected = ops.dequantize(ops.quantize(before[name]), torch.float32) if "proj" in name else before[name]
        assert torch.equal(tensor, expected)
    works("quantize", model, tmp_path / "q", "--format", "int4", "--group-size", "32", "--overwrite")
    works("quantize", model, tmp_path / "s", "--only", "*.0.*", "--flat", "--max-shard-size", "20 KB")
    assert len(list((tmp_path / "s").glob("*.safetensors"))) > 1


def test_wrong_usage_is_2(model: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    assert "No such command 'quantise'" in fails(2, "quantise")
    assert "Missing argument" in fails(2, "quantize")
    assert "No such option" in fails(2, "quantize", model, target, "--frmat", "nf4")
    assert "format is 'nf5'; known formats are" in fails(2, "quantize", model, target, "--format", "nf5")
    assert "block_size is 65" in fails(2, "quantize", model, target, "--block-size", "65")
    assert "give one of them" in fails(2, "quantize", model, target, "--only", "*", "--include", "*")
    assert "group_size is for int4" in fails(2, "quantize", model, target, "--group-size", "64")
    assert "nested is for nf4 and fp4" in fails(2, "quantize", model, target, "--format", "int4", "--nested")
    assert "5GB, 500MB" in fails(2, "quantize", model, target, "--max-shard-size", "5 apples")
    assert "5GB, 500MB" in fails(2, "quantize", model, target, "--max-shard-size", "-5GB")
    assert "device 'toaster' cannot be used here" in fails(2, "quantize", model, target, "--device", "toaster")
    assert "larger than absmax" in fails(2, "explain", "3")
    assert "valid" in fails(2, "explain", "x")
    assert not target.exists()


def test_failures_are_1(model: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    assert "does not exist" in fails(1, "quantize", tmp_path / "nowhere", target)
    assert "--overwrite" in fails(1, "quantize", model, model)
    assert "create it first" in fails(1, "quantize", model, tmp_path / "no" / "where")
    assert "matches none" in fails(1, "quantize", model, target, "--include", "nothing")
    assert "has no nf4, fp4, int4 or mxfp4 weight" in fails(1, "dequantize", model, target)
    file = model / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    assert "not a whole safetensors file" in fails(1, "quantize", model, target)
    file.unlink()
    assert "holds no .safetensors file" in fails(1, "quantize", model, target)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model"]


def test_summary_as_json(model: Path, tmp_path: Path) -> None:
    planned, done = (
        json.loads(works("quantize", model, tmp_path / "q", "--json", "--device", "cpu", *more))
        for more in (["--dry-run"], [])
    )
    assert planned["dry_run"]
    assert not done["dry_run"]
    assert done["destination"] == str(tmp_path / "q")
    assert [layer["shape"] for layer in done["layers"]] == [[64, 128]] * 3
    assert all(0 < layer["relative_error"] < 0.2 for layer in done["layers"])
    assert planned["files"] == done["files"] == ["config.json", "model.safetensors"]
    back = json.loads(works("dequantize", tmp_path / "q", tmp_path / "d", "--json"))
    assert back["bytes_after"] == done["bytes_before"]


def test_quiet_and_dry_run(model: Path, tmp_path: Path) -> None:
    text = works("quantize", model, tmp_path / "q", "--dry-run")
    assert "3 weights would be converted, 1 tensor would be copied" in text
    assert "files: config.json, model.safetensors" in text
    assert "nothing was written" in text
    assert works("quantize", model, tmp_path / "q", "--dry-run", "--quiet") == ""
    assert not (tmp_path / "q").exists()
    assert works("quantize", model, tmp_path / "q", "--quiet") == ""
    assert (tmp_path / "q").exists()


def test_experts_are_mentioned(tmp_path: Path) -> None:
    names = ["mlp.up_proj", *(f"mlp.experts.{i}.up_proj" for i in range(4))]
    save_file({f"{name}.weight": torch.randn(64, 128) for name in names}, tmp_path / "s.safetensors")
    text = " ".join(works("quantize", tmp_path / "s.safetensors", tmp_path / "q.safetensors").split())
    assert "1 weight converted, 4 tensors copied" in text
    assert "left dense: 4 weights of experts, 0.13 MB; they were to stay so, or are of a kind that" in text


def test_the_source_is_replaced_on_demand_only(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = (model / "model.safetensors").read_bytes()
    assert "--force" in fails(2, "quantize", model, model, "--overwrite")
    assert "--force" in fails(2, "quantize", model, model.parent / "." / model.name, "--overwrite")
    monkeypatch.setattr("halfbyte.checkpoints.cli._can_ask", lambda: True)
    for answer, code in (("n\n", 130), ("", 130)):
        result = runner.invoke(app, ["quantize", str(model), str(model), "--overwrite"], input=answer)
        assert result.exit_code == code, result.output
        assert "which is SRC itself" in " ".join(result.stderr.split())
        assert (model / "model.safetensors").read_bytes() == before
    works("quantize", model, model, "--overwrite", "--dry-run")
    assert (model / "model.safetensors").read_bytes() == before
    result = runner.invoke(app, ["quantize", str(model), str(model), "--overwrite"], input="y\n")
    assert result.exit_code == 0, result.output
    works("dequantize", model, model, "--overwrite", "--force")
    assert load_file(model / "model.safetensors")["model.layers.0.mlp.up_proj.weight"].shape == (64, 128)


def test_no_permission(model: Path, tmp_path: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("root may do everything")
    tmp_path.chmod(0o500)
    try:
        assert "Permission denied" in fails(1, "quantize", model, tmp_path / "target")
    finally:
        tmp_path.chmod(0o700)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="signals")
@pytest.mark.parametrize(("name", "code"), [("SIGINT", 130), ("SIGTERM", 143), ("SIGHUP", 129)])
def test_interrupted(tmp_path: Path, name: str, code: int) -> None:
    """A real process, stopped while its temporary file is there: it leaves nothing, and what was there before stays."""
    source, target = tmp_path / "s.safetensors", tmp_path / "t.safetensors"
    weight = torch.randn(512, 1024)
    save_file({f"l.{i}.weight": weight.clone() for i in range(200)}, source)
    target.write_bytes(b"old")
    command = [sys.executable, "-m", "halfbyte", "quantize", str(source), str(target), "--overwrite", "--device", "cpu"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    end = time.monotonic() + 120
    while not list(tmp_path.glob(".t.safetensors.*.tmp/*")):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end
        time.sleep(0.002)
    process.send_signal(signal.Signals[name])
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == code, stderr
    assert stdout == ""
    assert "Traceback" not in stderr
    assert code != 130 or "halfbyte: interrupted" in stderr
    assert sorted(p.name for p in tmp_path.iterdir()) == ["s.safetensors", "t.safetensors"]
    assert target.read_bytes() == b"old"
