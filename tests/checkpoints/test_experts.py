"""Which tensors of a checkpoint are experts, which way round stacks are, and which layers can be 4-bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import halfbyte as hb
from halfbyte.checkpoints import dequantize_checkpoint, quantize_checkpoint
from halfbyte.checkpoints.experts import SavedStacks, check_whole, cut, is_one, is_stack, layers
from halfbyte.checkpoints.reader import Entry

E, H, I = 2, 64, 96  # noqa: E741


def entries(shapes: dict[str, tuple[int, ...]], dtype: str = "BF16") -> dict[str, Entry]:
    return {name: Entry(name, dtype, shape, Path(), 0, 1) for name, shape in shapes.items()}


def one_by_one(parts: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj"), count: int = E) -> dict[str, Any]:
    return {
        f"m.experts.{e}.{part}.weight": (H, I) if part in ("down_proj", "w2") else (I, H)
        for e in range(count)
        for part in parts
    }


def test_names() -> None:
    assert is_one("model.layers.0.block_sparse_moe.experts.3.w1.weight")
    assert is_one("experts.3.w1.weight")
    assert not is_one("model.shared_experts.up_proj.weight")
    assert not is_one("model.experts.3.w1.bias")
    assert is_stack("m.experts.down_proj")
    assert not is_stack("m.experts.down_proj_bias")
    assert not is_stack("m.mlp.down_proj")


def test_layers_one_by_one() -> None:
    for parts in (("gate_proj", "up_proj", "down_proj"), ("w1", "w2", "w3")):
        [(path, layer)] = layers(entries(one_by_one(parts)), {"hidden_act": "silu"}).items()
        assert path == "m.experts"
        assert sorted(layer.names) == sorted(one_by_one(parts))
    assert not layers(entries(one_by_one(("up_proj", "down_proj"))), {})  # without a gate
    assert not layers(entries(one_by_one()), {"hidden_act": "relu2"})
    assert not layers(entries(one_by_one(), "F8_E4M3"), {})
    holey = {name: shape for name, shape in one_by_one(count=3).items() if ".1." not in name}
    assert not layers(entries(holey), {})


@pytest.mark.parametrize(
    ("gate_up", "down", "transposed"),
    [
        ((E, 2 * I, H), (E, H, I), False),
        ((E, H, 2 * I), (E, I, H), True),
        ((E, H, 2 * H), (E, H, H), True),  # gpt-oss, whose H and I are equal
        ((E, 2 * H, H), (E, H, H), False),
        ((E, 32, H), (E, 32, H), None),
        ((E, 2 * I, H), (E + 1, H, I), None),
    ],
)
def test_which_way_round_stacks_are(gate_up: Any, down: Any, transposed: bool | None) -> None:
    found = layers(entries({"m.experts.gate_up_proj": gate_up, "m.experts.down_proj": down}), {})
    if transposed is None:
        assert not found
        return
    layer = found["m.experts"]
    assert layer.transposed is transposed
    assert layer.shapes == tuple(shape[:0:-1] if transposed else shape[1:] for shape in (gate_up, down))


def test_a_layer_is_one_thing() -> None:
    found = layers(entries(one_by_one()), {})
    names = list(one_by_one())
    assert cut(found.values(), "int4", 64) == names  # 96 is no multiple of 64
    assert not cut(found.values(), "int4", 32)
    check_whole(found, names)
    check_whole(found, ["others"])
    with pytest.raises(ValueError, match=r"5 of the 6 weights of 'm\.experts' are chosen; .* exclude 'm\.experts\.\*'"):
        check_whole(found, names[1:])


def test_what_config_json_has_to_say() -> None:
    q = hb.quantize(torch.randn(E, H, I), "nf4", nested=False)
    tensors = {"m.experts.down_proj": q.packed.view(E, -1), "m.experts.down_proj_scale": q.scale.view(E, -1)}
    config = {"hidden_size": H, "dtype": "float16", "quantization_config": {"format": "fp4", "experts": "nf4"}}
    read = SavedStacks.of(config).read("m.experts.down_proj", tensors)
    assert (read.format, read.shape, read.block_size, read.dtype) == ("nf4", (E, H, I), 64, torch.float16)
    assert torch.equal(hb.dequantize(read, torch.float32), hb.dequantize(q))
    nested = {"text_config": {"hidden_size": H, "model_type": "gpt_oss"}, "quantization_config": {"format": "nf4"}}
    assert SavedStacks.of(nested).transposed
    assert SavedStacks.of(nested).read("m.experts.down_proj", tensors).shape == (E, H, I)
    with pytest.raises(ValueError, match=r"config\.json does not tell"):
        SavedStacks.of(None).read("m.experts.down_proj", tensors)
    with pytest.raises(ValueError, match="only one of packed weights and scales is there"):
        SavedStacks.of(config).read("m.experts.down_proj", {"m.experts.down_proj": q.packed})


@pytest.mark.parametrize("format", ["nf4", "int4", "mxfp4"])
@pytest.mark.parametrize("kind", ["other", "gpt_oss"])
def test_stacks_there_and_back(tmp_path: Path, format: str, kind: str) -> None:
    transposed = kind == "gpt_oss"
    dense = {"m.experts.gate_up_proj": torch.randn(E, 256, 128), "m.experts.down_proj": torch.randn(E, 128, 128)}
    if transposed:
        dense = {name: stack.transpose(1, 2).contiguous() for name, stack in dense.items()}
    source = tmp_path / "source"
    source.mkdir()
    save_file(dense, source / "model.safetensors")
    config = {"model_type": kind, "hidden_size": 128, "dtype": "float32"}
    (source / "config.json").write_text(json.dumps(config))
    summary = quantize_checkpoint(source, tmp_path / "q", format)
    assert {layer.name for layer in summary.layers} == set(dense)
    written = load_file(tmp_path / "q" / "model.safetensors")
    assert written.keys() == {key for name in dense for key in (name, f"{name}_scale")}
    dequantize_checkpoint(tmp_path / "q", tmp_path / "back")
    back = load_file(tmp_path / "back" / "model.safetensors")
    for name, stack in dense.items():
        k_last = stack.transpose(1, 2).contiguous() if transposed else stack
        options = {"nested": False} if format == "nf4" else {}
        expected = hb.dequantize(hb.quantize(k_last, format, **options))
        assert torch.equal(back[name], expected.transpose(1, 2) if transposed else expected)
    assert "quantization_config" not in json.loads((tmp_path / "back" / "config.json").read_text())
