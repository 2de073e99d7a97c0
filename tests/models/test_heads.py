"""Dense heads of accelerated models on a CPU."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import halfbyte as hb
from halfbyte.measure import models
from halfbyte.models import heads
from halfbyte.models.patch import is_method_of

pytest.importorskip("transformers")
cpu = pytest.importorskip("halfbyte.kernels.head.cpu")


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setattr(heads, "_is_faster", lambda head: True)
    model = models.load("tiny", torch.device("cpu"), torch.bfloat16).eval()
    yield model
    hb.restore(model)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of W, call by call."""
    found: list[int] = []
    theirs = cpu.head

    def head(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        found.append(len(weight))
        return theirs(x, weight, bias)

    monkeypatch.setattr(cpu, "head", head)
    return found


def is_ours(model: Any) -> bool:
    return is_method_of(heads.forward, vars(model.lm_head).get("forward"))


def test_a_step(tiny: Any, asked: list[int]) -> None:
    """One row is multiplied by our kernel, a prompt with all its logits and what is trained are not."""
    hb.accelerate(tiny)
    assert is_ours(tiny)
    ids, vocabulary = torch.randint(0, 100, (1, 5)), tiny.config.vocab_size
    with torch.no_grad():
        logits = tiny(ids).logits
        assert asked == []
        last = tiny(ids, logits_to_keep=1).logits
    assert asked == [vocabulary]
    torch.testing.assert_close(last, logits[:, -1:], rtol=2.0**-6, atol=2.0**-6)
    tiny.lm_head.weight.requires_grad_(True)
    assert tiny(ids, logits_to_keep=1).logits.requires_grad
    assert asked == [vocabulary]
    tiny.generate(ids, max_new_tokens=3, do_sample=False)
    assert asked == [vocabulary] * 4


def test_traced(tiny: Any, asked: list[int]) -> None:
    """A compiled model keeps torch's product."""
    hb.accelerate(tiny)
    x = torch.randn(1, 1, tiny.lm_head.in_features).bfloat16()
    with torch.no_grad():
        found = torch.compile(tiny.lm_head, backend="eager", fullgraph=True)(x)
    torch.testing.assert_close(found, nn.functional.linear(x, tiny.lm_head.weight))
    assert asked == []


def test_taken_once_and_given_back(tiny: Any) -> None:
    keys = list(tiny.state_dict())
    for _ in range(2):
        hb.accelerate(tiny)
        assert is_ours(tiny)
    assert is_ours(copy.deepcopy(tiny))
    assert list(tiny.state_dict()) == keys
    hb.restore(tiny)
    assert "forward" not in vars(tiny.lm_head)


def test_also_where_bitsandbytes_is_faster(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("halfbyte.models.bitsandbytes.is_faster", lambda facts: True)
    report = hb.accelerate(tiny)
    assert not report.modules
    assert is_ours(tiny)
    hb.restore(tiny)
    assert not is_ours(tiny)


def test_what_is_left_alone(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A head that another forward computes, one that torch multiplies with as fast, and any where numba is missing."""
    tiny.lm_head.forward = lambda x: x
    hb.accelerate(tiny)
    assert not is_ours(tiny)
    del tiny.lm_head.forward
    monkeypatch.setattr(heads, "_is_faster", lambda head: False)
    heads.apply(tiny)
    assert not is_ours(tiny)
    monkeypatch.undo()
    monkeypatch.setattr(heads, "has_numba", lambda: False)
    heads.apply(tiny)
    assert not is_ours(tiny)


def test_both_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once for each kind of head, but in fp16, where torch is as fast, and not of small ones."""
    times: list[int] = []

    def least(*functions: Any) -> tuple[float, float]:
        times.append(len([function() for function in functions]))
        return 1.0, 0.5

    monkeypatch.setattr(heads, "least", least)
    heads._measured.cache_clear()
    try:
        for dtype, faster in ((torch.float32, True), (torch.float16, False), (torch.float32, True)):
            assert heads._is_faster(nn.Linear(1024, 1 << 13, bias=False, dtype=dtype)) is faster
        assert not heads._is_faster(nn.Linear(64, 200, bias=False))
    finally:
        heads._measured.cache_clear()
    assert times == [2]
