"""Checkpoints written here, loaded by plain transformers with real bitsandbytes; and the other way round."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from halfbyte import ops
from halfbyte.checkpoints import dequantize_checkpoint, quantize_checkpoint
from halfbyte.formats.bitsandbytes import from_bitsandbytes, from_tensors

transformers = pytest.importorskip("transformers")
bitsandbytes = pytest.importorskip("bitsandbytes")


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of random weights, saved in several files; its head is tied to its embeddings in one of two."""
    path = tmp_path_factory.mktemp("dense")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=320, hidden_size=128, intermediate_size=320, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, dtype=torch.bfloat16,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(path, max_shard_size="300KB")
    assert len(list(path.glob("*.safetensors"))) > 1
    return path


def linear_layers(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    return {name: m for name, m in model.named_modules() if isinstance(m, bitsandbytes.nn.Linear4bit)}


@pytest.mark.parametrize("format", ["nf4", "fp4"])
@pytest.mark.parametrize("nested", [True, False])
def test_transformers_loads_what_we_write(model_dir: Path, tmp_path: Path, format: str, nested: bool) -> None:
    target = tmp_path / "quantized"
    summary = quantize_checkpoint(model_dir, target, format, nested=nested)
    assert len(summary.layers) == 14

    dense = transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.bfloat16)
    model = transformers.AutoModelForCausalLM.from_pretrained(target, device_map="cpu", dtype=torch.bfloat16)
    layers = linear_layers(model)
    assert {layer.name.removesuffix(".weight") for layer in summary.layers} == set(layers)
    for name, layer in layers.items():
        weight = dense.get_submodule(name).weight.data
        expected, state = bitsandbytes.functional.quantize_4bit(weight, quant_type=format, compress_statistics=nested)
        assert torch.equal(layer.weight.data, expected), name
        assert torch.equal(layer.weight.quant_state.absmax, state.absmax), name
        back = bitsandbytes.functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state)
        assert torch.equal(back, bitsandbytes.functional.dequantize_4bit(expected, state)), name
    for name, parameter in dense.named_parameters():
        if name.removesuffix(".weight") not in layers:
            assert torch.equal(parameter, model.get_parameter(name)), name

    tokens = torch.arange(24).view(2, 12)
    with torch.no_grad():
        logits = model(tokens).logits
    assert torch.isfinite(logits).all()


def test_we_read_what_transformers_writes(model_dir: Path, tmp_path: Path) -> None:
    config = transformers.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16, bnb_4bit_quant_storage=torch.bfloat16,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_pretrained(
        model_dir, quantization_config=config, device_map="cpu", dtype=torch.bfloat16
    )
    saved, target = tmp_path / "saved", tmp_path / "dense"
    model.save_pretrained(saved, max_shard_size="100KB")
    files = sorted(saved.glob("*.safetensors"))
    assert len(files) > 1
    tensors = {name: tensor for file in files for name, tensor in load_file(file).items()}
    for name, layer in linear_layers(model).items():
        expected = bitsandbytes.functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state)
        assert torch.equal(ops.dequantize(from_bitsandbytes(layer.weight)), expected), name
        assert torch.equal(ops.dequantize(from_tensors(f"{name}.weight", tensors)), expected), name

    summary = dequantize_checkpoint(saved, target)
    assert len(summary.layers) == 14
    assert "quantization_config" not in json.loads((target / "config.json").read_text())
    dense = transformers.AutoModelForCausalLM.from_pretrained(target, dtype=torch.bfloat16)
    for name, layer in linear_layers(model).items():
        expected = bitsandbytes.functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state)
        assert torch.equal(dense.get_submodule(name).weight, expected), name


def test_tied_head_stays_dense(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    config = transformers.LlamaConfig(
        vocab_size=320, hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, tie_word_embeddings=True,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(source)
    quantize_checkpoint(source, target)
    model = transformers.AutoModelForCausalLM.from_pretrained(target, device_map="cpu")
    assert type(model.lm_head) is torch.nn.Linear
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    with torch.no_grad():
        assert torch.isfinite(model(torch.arange(8).view(1, 8)).logits).all()


def test_excluded_layers_stay_dense(model_dir: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    quantize_checkpoint(model_dir, target, exclude=["*.layers.0.*", "*.o_proj"], max_shard_size=200_000)
    assert (target / "model.safetensors.index.json").is_file()
    model = transformers.AutoModelForCausalLM.from_pretrained(target, device_map="cpu")
    names = linear_layers(model)
    assert names
    assert all(".layers.1." in name and "o_proj" not in name for name in names)
