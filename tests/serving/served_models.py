"""Tiny checkpoints to serve, made here, and what they are: nothing is downloaded."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

import halfbyte as hb
from halfbyte.formats.layouts import layout_of

VOCABULARY = 512
PROMPTS = [[5, 6, 7, 8], list(range(20, 60)), [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]]
NEW_TOKENS = 12
SHAPE = {
    "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 1, "head_dim": 64, "vocab_size": VOCABULARY, "max_position_embeddings": 512,
    "bos_token_id": 0, "eos_token_id": 1, "tie_word_embeddings": False,
}  # fmt: skip
BITSANDBYTES = {"quant_method": "bitsandbytes", "load_in_4bit": True, "llm_int8_skip_modules": ["lm_head"]}


def dense(path: Path, kind: str = "llama") -> Path:
    """A model with random bf16 weights and a tokenizer of words "t0" to "t511".

    kind: "llama", "mistral", "qwen3", "qwen3_moe" or "gpt_oss".
    """
    import transformers

    torch.manual_seed(0)
    if kind == "llama":
        model: Any = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE))
    elif kind == "mistral":
        model = transformers.MistralForCausalLM(transformers.MistralConfig(**SHAPE, sliding_window=None))
    elif kind == "qwen3":
        model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SHAPE))
    elif kind == "gpt_oss":
        # Three blocks of 32 weights: two processes get two and one. vLLM's gpt-oss does not keep a head twice.
        experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 96, "sliding_window": 16}
        config = transformers.GptOssConfig(**SHAPE | experts | {"num_key_value_heads": 2})
        model = transformers.GptOssForCausalLM(config)
        for name, parameter in model.named_parameters():
            if "experts" in name or name.endswith("bias"):  # so large that gates are clamped
                torch.nn.init.normal_(parameter, std=2.0 if name.endswith("gate_up_proj_bias") else 0.2)
    else:
        experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "norm_topk_prob": True}
        model = transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**SHAPE, **experts))
    model.to(torch.bfloat16).save_pretrained(path)
    _tokenizer().save_pretrained(path)
    return path


def _tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(VOCABULARY)}, unk_token="t2"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    return PreTrainedTokenizerFast(tokenizer_object=words, bos_token="t0", eos_token="t1", chat_template=template)


def quantized(path: Path, source: Path, format: str, **settings: Any) -> Path:
    """`source` with every projection in 4 bits, those of experts one by one, as the format's library saves them."""
    shutil.copytree(source, path)
    tensors, packed = load_file(source / "model.safetensors"), {}
    for name, tensor in tensors.items():
        if name.endswith("_proj.weight"):
            q = hb.quantize(tensor, format, **settings)
            packed |= layout_of(format).to_tensors(name, q)
        else:
            packed[name] = tensor
    save_file(
        {name: tensor.contiguous() for name, tensor in packed.items()}, path / "model.safetensors", {"format": "pt"}
    )
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    config["quantization_config"] = _config_of(format, settings)
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return path


def in_mxfp4(path: Path, source: Path, attention: str | None = None) -> Path:
    """A gpt-oss model as openai saves it, its experts in MXFP4 stacks; attention: a format for its projections, with
    which it is a checkpoint of halfbyte's own."""
    shutil.copytree(source, path)
    tensors, packed = load_file(source / "model.safetensors"), {}
    for name, tensor in tensors.items():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):  # dense, they are [E, K, N]
            q = hb.quantize(tensor.transpose(1, 2).contiguous(), "mxfp4")
            packed |= layout_of("mxfp4").to_tensors(name, q)
        elif attention is not None and name.endswith("_proj.weight"):
            packed |= layout_of(attention).to_tensors(name, hb.quantize(tensor, attention))
        else:
            packed[name] = tensor
    save_file(packed, path / "model.safetensors", {"format": "pt"})
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    dense = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    theirs = {"quant_method": "mxfp4", "modules_to_not_convert": dense}
    config["quantization_config"] = theirs if attention is None else {
        "quant_method": "halfbyte", "format": attention, "nested": True, "experts": "mxfp4",
    }  # fmt: skip
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return path


def _config_of(format: str, settings: dict[str, Any]) -> dict[str, Any]:
    if format != "int4":
        nested = settings.get("nested", True)
        return {**BITSANDBYTES, "bnb_4bit_quant_type": format, "bnb_4bit_use_double_quant": nested}
    weights = {
        "num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "dynamic": False,
        "group_size": settings.get("group_size", 128),
    }  # fmt: skip
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed",
        "config_groups": {"group_0": group}, "ignore": ["lm_head"],
    }  # fmt: skip


def dequantized(path: Path, source: Path) -> Path:
    """The dense fp32 model that `source` stands for."""
    shutil.copytree(source, path)
    tensors = load_file(source / "model.safetensors")
    found = {}
    formats = {"_packed": "int4", ".absmax": "nf4", "_blocks": "mxfp4"}
    for name in tensors:
        last = next((suffix for suffix in formats if name.endswith(suffix)), None)
        if last is not None and ".nested_" not in name:
            stem = name.removesuffix(last)
            weight = hb.dequantize(layout_of(formats[last]).from_tensors(stem, tensors), torch.float32)
            found[stem] = weight if weight.dim() == 2 else weight.transpose(1, 2).contiguous()  # as gpt-oss has them
        elif (
            ".weight." not in name
            and not name.endswith(("_scale", "_scales", "_shape"))
            and f"{name}.absmax" not in tensors
        ):
            found[name] = tensors[name].float()
    save_file(found, path / "model.safetensors", {"format": "pt"})
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    del config["quantization_config"]
    (path / "config.json").write_text(json.dumps(config | {"dtype": "float32"}), encoding="utf-8")
    return path


def tokens_in(step: Any) -> list[list[int]]:
    """What an engine has said in a step "tokens" (engines/engine.py)."""
    return [each["tokens"] for each in step]


def tokens_of(model: Any) -> list[list[int]]:
    """What a transformers model in fp32 goes on with, greedily, a prompt at a time."""
    found = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        made = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NEW_TOKENS, eos_token_id=-1,
            pad_token_id=0,
        )  # fmt: skip
        found.append(made[0, len(prompt) :].tolist())
    return found


def through_transformers(path: Path, format: str | None = None, **settings: Any) -> list[list[int]]:
    """Greedy tokens of a checkpoint in transformers, by halfbyte's kernels; format, settings: of dense weights."""
    from transformers import AutoModelForCausalLM

    from halfbyte import HalfbyteConfig, accelerate, restore
    from halfbyte.models.quantizer import config_from_bitsandbytes

    options: dict[str, Any] = {"dtype": torch.float32}
    if format is not None:
        options["quantization_config"] = HalfbyteConfig(format, **settings)
    elif "compressed-tensors" not in (path / "config.json").read_text(encoding="utf-8"):
        options["config"] = config_from_bitsandbytes(path)
    model = AutoModelForCausalLM.from_pretrained(path, **options)
    report = accelerate(model)
    assert not report.skipped
    try:
        return tokens_of(model)
    finally:
        restore(model)


def lora_adapter(folder: Path, path: Path) -> tuple[Path, Path]:
    """An adapter of all projections as PEFT saves it, and the dense model with it merged in."""
    merged, adapter, rank = dequantized(folder / "merged", path), folder / "adapter", 8
    torch.manual_seed(1)
    weights, pairs = load_file(merged / "model.safetensors"), {}
    for name, weight in weights.items():
        if name.endswith("_proj.weight"):
            down, up = 0.2 * torch.randn(rank, weight.shape[1]), 0.2 * torch.randn(weight.shape[0], rank)
            stem = f"base_model.model.{name.removesuffix('.weight')}"
            pairs |= {f"{stem}.lora_A.weight": down, f"{stem}.lora_B.weight": up}
            weight += up @ down
    save_file(weights, merged / "model.safetensors", {"format": "pt"})
    adapter.mkdir()
    save_file(pairs, adapter / "adapter_model.safetensors")
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": targets, "bias": "none"}
    (adapter / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    return adapter, merged
