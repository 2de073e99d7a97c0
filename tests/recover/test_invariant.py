"""With `batch_invariant` a candidate's state has the same bits whatever it is tried with, from 4-bit weights too."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import halfbyte as hb
from halfbyte.recover import recover_tokens
from halfbyte.recover.blocks import Blocks
from halfbyte.recover.invariant import BatchInvariant

transformers = pytest.importorskip("transformers")

BATCH = 64  # beyond the rows that any fused kernel of a CPU takes by itself


@pytest.fixture(scope="module", params=["halfbyte", "bitsandbytes"])
def packed(request: pytest.FixtureRequest, llama: Any) -> Any:
    """The small Llama in NF4 and bf16, with layers of our own, or bitsandbytes' accelerated."""
    if request.param == "halfbyte":
        model = copy.deepcopy(llama).bfloat16()
        for layer in model.model.layers:
            for parent in (layer.self_attn, layer.mlp):
                for name, linear in list(parent.named_children()):
                    if isinstance(linear, torch.nn.Linear):
                        setattr(parent, name, hb.nn.Linear4bit.from_linear(linear))
        return model
    return request.getfixturevalue("accelerated")


def blocks_of(model: Any, batch_invariant: bool) -> Blocks:
    return Blocks(model, 3, normed=True, length=4, batch_invariant=batch_invariant)


def test_batches_of_other_tokens_in_another_order(packed: Any) -> None:
    """All of one size, as `recover_tokens` makes them, behind prefixes of several lengths."""
    blocks = blocks_of(packed, batch_invariant=True)
    wanted = torch.arange(1, 21)
    for _ in range(4):
        states = blocks.states(torch.cat((wanted, torch.arange(200, 200 + BATCH - 20))))
        others = torch.cat((torch.randint(100, 200, (BATCH - 20,)), wanted.flip(0)))
        assert torch.equal(blocks.states(others)[-20:].flip(0), states[:20])
        blocks.append(BATCH - 1)


def test_batches_of_any_size(packed: Any) -> None:
    """The first position, where no dense product has a part in a state: all that can differ is halfbyte's."""
    tokens = torch.arange(1, 1 + BATCH)  # 0 is padding, and zero
    blocks = blocks_of(packed, batch_invariant=True)
    states = blocks.states(tokens)
    for size in (1, 2, 7, 16, 33):
        assert torch.equal(blocks.states(tokens[:size]), states[:size])
        assert torch.equal(blocks.states(tokens[-size:]), states[-size:])
    plain = blocks_of(packed, batch_invariant=False)
    assert not torch.equal(plain.states(tokens[:1]), plain.states(tokens)[:1])


def test_recovery_says_the_same_of_tokens_whatever_they_are_tried_with(
    packed: Any, prompt: Tensor, states_of: Callable[..., tuple[Tensor, ...]]
) -> None:
    states = states_of(packed, prompt[:3])[3]
    options = {"batch_invariant": True, "whole": True, "epsilon": 0.05, "batch_size": 48}
    one, other = (recover_tokens(packed, states, 3, policy=p, **options) for p in ("gradient", "exhaustive"))
    facts = [
        [(p.status, p.nearest, p.distance, p.runner_up_distance) for p in found.positions] for found in (one, other)
    ]
    assert facts[0] == facts[1]


def test_gradients_flow_and_come_from_the_same_bits(packed: Any) -> None:
    blocks = blocks_of(packed, batch_invariant=True)
    target = blocks.states(torch.tensor([9]))[0]
    rows = blocks.table[torch.tensor([9, *range(20, 39)])]
    distances, gradients = blocks.pull(rows, target)
    assert distances[0] == 0  # it was computed among others, and the target alone
    assert gradients[1:].abs().sum(-1).all()


def test_products_outside_are_as_they_were(packed: Any) -> None:
    x = torch.randn(BATCH, 64, dtype=torch.bfloat16)
    layer = packed.model.layers[0].mlp.up_proj
    with torch.no_grad():
        before = layer(x)
        with BatchInvariant():  # type: ignore[no-untyped-call]
            within, alone = layer(x), layer(x[:1])
        assert torch.equal(layer(x), before)
    assert torch.equal(within[:1], alone)
    assert not torch.equal(within, before)
