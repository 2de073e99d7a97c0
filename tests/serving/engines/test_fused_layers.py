"""Decoder layers that compute several modules at once, as on Hopper GPUs: the same tokens, all in fp32."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from served_models import SHAPE, through_transformers, tokens_in

layers = pytest.importorskip("halfbyte.serving.vllm.layers")
Models = Callable[..., Path]
Engine = Callable[..., list[Any]]
LAYERS = SHAPE["num_hidden_layers"]


@pytest.mark.parametrize(
    ("module", "name", "without"),
    [
        ("llama", "LlamaDecoderLayer", set()),
        ("mistral", "MistralDecoderLayer", {"ada_rms_norm_t_cond"}),
        ("qwen2", "Qwen2DecoderLayer", set()),
        ("qwen3", "Qwen3DecoderLayer", set()),
        ("gemma3", "Gemma3DecoderLayer", None),  # norms what it adds
        ("granite", "GraniteDecoderLayer", None),  # adds a part of it
        ("qwen3_moe", "Qwen3MoeDecoderLayer", None),
    ],
)
def test_classes(module: str, name: str, without: set[str] | None) -> None:
    assert layers.behaves(getattr(importlib.import_module(layers.MODELS + module), name)) == without


@pytest.mark.parametrize(
    ("kind", "format", "settings", "arguments"),
    [
        ("llama", "nf4", {"nested": True}, {}),
        ("mistral", "fp4", {"nested": False}, {}),
        ("qwen3", "int4", {"group_size": 64}, {"enforce_eager": False, "quantization": "halfbyte"}),  # in one weight
    ],
)
def test_tokens(
    models: Models, run_engine: Engine, kind: str, format: str, settings: dict[str, Any], arguments: dict[str, Any]
) -> None:
    path = models(kind, format, **settings)
    count, found, _, again = run_engine(path, "layers", "tokens", "reload", "tokens", fuses=True, **arguments)
    assert count == LAYERS
    assert tokens_in(found) == through_transformers(path)
    assert again == found


def test_with_lora_they_stay(models: Models, run_engine: Engine) -> None:
    """An adapter's product is of what a module reads, which would be x before its norm."""
    path = models("llama", "nf4", nested=True)
    (count,) = run_engine(path, "layers", fuses=True, enable_lora=True, max_lora_rank=8)
    assert count == 0


def test_experts_stay(models: Models, run_engine: Engine) -> None:
    (count,) = run_engine(models("qwen3_moe", "nf4", nested=True), "layers", fuses=True)
    assert count == 0
