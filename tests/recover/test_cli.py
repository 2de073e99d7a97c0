"""`halfbyte recover` on a small saved model with a tokenizer of characters."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner, Result

from halfbyte.cli import app

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

TEXT = "Licensed under the"


@pytest.fixture(scope="module")
def folder(llama: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    llama.save_pretrained(path)
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel({chr(code): code for code in range(256)}, "\x00"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex("."), "isolated")
    inner.decoder = tokenizers.decoders.Fuse()
    transformers.PreTrainedTokenizerFast(tokenizer_object=inner).save_pretrained(path)
    return path


def run(*arguments: object) -> Result:
    return CliRunner(env={"COLUMNS": "100"}).invoke(app, ["recover", "--device", "cpu", *map(str, arguments)])


def test_text_is_computed_forgotten_and_recovered(folder: Path) -> None:
    result = run("--model", folder, "--text", TEXT, "--layer", 2)
    assert result.exit_code == 0, result.output
    assert f"text: {TEXT!r}" in result.stdout
    assert "the same as --text: yes" in result.stdout
    assert f"{len(TEXT)} positions: {len(TEXT)} recovered; layer 2, policy gradient" in " ".join(result.stdout.split())


def test_states_kept_and_read_again(folder: Path, tmp_path: Path) -> None:
    kept = tmp_path / "states.safetensors"
    assert run("--model", folder, "--text", TEXT, "--layer", 1, "--save-states", kept).exit_code == 0
    states = load_file(kept)["hidden_states"]
    assert states.shape == (len(TEXT), 64)
    torch.save({"hidden_states": states}, tmp_path / "states.pt")
    np.save(tmp_path / "states.npy", states.numpy())
    for name, layer in (("states.safetensors", ()), ("states.pt", ("--layer", 1)), ("states.npy", ("--layer", 1))):
        result = run("--model", folder, "--states", tmp_path / name, *layer, "--policy", "exhaustive")
        assert result.exit_code == 0, result.output
        assert f"text: {TEXT!r}" in result.stdout
    result = run("--model", folder, "--states", kept, "--layer", 2)
    assert result.exit_code == 1
    assert "nothing is claimed" in result.stdout
    assert "text:" not in result.stdout


def test_what_was_found_is_gone_on_with(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "state.json"
    first, second = (run("--model", folder, "--text", TEXT, "--state", file) for _ in range(2))
    assert first.exit_code == second.exit_code == 0
    assert first.stdout == second.stdout  # seconds included: nothing was searched anew


def test_errors_are_one_line(folder: Path, tmp_path: Path) -> None:
    save_file({"other": torch.zeros(2, 64)}, tmp_path / "other.safetensors")
    (tmp_path / "broken.safetensors").write_bytes(b"no states")
    for code, told, arguments in (
        (2, "give --text, or --states", ()),
        (2, "give --text, or --states", ("--text", "a", "--states", tmp_path / "x.pt")),
        (2, "dtype 'int8' is not one of", ("--text", "a", "--dtype", "int8")),
        (2, "--save-states keeps", ("--states", tmp_path / "x.pt", "--save-states", tmp_path / "y")),
        (1, "x.pt is not a file", ("--states", tmp_path / "x.pt")),
        (1, "has no tensor 'hidden_states' but other", ("--states", tmp_path / "other.safetensors")),
        (1, "broken.safetensors is not a", ("--states", tmp_path / "broken.safetensors")),
        (1, "policy is 'x'", ("--text", "abc", "--policy", "x")),
        (1, "layer is 9", ("--text", "abc", "--layer", 9)),
    ):
        result = run("--model", folder, *arguments)
        assert result.exit_code == code, (arguments, result.output)
        last = result.stderr.rstrip().split("\n")[-1]  # transformers says before that it loads
        assert last.startswith("halfbyte: ")
        assert told in last
