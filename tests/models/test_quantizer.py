"""`from_pretrained` with a HalfbyteConfig: what it loads is what replacing the layers by hand gives, to the bit."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import halfbyte as hb
from halfbyte.nn import Linear4bit

transformers = pytest.importorskip("transformers")

from halfbyte.models import quantizer  # noqa: E402
from halfbyte.models.quantizer import HalfbyteConfig, config_from_bitsandbytes  # noqa: E402

from .memory import CAN_MEASURE, peak_of_loading  # noqa: E402

SIZES: dict[str, Any] = {
    "vocab_size": 256, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 128,
}  # fmt: skip
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"attention_bias": True, "tie_word_embeddings": False}),
    "qwen3": ("qwen3", {"tie_word_embeddings": True}),
    "gemma3": ("gemma3_text", {"sliding_window": 32, "layer_types": ["sliding_attention", "full_attention"]}),
}
KINDS: list[dict[str, Any]] = [
    {"format": "nf4"},
    {"format": "fp4", "nested": False, "block_size": 128},
    {"format": "int4", "group_size": 64},
]
kinds = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind["format"])
TOKENS = torch.arange(24).view(2, 12)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Dense checkpoints of small random models, one a family."""
    paths = {}
    for family, (kind, options) in FAMILIES.items():
        torch.manual_seed(0)
        config = transformers.AutoConfig.for_model(kind, **SIZES, **options)
        model = transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                nn.init.normal_(parameter)
        paths[family] = tmp_path_factory.mktemp(family)
        model.save_pretrained(paths[family])
    return paths


def load(path: Path, kind: dict[str, Any] | None = None, **options: Any) -> Any:
    if kind is not None:
        options["quantization_config"] = HalfbyteConfig(**kind)
    options.setdefault("dtype", torch.bfloat16)
    return transformers.AutoModelForCausalLM.from_pretrained(path, **options)


def replaced(path: Path, kind: dict[str, Any], **options: Any) -> Any:
    """The dense model with its linear layers, but for the head, replaced by hand."""
    model = load(path, **options)
    for name, module in list(model.named_modules()):
        if type(module) is nn.Linear and name != "lm_head":
            model.set_submodule(name, Linear4bit.from_linear(module, **kind))
    return model


def quantized(model: nn.Module) -> dict[str, Linear4bit]:
    return {name: module for name, module in model.named_modules() if isinstance(module, Linear4bit)}


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    result: torch.Tensor = model(TOKENS).logits
    assert torch.isfinite(result).all()
    return result


def same_state(a: nn.Module, b: nn.Module) -> None:
    one, other = a.state_dict(), b.state_dict()
    assert one.keys() == other.keys()
    for key, tensor in one.items():
        assert tensor.dtype == other[key].dtype, key
        assert torch.equal(tensor, other[key]), key


# Loading.


@kinds
@pytest.mark.parametrize("family", FAMILIES)
def test_loads_what_replacing_by_hand_gives(checkpoints: dict[str, Path], family: str, kind: dict[str, Any]) -> None:
    model = load(checkpoints[family], kind)
    by_hand = replaced(checkpoints[family], kind)
    assert len(quantized(model)) == 14
    assert type(model.lm_head) is nn.Linear
    assert not model.training
    assert not any(layer.training for layer in quantized(model).values())
    same_state(model, by_hand)
    assert torch.equal(logits(model), logits(by_hand))
    options = {"max_new_tokens": 6, "do_sample": False}
    assert torch.equal(model.generate(TOKENS, **options), by_hand.generate(TOKENS, **options))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_rounds_in_the_dtype_asked_for(checkpoints: dict[str, Path], dtype: torch.dtype) -> None:
    model = load(checkpoints["llama"], {}, dtype=dtype)
    assert {layer.weight.dtype for layer in quantized(model).values()} == {dtype}
    assert model.dtype == dtype
    same_state(model, replaced(checkpoints["llama"], {}, dtype=dtype))


@pytest.mark.parametrize("device_map", ["cpu", {"": "cpu"}, {"": torch.device("cpu")}, "auto"])
def test_device_maps(checkpoints: dict[str, Path], device_map: Any) -> None:
    pytest.importorskip("accelerate")
    assert len(quantized(load(checkpoints["llama"], {}, device_map=device_map))) == 14


def test_modules_to_not_convert(checkpoints: dict[str, Path]) -> None:
    model = load(checkpoints["llama"], {"modules_to_not_convert": ["model.layers.0", "v_proj"]})
    assert sorted(quantized(model)) == [
        f"model.layers.1.{name}"
        for name in (
            "mlp.down_proj", "mlp.gate_proj", "mlp.up_proj", "self_attn.k_proj", "self_attn.o_proj", "self_attn.q_proj",
        )
    ]  # fmt: skip
    assert type(model.lm_head) is nn.Linear


def test_a_layer_that_the_checkpoint_lacks_is_made_dense(checkpoints: dict[str, Path]) -> None:
    model = transformers.AutoModelForSequenceClassification.from_pretrained(
        checkpoints["llama"], quantization_config=HalfbyteConfig(), num_labels=3
    )
    assert len(quantized(model)) == 14
    assert type(model.score) is nn.Linear
    assert torch.isfinite(model.score.weight).all()


def test_conv1d_is_read_as_the_linear_layer_that_it_is(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=256, n_embd=64, n_layer=1, n_head=2, n_positions=64)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path / "dense")
    model = load(tmp_path / "dense", {}, dtype=torch.float32)
    dense = load(tmp_path / "dense", dtype=torch.float32).transformer.h[0].mlp.c_fc
    layer = model.transformer.h[0].mlp.c_fc
    assert (layer.in_features, layer.out_features) == (64, 256)
    assert torch.equal(layer.weight.packed, hb.quantize(dense.weight.T).packed)
    assert torch.equal(layer.bias, dense.bias)
    model.save_pretrained(tmp_path / "quantized")
    again = load(tmp_path / "quantized", dtype=torch.float32)
    same_state(model, again)
    assert torch.equal(logits(model), logits(again))


def test_layers_that_loading_splits(tmp_path: Path) -> None:
    """The checkpoints of this family have q, k, v in one matrix and gate, up in another; loading cuts them apart."""
    torch.manual_seed(0)
    dense = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model("hrm_text", **SIZES)).eval()
    dense.save_pretrained(tmp_path / "dense")
    assert any("gate_up_proj" in key for key in load_file(tmp_path / "dense" / "model.safetensors"))
    model = load(tmp_path / "dense", {}, dtype=torch.float32)
    assert any("gate_proj" in name for name in quantized(model))
    for name, layer in quantized(model).items():
        assert torch.equal(layer.weight.packed, hb.quantize(dense.get_submodule(name).weight).packed), name
    model.save_pretrained(tmp_path / "quantized")
    again = load(tmp_path / "quantized", dtype=torch.float32)
    same_state(model, again)
    assert torch.equal(logits(model), logits(again))


@pytest.mark.slow
@pytest.mark.skipif(not CAN_MEASURE, reason="memory is measured as Linux tells it")
@pytest.mark.parametrize("again", [False, True], ids=["quantized as it loads", "quantized before"])
def test_the_peak_of_memory_is_the_quantized_model_and_one_weight(
    checkpoints: dict[str, Path], tmp_path: Path, again: bool
) -> None:
    options = {**SIZES, "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 4}
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**options)).to(torch.bfloat16)
    model = model.to_empty(device="cpu")
    for parameter in model.parameters():
        nn.init.uniform_(parameter, -0.1, 0.1)
    model.save_pretrained(tmp_path)
    total, largest = 4 * sum(p.numel() for p in model.parameters()), 4 * 1024 * 4096  # in fp32
    assert total > 200e6
    if again:
        load(tmp_path, {}).save_pretrained(tmp_path)
    del model
    peak, _ = peak_of_loading(tmp_path, "float32", checkpoints["llama"])
    assert peak < 0.16 * total + (0 if again else 1.1 * largest)


# Saving, and loading what was saved.


@kinds
@pytest.mark.parametrize("shards", ["5GB", "100KB"])
def test_saved_and_loaded_again(
    checkpoints: dict[str, Path], tmp_path: Path, kind: dict[str, Any], shards: str
) -> None:
    model = load(checkpoints["llama"], kind)
    model.save_pretrained(tmp_path, max_shard_size=shards)
    files = list(tmp_path.glob("*.safetensors"))
    assert (len(files) > 1) == (shards == "100KB")
    saved = {key: tensor for file in files for key, tensor in load_file(file).items()}
    assert saved.keys() == model.state_dict().keys()
    suffix = "_packed" if kind["format"] == "int4" else ".absmax"
    assert f"model.layers.0.mlp.up_proj.weight{suffix}" in saved

    again = load(tmp_path)
    assert again.config.quantization_config.to_dict() == HalfbyteConfig(**kind).to_dict()
    same_state(model, again)
    assert torch.equal(logits(model), logits(again))
    # And once more, from what was loaded quantized.
    again.save_pretrained(tmp_path / "again")
    same_state(model, load(tmp_path / "again"))


def test_tied_weights_stay_tied(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    load(checkpoints["qwen3"], {}).save_pretrained(tmp_path)
    again = load(tmp_path)
    assert again.lm_head.weight is again.model.embed_tokens.weight


def test_another_dtype_leaves_the_bits(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    model = load(checkpoints["llama"], {})
    model.save_pretrained(tmp_path)
    again = load(tmp_path, dtype=torch.float32)
    assert {parameter.dtype for parameter in again.parameters()} == {torch.float32}
    for name, layer in quantized(model).items():
        pairs = zip(layer.weight.tensors, again.get_submodule(name).weight.tensors, strict=True)
        assert all(torch.equal(a.view(-1), b.view(-1)) for a, b in pairs), name
    assert torch.isfinite(logits(again)).all()


def test_weights_of_the_base_model_load_into_one_with_a_head(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    model = load(checkpoints["qwen3"], {})
    model.model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "halfbyte"
    assert torch.equal(logits(model), logits(load(tmp_path)))


def test_a_dense_layer_in_a_quantized_checkpoint_stays_dense(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    model = load(checkpoints["llama"], {"modules_to_not_convert": ["layers.0.mlp.up_proj"]})
    model.save_pretrained(tmp_path)
    again = load(tmp_path, dtype=torch.float32)
    dense = again.model.layers[0].mlp.up_proj
    assert type(dense) is nn.Linear
    assert dense.weight.dtype == torch.float32
    assert torch.equal(dense.weight, model.model.layers[0].mlp.up_proj.weight.float())


def test_a_checkpoint_with_a_part_missing_does_not_load(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    load(checkpoints["llama"], {}).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight.absmax"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(RuntimeError):
        load(tmp_path)


def test_dequantize(checkpoints: dict[str, Path]) -> None:
    model = load(checkpoints["llama"], {})
    layers = quantized(model)
    expected = logits(model)
    dense = model.dequantize()
    assert not quantized(dense)
    for name, layer in layers.items():
        assert torch.equal(dense.get_submodule(name).weight, hb.dequantize(layer.weight)), name
    torch.testing.assert_close(logits(dense), expected, rtol=0.1, atol=0.05)


# What bitsandbytes wrote.


def written_by_bitsandbytes(source: Path, target: Path, **options: Any) -> Any:
    pytest.importorskip("bitsandbytes")
    config = transformers.BitsAndBytesConfig(load_in_4bit=True, **options)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        source, quantization_config=config, dtype=torch.bfloat16, device_map="cpu"
    )
    model.save_pretrained(target)
    return model


def as_ours(path: Path, **options: Any) -> Any:
    return load(path, config=config_from_bitsandbytes(path), **options)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("format", ["nf4", "fp4"])
@pytest.mark.parametrize("nested", [True, False])
def test_reads_bitsandbytes(
    checkpoints: dict[str, Path], tmp_path: Path, family: str, format: str, nested: bool
) -> None:
    options = {"bnb_4bit_quant_type": format, "bnb_4bit_use_double_quant": nested}
    theirs = written_by_bitsandbytes(checkpoints[family], tmp_path, **options)
    model = as_ours(tmp_path)
    assert len(quantized(model)) == 14
    for name, layer in quantized(model).items():
        # bitsandbytes repacks its weights for some CPUs when they first run, so these are compared before.
        q = hb.from_bitsandbytes(theirs.get_submodule(name).weight)
        assert q.format == layer.weight.format == format
        assert torch.equal(hb.dequantize(q), hb.dequantize(layer.weight)), name
    # The same dense model, quantized by us as it loads.
    ours = load(checkpoints[family], {"format": format, "nested": nested})
    same_state(model, ours)
    assert torch.equal(logits(model), logits(ours))


def test_honours_the_layers_that_bitsandbytes_skipped(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    skipped = ["model.layers.1", "o_proj"]  # such a list replaces their defaults: the head is quantized
    theirs = written_by_bitsandbytes(checkpoints["llama"], tmp_path, llm_int8_skip_modules=skipped)
    model = as_ours(tmp_path)
    expected = [name for name, m in theirs.named_modules() if type(m).__name__ == "Linear4bit"]
    assert "lm_head" in expected
    assert sorted(quantized(model)) == sorted(expected)
    assert model.config.quantization_config.modules_to_not_convert == skipped
    logits(model)


def test_reads_quant_storage(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    written_by_bitsandbytes(
        checkpoints["llama"], tmp_path, bnb_4bit_quant_type="nf4", bnb_4bit_quant_storage=torch.bfloat16
    )
    if not hasattr(transformers.quantizers.HfQuantizer, "get_new_dtype"):
        with pytest.raises(ValueError, match="bnb_4bit_quant_storage bfloat16"):
            as_ours(tmp_path)
        return
    for dtype in (torch.bfloat16, torch.float16):
        model = as_ours(tmp_path, dtype=dtype)
        ours = load(checkpoints["llama"], {"nested": False})
        for name, layer in quantized(ours).items():
            assert torch.equal(layer.weight.packed.view(-1), model.get_submodule(name).weight.packed.view(-1)), name


def test_what_was_read_from_bitsandbytes_is_saved_as_ours(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    written_by_bitsandbytes(checkpoints["llama"], tmp_path / "theirs", bnb_4bit_quant_type="nf4")
    model = as_ours(tmp_path / "theirs")
    model.save_pretrained(tmp_path / "ours")
    same_state(model, load(tmp_path / "ours"))


def test_bitsandbytes_reads_ours(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """The tensors are its own, so that one entry of config.json is all there is to change."""
    pytest.importorskip("bitsandbytes")
    model = load(checkpoints["llama"], {"format": "nf4"})
    model.save_pretrained(tmp_path)
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    config.quantization_config = transformers.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True
    ).to_dict()
    theirs = load(tmp_path, config=config, device_map="cpu")
    for name, layer in quantized(model).items():
        weight = hb.from_bitsandbytes(theirs.get_submodule(name).weight)
        assert torch.equal(hb.dequantize(weight), hb.dequantize(layer.weight)), name


def test_other_checkpoints_are_refused(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not quantized"):
        config_from_bitsandbytes(checkpoints["llama"])
    load(checkpoints["llama"], {}).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="is halfbyte, without load_in_4bit"):
        config_from_bitsandbytes(tmp_path)


# Adapters.


def test_adapters_of_peft(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    model = load(checkpoints["llama"], {}, dtype=torch.float32)
    assert model.hf_quantizer.is_trainable
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    expected = logits(model)

    def lora() -> Any:
        config = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"])
        config._register_custom_module({Linear4bit: peft.tuners.lora.Linear})
        return config

    tuned = peft.get_peft_model(model, lora())
    assert torch.equal(logits(tuned), expected)
    optimizer = torch.optim.AdamW([p for p in tuned.parameters() if p.requires_grad], lr=0.01)
    losses = []
    for _ in range(5):
        loss = tuned(TOKENS, labels=TOKENS).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    tuned.eval()
    changed = logits(tuned)
    assert not torch.equal(changed, expected)

    tuned.save_pretrained(tmp_path)
    again = load(checkpoints["llama"], {}, dtype=torch.float32)
    assert torch.equal(logits(peft.PeftModel.from_pretrained(again, tmp_path, config=lora())), changed)
    same_state_after = tuned.unload().state_dict()
    assert all(torch.equal(tensor, same_state_after[key]) for key, tensor in before.items())


# What is refused.


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"format": "nf5"}, "known formats"),
        ({"block_size": 48}, "block_size is 48"),
        ({"format": "int4", "group_size": 48}, "group_size"),
        ({"format": "int4", "block_size": 64}, "int4 takes group_size"),
        ({"format": "nf4", "group_size": 64}, "nf4 takes block_size"),
        ({"modules_to_not_convert": "lm_head"}, "a list of names"),
        ({"modules_to_not_convert": [3]}, "a list of names"),
        ({"bits": 4}, "bits"),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        HalfbyteConfig(**arguments)


@kinds
def test_configurations_survive_json(kind: dict[str, Any]) -> None:
    config = HalfbyteConfig(**kind, modules_to_not_convert=["a"])
    again = HalfbyteConfig.from_dict(json.loads(json.dumps(config.to_dict())))
    assert again.to_dict() == config.to_dict()
    assert again.quant_method == "halfbyte"


def test_a_group_that_does_not_divide_k_names_the_layers(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    config = transformers.LlamaConfig(**{**SIZES, "intermediate_size": 160})
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"of 2 layers: model\.layers\.0\.mlp\.down_proj \(K = 160\)"):
        load(tmp_path, {"format": "int4"})
    kind = {"format": "int4", "modules_to_not_convert": ["down_proj"]}
    assert len(quantized(load(tmp_path, kind))) == 12
    assert len(quantized(load(tmp_path, {"format": "int4", "group_size": 32}))) == 14


@pytest.mark.parametrize(
    "device_map", [{"": "disk"}, {"model": 0, "lm_head": "cpu"}, {"model": "cpu", "lm_head": "disk"}]
)
def test_offloading_is_refused(checkpoints: dict[str, Path], device_map: dict[str, Any]) -> None:
    pytest.importorskip("accelerate")
    with pytest.raises(ValueError, match="offloads part of the model"):
        load(checkpoints["llama"], {}, device_map=device_map)


def test_other_dtypes_are_refused(checkpoints: dict[str, Path]) -> None:
    with pytest.raises(ValueError, match="float64"):
        load(checkpoints["llama"], {}, dtype=torch.float64)


@pytest.mark.slow
def test_old_versions_are_refused() -> None:
    code = "import transformers; transformers.__version__ = '4.57.1'; import halfbyte.models.quantizer"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert f"needs transformers >= {quantizer.OLDEST} (transformers is 4.57.1)" in run.stderr


def test_halfbyte_alone_imports_no_transformers() -> None:
    code = "import sys, halfbyte; assert 'transformers' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
