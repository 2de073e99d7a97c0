"""What transformers' server is given to serve: 4-bit weights as they are, whichever library wrote them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from served_models import dense, dequantized, in_mxfp4, quantized, tokens_of

from halfbyte import restore
from halfbyte.nn import Experts4bit, Linear4bit
from halfbyte.serving.choice import find_model
from halfbyte.serving.transformers_server import _manager

pytest.importorskip("transformers")


class Manager:
    """transformers' own, as far as a checkpoint that halfbyte reads needs it."""

    dtype, device, attn_implementation = torch.float32, "cpu", None


def served(path: Path) -> Any:
    return _manager(Manager, find_model(str(path)), "name", None)()._load_model("whatever is asked for")


@pytest.mark.parametrize(
    ("kind", "packed", "layer"),
    [
        ("llama", lambda path, source: quantized(path, source, "nf4", nested=True), Linear4bit),
        ("gpt_oss", in_mxfp4, Experts4bit),
    ],
)
def test_checkpoints_of_other_libraries(
    tmp_path: Path, kind: str, packed: Callable[[Path, Path], Path], layer: type
) -> None:
    from transformers import AutoModelForCausalLM

    path = packed(tmp_path / "packed", dense(tmp_path / "dense", kind))
    model = served(path)
    assert any(isinstance(module, layer) for module in model.modules())
    try:
        found = tokens_of(model)
    finally:
        restore(model)
    right = AutoModelForCausalLM.from_pretrained(dequantized(tmp_path / "right", path), dtype=torch.float32)
    assert found == tokens_of(right)
