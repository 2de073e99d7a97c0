"""What a request must be like before transformers' server sees it: some that it does not check end its worker, and then
every other request fails. vLLM checks all of this itself."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
PATHS = (COMPLETIONS, CHAT)


def problem(path: str, raw: bytes) -> str | None:
    """What is wrong with the body of a POST to one of PATHS, in words for who sent it; None where nothing is."""
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError) as error:
        return f"the body is no JSON: {error}"
    if not isinstance(body, dict):
        return f"the body is a {type(body).__name__}; a JSON object is expected"
    if path == COMPLETIONS:
        if not isinstance(body.get("prompt"), str) or not body["prompt"]:
            return f"prompt is {body.get('prompt')!r:.80}; a text that is not empty is expected"
    elif not _are_messages(body.get("messages")):
        return "messages is no list of objects that each have a role, the first of them with content"
    for name, accepted in NUMBERS.items():
        value = body.get(name)
        if value is not None and (
            isinstance(value, bool) or not isinstance(value, (int, float)) or not accepted(value)
        ):
            return f"{name} is {value!r:.80}; {EXPECTED[name]} is expected"
    if body.get("stop"):
        return "stop is given, which transformers' server ignores when it batches; vLLM knows it: pip install vllm"
    return None


NUMBERS: dict[str, Callable[[Any], bool]] = {
    "max_tokens": lambda value: isinstance(value, int) and value > 0,
    "max_completion_tokens": lambda value: isinstance(value, int) and value > 0,
    "temperature": lambda value: 0 <= value <= 2,
    "top_p": lambda value: 0 < value <= 1,
    "n": lambda value: value == 1,
}
EXPECTED = {
    "max_tokens": "a number of 1 or more", "max_completion_tokens": "a number of 1 or more",
    "temperature": "a number from 0 to 2", "top_p": "a number above 0, to 1", "n": "1, one answer to a request,",
}  # fmt: skip


def _are_messages(messages: Any) -> bool:
    if not isinstance(messages, list) or not messages:
        return False
    return all(isinstance(each, dict) and isinstance(each.get("role"), str) for each in messages) and bool(
        messages[0].get("content")
    )
