"""Recovery on a GPU: CUDA graphs give what eager calls give, and every token comes back, dense and in 4 bits."""

from typing import Any

import pytest
import torch
from torch import Tensor

import halfbyte as hb
from halfbyte.measure import models
from halfbyte.recover import recover_tokens
from halfbyte.recover.blocks import Blocks

from .conftest import BF16, DEVICE, F32

pytest.importorskip("transformers")
pytest.importorskip("bitsandbytes")

TOKENS = 12


def small(four_bit: bool, dtype: torch.dtype = BF16) -> Any:
    return models.load("tiny", DEVICE, dtype, four_bit=four_bit)


def prompt() -> Tensor:
    return torch.randint(1024, (TOKENS,), device=DEVICE)


def states_of(model: Any, tokens: Tensor) -> Tensor:
    with torch.no_grad():
        states: Tensor = model(tokens[None], output_hidden_states=True).hidden_states[-1][0]
    return states.clone()


@pytest.mark.filterwarnings("error:halfbyte")  # a capture that failed would say so
@pytest.mark.parametrize("policy", ["gradient", "exhaustive"])
@pytest.mark.parametrize("kind", ["bf16", "fp32", "nf4", "nf4 accelerated"])
def test_every_token(kind: str, policy: str) -> None:
    model = small(kind.startswith("nf4"), F32 if kind == "fp32" else BF16)
    if kind == "nf4 accelerated":
        assert hb.accelerate(model).modules
    tokens = prompt()
    found = recover_tokens(model, states_of(model, tokens), policy=policy)
    assert found.ok, str(found)
    assert found.tokens == tuple(tokens.tolist())
    hb.restore(model)


@pytest.mark.parametrize("four_bit", [False, True])
def test_graphs_give_what_eager_calls_give(four_bit: bool) -> None:
    model = small(four_bit)
    hb.accelerate(model)
    tokens = prompt()
    pair = [Blocks(model, 2, True, TOKENS, graphs=graphs) for graphs in (False, True)]
    target = states_of(model, tokens)
    for position in range(TOKENS):
        candidates = torch.randint(1024, (32,), device=DEVICE)
        candidates[position] = tokens[position]
        eager, replayed = (blocks.states(candidates).clone() for blocks in pair)
        assert torch.equal(eager, replayed)
        rows = pair[0].table[candidates[:8]]
        for one, other in zip(*(blocks.pull(rows, target[position]) for blocks in pair), strict=True):
            assert torch.allclose(one, other, rtol=1e-2, atol=1e-3)
        for blocks in pair:
            blocks.append(position)
    assert all(kernels.works for kernels in (pair[1]._states, pair[1]._pull))  # type: ignore[attr-defined]
    hb.restore(model)


def test_the_same_bits_whatever_the_policy() -> None:
    model = small(False)
    tokens = prompt()
    states = states_of(model, tokens)
    runs = [recover_tokens(model, states, policy=policy, batch_invariant=True) for policy in ("gradient", "exhaustive")]
    assert [position.distance for position in runs[0].positions] == [
        position.distance for position in runs[1].positions
    ]


def test_states_on_another_device_are_refused() -> None:
    with pytest.raises(ValueError, match=r"on cpu and the model on cuda:0; pass hidden_states.to\('cuda:0'\)"):
        recover_tokens(small(False), torch.zeros(2, 256))
