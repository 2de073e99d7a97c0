"""Stacks of experts by sm80_gemm, as GPUs from sm_80 on that are not Hopper's multiply them: forward and back."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import halfbyte as hb
from halfbyte.kernels.experts import grouped as sorted_experts
from halfbyte.kernels.experts import reference
from halfbyte.kernels.experts.block import Block

from .conftest import BF16, DEVICE, F32, captured, error, sixteen_bits

KINDS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("nf4", {}),
    ("fp4", {"nested": False}),
    ("int4", {"group_size": 32}),
    ("mxfp4", {}),
)
#         experts, I, H, experts of a token
SIZES = [(16, 256, 512, 4), (128, 768, 2048, 8), (8, 2880, 2880, 4), (4, 96, 160, 2)]


pytestmark = pytest.mark.usefixtures("sorts_as_other_gpus")


def stack(experts: int, n: int, k: int, format: str, dtype: torch.dtype, **options: Any) -> hb.QuantizedWeight:
    return hb.quantize((torch.randn((experts, n, k), device=DEVICE) / k**0.5).to(dtype), format, **options)


def ids_of(tokens: int, experts: int, k: int, kind: str) -> torch.Tensor:
    ids = torch.rand((tokens, experts), device=DEVICE).topk(k).indices
    if kind == "one expert":
        return torch.full_like(ids, experts - 1)
    if kind == "out of range":
        return torch.where(torch.rand(ids.shape, device=DEVICE) < 0.5, ids, -1)
    return torch.full_like(ids, -7) if kind == "none" else ids


def multiplied(x: torch.Tensor, dense: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """x [S, K] times the expert of each row, zeros for ids that are none."""
    out = x.new_zeros((len(x), dense.shape[1]))
    for expert in ids.unique().tolist():
        if 0 <= expert < len(dense):
            rows = ids == expert
            out[rows] = x[rows] @ dense[expert].t()
    return out


@sixteen_bits
@pytest.mark.parametrize(("format", "options"), KINDS, ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_a_block(sizes: tuple[int, ...], format: str, options: dict[str, Any], dtype: torch.dtype) -> None:
    """The error is not above that of dequantized experts in transformers' order; the same bits in every run."""
    experts, inner, hidden, k = sizes
    gate_up = stack(experts, 2 * inner, hidden, format, dtype, **options)
    down = stack(experts, hidden, inner, format, dtype, **options)
    kinds = ("usual", "one expert", "out of range", "none", "usual")
    for tokens, kind, activation in zip((1, 9, 100, 3, 700), kinds, (*reference.ACTIVATIONS, "silu"), strict=True):
        x, weights = torch.randn((tokens, hidden), device=DEVICE).to(dtype), torch.rand((tokens, k), device=DEVICE)
        ids = ids_of(tokens, experts, k, kind)
        biases: tuple[Any, Any] = (None, None)
        if tokens % 2:
            biases = tuple(torch.randn((experts, n), device=DEVICE).to(dtype) for n in (2 * inner, hidden))
        block = Block(gate_up, down, activation, *biases)
        found = sorted_experts.moe(x, ids, weights, block)
        assert found is not None
        again = sorted_experts.moe(x, ids, weights, block)
        assert again is not None
        assert torch.equal(found, again)
        if kind == "none":
            assert not found.any()
            continue
        pairs, flat = x.repeat_interleave(k, 0), ids.flatten()
        results = []
        for exact in (True, False):
            kept = torch.float64 if exact else dtype
            stacks = [hb.dequantize(q, F32 if exact else dtype).to(kept) for q in (gate_up, down)]
            valid = ((flat >= 0) & (flat < experts)).unsqueeze(1)
            of_pairs = [0 if one is None else one.to(kept)[flat.clamp(0, experts - 1)] for one in biases]
            both = multiplied(pairs.to(kept), stacks[0], flat) + of_pairs[0]
            between = reference.activate(both.double() if exact else both.float(), activation).to(kept)
            y = torch.where(valid, multiplied(between, stacks[1], flat) + of_pairs[1], 0)
            y = y.view(tokens, k, -1) * weights.to(kept).unsqueeze(-1)
            results.append(y.sum(1))
        assert error(found, results[0]) <= 1.1 * error(results[1], results[0]), (tokens, kind)


@sixteen_bits
@pytest.mark.parametrize(("format", "options"), KINDS, ids=str)
def test_rows_forward_and_back(format: str, options: dict[str, Any], dtype: torch.dtype) -> None:
    for experts, n, k in ((5, 336, 1024), (3, 70, 96), (128, 1536, 2048)):
        q = stack(experts, n, k, format, dtype, **options)
        exact, dense = hb.dequantize(q, F32).double(), hb.dequantize(q, dtype)
        for rows in (1, 40, 3000):
            ids = torch.randint(-1, experts + 1, (rows,), device=DEVICE)
            x, grad = (torch.randn((rows, side), device=DEVICE).to(dtype) for side in (k, n))
            y, dx = (
                sorted_experts.grouped_linear(x, q, ids, None),
                sorted_experts.grouped_linear_backward(grad, q, ids),
            )
            assert y is not None
            assert dx is not None
            for found, given, weights, peer in (
                (y, x, exact, dense), (dx, grad, exact.transpose(1, 2), dense.transpose(1, 2))
            ):  # fmt: skip
                right, theirs = multiplied(given.double(), weights, ids), multiplied(given, peer, ids)
                assert not found[(ids < 0) | (ids >= experts)].any()
                if right.any():
                    assert error(found, right) <= 1.02 * error(theirs, right) + 1e-5


def test_cuda_graph() -> None:
    """Other ids in the same graph: no launch depends on them."""
    q, x = stack(8, 256, 512, "nf4", BF16), torch.randn((64, 512), device=DEVICE).to(BF16)
    ids = torch.randint(0, 8, (64,), device=DEVICE)
    sorted_experts.grouped_linear(x, q, ids, None)
    graph, found = captured(lambda: sorted_experts.grouped_linear(x, q, ids, None))
    for _ in range(3):
        ids.copy_(torch.randint(-1, 9, (64,), device=DEVICE))
        graph.replay()
        right = multiplied(x.double(), hb.dequantize(q, F32).double(), ids)
        assert error(found, right) <= 4e-3
