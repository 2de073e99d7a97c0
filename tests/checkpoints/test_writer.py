"""The streaming writer, read back by the safetensors library."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from halfbyte.checkpoints import SafetensorsWriter, Spec, open_checkpoint

DTYPES = (torch.float32, torch.bfloat16, torch.uint8, torch.int64, torch.bool, torch.float16)


@pytest.mark.slow
@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_tensors_in_any_order(tmp_path: Path, data: st.DataObject) -> None:
    """Also odd sizes, which would leave later tensors misaligned if they were written as they come."""
    tensors, specs = {}, []
    for i in range(data.draw(st.integers(0, 8))):
        shape = data.draw(st.lists(st.integers(0, 5), max_size=3))
        name = f'{data.draw(st.text(max_size=4))}"{i}'.encode("utf-8", "ignore").decode()
        if data.draw(st.booleans()):
            tensors[name] = torch.randint(0, 2, shape).to(data.draw(st.sampled_from(DTYPES)))
            specs.append(Spec.of(name, tensors[name].dtype, shape))
        else:
            tensors[name] = torch.randint(0, 255, (data.draw(st.integers(0, 300)),), dtype=torch.uint8)
            specs.append(Spec.blob(name))
    path = tmp_path / "x.safetensors"
    with SafetensorsWriter(path, specs, {"format": "pt"}) as writer:
        for name in data.draw(st.permutations(list(tensors))):
            writer.write(name, tensors[name])
    loaded = load_file(path)
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert (loaded[name].dtype, loaded[name].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(loaded[name], tensor)
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt"}
    for entry in open_checkpoint(path).entries.values():
        assert entry.start % torch.empty(0, dtype=tensors[entry.name].dtype).element_size() == 0
    assert int.from_bytes(path.read_bytes()[:8], "little") % 8 == 0


def test_copies_bit_for_bit(tmp_path: Path) -> None:
    source, target = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    tensors = {"x": torch.randn(1000), "y": torch.full((3,), float("nan")), "z": torch.zeros(0)}
    save_file(tensors, source)
    entries = open_checkpoint(source).entries
    specs = [Spec(e.name, e.dtype, e.shape, e.nbytes) for e in entries.values()]
    with SafetensorsWriter(target, specs) as writer:
        for name, entry in entries.items():
            writer.copy(name, entry)
    again = open_checkpoint(target).entries
    assert all(list(entries[name].chunks()) == list(again[name].chunks()) for name in tensors)


def test_dtypes_that_torch_does_not_have(tmp_path: Path) -> None:
    """They are copied as they are; only reading one needs torch to know it."""
    path = tmp_path / "a.safetensors"
    header = json.dumps({"w": {"dtype": "F8_E8M0", "shape": [4], "data_offsets": [0, 4]}}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + b"\x01\x02\x03\x04")
    entry = open_checkpoint(path).entries["w"]
    with pytest.raises(ValueError, match="'w' has dtype F8_E8M0"):
        entry.read()
    with SafetensorsWriter(tmp_path / "b.safetensors", [Spec("w", entry.dtype, entry.shape, 4)]) as writer:
        writer.copy("w", entry)
    assert b"".join(open_checkpoint(tmp_path / "b.safetensors").entries["w"].chunks()) == b"\x01\x02\x03\x04"


def test_what_was_not_planned(tmp_path: Path) -> None:
    spec = Spec.of("w", torch.float32, (2,))
    path = tmp_path / "x"
    with pytest.raises(ValueError, match="planned and not written"), SafetensorsWriter(path, [spec]):
        pass
    with pytest.raises(ValueError, match="two tensors have one name"):
        SafetensorsWriter(path, [spec, spec])
    with SafetensorsWriter(path, [spec]) as writer:
        with pytest.raises(ValueError, match="not planned"):
            writer.write("v", torch.zeros(2))
        writer.write("w", torch.zeros(2))
        with pytest.raises(ValueError, match="written before"):
            writer.write("w", torch.zeros(2))
    for wrong in (torch.zeros(3), torch.zeros(2, dtype=torch.int32)):
        with pytest.raises(ValueError, match="was planned"), SafetensorsWriter(path, [spec]) as writer:
            writer.write("w", wrong)
    with (
        pytest.raises(ValueError, match="4096 were planned at most"),
        SafetensorsWriter(path, [Spec.blob("b")]) as writer,
    ):
        writer.write("b", torch.zeros(5000, dtype=torch.uint8))
