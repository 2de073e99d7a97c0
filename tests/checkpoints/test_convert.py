"""Whole checkpoints to 4 bits and back: what is converted, what is not, and how much memory it takes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_checkpoint import LINEAR, K, N, everything, left, tensors

from halfbyte import ops
from halfbyte.checkpoints import SafetensorsWriter, Spec, dequantize_checkpoint, open_checkpoint, quantize_checkpoint
from halfbyte.checkpoints.select import is_linear
from halfbyte.formats import bitsandbytes, compressed_tensors
from halfbyte.measure.error import relative_error


@pytest.mark.parametrize("format", ["nf4", "fp4", "int4"])
def test_directory_there_and_back(source: Path, tmp_path: Path, format: str) -> None:
    target, back = tmp_path / "target", tmp_path / "back"
    seen: list[tuple[str, int, int]] = []
    summary = quantize_checkpoint(source, target, format, progress=lambda *what: seen.append(what))
    assert left(target) == [
        "a.safetensors",
        "b.safetensors",
        "config.json",
        "model.safetensors.index.json",
        "sub",
        "tokenizer.json",
    ]
    odd = "model.layers.1.mlp.down_proj.weight"
    expected = [name for name in LINEAR if format != "int4" or name != odd]
    assert {layer.name for layer in summary.layers} == set(expected)
    assert summary.skipped == ((odd,) if format == "int4" else ())
    assert summary.copied == len(tensors()) - len(expected)
    assert summary.bytes_before == sum(t.nbytes for t in tensors().values())
    assert summary.bytes_after == sum(t.nbytes for t in everything(target).values())
    assert [done for _, done, _ in seen] == sorted(done for _, done, _ in seen)
    assert seen[-1] == ("", summary.bytes_before, summary.bytes_before)

    written, index = everything(target), json.loads((target / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == written.keys()
    assert index["metadata"]["total_size"] == summary.bytes_after
    family = compressed_tensors if format == "int4" else bitsandbytes
    for layer in summary.layers:
        dense = tensors()[layer.name]
        q = family.from_tensors(layer.name, written)
        again = ops.dequantize(ops.quantize(dense, format))
        assert torch.equal(ops.dequantize(q), again)
        assert layer.shape == tuple(dense.shape)
        assert layer.relative_error == pytest.approx(relative_error(again, dense.double()), rel=1e-5)
        assert layer.max_error == pytest.approx((dense.float() - again.float()).abs().max().item())
        parts = [t for key, t in written.items() if key.startswith(layer.name)]
        assert layer.bytes_after == sum(t.nbytes for t in parts)
    assert open_checkpoint(target).metadata["a.safetensors"] == {"format": "pt", "who": "a.safetensors"}

    config = json.loads((target / "config.json").read_text())
    assert config["é"] == 1
    method = "compressed-tensors" if format == "int4" else "bitsandbytes"
    assert config["quantization_config"]["quant_method"] == method
    skip = config["quantization_config"]["ignore" if format == "int4" else "llm_int8_skip_modules"]
    assert {"lm_head", "model.embed_tokens", "model.layers.0.mlp.gate"} <= set(skip)
    assert not {name.removesuffix(".weight") for name in expected} & set(skip)

    dequantize_checkpoint(target, back)
    assert left(back) == left(target)
    assert json.loads((back / "config.json").read_text()) == json.loads((source / "config.json").read_text())
    for name, tensor in everything(back).items():
        dense = tensors()[name]
        assert torch.equal(tensor, ops.dequantize(ops.quantize(dense, format)) if name in expected else dense)
    assert (
        json.loads((back / "model.safetensors.index.json").read_text())["weight_map"]
        == (json.loads((source / "model.safetensors.index.json").read_text())["weight_map"])
    )


def test_one_file_there_and_back(tmp_path: Path) -> None:
    source, target, back = (tmp_path / f"{name}.safetensors" for name in "abc")
    save_file(tensors(), source, {"format": "pt"})
    quantize_checkpoint(source, target, block_size=128, nested=False)
    q = bitsandbytes.from_tensors(LINEAR[0], load_file(target))
    assert (q.block_size, q.nested) == (128, None)
    dequantize_checkpoint(target, back, torch.float16)
    for name, tensor in load_file(back).items():
        assert tensor.dtype == (torch.float16 if name in LINEAR else tensors()[name].dtype)
    with pytest.raises(ValueError, match=r"end its name in \.safetensors"):
        quantize_checkpoint(source, tmp_path / "x")
    with pytest.raises(ValueError, match="the source must be a directory"):
        quantize_checkpoint(source, tmp_path / "x.safetensors", max_shard_size=100)
    assert left(tmp_path) == ["a.safetensors", "b.safetensors", "c.safetensors"]


def test_sharding(source: Path, tmp_path: Path) -> None:
    quantize_checkpoint(source, tmp_path / "many", max_shard_size=15_000)
    files = sorted((tmp_path / "many").glob("*.safetensors"))
    assert files[0].name == f"model-00001-of-{len(files):05}.safetensors"
    assert all(sum(t.nbytes for t in load_file(file).values()) <= 15_000 for file in files)
    quantize_checkpoint(source, tmp_path / "one", max_shard_size=10**9)
    assert [p.name for p in (tmp_path / "one").glob("*.safetensors")] == ["model.safetensors"]
    ones, manys = everything(tmp_path / "one"), everything(tmp_path / "many")
    assert ones.keys() == manys.keys()
    assert all(torch.equal(ones[name], manys[name]) for name in ones)
    with pytest.raises(ValueError, match="a number of bytes"):
        quantize_checkpoint(source, tmp_path / "x", max_shard_size=0)


def test_parts_of_a_weight_in_different_files(tmp_path: Path) -> None:
    """As transformers writes them when it cuts a checkpoint into small files."""
    source, weight = tmp_path / "source", torch.randn(N, K)
    source.mkdir()
    for i, (name, tensor) in enumerate(bitsandbytes.to_tensors("l.weight", ops.quantize(weight)).items()):
        save_file({name: tensor}, source / f"{i}.safetensors")
    dequantize_checkpoint(source, tmp_path / "back")
    assert torch.equal(everything(tmp_path / "back")["l.weight"], ops.dequantize(ops.quantize(weight)))
    assert left(tmp_path / "back") == ["0.safetensors", "model.safetensors.index.json"]


@pytest.mark.parametrize(
    ("name", "linear"),
    [
        ("model.layers.0.self_attn.q_proj.weight", True), ("encoder.layer.0.output.dense.weight", True),
        ("model.layers.0.block_sparse_moe.experts.3.w1.weight", False), ("mlp.shared_experts.up_proj.weight", True),
        ("bert.encoder.layer.1.output.weight", True),
        ("model.layers.0.mlp.gate_proj.weight", True), ("transformer.blocks.0.linear.weight", True),
        ("model.layers.0.mlp.gate.weight", False), ("model.layers.0.mlp.shared_expert_gate.weight", False),
        ("model.layers.0.mlp.router.weight", False), ("router.layer.weight", False), ("output.weight", False),
        ("lm_head.weight", False), ("model.embed_tokens.weight", False), ("embeddings.LayerNorm.weight", False),
        ("transformer.wte.weight", False), ("shared.weight", False), ("tok_emb.weight", False), ("ln_f.weight", False),
        ("model.layers.0.mlp.up_proj.bias", False), ("weight", False), ("x.lora_A", False),
        ("block.0.layer.0.SelfAttention.relative_attention_bias.weight", False), ("classifier.weight", False),
    ],
)  # fmt: skip
def test_which_tensors_are_linear(name: str, linear: bool) -> None:
    assert is_linear(name) is linear


def test_globs(source: Path, tmp_path: Path) -> None:
    def names(**globs: Any) -> set[str]:
        target = tmp_path / "x.safetensors"
        save_file(tensors(), tmp_path / "s.safetensors")
        summary = quantize_checkpoint(tmp_path / "s.safetensors", target, overwrite=True, **globs)
        return {layer.name for layer in summary.layers}

    assert names() == set(LINEAR)
    assert names(exclude=["*.layers.1.*"]) == {LINEAR[0]}
    assert names(exclude=["*.down_proj"]) == set(LINEAR) - {"model.layers.1.mlp.down_proj.weight"}
    assert names(include=["lm_head"]) == {"lm_head.weight", *LINEAR}
    assert names(include=["lm_head"], exclude=["*.up_proj", "*.down_proj"]) == {"lm_head.weight"}
    assert names(only=["lm_head"]) == {"lm_head.weight"}
    assert names(only=["lm_head", "*.up_proj"], exclude=["*.0.*"]) == {"lm_head.weight", LINEAR[1]}
    with pytest.raises(ValueError, match=r"include '\*steps' matches none"):
        names(include=["*steps"])
    with pytest.raises(ValueError, match="only 'nothing' matches none"):
        names(only=["nothing"])
    with pytest.raises(ValueError, match="give one of them"):
        names(only=["lm_head"], include=["*.up_proj"])
    with pytest.raises(ValueError, match="nothing to quantize"):
        names(exclude=["*"])


def test_odd_weights(tmp_path: Path) -> None:
    """Zeros, NaN, one element, an odd number of weights."""
    odd = {"a.weight": torch.zeros(4, 64), "b.weight": torch.full((2, 64), torch.nan), "c.weight": torch.ones(1, 1),
           "d.weight": torch.randn(3, 7), "e.weight": torch.zeros(0, 4)}  # fmt: skip
    save_file(odd, tmp_path / "s.safetensors")
    summary = quantize_checkpoint(tmp_path / "s.safetensors", tmp_path / "q.safetensors")
    errors = {layer.name: layer.relative_error for layer in summary.layers}
    assert errors.keys() == odd.keys() - {"e.weight"}
    assert errors["a.weight"] == errors["c.weight"] == 0
    dequantize_checkpoint(tmp_path / "q.safetensors", tmp_path / "d.safetensors")
    back = load_file(tmp_path / "d.safetensors")
    assert {name: t.shape for name, t in back.items()} == {name: t.shape for name, t in odd.items()}


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="peaks are read from /proc")
def test_memory_stays_near_the_largest_tensor(tmp_path: Path) -> None:
    """40 tensors of 8 MiB, 320 MiB in all and 80 in 4 bits, in a process of its own."""
    source = tmp_path / "s.safetensors"
    specs = [Spec.of(f"l.{i}.weight", torch.bfloat16, (1024, 4096)) for i in range(40)]
    weight = torch.randn(1024, 4096).bfloat16()
    with SafetensorsWriter(source, specs) as file:
        for spec in specs:
            file.write(spec.name, weight)
    code = """
import re, sys, torch
from pathlib import Path
from halfbyte import checkpoints, ops
from halfbyte.measure.error import relative_error

def memory(what):
    return int(re.search(what + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) / 1024

ops.dequantize(ops.quantize(torch.randn(64, 64).bfloat16()))  # compiles, which takes memory too
a, b, c = sys.argv[1:]
for convert in (lambda: checkpoints.quantize_checkpoint(a, b), lambda: checkpoints.dequantize_checkpoint(b, c)):
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM, the peak, starts anew
    start = memory("VmRSS")
    convert()
    print(memory("VmHWM") - start)
"""
    paths = [str(source), str(tmp_path / "q.safetensors"), str(tmp_path / "d.safetensors")]
    # Tensors get pages of their own and give them back: what is measured is what is in use, not what glibc sets aside.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(1 << 20)}
    command = [sys.executable, "-c", code, *paths]
    result = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    quantizing, dequantizing = map(float, result.stdout.split())
    assert quantizing < 64, f"{quantizing} MiB more than at the start"
    assert dequantizing < 32, f"{dequantizing} MiB more than at the start"
