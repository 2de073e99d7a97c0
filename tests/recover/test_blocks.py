"""One position of many candidates at once is what the whole model computes, in every family of models."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from halfbyte.recover.blocks import Blocks
from halfbyte.recover.calibrate import relative

transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
GPT2 = {
    "vocab_size": 97,
    "n_embd": 32,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "mistral with a window": ("mistral", {"sliding_window": 4}),
    "qwen2 with biases": ("qwen2", {}),
    "qwen3 with normed heads": ("qwen3", {"head_dim": 8}),
    "gemma with scaled embeddings": ("gemma", {"head_dim": 8}),
    "gemma2 with soft caps": ("gemma2", {"head_dim": 8, "sliding_window": 4, "attn_implementation": "eager"}),
    "gemma3 with both kinds of layers": (
        "gemma3_text",
        {"head_dim": 8, "sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"] * 2},
    ),
    "gpt-oss with sinks and experts": (
        "gpt_oss",
        {"head_dim": 8, "sliding_window": 4, "num_local_experts": 4, "attn_implementation": "eager"},
    ),
    "gpt2 with learned positions": ("gpt2", GPT2),
}
POSITIONS = 9  # more than the windows


def model_of(kind: str, facts: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    sizes = {} if kind == "gpt2" else SIZES
    if "layer_types" in facts:
        facts = facts | {"layer_types": facts["layer_types"][: SIZES["num_hidden_layers"]]}
    attention = {name: facts[name] for name in ("attn_implementation",) if name in facts}
    rest = {name: value for name, value in facts.items() if name not in attention}
    config = transformers.AutoConfig.for_model(kind, **sizes, **rest)
    return transformers.AutoModelForCausalLM.from_config(config, **attention).eval()


@pytest.mark.parametrize("family", FAMILIES)
def test_states_are_those_of_the_whole_model(family: str, states_of: Callable[..., tuple[Tensor, ...]]) -> None:
    model = model_of(*FAMILIES[family])
    tokens = torch.randint(3, 97, (POSITIONS,))
    attention = model.config._attn_implementation
    for layer, states in enumerate(states_of(model, tokens)):
        blocks = Blocks(model, layer, normed=layer == 3, length=POSITIONS)
        assert torch.equal(blocks.whole(tokens), states)
        for position, token in enumerate(tokens):
            candidates = torch.randint(0, 97, (5,))
            place = position % 5
            candidates[place] = token
            found = blocks.states(candidates)
            assert relative(found, states[position])[place] < 2e-6
            distances, gradients = blocks.pull(blocks.table[candidates], states[position])
            assert torch.allclose(distances[place], torch.zeros(()), atol=1e-4)
            assert gradients.isfinite().all()
            blocks.append(place)
    assert model.config._attn_implementation == attention


def test_the_gradient_is_that_of_the_squared_distance(llama: Any) -> None:
    """Against differences in fp64, behind a prefix."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(llama.config).double().eval()
    blocks = Blocks(model, 3, normed=True, length=4)
    blocks.states(torch.tensor([5, 6]))
    blocks.append(1)
    target = blocks.states(torch.tensor([9]))[0]
    start = blocks.table[torch.tensor([20, 30])]
    step = torch.randn_like(start) * 1e-4
    ahead, _ = blocks.pull(start + step, target)
    behind, _ = blocks.pull(start - step, target)
    distances, gradients = blocks.pull(start, target)
    scale = distances / target.numel() ** 0.5  # the root mean square of each residual
    slopes = (ahead.square() - behind.square()) / 4
    assert torch.allclose(slopes, scale * (gradients * step).sum(-1).float(), rtol=5e-2, atol=1e-5)


def test_a_candidate_does_not_see_the_others(llama: Any) -> None:
    blocks = Blocks(llama, 3, normed=False, length=3)
    blocks.states(torch.tensor([1]))
    blocks.append(0)
    first = blocks.states(torch.tensor([7, 8, 9, 10]))[0]
    second = blocks.states(torch.tensor([7, 200, 201, 202]))[0]
    assert torch.equal(first, second)


def test_the_prefix_is_neither_copied_nor_computed_anew(llama: Any) -> None:
    blocks = Blocks(llama, 3, normed=False, length=3)
    blocks.states(torch.tensor([1, 2]))
    addresses = {layer: [x.data_ptr() for x in pair] for layer, pair in blocks.prefix.kept.items()}
    blocks.append(1)
    kept = blocks.prefix.kept[2][0][:, :, 0].clone()
    blocks.states(torch.arange(64))
    assert {layer: [x.data_ptr() for x in pair] for layer, pair in blocks.prefix.kept.items()} == addresses
    assert torch.equal(blocks.prefix.kept[2][0][:, :, 0], kept)


def test_a_decoder_that_accelerate_has_hooked_stops_after_its_blocks(llama: Any, prompt: Tensor) -> None:
    hooks = pytest.importorskip("accelerate.hooks")
    hooks.add_hook_to_module(llama.model, hooks.AlignDevicesHook(execution_device="cpu"))
    try:
        hooked = Blocks(llama, 1, normed=False, length=12).whole(prompt)
    finally:
        hooks.remove_hook_from_module(llama.model)
    assert torch.equal(hooked, Blocks(llama, 1, normed=False, length=12).whole(prompt))


def test_models_that_cannot_be_searched_are_refused() -> None:
    with pytest.raises(TypeError, match="Linear; recovery takes a causal language model"):
        Blocks(nn.Linear(2, 2), 0, False, 1)
    bloom = transformers.BloomForCausalLM(transformers.BloomConfig(vocab_size=9, hidden_size=8, n_layer=1, n_head=2))
    with pytest.raises(ValueError, match="does not let its attention be chosen"):
        Blocks(bloom, 0, False, 1)
