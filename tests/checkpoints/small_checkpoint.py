"""A small checkpoint with one of everything, and looks at what lies in a directory."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file

N, K = 32, 128


def tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {
        "model.embed_tokens.weight": torch.randn(50, K).bfloat16(),
        "model.layers.0.mlp.up_proj.weight": torch.randn(N, K).bfloat16(),
        "model.layers.0.mlp.up_proj.bias": torch.randn(N).bfloat16(),
        "model.layers.0.mlp.gate.weight": torch.randn(8, K).bfloat16(),
        "model.layers.0.input_layernorm.weight": torch.ones(K).bfloat16(),
        "model.layers.1.mlp.up_proj.weight": torch.randn(N, K).half(),
        "model.layers.1.mlp.down_proj.weight": torch.randn(K, N + 1),
        "model.layers.1.steps": torch.arange(7),
        "lm_head.weight": torch.randn(50, K).bfloat16(),
    }


LINEAR = [name for name in tensors() if "_proj.weight" in name]


def everything(path: Path) -> dict[str, torch.Tensor]:
    """All tensors of all files of a directory."""
    return {name: t for file in sorted(path.glob("*.safetensors")) for name, t in load_file(file).items()}


def left(path: Path) -> list[str]:
    """What a directory holds, hidden files too."""
    return sorted(p.name for p in path.iterdir())
