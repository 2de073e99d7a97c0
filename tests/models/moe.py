"""Small random mixture-of-experts models, their checkpoints, and the dense models that 4-bit ones stand for."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import halfbyte as hb
from halfbyte.nn import Experts4bit, Linear4bit

E, H, I = 4, 64, 96  # noqa: E741
COMMON = {
    "vocab_size": 96, "hidden_size": H, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 128, "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {
        "intermediate_size": 128, "moe_intermediate_size": I, "num_experts": E, "num_experts_per_tok": 2,
        "head_dim": 16,
    },
    "mixtral": {"intermediate_size": I, "num_local_experts": E, "num_experts_per_tok": 2},
    "gpt_oss": {
        "intermediate_size": I, "num_local_experts": E, "num_experts_per_tok": 2, "head_dim": 16,
        "sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "deepseek_v3": {
        "intermediate_size": 128, "moe_intermediate_size": I, "n_routed_experts": E, "num_experts_per_tok": 2,
        "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "kv_lora_rank": 32, "q_lora_rank": 32,
        "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16, "num_key_value_heads": 4,
    },
}  # fmt: skip
RENAMED = {"granitemoe": {"intermediate_size": I, "num_local_experts": E, "num_experts_per_tok": 2}}
PROJECTIONS = ("gate_up_proj", "down_proj")
TOKENS = torch.arange(3, 27).view(2, 12)


def make(family: str, **options: Any) -> Any:
    """A model in fp32, where no rounding decides between two tokens."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **COMMON | (FAMILIES | RENAMED)[family] | options)
    model = AutoModelForCausalLM.from_config(config).float().eval()
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1 or name.endswith("bias"):
            nn.init.normal_(parameter, std=0.2)
    return model


def load(path: Path, **options: Any) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, **{"dtype": torch.float32} | options).eval()


def experts_of(model: nn.Module) -> dict[str, Experts4bit]:
    return {name: module for name, module in model.named_modules() if isinstance(module, Experts4bit)}


def stacks(experts: Experts4bit) -> dict[str, hb.QuantizedWeight]:
    return {"gate_up_proj": experts.gate_up, "down_proj": experts.down}


def oriented(experts: Any, stack: Tensor) -> Tensor:
    """A stack [E, N, K] as the dense module `experts` holds it, and the other way round."""
    return stack.transpose(1, 2).contiguous() if experts.is_transposed else stack


def dequantized(model: nn.Module, path: Path) -> Any:
    """The dense model at `path` with the weights that `model` has in 4 bits."""
    dense = load(path)
    for name, module in model.named_modules():
        if isinstance(module, Linear4bit):
            dense.get_submodule(name).weight.data = hb.dequantize(module.weight, torch.float32)
        if isinstance(module, Experts4bit):
            experts = dense.get_submodule(name)
            for projection, q in stacks(module).items():
                stack = hb.dequantize(q, torch.float32)
                getattr(experts, projection).data = oriented(experts, stack)
    return dense


@torch.no_grad()
def logits(model: Any) -> Tensor:
    result: Tensor = model(TOKENS).logits
    assert torch.isfinite(result).all()
    return result


def generated(model: Any) -> Tensor:
    result: Tensor = model.generate(TOKENS, max_new_tokens=8, do_sample=False)
    return result


def stands_for(model: Any, dense: Any) -> None:
    """A 4-bit model computes what the dense one does."""
    torch.testing.assert_close(logits(model), logits(dense), rtol=1e-4, atol=1e-5)
    assert torch.equal(generated(model), generated(dense))


def same_bits(one: nn.Module, other: nn.Module) -> None:
    states = one.state_dict(), other.state_dict()
    assert states[0].keys() == states[1].keys()
    for key, tensor in states[0].items():
        assert tensor.dtype == states[1][key].dtype, key
        assert torch.equal(tensor, states[1][key]), key


def rewritten(
    source: Path, target: Path, change: Callable[[str, Tensor], dict[str, Tensor]], quantization: dict[str, Any]
) -> Path:
    """A copy of a checkpoint with other tensors, and what its config.json says of them."""
    target.mkdir(exist_ok=True)
    tensors: dict[str, Tensor] = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        tensors |= change(name, tensor)
    save_file({name: t.contiguous() for name, t in tensors.items()}, target / "model.safetensors", {"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, "quantization_config": quantization}))
    return target
