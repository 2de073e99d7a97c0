"""Opening checkpoints: every layout, and everything that can be wrong with one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save, save_file

from halfbyte.checkpoints import open_checkpoint

TENSORS = {
    "a.weight": torch.arange(12, dtype=torch.bfloat16).view(3, 4),
    "b.weight": torch.arange(5, dtype=torch.int64),
    "c": torch.tensor(3.5),
    "d": torch.zeros(0, 4),
    "e": torch.tensor([True, False]),
    "f": torch.arange(6.0).to(torch.float8_e4m3fn),
    "g": torch.ones(2, dtype=torch.complex64),
}
GOOD = save(TENSORS, {"format": "pt"})


def sharded(path: Path) -> Path:
    path.mkdir(exist_ok=True)
    save_file({"x.weight": torch.ones(2, 2)}, path / "model-00001-of-00002.safetensors", {"format": "pt"})
    save_file({"y.weight": torch.zeros(3)}, path / "model-00002-of-00002.safetensors", {"format": "pt"})
    weight_map = {"x.weight": "model-00001-of-00002.safetensors", "y.weight": "model-00002-of-00002.safetensors"}
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return path


def test_one_file(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(GOOD)
    checkpoint = open_checkpoint(path)
    assert not checkpoint.is_directory
    assert checkpoint.metadata == {"x.safetensors": {"format": "pt"}}
    assert checkpoint.entries.keys() == TENSORS.keys()
    assert checkpoint.nbytes == sum(tensor.nbytes for tensor in TENSORS.values())
    for name, tensor in TENSORS.items():
        read = checkpoint.read(name)
        assert (read.dtype, read.shape) == (tensor.dtype, tensor.shape)
        assert read.view(-1).view(torch.uint8).tolist() == tensor.view(-1).view(torch.uint8).tolist()
        assert b"".join(checkpoint.entries[name].chunks()) == bytes(tensor.view(-1).view(torch.uint8).tolist())


def test_directories(tmp_path: Path) -> None:
    directory = sharded(tmp_path / "indexed")
    save_file({"z": torch.ones(1)}, directory / "unlisted.safetensors")
    checkpoint = open_checkpoint(directory)
    assert checkpoint.index == "model.safetensors.index.json"
    assert set(checkpoint.entries) == {"x.weight", "y.weight"}  # the index says which files count

    (directory / "model.safetensors.index.json").unlink()
    assert set(open_checkpoint(directory).entries) == {"x.weight", "y.weight", "z"}

    save_file({"only": torch.ones(1)}, directory / "model.safetensors")
    assert set(open_checkpoint(directory).entries) == {"only"}


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="does not exist"):
        open_checkpoint(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match=r"holds no \.safetensors file"):
        open_checkpoint(tmp_path)


def test_index_and_files_disagree(tmp_path: Path) -> None:
    def index(**changes: object) -> Path:
        directory = sharded(tmp_path / "d")
        path = directory / "model.safetensors.index.json"
        content = json.loads(path.read_text())
        content["weight_map"].update({k: v for k, v in changes.items() if k != "drop"})
        content["weight_map"].pop(changes.get("drop"), None)
        path.write_text(json.dumps(content))
        return directory

    with pytest.raises(ValueError, match=r"lacks gone\.safetensors.*\(1 of 3 files\)"):
        open_checkpoint(index(z="gone.safetensors"))
    with pytest.raises(ValueError, match="does not hold 'z'"):
        open_checkpoint(index(z="model-00001-of-00002.safetensors"))
    with pytest.raises(ValueError, match=r"does not hold 'x\.weight'"):
        open_checkpoint(index(**{"x.weight": "model-00002-of-00002.safetensors"}))
    with pytest.raises(ValueError, match="a file beside the index"):
        open_checkpoint(index(z="../model-00001-of-00002.safetensors"))
    directory = sharded(tmp_path / "d")
    save_file({"y.weight": torch.zeros(3), "w": torch.ones(1)}, directory / "model-00002-of-00002.safetensors")
    with pytest.raises(ValueError, match="does not list 'w'"):
        open_checkpoint(directory)
    (directory / "other.safetensors.index.json").write_text("{}")
    (directory / "model.safetensors.index.json").rename(directory / "third.safetensors.index.json")
    with pytest.raises(ValueError, match="several indexes"):
        open_checkpoint(directory)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"weight_map": {}}', '{"weight_map": 3}', "\x00", "[" * 9999])
def test_damaged_index(tmp_path: Path, text: str) -> None:
    (sharded(tmp_path) / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ValueError, match=r"index\.json"):
        open_checkpoint(tmp_path)


def test_one_name_in_two_files(tmp_path: Path) -> None:
    for name in ("a", "b"):
        save_file({"w": torch.ones(1)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(ValueError, match=r"'w' is in both a\.safetensors and b\.safetensors"):
        open_checkpoint(tmp_path)


def test_any_truncation(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    for length in range(len(GOOD)):
        path.write_bytes(GOOD[:length])
        with pytest.raises(ValueError, match="not a whole safetensors file"):
            open_checkpoint(path)


def test_other_kinds_of_file(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    torch.save(TENSORS, path)
    with pytest.raises(ValueError, match="not a whole safetensors file"):
        open_checkpoint(path)
    path.write_bytes(GOOD + b"\x00")
    with pytest.raises(ValueError, match="not a whole safetensors file"):
        open_checkpoint(path)


def test_cut_short_while_reading(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(GOOD)
    checkpoint = open_checkpoint(path)
    path.write_bytes(GOOD[: checkpoint.entries["a.weight"].start + 3])
    with pytest.raises(ValueError, match=r"ended inside 'a\.weight'"):
        checkpoint.read("a.weight")


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(changes=st.lists(st.tuples(st.integers(0, 600), st.integers(0, 255)), min_size=1, max_size=6))
def test_corrupt_headers(tmp_path: Path, changes: list[tuple[int, int]]) -> None:
    """Whatever bytes a header has: a ValueError, or tensors that can be read."""
    raw = bytearray(GOOD)
    for at, byte in changes:
        raw[at % len(raw)] = byte
    path = tmp_path / "x.safetensors"
    path.write_bytes(raw)
    try:
        checkpoint = open_checkpoint(path)
        for name in checkpoint.entries:
            checkpoint.read(name)
    except ValueError as error:
        assert "x.safetensors" in str(error) or "has dtype" in str(error)  # noqa: PT017
