"""Requests that would harm transformers' server are told what is wrong with them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from halfbyte.serving.requests import CHAT, COMPLETIONS, problem

MESSAGES = [{"role": "system", "content": "x"}, {"role": "user", "content": [{"type": "text", "text": "y"}]}]


def asked(path: str, **body: Any) -> str | None:
    return problem(path, json.dumps(body).encode())


def test_good_ones() -> None:
    assert asked(COMPLETIONS, prompt="x", max_tokens=1, temperature=0, top_p=1.0, n=1, stop=None) is None
    assert asked(CHAT, messages=MESSAGES, max_completion_tokens=5, temperature=2) is None
    assert asked(CHAT, messages=[*MESSAGES, {"role": "assistant", "content": None}]) is None


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        (COMPLETIONS, {}, "prompt is None"),
        (COMPLETIONS, {"prompt": ""}, "prompt is ''"),
        (COMPLETIONS, {"prompt": [1, 2]}, "prompt is"),
        (COMPLETIONS, {"prompt": "x", "max_tokens": 0}, "max_tokens is 0; a number of 1 or more is expected"),
        (COMPLETIONS, {"prompt": "x", "max_tokens": True}, "max_tokens is True"),
        (COMPLETIONS, {"prompt": "x", "max_tokens": 1.5}, "max_tokens is 1.5"),
        (COMPLETIONS, {"prompt": "x", "temperature": -1}, "temperature is -1"),
        (COMPLETIONS, {"prompt": "x", "top_p": "a" * 500}, "top_p is 'aaa"),
        (COMPLETIONS, {"prompt": "x", "n": 2}, "n is 2; 1, one answer to a request, is expected"),
        (COMPLETIONS, {"prompt": "x", "stop": ["y"]}, "stop is given"),
        (CHAT, {"messages": "x"}, "messages is no list"),
        (CHAT, {"messages": []}, "messages is no list"),
        (CHAT, {"messages": [{"content": "x"}]}, "messages is no list"),
        (CHAT, {"messages": [{"role": "user"}]}, "messages is no list"),
    ],
)
def test_bad_ones(path: str, body: dict[str, Any], said: str) -> None:
    message = asked(path, **body)
    assert message is not None
    assert message.startswith(said)
    assert len(message) < 250


@pytest.mark.parametrize("raw", [b"", b"{", b"\xff", b"[" * 10**5, b"[1]", b"null"])
def test_bodies_that_are_no_objects(raw: bytes) -> None:
    assert (problem(COMPLETIONS, raw) or "").startswith("the body is")
