"""Checkpoints that are refused, and what is left behind when a conversion does not finish: nothing."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from small_checkpoint import LINEAR, K, N, everything, left

from halfbyte import ops
from halfbyte.checkpoints import dequantize_checkpoint, quantize_checkpoint, writer
from halfbyte.formats import bitsandbytes


def test_sources_that_are_quantized_already(source: Path, tmp_path: Path) -> None:
    for format in ("nf4", "int4"):
        quantize_checkpoint(source, tmp_path / format, format)
        with pytest.raises(ValueError, match="is quantized already"):
            quantize_checkpoint(tmp_path / format, tmp_path / "again")
    (source / "config.json").write_text('{"quantization_config": {"quant_method": "fp8"}}')
    with pytest.raises(ValueError, match=r"config\.json has a quantization_config"):
        quantize_checkpoint(source, tmp_path / "again")
    with pytest.raises(ValueError, match="has no nf4, fp4, int4 or mxfp4 weight among its 9 tensors"):
        dequantize_checkpoint(source, tmp_path / "again")
    (source / "config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(ValueError, match="Conv1D"):
        quantize_checkpoint(source, tmp_path / "again")
    (source / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json is not JSON"):
        quantize_checkpoint(source, tmp_path / "again")
    assert not (tmp_path / "again").exists()


@pytest.mark.parametrize(
    "options",
    [
        {"format": "nf5"}, {"block_size": 65}, {"format": "int4", "group_size": 256}, {"group_size": 128},
        {"format": "int4", "nested": True}, {"format": "int4", "block_size": 64},
    ],
)  # fmt: skip
def test_settings_that_clash(source: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"format|block_size|group_size|nested"):
        quantize_checkpoint(source, tmp_path / "x", **options)
    with pytest.raises(TypeError, match="dtype is"):
        dequantize_checkpoint(source, tmp_path / "x", torch.int8)


def test_incomplete_weights_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    q = ops.quantize(torch.randn(N, K))
    for key in bitsandbytes.to_tensors("l.weight", q):
        parts = {k: v for k, v in bitsandbytes.to_tensors("l.weight", q).items() if k != key}
        save_file(parts, tmp_path / "s.safetensors")
        with pytest.raises(ValueError, match=r"l\.weight"):
            dequantize_checkpoint(tmp_path / "s.safetensors", tmp_path / "t.safetensors")
        assert left(tmp_path) == ["s.safetensors"]


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(at=st.integers(0, 10**6), byte=st.integers(0, 255), cut=st.booleans())
def test_damage_gives_an_error_or_a_whole_output(tmp_path: Path, at: int, byte: int, cut: bool) -> None:
    source, target = tmp_path / "s.safetensors", tmp_path / "t.safetensors"
    save_file(bitsandbytes.to_tensors("l.weight", ops.quantize(torch.ones(4, 64))), source)
    raw = bytearray(source.read_bytes())
    at %= len(raw)
    if cut:
        raw = raw[:at]
    else:
        raw[at] = byte
    source.write_bytes(raw)
    target.unlink(missing_ok=True)
    try:
        dequantize_checkpoint(source, target)
    except ValueError:
        assert left(tmp_path) == ["s.safetensors"]
    else:
        assert not cut
        assert load_file(target)


class FullDisk:
    """A file on a disk that is full after `room` bytes."""

    def __init__(self, file: Any, room: int) -> None:
        self.file, self.room = file, room

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)

    def write(self, data: Any) -> int:
        if self.room <= 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        count: int = self.file.write(data[: self.room])
        self.room -= count
        return count


@pytest.mark.parametrize("room", [0, 1, 1000, 20_000])
def test_disk_full_in_the_middle(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int) -> None:
    make = writer.SafetensorsWriter.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        self._file = FullDisk(self._file, room)

    monkeypatch.setattr(writer.SafetensorsWriter, "__init__", init)
    with pytest.raises(OSError, match="is full; nothing was written"):
        quantize_checkpoint(source, tmp_path / "target")
    assert left(tmp_path) == ["source"]


def test_disk_too_small_from_the_start(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 1000}))
    with pytest.raises(OSError, match=r"needs 0\.1 MB, and the disk of") as info:
        quantize_checkpoint(source, tmp_path / "target")
    assert info.value.errno == errno.ENOSPC
    assert left(tmp_path) == ["source"]


def test_interrupted(source: Path, tmp_path: Path) -> None:
    def interrupt(name: str, done: int, total: int) -> None:
        if done > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantize_checkpoint(source, tmp_path / "target", progress=interrupt)
    assert left(tmp_path) == ["source"]


def test_overwriting_the_source_itself(source: Path, tmp_path: Path) -> None:
    with pytest.raises(FileExistsError, match="--overwrite"):
        quantize_checkpoint(source, source)
    quantize_checkpoint(source, source, overwrite=True)
    assert f"{LINEAR[0]}.absmax" in everything(source)
    assert left(tmp_path) == ["source"]
