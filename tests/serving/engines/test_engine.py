"""vLLM over 4-bit weights goes on with the tokens that halfbyte gives in transformers, all in fp32."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from served_models import lora_adapter, through_transformers, tokens_in, tokens_of

PREQUANTIZED = [
    pytest.param("nf4", {"nested": True}, id="nf4-nested"),
    pytest.param("fp4", {"nested": False}, id="fp4-flat"),
    pytest.param("int4", {"group_size": 64}, id="int4"),
]
Models = Callable[..., Path]
Engine = Callable[..., list[Any]]


def logprobs(step: Any) -> list[list[float]]:
    return [each["logprobs"] for each in step]


@pytest.mark.parametrize(("format", "settings"), PREQUANTIZED)
def test_prequantized(models: Models, run_engine: Engine, format: str, settings: dict[str, Any]) -> None:
    path = models("llama", format, **settings)
    asked = {"quantization": "halfbyte"} if format == "int4" else {}
    [found] = run_engine(path, **asked)
    assert tokens_in(found) == through_transformers(path)


def test_in_flight(models: Models, run_engine: Engine) -> None:
    """Options come as JSON; layers that are named stay dense, and a reload rounds the checkpoint to the same bytes."""
    options = {"format": "int4", "group_size": 32, "modules_to_not_convert": ["o_proj", "layers.1.mlp"]}
    overrides = {"quantization_config_dict_json": json.dumps(options)}
    found, _, again = run_engine(
        models("llama"), "tokens", "reload", "tokens", quantization="halfbyte", hf_overrides=overrides
    )
    assert tokens_in(found) == through_transformers(models("llama"), **options)
    assert found == again


def test_own_checkpoint(models: Models, run_engine: Engine, tmp_path: Path) -> None:
    """As transformers saves it with a HalfbyteConfig; q is dense in it, so its layer is one of dense and 4-bit rows."""
    from transformers import AutoModelForCausalLM

    from halfbyte import HalfbyteConfig

    path = tmp_path / "own"
    shutil.copytree(models("llama"), path)
    config = HalfbyteConfig("nf4", modules_to_not_convert=["q_proj"])
    model = AutoModelForCausalLM.from_pretrained(models("llama"), quantization_config=config, dtype=torch.float32)
    model.save_pretrained(path)
    right = tokens_of(model)
    found, _, again = run_engine(path, "tokens", "reload", "tokens")
    assert tokens_in(found) == right
    assert again == found


def test_compiled(models: Models, run_engine: Engine) -> None:
    """The same with torch.compile: q, k and v in one operator, and the others each in one."""
    path = models("llama", "nf4", nested=True)
    [found] = run_engine(path, enforce_eager=False)
    assert tokens_in(found) == through_transformers(path)


def test_two_processes(models: Models, run_engine: Engine) -> None:
    """The same tokens from shards, with the only k and v head in both processes; and again after a reload.

    The engine is in a process of its own here and starts on the first request while the others are on their way. How
    many rows its first steps have, and with that the last bit of a probability, is up to the machine.
    """
    path = models("llama", "nf4", nested=True)
    found, _, again = run_engine(path, "tokens", "reload", "tokens", tensor_parallel_size=2)
    assert tokens_in(found) == through_transformers(path)
    assert tokens_in(again) == tokens_in(found)
    assert logprobs(again) == [pytest.approx(each, abs=1e-5) for each in logprobs(found)]


def test_lora(models: Models, run_engine: Engine, tmp_path: Path) -> None:
    """With an adapter, the tokens of the model whose dense weights are those in 4 bits plus the adapter's product."""
    path = models("llama", "nf4", nested=True)
    adapter, merged = lora_adapter(tmp_path, path)
    plain, found = run_engine(path, "tokens", "lora", enable_lora=True, max_lora_rank=8, adapter=adapter)
    assert tokens_in(plain) == through_transformers(path)
    assert tokens_in(found) == dense_tokens(merged)
    assert tokens_in(found) != tokens_in(plain)


def dense_tokens(path: Path) -> list[list[int]]:
    from transformers import AutoModelForCausalLM

    return tokens_of(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32))
