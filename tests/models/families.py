"""Small random models of transformers' families, and what they generate with and without captured steps."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from halfbyte.kernels.common import slow
from halfbyte.models import attention, caches, captured, regions
from halfbyte.models import transformers as host

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
VOCABULARY, WINDOW = 96, 20
SIDES = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": VOCABULARY, "max_position_embeddings": 512,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0,
}  # fmt: skip
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "mistral": ("mistral", {"sliding_window": WINDOW}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "gemma2": ("gemma2", {"head_dim": 16, "sliding_window": WINDOW, "layer_types": MIXED}),
    "gemma3": ("gemma3_text", {"head_dim": 16, "sliding_window": WINDOW, "layer_types": MIXED}),
    "phi3": ("phi3", {"sliding_window": None}),
    "granite": (
        "granite",
        {"residual_multiplier": 0.22, "attention_multiplier": 0.1, "embedding_multiplier": 2.0, "logits_scaling": 0.5},
    ),
}

EXPERTS = {"num_experts_per_tok": 2, "head_dim": 16}
OF_EXPERTS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_moe": ("qwen3_moe", EXPERTS | {"num_experts": 6, "moe_intermediate_size": 32, "mlp_only_layers": [1]}),
    "mixtral": ("mixtral", EXPERTS | {"num_local_experts": 4, "sliding_window": None}),
    "gpt_oss": ("gpt_oss", EXPERTS | {"num_local_experts": 4, "sliding_window": WINDOW, "layer_types": MIXED}),
}


def make(family: str, **options: Any) -> Any:
    """A model in fp32, where no rounding decides between two tokens."""
    from transformers import AutoConfig, AutoModelForCausalLM

    kind, facts = (FAMILIES | OF_EXPERTS)[family]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SIDES | facts | options)).to(DEVICE).eval()
    model.requires_grad_(False)
    for name, parameter in model.named_parameters():
        if "embed" in name or "head" in name:
            parameter.mul_(20)
    model.generation_config.eos_token_id = None
    return model


def prompt(texts: int, tokens: int, padding: int = 0) -> dict[str, Tensor]:
    """Random tokens; the first text begins with so many of padding."""
    ids = torch.randint(3, VOCABULARY, (texts, tokens), generator=torch.Generator().manual_seed(tokens))
    mask = torch.ones_like(ids)
    mask[0, :padding] = 0
    ids[0, :padding] = 0
    return {"input_ids": ids.to(DEVICE), "attention_mask": mask.to(DEVICE)}


def generate(model: Any, inputs: dict[str, Tensor], **options: Any) -> Any:
    return model.generate(**inputs, **{"max_new_tokens": 24, "do_sample": False} | options)


def plainly(model: Any, inputs: dict[str, Tensor], **options: Any) -> Any:
    """By transformers' own loop, without graphs."""
    return generate(model, inputs, disable_compile=True, **options)


def counted(monkeypatch: Any, owner: Any, name: str) -> list[int]:
    """Grows by one with every call of a method."""
    calls: list[int] = []
    method: Callable[..., Any] = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return method(*args, **kwargs)

    monkeypatch.setattr(owner, name, call)
    return calls


@contextmanager
def captures(device: torch.device = DEVICE) -> Iterator[None]:
    """Steps can be captured within: on a CPU they run as they are, and nothing is compiled for them."""
    if device.type == "cuda":
        yield
        return
    with ExitStack() as patches:
        patches.enter_context(mock.patch.object(captured, "ON_CPU", True))
        as_it_is = lambda function: lambda *given, **named: function(*given, **named)  # noqa: E731
        patches.enter_context(mock.patch.object(regions, "_compiled", as_it_is))
        for module in (attention, caches, slow):
            patches.enter_context(mock.patch.object(module, "has_triton", return_value=False))
        yield


def hooked(model: Any) -> Any:
    """As `accelerate` does where it takes a layer."""
    assert host.apply(model) == host.ON_GRAPHS
    host.apply_to_library()
    return model
