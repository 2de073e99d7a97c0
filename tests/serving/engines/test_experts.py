"""Mixture-of-experts models in vLLM, whose experts `halfbyte.moe` multiplies with."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from served_models import dequantized, quantized, tokens_in, tokens_of

Models = Callable[..., Path]
Engine = Callable[..., list[Any]]


def dense_tokens(path: Path) -> list[list[int]]:
    from transformers import AutoModelForCausalLM

    return tokens_of(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32))


@pytest.fixture(scope="session")
def right(models: Models, tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    """Tokens of the dense model that the nested NF4 checkpoint stands for."""
    return dense_tokens(dequantized(tmp_path_factory.mktemp("dense") / "moe", models("qwen3_moe", "nf4", nested=True)))


def test_prequantized_experts(models: Models, run_engine: Engine, right: Any) -> None:
    found, _, again = run_engine(models("qwen3_moe", "nf4", nested=True), "tokens", "reload", "tokens")
    assert tokens_in(found) == right
    assert found == again


@pytest.mark.parametrize("experts", ["cut", "shared out"])
def test_experts_in_two_processes(models: Models, run_engine: Engine, right: Any, experts: str) -> None:
    path = models("qwen3_moe", "nf4", nested=True)
    [found] = run_engine(path, tensor_parallel_size=2, enable_expert_parallel=experts == "shared out")
    assert tokens_in(found) == right


def test_experts_in_flight(models: Models, run_engine: Engine, tmp_path: Path) -> None:
    """Dense experts are rounded while they load, with plain scales; here all weights are, so that they can be told."""
    overrides = {"quantization_config_dict_json": '{"format": "nf4", "nested": false}'}
    [found] = run_engine(models("qwen3_moe"), quantization="halfbyte", hf_overrides=overrides)
    flat = quantized(tmp_path / "flat", models("qwen3_moe"), "nf4", nested=False)
    assert tokens_in(found) == dense_tokens(dequantized(tmp_path / "dense", flat))


def test_dummy_weights(models: Models, run_engine: Engine) -> None:
    """A shape is served without its weights, with random ones."""
    found, again = run_engine(models("qwen3_moe"), "tokens", "tokens", quantization="halfbyte", load_format="dummy")
    assert found == again
    assert len({token for answer in tokens_in(found) for token in answer}) > 3
