"""In a step, attention of one token goes to our kernel, and nothing else does. Here the kernel is torch."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from halfbyte.kernels.attention import reference
from halfbyte.models import caches, graphs, regions
from halfbyte.models.attention import attention_of_steps

transformers = pytest.importorskip("transformers")
front = pytest.importorskip("halfbyte.kernels.attention.attend")
kernels = pytest.importorskip("halfbyte.kernels.attention.triton")
spans = pytest.importorskip("halfbyte.kernels.attention.spans")

SIDES = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 96,
}  # fmt: skip
MODELS = {
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIDES)),
    "gemma3": lambda: transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**SIDES, sliding_window=8)),
    "gemma2": lambda: transformers.Gemma2ForCausalLM(
        transformers.Gemma2Config(**SIDES, sliding_window=8, attn_logit_softcapping=2.0)
    ),
    "gpt-oss": lambda: transformers.GptOssForCausalLM(
        transformers.GptOssConfig(**SIDES, sliding_window=8, num_local_experts=2, num_experts_per_tok=1)
    ),
}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes of queries that our kernel was asked for."""
    seen: list[tuple[int, ...]] = []

    def attend(
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        mask: Tensor | None,
        scale: float,
        softcap: float | None,
        sinks: Tensor | None,
        spans: Tensor | None,
    ) -> Tensor:
        assert kernels.supports(query, keys, values, mask, sinks)
        assert (mask is None) == (spans is None)
        seen.append(tuple(query.shape))
        return reference.attend(query, keys, values, mask, scale, softcap, sinks)

    monkeypatch.setattr(front, "attend", attend)
    monkeypatch.setattr(spans, "spans_of", lambda mask, texts: torch.zeros(texts, spans.WIDTH, dtype=torch.int32))
    monkeypatch.setattr(kernels, "DTYPES", (torch.float32,))
    return seen


@torch.no_grad()
def logits(model: Any, ids: Tensor, mask: Tensor, new: int = 1, prompt: int = 10) -> list[Tensor]:
    cache = transformers.StaticCache(config=model.config, max_cache_len=ids.shape[1])
    found = []
    for first, last in [(0, prompt), *((at, at + new) for at in range(prompt, ids.shape[1], new))]:
        found.append(model(ids[:, first:last], attention_mask=mask[:, :last], past_key_values=cache).logits)
    return found


def random_model(name: str) -> Any:
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    for parameter_name, parameter in model.named_parameters():
        if parameter_name.endswith("sinks"):
            torch.nn.init.normal_(parameter)
    return model


@pytest.mark.parametrize(
    ("name", "attention"),
    [("llama", "sdpa"), ("gemma3", "sdpa"), ("llama", "eager"), ("gemma2", "eager"), ("gpt-oss", "eager")],
)
@pytest.mark.parametrize("padding", [0, 2])
@pytest.mark.parametrize("new", [1, 2])
def test_logits_are_those_of_transformers(name: str, attention: str, padding: int, new: int, calls: list[Any]) -> None:
    model = random_model(name)
    model.set_attn_implementation(attention)
    ids = torch.randint(3, 96, (2, 16))
    mask = torch.ones_like(ids)
    mask[0, :padding] = 0
    right = logits(model, ids, mask, new)
    assert not calls
    with attention_of_steps():
        found = logits(model, ids, mask, new)
    ours = [(2, 4, new, 16)] * (3 * 6 // new)
    assert calls == ([] if (name, attention) == ("llama", "eager") else ours)
    for mine, theirs in zip(found, right, strict=True):
        torch.testing.assert_close(mine[:, -new:], theirs[:, -new:], atol=1e-5, rtol=1e-4)
    calls.clear()
    logits(model, ids, mask)
    assert not calls


def test_layers_share_the_spans_of_a_mask(calls: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    spans_of = spans.spans_of
    monkeypatch.setattr(spans, "spans_of", lambda mask, texts: found.append(mask) or spans_of(mask, texts))
    ids = torch.randint(3, 96, (1, 12))
    with attention_of_steps():
        logits(random_model("gemma2"), ids, torch.ones_like(ids))
    assert len(calls) == 2 * 3
    assert len(found) == 2 * 2  # steps, kinds of masks


def test_attention_of_another_kind_is_left_alone(calls: list[Any]) -> None:
    """Weights that are asked for, prompts without a mask, attention of a model's own that says nothing of itself."""
    model, ids = random_model("gemma2"), torch.randint(3, 96, (1, 6))
    with attention_of_steps():
        found = model(ids, output_attentions=True, attention_mask=torch.ones_like(ids)).attentions
        assert found[0].shape == (1, 4, 6, 6)
        model.config.output_attentions = True
        assert model(ids).attentions[0].shape == (1, 4, 6, 6)
        random_model("llama")(ids)
    assert not calls


def test_several_threads(calls: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that are made ready at the same time, of several models, leave everything as it was."""
    functions = transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS
    before, rotary = functions["sdpa"], transformers.models.llama.modeling_llama.apply_rotary_pos_emb
    monkeypatch.setattr(caches, "has_triton", lambda: False)  # which has a test of its own
    monkeypatch.setattr(regions, "_compiled", lambda function: lambda *given, **named: function(*given, **named))
    torch.manual_seed(0)
    model = MODELS["llama"]().eval()
    ids = torch.randint(3, 96, (1, 6))
    mask = torch.ones_like(ids)
    right = logits(model, ids, mask, prompt=5)[-1]

    @torch.no_grad()
    def step(_: int) -> Tensor:
        cache = transformers.StaticCache(config=model.config, max_cache_len=6)
        model(ids[:, :5], past_key_values=cache)
        inputs = {"input_ids": ids[:, 5:], "attention_mask": {}}
        return graphs.DecodeGraphs(Masks(model, mask))._step(cache, inputs).logits

    with ThreadPoolExecutor(4) as pool:
        for found in pool.map(step, range(12)):
            torch.testing.assert_close(found, right, atol=1e-5, rtol=1e-4)
    assert functions["sdpa"] is before
    assert transformers.models.llama.modeling_llama.apply_rotary_pos_emb is rotary
    assert not any("forward" in vars(module) for module in model.modules())


class Masks(torch.nn.Module):
    """A model that is called as `generate` does it, with a dictionary of masks."""

    def __init__(self, model: Any, mask: Tensor) -> None:
        super().__init__()
        self.model, self.mask = model, mask

    def forward(self, input_ids: Tensor, attention_mask: Any, past_key_values: Any) -> Any:
        return self.model(input_ids, attention_mask=self.mask, past_key_values=past_key_values)


def test_what_was_registered_comes_back() -> None:
    functions = transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS
    before, names = functions["sdpa"], set(functions)
    with attention_of_steps():
        assert functions["sdpa"] is not before
        assert "get_interface" in vars(functions)
    assert functions["sdpa"] is before
    assert "get_interface" not in vars(functions)
    own = lambda *args, **kwargs: before(*args, **kwargs)  # noqa: E731
    functions["sdpa"] = own
    try:
        with attention_of_steps():
            assert functions["sdpa"] is not own
        assert functions["sdpa"] is own
    finally:
        del functions["sdpa"]
    assert functions["sdpa"] is before
    assert set(functions) == names
