from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from halfbyte.models import prompts
from halfbyte.models.prompts import begins_at_once, without_cudnn


@pytest.fixture
def cudnn(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """torch's switch, on whatever machine."""
    there = SimpleNamespace(on=True)
    monkeypatch.setattr(torch.backends.cuda, "cudnn_sdp_enabled", lambda: there.on)
    monkeypatch.setattr(torch.backends.cuda, "enable_cudnn_sdp", lambda on: setattr(there, "on", on))
    return there


def test_it_is_left_out_while_any_thread_has_a_prompt(cudnn: SimpleNamespace) -> None:
    inside, may_end = threading.Event(), threading.Event()

    def other() -> None:
        with without_cudnn:
            inside.set()
            may_end.wait(10)

    thread = threading.Thread(target=other)
    with without_cudnn:
        thread.start()
        assert inside.wait(10)
        assert not cudnn.on
    assert not cudnn.on
    may_end.set()
    thread.join()
    assert cudnn.on


def test_it_is_afterwards_as_it_was(cudnn: SimpleNamespace) -> None:
    with pytest.raises(ValueError, match="failed"), without_cudnn:
        raise ValueError("failed")
    assert cudnn.on
    cudnn.on = False
    with without_cudnn:
        pass
    assert not cudnn.on


def test_which_prompts() -> None:
    def ids(tokens: int, is_cuda: bool) -> torch.Tensor:
        return cast(Any, SimpleNamespace(shape=(2, tokens), is_cuda=is_cuda))

    assert begins_at_once(ids(300, True))
    assert not begins_at_once(ids(300, False))
    assert not begins_at_once(ids(prompts.LONG, True))
