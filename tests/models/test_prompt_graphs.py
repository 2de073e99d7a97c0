"""Prompts on graphs: which prompts share one, that their tokens are those of a plain prompt, and what is let go."""

from __future__ import annotations

import threading
from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch

import halfbyte as hb
from halfbyte.measure.kept import prompt_ms
from halfbyte.models import buckets, prompt_graphs, prompt_layers
from halfbyte.models.buckets import layer_weights, most_prompt_rows, prompt_bucket
from halfbyte.models.captured import Captured, Graph
from halfbyte.models.prompt_graphs import PromptGraphs
from halfbyte.models.steps import StepPool, pool_of

from .families import DEVICE, FAMILIES, OF_EXPERTS, counted, generate, make, plainly, prompt
from .test_prompt_layers import on_cpu, quantized  # noqa: F401

pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("captures")
WANTED: dict[str, Any] = {"max_new_tokens": 5, "output_logits": True, "return_dict_in_generate": True}


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by one with every prompt that is captured."""
    return counted(monkeypatch, PromptGraphs, "_capture")


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by one with every prompt that is filled up, captured or not."""
    return counted(monkeypatch, prompt_graphs._Prompt, "compute")


def pool(model: Any) -> StepPool:
    found = pool_of(model)
    assert found is not None
    return found


def agree_with_a_plain_call(model: Any, inputs: dict[str, torch.Tensor], **options: Any) -> None:
    found, right = (call(model, inputs, **WANTED | options) for call in (generate, plainly))
    assert torch.equal(found.sequences, right.sequences)
    torch.testing.assert_close(torch.stack(found.logits), torch.stack(right.logits), rtol=1e-3, atol=1e-3)
    padding = int((inputs["attention_mask"] == 0).sum(-1).max())  # nothing looks at what lies there
    for ours, theirs in zip(found.past_key_values.layers, right.past_key_values.layers, strict=True):
        for one, other in ((ours.keys, theirs.keys), (ours.values, theirs.values)):
            one, other = one[:, :, padding : other.shape[2]], other[:, :, padding:]
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)


def test_sizes() -> None:
    for texts in (1, 3, 8, 40):
        found = [prompt_bucket(texts, tokens) for tokens in range(1, 600)]
        assert all(tokens <= length < tokens + 64 for tokens, length in enumerate(found, start=1))
        assert found == sorted(found)
    assert sorted({prompt_bucket(1, tokens) for tokens in range(1, 400)}) == [*range(32, 257, 32), 320, 384, 448]
    assert prompt_bucket(8, 20) == 32


def test_a_large_model_keeps_a_gpu_busy_with_fewer_rows() -> None:
    from transformers import LlamaConfig, Qwen3MoeConfig

    sides = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8}
    assert layer_weights(LlamaConfig(**sides)) == 4096 * (2 * 40 * 128 + 3 * 14336)
    experts = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "head_dim": 128}
    config = Qwen3MoeConfig(**sides | experts | {"hidden_size": 2048, "num_key_value_heads": 4})
    assert layer_weights(config) == 2048 * (2 * 36 * 128 + 3 * 8 * 768)
    assert most_prompt_rows(make("llama")) == buckets.MOST_PROMPT


@pytest.mark.parametrize("family", FAMILIES | OF_EXPERTS)
def test_tokens_of_every_family(family: str, captured: list[int], computed: list[int]) -> None:
    """Of new lengths in every call, and of several texts, with padding and without."""
    wide = {"sliding_window": 72} if "sliding_window" in (FAMILIES | OF_EXPERTS)[family][1] else {}
    model = quantized(family, **wide)
    lengths = (15, 30, 22, 41, 33, 9)
    for count, tokens in enumerate(lengths, start=1):
        agree_with_a_plain_call(model, prompt(1, tokens))
        assert len(computed) == count
    for tokens in (20, 25, 31):
        agree_with_a_plain_call(model, prompt(3, tokens, padding=4))
        agree_with_a_plain_call(model, prompt(3, tokens))
    if DEVICE.type == "cuda" and family in OF_EXPERTS:  # in fp32 experts wait for the host, so the first capture fails
        assert len(captured) == 1
    else:  # with eager attention one graph for both, as there is a mask anyway
        assert len(captured) == 3 + (model.config._attn_implementation == "sdpa")
    hb.restore(model)


def test_tokens_do_not_depend_on_what_came_before() -> None:
    model = quantized("llama")
    first = generate(model, prompt(1, 21), **WANTED)
    for _ in range(3):
        generate(model, prompt(1, 27), **WANTED)
        again = generate(model, prompt(1, 21), **WANTED)
        assert torch.equal(torch.stack(first.logits), torch.stack(again.logits))


@pytest.mark.parametrize(("padding", "masked"), [(0, False), (7, True)])
def test_masks(padding: int, masked: bool, captured: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers would make one in every capture. With one torch has another attention, which rounds otherwise."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    masks: list[Any] = []
    sdpa, make_mask = ALL_ATTENTION_FUNCTIONS["sdpa"], ALL_MASK_ATTENTION_FUNCTIONS["sdpa"]

    def attend(module: Any, query: Any, keys: Any, values: Any, mask: Any, **others: Any) -> Any:
        masks.append(mask)
        return sdpa(module, query, keys, values, mask, **others)

    def make(*given: Any, **named: Any) -> Any:
        assert not in_a_prompt
        return make_mask(*given, **named)

    in_a_prompt: list[Any] = []
    run = prompt_graphs._Prompt.run

    def watched(one: Any) -> Any:
        in_a_prompt.append(one)
        try:
            return run(one)
        finally:
            in_a_prompt.pop()

    model = quantized("gemma3", sliding_window=72)
    inputs = prompt(2, 30, padding)
    generate(model, inputs, **WANTED | {"max_new_tokens": 1})  # compares layers with transformers' own
    monkeypatch.setattr(prompt_graphs._Prompt, "run", watched)
    monkeypatch.setitem(ALL_MASK_ATTENTION_FUNCTIONS, "sdpa", make)
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "sdpa", attend)
    generate(model, inputs, **WANTED | {"max_new_tokens": 1})
    assert len(captured) == 1
    assert [mask is not None for mask in masks] == [masked] * len(model.model.layers)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_texts_of_different_lengths(attention: str, captured: list[int]) -> None:
    model = quantized("gemma3", sliding_window=72)
    model.set_attn_implementation(attention)
    for tokens, padding in ((15, 3), (25, 20), (30, 0), (31, 7)):
        agree_with_a_plain_call(model, prompt(2, tokens, padding))
    assert len(captured) == 1


def test_caches_of_any_length_share_a_graph(captured: list[int]) -> None:
    model = quantized("qwen2")
    for new in (3, 100, 165):
        agree_with_a_plain_call(model, prompt(1, 30), max_new_tokens=new)
    assert len(captured) == 1
    assert len(pool(model).buckets) == 3


@pytest.mark.parametrize(
    ("family", "inputs", "options"),
    [
        ("mistral", prompt(1, 19), {}),  # fills a window of 20 up
        ("llama", prompt(1, 25), {"output_hidden_states": True}),
        ("llama", prompt(1, 25), {"use_cache": False}),
        ("llama", prompt(1, 25), {"prefill_chunk_size": 8}),
        ("llama", prompt(1, 25), {"num_beams": 2}),
    ],
)
def test_what_goes_as_before(family: str, inputs: Any, options: dict[str, Any], computed: list[int]) -> None:
    model = quantized(family)
    wanted = {"max_new_tokens": 5, **options}
    for _ in range(3):
        assert torch.equal(generate(model, inputs, **wanted), plainly(model, inputs, **wanted))
    assert not computed or options == {"num_beams": 2}


def test_models_that_go_as_before(computed: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """A rotary embedding that looks for the longest position, inputs of its own, and too many rows."""
    moving = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    generate(quantized("llama", rope_parameters=moving), prompt(1, 25))
    model = quantized("llama")
    model.prepare_inputs_for_generation = partial(type(model).prepare_inputs_for_generation, model)
    generate(model, prompt(1, 25))
    model = quantized("llama")
    monkeypatch.setattr(buckets, "MOST_PROMPT", 31)
    generate(model, prompt(1, 25))
    assert not computed
    monkeypatch.setattr(buckets, "MOST_PROMPT", 32)
    generate(model, prompt(1, 25))
    assert len(computed) == 1


def test_layers_that_are_not_ours(captured: list[int], computed: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """One that agrees with transformers' no more, which the first prompt finds out."""
    monkeypatch.setattr(prompt_layers._PromptLayer, "_agrees", lambda *given: False)
    model = quantized("llama")
    with pytest.warns(UserWarning, match="leaves prompts in LlamaDecoderLayer to transformers"):
        generate(model, prompt(1, 25))
    for _ in range(3):
        agree_with_a_plain_call(model, prompt(1, 25))
    assert len(computed) == 1
    assert not captured


def test_a_model_that_changes_is_captured_anew(captured: list[int]) -> None:
    model = quantized("llama")
    for expected in (1, 2):
        for _ in range(3):
            agree_with_a_plain_call(model, prompt(1, 25))
        assert len(captured) == expected
        model.model.norm.weight = torch.nn.Parameter(model.model.norm.weight * 2, requires_grad=False)


def graphs(kept: prompt_graphs.PromptGraphs) -> int:
    """Bytes that captured prompts have for themselves, such as their kernels' workspace; none on a CPU."""
    return sum(prompt.nbytes for prompt in kept.prompts.values())


def test_what_is_kept_and_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    model = quantized("llama")
    kept = pool(model).prompt_graphs
    assert kept.nbytes == 0
    for tokens in (25, 25, 40, 50):
        generate(model, prompt(1, tokens))
    kept = pool(model).prompt_graphs
    assert kept.nbytes == buckets.cache_bytes(model, 1, 256) + graphs(kept)
    for _ in range(2):
        generate(model, prompt(1, 300))
    assert kept.nbytes == buckets.cache_bytes(model, 1, 256 + 512) + graphs(kept)
    assert pool(model).nbytes == kept.nbytes + sum(bucket.nbytes for bucket in pool(model).buckets)
    assert not pool(deepcopy(model)).prompt_graphs.prompts
    hb.release(model)
    assert pool(model).nbytes == 0
    for _ in range(3):
        agree_with_a_plain_call(model, prompt(1, 25))
    monkeypatch.setattr(prompt_graphs, "MOST_GRAPHS", 2)
    for tokens in (40, 80, 100, 120):
        generate(model, prompt(1, tokens))
    assert len(kept.prompts) == 2


def test_no_memory_for_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_graphs, "SHARE", 0)
    model = quantized("llama")
    for _ in range(4):
        agree_with_a_plain_call(model, prompt(1, 25))
    assert pool(model).prompt_graphs.nbytes == 0


def test_a_capture_meets_nothing_new(monkeypatch: pytest.MonkeyPatch) -> None:
    """What libraries plan for the place of keys and values is planned in a run that is not captured."""
    monkeypatch.setitem(prompt_graphs.GRAPHS, DEVICE.type, Graph)  # or a CPU would have no such run
    model, ran = quantized("llama"), []
    run, make = prompt_graphs._Prompt.run, prompt_graphs.Captured

    def running(self: Any) -> Any:
        outputs = run(self)
        ran.append(self.cache.layers[0].keys.data_ptr())
        return outputs

    def making(*given: Any) -> Any:
        assert ran[-1] == pool(model).prompt_graphs.memory[256][0][0].data_ptr()
        if DEVICE.type == "cpu":
            monkeypatch.delitem(prompt_graphs.GRAPHS, "cpu")
        return make(*given)

    monkeypatch.setattr(prompt_graphs._Prompt, "run", running)
    monkeypatch.setattr(prompt_graphs, "Captured", making)
    for _ in range(3):
        agree_with_a_plain_call(model, prompt(1, 25))
    assert any(kept.captured for kept in pool(model).prompt_graphs.prompts.values())


def test_a_capture_that_fails(captured: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    model = quantized("llama")
    generate(model, prompt(1, 25))

    def refuse(*given: Any) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(prompt_graphs, "Captured", refuse)
    with pytest.warns(UserWarning, match="prompts of LlamaForCausalLM cannot be captured .*: operation not permitted"):
        generate(model, prompt(1, 26))
    for _ in range(2):
        agree_with_a_plain_call(model, prompt(1, 27))
    assert len(captured) == 1
    assert pool(model).prompt_graphs.nbytes == 0


def test_a_prompt_that_finds_no_memory_is_computed_once_more(monkeypatch: pytest.MonkeyPatch) -> None:
    model = quantized("llama")
    for _ in range(2):
        generate(model, prompt(1, 25))
    right = generate(model, prompt(1, 26))
    failures = [torch.OutOfMemoryError("of this test")]
    replay = Captured.replay

    def fail_once(self: Captured) -> Any:
        if failures:
            raise failures.pop()
        return replay(self)

    monkeypatch.setattr(Captured, "replay", fail_once)
    assert torch.equal(generate(model, prompt(1, 26)), right)
    assert not failures


def test_threads_share_graphs() -> None:
    model = quantized("llama")
    inputs = [prompt(1, tokens) for tokens in (20, 25, 30, 32)]
    right = [plainly(model, one) for one in inputs]
    generate(model, inputs[0])
    found: dict[int, list[torch.Tensor]] = {}

    def work(index: int) -> None:
        found[index] = [generate(model, inputs[index]) for _ in range(3)]

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for index, results in found.items():
        assert all(torch.equal(result, right[index]) for result in results)
    assert len(found) == 4


def test_a_measured_prompt_is_one_of_generate(captured: list[int]) -> None:
    model = quantized("llama")
    ids = prompt(1, 25)["input_ids"]
    assert all((prompt_ms(model, ids) or 0) > 0 for _ in range(3))
    assert len(captured) == 1
    agree_with_a_plain_call(model, prompt(1, 25))
    assert prompt_ms(make("llama"), ids) is None
    model.config.sliding_window = 20
    assert prompt_ms(model, ids) is None
