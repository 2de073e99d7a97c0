"""`halfbyte serve` says before anything long what it will do, or what is wrong."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from halfbyte.cli import app
from halfbyte.serving import choice
from halfbyte.serving.choice import Model, choose, is_installed
from halfbyte.serving.claims import METHOD
from halfbyte.serving.vllm import register
from halfbyte.serving.vllm.server import arguments

ALL = {"vllm", *choice.SERVER_PACKAGES}


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The packages that seem to be there; a test takes some away."""
    there = set(ALL)
    monkeypatch.setattr(choice, "is_installed", there.__contains__)
    return there


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    (tmp_path / "model.safetensors").touch()
    return tmp_path


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["serve", *arguments])


def test_engines(installed: set[str]) -> None:
    assert (choose(None).name, choose(None).reason) == ("vllm", "it is installed")
    assert choose("transformers").reason == "--engine asks for it"
    installed.remove("vllm")
    assert (choose(None).name, choose(None).reason) == ("transformers", "vLLM is not installed")
    with pytest.raises(ImportError, match="pip install vllm"):
        choose("vllm")
    installed.remove("uvicorn")
    with pytest.raises(
        ImportError, match=r"vLLM is not installed .*lacks uvicorn: pip install 'transformers\[serving\]'"
    ):
        choose(None)
    with pytest.raises(ImportError, match=r"^transformers' server lacks uvicorn"):
        choose("transformers")
    with pytest.raises(ValueError, match="engine is 'sglang'; vllm and transformers are known"):
        choose("sglang")


def test_a_folder_is_no_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "halfcloned").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert not is_installed("halfcloned")
    assert is_installed("torch")


def test_the_plugin_is_idle_without_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("halfbyte.serving.vllm.is_installed", lambda name: False)
    register()


def test_what_is_no_checkpoint(installed: set[str], tmp_path: Path) -> None:
    for files, said in (
        ({}, "has no config.json"),
        ({"config.json": "{"}, "config.json is no JSON"),
        ({"config.json": "{}"}, "has no .safetensors files"),
    ):
        for name, text in files.items():
            (tmp_path / name).write_text(text, encoding="utf-8")
        result = run(str(tmp_path))
        assert result.exit_code == 1
        assert said in result.output
    result = run(str(tmp_path / "nowhere"))
    assert result.exit_code == 1
    assert "nowhere does not exist" in result.output


def test_wrong_usage(installed: set[str], checkpoint: Path) -> None:
    for options, said in (
        (["--format", "nf5"], "nf5"),
        (["--engine", "transformers", "--", "--tensor-parallel-size", "2"], "what follows -- is for vLLM"),
        (["--port", "0"], "port"),
        (["--device", "cpu"], "--device cpu is for transformers"),
    ):
        result = run(str(checkpoint), *options)
        assert result.exit_code == 2, result.output
        assert said in result.output


def test_a_port_that_is_taken(installed: set[str], checkpoint: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        result = run(str(checkpoint), "--port", str(port))
    assert result.exit_code == 1
    assert f"cannot listen on 127.0.0.1, port {port}" in result.output
    assert "--port" in result.output


def test_formats_of_quantized_checkpoints(installed: set[str], checkpoint: Path) -> None:
    for config, options, said in (
        (
            {"quant_method": "bitsandbytes", "load_in_4bit": True},
            ["--format", "nf4"],
            "--format is for dense checkpoints",
        ),
        ({"quant_method": "fp8"}, [], "quant_method is 'fp8'"),
    ):
        (checkpoint / "config.json").write_text(json.dumps({"quantization_config": config}), encoding="utf-8")
        result = run(str(checkpoint), *options)
        assert result.exit_code == 1
        assert said in result.output


def test_what_vllm_is_told(tmp_path: Path) -> None:
    common = ["serve", str(tmp_path), "--served-model-name", "m", "--host", "::1", "--port", "8001"]
    common += ["--shutdown-timeout", "30"]
    assert arguments(Model(tmp_path, None), "m", "::1", 8001, None, []) == common
    quantized = arguments(Model(tmp_path, {"quant_method": "bitsandbytes"}), "m", "::1", 8001, None, ["--seed", "1"])
    assert quantized == [*common, "--quantization", METHOD, "--seed", "1"]
    *rest, overrides = arguments(Model(tmp_path, None), "m", "::1", 8001, "int4", [])
    assert rest == [*common, "--quantization", METHOD, "--hf-overrides"]
    assert json.loads(json.loads(overrides)["quantization_config_dict_json"]) == {"format": "int4"}
