"""The small checkpoint, on disk."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from small_checkpoint import tensors


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A directory of two files with an index, and what lies beside weights."""
    path = tmp_path / "source"
    path.mkdir()
    files: dict[str, dict[str, torch.Tensor]] = {"a.safetensors": {}, "b.safetensors": {}}
    weight_map = {}
    for i, (name, tensor) in enumerate(tensors().items()):
        file = sorted(files)[i > 4]
        files[file][name] = tensor
        weight_map[name] = file
    for file, content in files.items():
        save_file(content, path / file, {"format": "pt", "who": file})
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (path / "config.json").write_text(json.dumps({"model_type": "llama", "torch_dtype": "bfloat16", "é": 1}))
    (path / "tokenizer.json").write_text("{}")
    (path / "sub").mkdir()
    (path / "sub" / "config.json").write_text('{"a": 1}')
    (path / "pytorch_model.bin").write_bytes(b"old")
    (path / ".cache").mkdir()
    return path
