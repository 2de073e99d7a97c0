"""What a call of `generate` compiles before its first product."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from gpus import H200

import halfbyte as hb
from halfbyte.kernels.common import nvrtc
from halfbyte.kernels.head import launch as head
from halfbyte.kernels.linear.dispatch import variant_of
from halfbyte.measure import models
from halfbyte.models import ahead, outside, serving_ahead
from halfbyte.models.ahead import Ahead, weights_of

pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def tiny() -> Any:
    model = models.load("tiny", torch.device("cpu"), torch.bfloat16)
    with pytest.MonkeyPatch.context() as patch:  # the fixture of all tests comes after one of a module
        patch.setattr("halfbyte.models.bitsandbytes.is_faster", lambda facts: False)
        assert len(hb.accelerate(model).modules) == 14
    yield model
    hb.restore(model)


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[list[nvrtc.Variant]]:
    """What is compiled, call by call, as on an H200."""
    found: list[list[nvrtc.Variant]] = []
    monkeypatch.setattr(ahead.reach, "can_compile", lambda device: True)
    monkeypatch.setattr(ahead, "properties_of", lambda index: H200)
    monkeypatch.setattr(nvrtc, "compile_ahead", lambda variants: found.append(list(variants)))
    return found


def test_a_prompt_and_its_steps(tiny: Any, compiled: list[list[nvrtc.Variant]]) -> None:
    """Each once; a call like one before, and one with the same rows, has nothing new."""
    there = Ahead()
    for texts, tokens in ((1, 300), (1, 300), (3, 100)):
        there.begin(tiny, texts, tokens, False)
    first, second = compiled
    problems = set(weights_of(tiny).values())
    for problem in problems:
        assert variant_of(300, (problem,), H200, False) in first
        assert variant_of(1, (problem,), H200, False) in first
        assert variant_of(4, (problem,), H200, False) in second  # the bucket of three texts
    there.begin(tiny, 1, 300, True)
    assert len(compiled) == 3
    there.forget()
    there.begin(tiny, 1, 300, False)
    assert set(compiled[3]) == set(first)


def test_the_head_of_a_step(tiny: Any, compiled: list[list[nvrtc.Variant]], monkeypatch: pytest.MonkeyPatch) -> None:
    dense = torch.nn.Linear(512, 16 * H200.sms, dtype=torch.float16)
    monkeypatch.setattr(ahead, "dense_head", lambda model: dense)
    Ahead().begin(tiny, 3, 100, False)
    (wanted,) = head.variants([4], (16 * H200.sms, 512), torch.float16, True, H200)
    assert wanted in compiled[0]
    assert outside.dense_head(tiny) is tiny.lm_head


def test_every_step_of_a_server(
    tiny: Any, compiled: list[list[nvrtc.Variant]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a call with as many rows would compile is among them."""
    monkeypatch.setattr(serving_ahead, "properties_of", lambda index: H200)
    serving_ahead.begin_serving(tiny, 900)
    (every,) = compiled
    for rows in (1, 33, 64, 200, 512, 640, 900):
        Ahead().begin(tiny, 1, rows, False)
        assert set(compiled.pop()) <= set(every)
    assert ahead.rows_up_to(900)[-2:] == [896, 900]
    assert ahead.rows_up_to(3) == [1, 2, 3]
    monkeypatch.setattr(ahead.reach, "can_compile", lambda device: False)
    serving_ahead.begin_serving(tiny, 900)
    assert len(compiled) == 1


def test_attention_of_a_server(tiny: Any, compiled: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each kind of layer once, with what its calls will say."""
    pytest.importorskip("triton")
    from halfbyte.kernels.attention import paged_ahead

    asked: list[tuple[Any, Any]] = []
    monkeypatch.setattr(serving_ahead, "properties_of", lambda index: H200)
    monkeypatch.setattr(serving_ahead.paged, "reason_against", lambda model: None)
    monkeypatch.setattr(serving_ahead.paged, "page_of", lambda config: 256)
    monkeypatch.setattr(paged_ahead, "compile_ahead", lambda *given, **options: asked.append((given, options)))
    serving_ahead.begin_serving(tiny, 900)
    ((given, options),) = asked
    attention = tiny.model.layers[0].self_attn
    assert given[1:6] == (
        torch.bfloat16, tiny.config.num_attention_heads, tiny.config.num_key_value_heads, attention.head_dim,
        attention.scaling,
    )  # fmt: skip
    assert given[6:] == (256, serving_ahead.MOST_REQUESTS, 900, serving_ahead.MOST_TOKENS)
    assert options == {"softcap": None, "sinks": None, "window": 0}


def test_steps_with_what_they_fuse(tiny: Any, compiled: list[list[nvrtc.Variant]]) -> None:
    Ahead().begin(tiny, 1, 300, False)
    told = [dict(variant.constants) for variant in compiled[0]]
    assert any(one.get("norm") for one in told)
    assert any(one.get("residual") for one in told)
    assert any(one.get("parts", 1) > 1 for one in told)


def test_experts(compiled: list[list[nvrtc.Variant]]) -> None:
    model = models.load("tiny-moe", torch.device("cpu"), torch.bfloat16)
    hb.accelerate(model)
    Ahead().begin(model, 1, 2000, False)
    told = [dict(variant.constants) for variant in compiled[0]]
    assert any(one.get("experts") for one in told)
    assert any(one.get("grouped") for one in told)


def test_nothing_without_a_gpu(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc, "compile_ahead", lambda variants: pytest.fail("compiles"))
    Ahead().begin(tiny, 1, 300, False)


def test_a_copy_begins_anew(tiny: Any, compiled: list[list[nvrtc.Variant]]) -> None:
    there = Ahead()
    there.begin(tiny, 1, 300, False)
    for again in (copy.deepcopy(there), pickle.loads(pickle.dumps(there))):
        assert again.products is None
        assert not again.rows
