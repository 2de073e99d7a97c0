"""The soak draws what it says, finds what is wrong, and finds nothing in some calls on the CPU."""

from typing import Any

import pytest
import torch

from halfbyte.models import transformers as host

from . import soak
from .models.families import hooked, make

pytest.importorskip("transformers")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="make soak is for GPUs")


@pytest.mark.slow
def test_some_calls() -> None:
    told: list[str] = []
    threads = torch.get_num_threads()
    with soak.captures():
        assert soak.run(1, list(range(10)), told.append, longest=30) == 0, "\n".join(told)
    torch.set_num_threads(threads)


def test_a_call_can_be_had_again() -> None:
    assert soak.draw(3, 14) == soak.draw(3, 14) != soak.draw(3, 15)
    calls = [soak.draw(0, number) for number in range(600)]
    assert {call.family for call in calls} == set(soak.FAMILIES)
    assert {call.options for call in calls} == set(range(len(soak.OPTIONS)))
    assert {call.before for call in calls} == {"", "release", "restore"}
    assert any(call.padding for call in calls)
    assert all(call.padding < call.tokens for call in calls)


def test_what_is_wrong_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    real: Any = soak.generate
    monkeypatch.setattr(soak, "generate", lambda *given, **named: real(*given, **named) + 1)
    monkeypatch.setattr(soak, "kept_by", lambda model: 1 << 60)
    call = soak.Call("llama", 1, 5, 0, 2, 0, "release")
    threads = torch.get_num_threads()
    with soak.captures():
        model = hooked(make("llama"))
        behind, tokens, share = soak.check(call, model)
        host.undo(model)
        host.undo_in_library()
    torch.set_num_threads(threads)
    assert "kept behind release" in behind
    assert "tokens differ" in tokens
    assert "the share is" in share


def test_only_ties_are_let_through(monkeypatch: pytest.MonkeyPatch) -> None:
    call = soak.Call("llama", 2, 5, 1, 4, 0, "")
    inputs = soak.prompt(call.texts, call.tokens, call.padding)
    model = make("llama")
    tokens = soak.plainly(model, inputs, max_new_tokens=call.new)
    tokens[1, 6:] = 3
    assert not soak.parts_at_ties(tokens, model, inputs, max_new_tokens=call.new)
    monkeypatch.setattr(soak, "TIE", 1e6)
    assert soak.parts_at_ties(tokens, model, inputs, max_new_tokens=call.new)
    tokens[0, 0] = 3  # of the prompt
    assert not soak.parts_at_ties(tokens, model, inputs, max_new_tokens=call.new)
