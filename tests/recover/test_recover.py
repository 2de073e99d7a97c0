"""recover_tokens on small models: what it finds, and what it does not claim."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from halfbyte.recover import recover_tokens
from halfbyte.recover import search as searches
from halfbyte.recover.walk import Walk

transformers = pytest.importorskip("transformers")

States = Callable[[Any, Tensor], tuple[Tensor, ...]]
POLICIES = ("gradient", "exhaustive")


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("layer", [0, 1, 2, 3, -1])
def test_every_token_of_every_layer(llama: Any, prompt: Tensor, states_of: States, layer: int, policy: str) -> None:
    found = recover_tokens(llama, states_of(llama, prompt)[layer], layer, policy=policy)
    assert found.ok
    assert found.tokens == tuple(prompt.tolist())
    assert found.layer == layer % 4
    for position in found.positions:
        assert position.status == "recovered"
        assert position.token == position.nearest
        assert position.distance is not None
        assert position.distance <= found.epsilon < position.runner_up_distance
        assert position.tried == 256 if policy == "exhaustive" else position.tried <= 256
    assert "12 positions: 12 recovered" in str(found)


def test_shapes_and_shorter_texts(llama: Any, prompt: Tensor, states_of: States) -> None:
    states = states_of(llama, prompt)[2]
    assert recover_tokens(llama, states[None, :5], 2).tokens == tuple(prompt[:5].tolist())


def test_before_and_after_the_final_norm(llama: Any, prompt: Tensor, states_of: States) -> None:
    raw: list[Tensor] = []
    handle = llama.model.norm.register_forward_pre_hook(lambda _, inputs: raw.append(inputs[0][0]))
    states_of(llama, prompt)
    handle.remove()
    truth = tuple(prompt.tolist())
    assert recover_tokens(llama, raw[0], 3, final_norm=False).tokens == truth
    assert recover_tokens(llama, raw[0], 3).tokens == ()  # these are not what transformers gives as the last
    normed = llama.model.norm(states_of(llama, prompt)[1]).detach()
    assert recover_tokens(llama, normed, 1, final_norm=True).tokens == truth


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(llama: Any, prompt: Tensor, states_of: States, dtype: torch.dtype) -> None:
    import copy

    model = copy.deepcopy(llama).to(dtype)
    states = states_of(model, prompt)[2]
    assert states.dtype == dtype
    assert recover_tokens(model, states, 2).tokens == tuple(prompt.tolist())
    rounded = states_of(llama, prompt)[2].to(dtype)  # an fp32 model's states, kept in fewer bits
    assert recover_tokens(llama, rounded, 2).tokens == tuple(prompt.tolist())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:states of different tokens")  # so small a model in so few bits
def test_bitsandbytes_weights_accelerated(llama: Any, accelerated: Any, prompt: Tensor, states_of: States) -> None:
    states = states_of(accelerated, prompt)[-1]
    for policy in POLICIES:
        assert recover_tokens(accelerated, states, policy=policy, batch_invariant=True).tokens == tuple(prompt.tolist())
    before_rounding = states_of(llama, prompt)[-1].bfloat16()
    dense = recover_tokens(accelerated, before_rounding)
    assert not dense.ok
    assert dense.tokens == tuple(prompt[: len(dense.tokens)].tolist())


def test_wrong_layer_noise_and_another_model_claim_nothing(llama: Any, prompt: Tensor, states_of: States) -> None:
    states = states_of(llama, prompt)
    torch.manual_seed(1)
    other = transformers.AutoModelForCausalLM.from_config(llama.config).eval()
    noisy = states[2] * (1 + 0.05 * torch.randn_like(states[2]))
    for wanted in (states[1], states[3], noisy, states_of(other, prompt)[2]):
        for policy in POLICIES:
            found = recover_tokens(llama, wanted, 2, policy=policy)
            assert not found.ok
            assert found.tokens == ()
            first = found.positions[0]
            assert first.status in ("near miss", "no match")
            assert first.token is None
            assert first.tried == 256  # nothing was left out
            assert first.distance is not None
            assert first.distance > found.epsilon
            assert all(position.status == "not reached" for position in found.positions[1:])
            assert "nothing is claimed" in str(found)


def test_a_near_miss_names_the_token_without_claiming_it(llama: Any, prompt: Tensor, states_of: States) -> None:
    states = states_of(llama, prompt)[1].clone()
    states[4] += 0.02 * states[4].norm() * torch.nn.functional.normalize(torch.randn(64), dim=0)
    found = recover_tokens(llama, states, 1)
    assert found.tokens == tuple(prompt[:4].tolist())
    missed = found.positions[4]
    assert missed.status == "near miss"
    assert missed.nearest == prompt[4]
    assert missed.distance == pytest.approx(0.02, rel=1e-2)
    assert missed.margin is not None
    assert missed.margin > 2
    assert recover_tokens(llama, states, 1, epsilon=0.03).tokens == tuple(prompt.tolist())


@pytest.mark.parametrize("policy", POLICIES)
def test_tokens_of_one_embedding_are_ambiguous(llama: Any, prompt: Tensor, states_of: States, policy: str) -> None:
    import copy

    model = copy.deepcopy(llama)
    twin = 255  # which the text does not have
    model.get_input_embeddings().weight.data[twin] = model.get_input_embeddings().weight.data[prompt[3]]
    found = recover_tokens(model, states_of(model, prompt)[2], 2, policy=policy)
    assert not found.ok
    doubtful = [number for number, token in enumerate(prompt) if token == prompt[3]]
    for number, position in enumerate(found.positions):
        assert position.status == ("ambiguous" if number in doubtful else "recovered")
        assert position.alternatives == ((twin,) if number in doubtful else ())
    assert found.tokens == tuple(prompt.tolist())  # the lower of two
    assert f"position 3: ambiguous, {int(prompt[3])} or {twin}" in str(found)


@pytest.mark.slow
def test_padded_batches_give_the_same_bits(llama: Any, prompt: Tensor, states_of: States) -> None:
    states = states_of(llama, prompt)[3]
    first, second = (
        recover_tokens(llama, states, 3, policy=policy, batch_invariant=True, whole=True, batch_size=48)
        for policy in POLICIES
    )
    for ours, theirs in zip(first.positions, second.positions, strict=True):
        assert (ours.distance, ours.runner_up, ours.runner_up_distance) == (
            theirs.distance,
            theirs.runner_up,
            theirs.runner_up_distance,
        )


@pytest.mark.slow
def test_one_seed_one_search(llama: Any, prompt: Tensor, states_of: States) -> None:
    states = states_of(llama, prompt)[3]
    runs = [recover_tokens(llama, states, 3, seed=seed) for seed in (5, 5, 6)]
    tried = [[position.tried for position in run.positions] for run in runs]
    assert tried[0] == tried[1]
    assert all(run.tokens == tuple(prompt.tolist()) for run in runs)


def test_a_search_is_gone_on_with(
    llama: Any, prompt: Tensor, states_of: States, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    states, file = states_of(llama, prompt)[2], tmp_path / "state.json"
    find = Walk.find

    def interrupted(self: Walk, wanted: Tensor, number: int, epsilon: float) -> Any:
        if number == 5:
            raise KeyboardInterrupt
        return find(self, wanted, number, epsilon)

    monkeypatch.setattr(Walk, "find", interrupted)
    with pytest.raises(KeyboardInterrupt):
        recover_tokens(llama, states, 2, state_file=file)
    assert len(json.loads(file.read_text())["positions"]) == 5
    searched: list[int] = []

    def counted(self: Walk, wanted: Tensor, number: int, epsilon: float) -> Any:
        searched.append(number)
        return find(self, wanted, number, epsilon)

    monkeypatch.setattr(Walk, "find", counted)
    found = recover_tokens(llama, states, 2, state_file=file)
    assert found.tokens == tuple(prompt.tolist())
    assert searched == list(range(5, 12))
    again = recover_tokens(llama, states, 2, state_file=file)
    assert again.positions == found.positions
    for difference in ({"seed": 1}, {"policy": "exhaustive"}):
        with pytest.raises(ValueError, match="belongs to another recovery"):
            recover_tokens(llama, states, 2, state_file=file, **difference)
    with pytest.raises(ValueError, match="belongs to another recovery"):
        recover_tokens(llama, states * 1.01, 2, state_file=file)
    file.write_text("{}")
    with pytest.raises(ValueError, match="not the state of a recovery"):
        recover_tokens(llama, states, 2, state_file=file)
    assert [path.name for path in tmp_path.iterdir()] == ["state.json"]


def test_the_model_is_left_as_it_was(llama: Any, prompt: Tensor, states_of: States) -> None:
    states = states_of(llama, prompt)[2]
    llama.train()
    before = {name: value.clone() for name, value in llama.state_dict().items()}
    modes = {name: module.training for name, module in llama.named_modules()}
    try:
        assert recover_tokens(llama, states, 2).ok
        assert {name: module.training for name, module in llama.named_modules()} == modes
    finally:
        llama.eval()
    assert all(torch.equal(value, before[name]) for name, value in llama.state_dict().items())
    assert all(parameter.grad is None or not parameter.grad.any() for parameter in llama.parameters())
    assert llama.config._attn_implementation == "sdpa"


def test_under_no_grad_and_inference_mode(llama: Any, prompt: Tensor, states_of: States) -> None:
    with torch.no_grad():
        assert recover_tokens(llama, states_of(llama, prompt)[2], 2).ok
    with torch.inference_mode():
        assert recover_tokens(llama, states_of(llama, prompt)[2].clone(), 2).ok


def test_arguments_that_do_not_fit(llama: Any, prompt: Tensor, states_of: States) -> None:
    states = states_of(llama, prompt)[2]
    broken = states.clone()
    broken[3, 1] = torch.nan
    cases: list[tuple[type[Exception], str, Any, Any]] = [
        (ValueError, "32 numbers a position; this model's states have 64", states[:, :32], {}),
        (ValueError, r"shape \[64\]; recovery takes \[T, D\]", states[0], {}),
        (ValueError, r"shape \[0, 64\]", states[:0], {}),
        (ValueError, r"shape \[2, 6, 64\]", states.view(2, 6, 64), {}),
        (ValueError, "not finite at position 3", broken, {}),
        (TypeError, "is a list", states.tolist(), {}),
        (TypeError, "dtype torch.int64", states.long(), {}),
        (ValueError, "layer is 4; this model has 3 blocks", states, {"layer": 4}),
        (ValueError, "policy is 'greedy'; there are 'gradient' and 'exhaustive'", states, {"policy": "greedy"}),
        (ValueError, "epsilon is -1", states, {"epsilon": -1}),
        (ValueError, "batch_size is 0", states, {"batch_size": 0}),
        (ValueError, "on meta and the model on cpu", states.to("meta"), {}),
    ]
    for kind, told, given, options in cases:
        with pytest.raises(kind, match=told):
            recover_tokens(llama, given, **{"layer": 2} | options)
    assert searches.layer_of(llama, -4) == (0, False)
    assert searches.layer_of(llama, -1) == (3, True)
