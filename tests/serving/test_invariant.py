"""Experts of which a token's bits do not depend on the other tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import halfbyte as hb
from halfbyte.serving.invariant import invariant_moe

E, H, I, K = 4, 128, 64, 2  # noqa: E741
TOKENS = 40


def made(format: str, activation: str, **settings: Any) -> tuple[Any, ...]:
    torch.manual_seed(0)
    gate_up, down = (hb.quantize(torch.randn(E, *side), format, **settings) for side in ((2 * I, H), (H, I)))
    biases = (torch.randn(E, 2 * I), torch.randn(E, H)) if activation == "swiglu_oai" else ()
    return gate_up, down, activation, *biases


@pytest.mark.parametrize(("format", "activation"), [("nf4", "silu"), ("int4", "gelu_tanh"), ("mxfp4", "swiglu_oai")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_does_not_depend_on_the_others(format: str, activation: str, dtype: torch.dtype) -> None:
    settings = {"nf4": {"nested": False}, "int4": {"group_size": 64}}.get(format, {})
    gate_up, down, name, *biases = made(format, activation, **settings)
    block = gate_up, down, name, *(bias.to(dtype) for bias in biases)
    x = torch.randn(TOKENS, H).to(dtype)
    ids, shares = torch.randint(-1, E, (TOKENS, K)), torch.rand(TOKENS, K)  # some experts are elsewhere
    y = invariant_moe(x, ids, shares, *block)
    right = hb.moe(x.float(), ids, shares, gate_up, down, name, *(bias.to(dtype).float() for bias in biases))
    assert (y - right).norm() / right.norm() < (1e-6 if dtype == torch.float32 else 1e-2)
    for some in (slice(1), slice(7, 12), slice(3, None)):
        assert torch.equal(invariant_moe(x[some], ids[some], shares[some], *block), y[some])
    mixed = torch.randperm(TOKENS)
    assert torch.equal(invariant_moe(x[mixed], ids[mixed], shares[mixed], *block), y[mixed])


def test_no_tokens() -> None:
    block = made("mxfp4", "swiglu_oai")
    nothing = torch.empty(0, H), torch.empty(0, K, dtype=torch.int64), torch.empty(0, K)
    assert invariant_moe(*nothing, *block).shape == (0, H)
