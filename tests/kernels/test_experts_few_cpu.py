"""A block of experts of few pairs on the CPU: the bits of any number of pairs, and which calls it leaves to those."""

from __future__ import annotations

import pytest
import torch
from kinds import kinds, quantize
from torch import Tensor

import halfbyte as hb
from halfbyte import eager_experts
from halfbyte.formats.weight import FLOAT_DTYPES
from halfbyte.kernels.common import float_strips
from halfbyte.kernels.experts import few_cpu
from halfbyte.kernels.experts.block import Block
from halfbyte.kernels.experts.reference import ACTIVATIONS

E, H, INNER = 5, 256, 128


def block_of(format: str = "nf4", size: int = 64, nested: bool = False, activation: str = "silu") -> Block:
    stacks = (quantize(torch.randn(E, *shape) / 8, format, size, nested) for shape in ((2 * INNER, H), (H, INNER)))
    return Block(*stacks, activation)


def check(x: Tensor, ids: Tensor, weights: Tensor, block: Block) -> Tensor:
    right = eager_experts._sorted_moe(x, ids, weights, block)
    found = few_cpu.moe(x, ids, weights, block)
    assert found is not None
    assert found.dtype is x.dtype
    assert found.is_contiguous()
    assert torch.equal(found, right)
    return found


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
@kinds
def test_every_format(format: str, size: int, nested: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    block = block_of(format, size, nested).with_biases(torch.randn(E, 2 * INNER).to(dtype), torch.randn(E, H).to(dtype))
    most = min(few_cpu._most_rows(q, dtype) for q in block.stacks)
    for tokens in (1, 3, int(min(most, 14))):
        ids = torch.stack([torch.randperm(E)[:3] for _ in range(tokens)])
        check(torch.randn(tokens, H).to(dtype), ids, torch.rand(tokens, 3), block)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_activation(activation: str) -> None:
    x, ids = torch.randn(4, H), torch.stack([torch.randperm(E)[:2] for _ in range(4)]).int()
    check(x, ids, torch.randn(2, 4).t(), block_of(activation=activation))


def test_ids_out_of_range_and_the_same_expert_twice() -> None:
    ids = torch.tensor([[-1, 2, 2], [7, 0, E], [-1, -1, E], [4, 4, 4]])
    weights = torch.randn(4, 3)
    weights[ids >= E] = torch.nan
    x, block = torch.randn(4, H), block_of()
    assert check(x, ids, weights, block)[2].eq(0).all()


def test_what_it_leaves_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(float_strips, "MOST_FEW", 32)
    x, block = torch.randn(70, H), block_of()
    every = torch.zeros(70, 1, dtype=torch.int64)
    assert few_cpu.moe(x, every, torch.rand(70, 1), block) is None  # too many pairs
    assert few_cpu.moe(x[:17], every[:17], torch.rand(17, 1), block) is None  # many rows of one expert
    assert few_cpu.moe(x[:16], every[:16], torch.rand(16, 1), block) is not None
    monkeypatch.setattr(float_strips, "MOST_FEW", 4)
    assert few_cpu.moe(x[:5], every[:5], torch.rand(5, 1), block) is None or not float_strips.supports(H)
    assert few_cpu.moe(x[:4], every[:4], torch.rand(4, 1), block) is not None
    assert few_cpu.moe(x[:2], torch.full((2, 3), -1), torch.rand(2, 3), block) is None
    assert few_cpu.moe(x[:2], torch.empty(2, 0, dtype=torch.int64), torch.empty(2, 0), block) is None
    odd = Block(hb.quantize(torch.randn(E, 64, H)), hb.quantize(torch.randn(E, H, 33), nested=False), "silu")
    assert few_cpu.moe(x[:2], every[:2], torch.rand(2, 1), odd) is None  # not in whole steps


def test_moe_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    x, block = torch.randn(2, H), block_of()
    ids, weights = torch.tensor([[0, 1], [4, 2]]), torch.rand(2, 2)
    right = hb.moe(x, ids, weights, *block.stacks)
    monkeypatch.setattr(eager_experts, "_sorted_moe", None)
    assert torch.equal(hb.moe(x, ids, weights, *block.stacks), right)
