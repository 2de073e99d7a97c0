"""Models to measure: a checkpoint in a folder, or a named shape with random weights, for which nothing is downloaded.

The weights of a named shape are drawn on the device, one matrix or expert at a time, and rounded to 4 bits at once, so
that the peak of memory is near the quantized size. The modules are bitsandbytes' own Linear4bit, as transformers makes
them, and halfbyte's Experts4bit: bitsandbytes has none, and leaves experts dense.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from halfbyte import hub, ops
from halfbyte.formats.bitsandbytes import from_bitsandbytes, to_bitsandbytes
from halfbyte.formats.settings import DEFAULT
from halfbyte.formats.stacks import StackWriter
from halfbyte.formats.weight import QuantizedWeight
from halfbyte.models import bitsandbytes
from halfbyte.models.experts import Facts, dense_module, facts_of, is_experts, replacement
from halfbyte.nn.experts import BIAS, Experts4bit

# What the configurations on the model hubs say, where it differs from the class's defaults.
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "tiny": (
        "llama",
        {
            "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4,
            "num_key_value_heads": 2, "vocab_size": 1024,
        },
    ),
    "tiny-moe": (
        "qwen3_moe",
        {
            "hidden_size": 256, "moe_intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
            "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 1024, "num_experts": 8, "num_experts_per_tok": 2,
            "norm_topk_prob": True,
        },
    ),
    "qwen2.5-0.5b": (
        "qwen2",
        {
            "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14,
            "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True,
        },
    ),
    "qwen2.5-1.5b": (
        "qwen2",
        {
            "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12,
            "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True,
        },
    ),
    "qwen2.5-7b": (
        "qwen2",
        {
            "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
            "num_key_value_heads": 4, "vocab_size": 152064,
        },
    ),
    "mistral-7b": (
        "mistral",
        {
            "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
            "num_key_value_heads": 8, "vocab_size": 32000, "sliding_window": 4096,
        },
    ),
    "llama-3-8b": (
        "llama",
        {
            "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
            "num_key_value_heads": 8, "vocab_size": 128256,
        },
    ),
    "gpt-oss-20b": ("gpt_oss", {"num_hidden_layers": 24, "num_local_experts": 32}),
    "gemma-3-27b": (
        "gemma3_text",
        {
            "hidden_size": 5376, "intermediate_size": 21504, "num_hidden_layers": 62, "num_attention_heads": 32,
            "num_key_value_heads": 16, "head_dim": 128, "vocab_size": 262208, "query_pre_attn_scalar": 168,
            "sliding_window": 1024,
        },
    ),
    "qwen3-30b-a3b": (
        "qwen3_moe",
        {
            "hidden_size": 2048, "moe_intermediate_size": 768, "num_hidden_layers": 48, "num_attention_heads": 32,
            "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936, "num_experts": 128,
            "num_experts_per_tok": 8, "norm_topk_prob": True,
        },
    ),
    "qwen3-32b": (
        "qwen3",
        {
            "hidden_size": 5120, "intermediate_size": 25600, "num_hidden_layers": 64, "num_attention_heads": 64,
            "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
        },
    ),
    "mixtral-8x7b": (
        "mixtral",
        {
            "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
            "num_key_value_heads": 8, "vocab_size": 32000, "num_local_experts": 8, "num_experts_per_tok": 2,
        },
    ),
    "llama-3.3-70b": (
        "llama",
        {
            "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64,
            "num_key_value_heads": 8, "vocab_size": 128256,
        },
    ),
}  # fmt: skip


BRANCHES = ("o_proj", "down_proj")  # the projections that end a residual branch
# The standard deviation of a router's scores, which tells experts apart as a trained one does. Where scores are close,
# the last bit of a sum chooses between experts of nearly the same weight, and the logits say nothing of the kernels.
ROUTER = 4.0
# What the down products of experts are made smaller by, so that their branch adds to the residual stream what one with
# silu does: gpt-oss' (up + 1) * gate has over twice the variance. Without it 24 layers blow the last bit of a sum up
# until bitsandbytes' own logits are 0.46 from those in fp32.
TAMED = {"swiglu_oai": 0.5}
FORMATS_OF_EXPERTS = {"gpt_oss": "mxfp4"}  # in which a kind of model is published


def place_of(name: str) -> Path:
    """The folder of a checkpoint: `name` itself, or the snapshot of a repository on the Hugging Face hub.

    Raises ValueError where it is neither.
    """
    place = hub.local(name)
    if not place.is_dir():
        raise ValueError(
            f"model {name!r} is none: it is neither a folder here nor one of the shapes {', '.join(SHAPES)}; the path "
            "of a checkpoint, or its name on the Hugging Face hub (org/name), is taken as well"
        )
    if not (place / "config.json").is_file():
        raise ValueError(f"model {name!r} has no config.json, so transformers cannot load it; give a whole checkpoint")
    return place


def check(names: Sequence[str]) -> None:
    """Raise ValueError, or OSError from the hub, before anything is measured of a model that there is not."""
    for name in names:
        if name not in SHAPES:
            place_of(name)


def config_of(name: str, dtype: torch.dtype, layers: int = 0) -> Any:
    """transformers' configuration of a key of SHAPES. layers: of so many of its layers only."""
    from transformers import AutoConfig

    kind, facts = SHAPES[name]
    if layers:
        facts = facts | {"num_hidden_layers": layers}
    return AutoConfig.for_model(kind, **facts, dtype=dtype, bos_token_id=1, eos_token_id=2, pad_token_id=0)


def load(name: str, device: torch.device, dtype: torch.dtype, *, four_bit: bool = True, layers: int = 0) -> Any:
    """A causal language model on `device`, in bitsandbytes' nested NF4 or, without `four_bit`, dense in `dtype`.

    The experts of a named shape are 4-bit too: in NF4, not nested, or in the format in which they are published.

    name: a key of SHAPES, or what `place_of` finds. layers: keep only so many of a named shape's layers.
    Raises ValueError for a name that is neither.
    """
    from accelerate import init_empty_weights
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    if name not in SHAPES:
        quantization = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=dtype
        )
        return AutoModelForCausalLM.from_pretrained(
            place_of(name), dtype=dtype, device_map={"": device}, quantization_config=quantization if four_bit else None
        ).eval()
    config = config_of(name, dtype, layers)
    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    if four_bit:
        _replace_linears(model, dtype)
        _replace_experts(model, device, dtype, FORMATS_OF_EXPERTS.get(config.model_type, DEFAULT))
        model.is_loaded_in_4bit = True  # PEFT goes by it
    _materialize(model, device, dtype)
    model.tie_weights()
    # A checkpoint's weights were trained not to end a sentence at once; random ones must be told.
    model.generation_config.eos_token_id = None
    return model.eval()


def four_bit(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Path and module of every Linear4bit of bitsandbytes."""
    for path, module in model.named_modules():
        if bitsandbytes.supports(module):
            yield path, module


def experts_of(model: nn.Module) -> dict[str, Experts4bit]:
    """Every module of 4-bit experts, by its path."""
    return {path: module for path, module in model.named_modules() if isinstance(module, Experts4bit)}


def make_experts_dense(model: nn.Module, dtype: torch.dtype) -> None:
    """Put dense experts in the place of the 4-bit ones, which are dropped layer by layer. The linear layers stay."""
    for path in list(experts_of(model)):
        module: Any = model.get_submodule(path)
        model.set_submodule(path, dense_module(module, dtype))
        del module


def make_dense(model: nn.Module, dtype: torch.dtype) -> None:
    """Put dequantized weights in the place of the 4-bit ones, which are dropped one by one, and cast all the rest."""
    make_experts_dense(model, dtype)
    for path, module in list(four_bit(model)):
        dense = nn.Linear(module.in_features, module.out_features, module.bias is not None, device="meta")
        dense.weight = nn.Parameter(ops.dequantize(from_bitsandbytes(module.weight), dtype), requires_grad=False)
        dense.bias = module.bias
        model.set_submodule(path, dense)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)


def _replace_linears(model: Any, dtype: torch.dtype) -> None:
    from bitsandbytes.nn import Linear4bit

    for path, module in list(_named_linears(model)):
        four_bit = Linear4bit(
            module.in_features, module.out_features, module.bias is not None, dtype, quant_type="nf4", device="meta"
        )
        model.set_submodule(path, four_bit)


def _replace_experts(model: Any, device: torch.device, dtype: torch.dtype, format: str) -> None:
    """Random 4-bit experts for every module of dense ones, whose parameters have no memory yet."""
    for path, module in list(model.named_modules()):
        if not is_experts(module):
            continue
        facts = facts_of(module)
        if isinstance(facts, str):
            raise ValueError(f"experts of this shape cannot be measured: {facts}")
        stacks = {name: _random_stack(model, facts, name, device, dtype, format) for name in facts.shapes}
        for name in facts.shapes:
            if (bias := module._parameters.get(name + BIAS)) is not None:
                values = torch.empty(bias.shape, dtype=dtype, device=device).normal_(std=bias.shape[-1] ** -0.5)
                module._parameters[name + BIAS] = nn.Parameter(values)
        model.set_submodule(path, replacement(module, facts, stacks))


def _random_stack(
    model: Any, facts: Facts, name: str, device: torch.device, dtype: torch.dtype, format: str
) -> QuantizedWeight:
    n, k = facts.shapes[name]
    spread = spread_of(k, name, model.config.num_hidden_layers)
    if name.endswith(BRANCHES):
        spread *= TAMED.get(facts.activation, 1.0)
    writer = StackWriter((facts.count, n, k))
    for expert in range(facts.count):
        values = torch.empty((n, k), dtype=dtype, device=device).normal_(std=spread)
        writer.write(expert, 0, ops.quantize(values, format, nested=False))
    return writer.weight()


def spread_of(k: int, path: str, layers: int) -> float:
    """The standard deviation of a weight with K columns.

    Sums have one variance, and residual branches add up to one: like a trained model, and unlike one of the
    configuration's initial weights, it does not blow a difference in the last bit up into other logits.
    """
    return float((k * (2 * layers if path.endswith(BRANCHES) else 1)) ** -0.5)


def _named_linears(model: Any) -> Iterator[tuple[str, nn.Linear]]:
    """Every linear layer but the head, which transformers leaves dense too."""
    head = model.get_output_embeddings()
    for path, module in model.named_modules():
        if type(module) is nn.Linear and module is not head:
            yield path, module


def _materialize(model: Any, device: torch.device, dtype: torch.dtype) -> None:
    """Give every parameter memory and random values."""
    from bitsandbytes.nn import Linear4bit, Params4bit

    layers = model.config.num_hidden_layers
    for path, module in model.named_modules():
        if isinstance(module, Experts4bit):
            continue
        four_bit, is_router = isinstance(module, Linear4bit), type(module).__name__.endswith("Router")
        for name, parameter in list(module.named_parameters(recurse=False)):
            values = torch.empty(parameter.shape, device=device, dtype=dtype)
            spread = spread_of(parameter.shape[-1], path, layers) * (ROUTER if is_router else 1)
            if four_bit and name == "weight":
                packed, state = to_bitsandbytes(ops.quantize(values.normal_(std=spread), "nf4"))
                drawn = Params4bit(packed, quant_state=state, quant_type="nf4", bnb_quantized=True, module=module)
                module.quant_state = state
            else:
                is_random = values.dim() > 1 or name == "bias"
                drawn = nn.Parameter(values.normal_(std=spread) if is_random else values.fill_(_neutral(module)))
            drawn.requires_grad_(not four_bit)
            setattr(module, name, drawn)
    model.to(device)


def _neutral(module: nn.Module) -> float:
    """The weight with which a norm does nothing more than normalize: Gemma's add one to theirs."""
    return 0.0 if type(module).__name__.startswith("Gemma") else 1.0
