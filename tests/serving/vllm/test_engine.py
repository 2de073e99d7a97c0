"""vLLM over 4-bit weights of ours goes on with the tokens that halfbyte gives in transformers, whose weights are fp32."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from served_models import dequantized, tokens_of

PREQUANTIZED = [
    pytest.param("nf4", {"nested": True}, id="nf4-nested"),
    pytest.param("nf4", {"nested": False}, id="nf4-flat"),
    pytest.param("fp4", {"nested": True}, id="fp4-nested"),
    pytest.param("int4", {"group_size": 64}, id="int4"),
]
Models = Callable[..., Path]
Engine = Callable[..., list[Any]]


def tokens(step: Any) -> list[list[int]]:
    return [each["tokens"] for each in step]


def through_transformers(path: Path, format: str | None = None) -> list[list[int]]:
    """Greedy tokens of a checkpoint in transformers, by halfbyte's kernels; format: of dense weights."""
    from transformers import AutoModelForCausalLM

    from halfbyte import HalfbyteConfig, accelerate, restore
    from halfbyte.models.quantizer import config_from_bitsandbytes

    options: dict[str, Any] = {"dtype": torch.float32}
    if format is not None:
        options["quantization_config"] = HalfbyteConfig(format)
    elif "compressed-tensors" not in (path / "config.json").read_text(encoding="utf-8"):
        options["config"] = config_from_bitsandbytes(path)
    model = AutoModelForCausalLM.from_pretrained(path, **options)
    report = accelerate(model)
    assert not report.skipped
    try:
        return tokens_of(model)
    finally:
        restore(model)


@pytest.mark.parametrize(("format", "settings"), PREQUANTIZED)
def test_prequantized(models: Models, run_engine: Engine, format: str, settings: dict[str, Any]) -> None:
    path = models("llama", format, **settings)
    asked = {"quantization": "halfbyte"} if format == "int4" else {}
    [found] = run_engine(path, **asked)
    assert tokens(found) == through_transformers(path)


def test_in_flight(models: Models, run_engine: Engine) -> None:
    path = models("llama")
    [found] = run_engine(path, quantization="halfbyte")
    assert tokens(found) == through_transformers(path, "nf4")
