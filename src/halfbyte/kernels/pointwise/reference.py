"""Norms and gates in plain torch, each in fp32 and rounded once: the definition, and what runs without Triton."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

GATES = {"silu": F.silu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh")}


def rms_norm(x: Tensor, weight: Tensor, epsilon: float, offset: float, residual: Tensor | None = None) -> Tensor:
    """x * (offset + weight) / sqrt(mean(x²) + epsilon) over the last dimension, plus residual."""
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon) * (offset + weight.float())
    return (normed if residual is None else residual.float() + normed).to(x.dtype)


def gated(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """activation(gate) * up, for an activation of GATES."""
    return (GATES[activation](gate.float()) * up.float()).to(up.dtype)
