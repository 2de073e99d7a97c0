"""A bounded load on an OpenAI-compatible server of this machine: so many clients, each with one request at a time.

A client sends its next request when it has the whole answer to the last. Prompts and their order come from a seed.
Times are those that a client sees: from sending to the first piece of text, and from each piece to the next.
"""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException
from typing import Any

HOST = "127.0.0.1"  # a load goes nowhere else
PATIENCE = 120.0  # seconds until the next piece of an answer


@dataclass(frozen=True)
class Load:
    """prompts: texts, of which each request takes one. requests: how many in all. new_tokens: that each asks for.
    seconds: after so long no request is begun. ignore_eos: have the server go on behind the end of a text."""

    model: str
    prompts: Sequence[str]
    requests: int
    new_tokens: int
    seconds: float = 600.0
    seed: int = 0
    ignore_eos: bool = False

    def order(self) -> list[str]:
        """The prompt of each request."""
        draw = random.Random(self.seed)
        return [self.prompts[draw.randrange(len(self.prompts))] for _ in range(self.requests)]


@dataclass
class Answer:
    """sent, arrived: seconds of a clock, of the request and of each piece of text. error: what went wrong, if so."""

    prompt: str
    sent: float
    arrived: list[float] = field(default_factory=list)
    text: str = ""
    tokens: int = 0
    error: str = ""


def run(port: int, load: Load, clients: int) -> list[Answer]:
    """Every answer, in the order of requests; those that were not begun in time are not there."""
    order, answers = load.order(), {}
    lock, places = threading.Lock(), iter(range(load.requests))
    ends = time.monotonic() + load.seconds

    def client() -> None:
        while time.monotonic() < ends:
            with lock:
                place = next(places, None)
            if place is None:
                return
            answers[place] = ask(port, load, order[place])

    threads = [threading.Thread(target=client, daemon=True) for _ in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [answers[place] for place in sorted(answers)]


def ask(port: int, load: Load, prompt: str) -> Answer:
    """One request for a greedy answer, streamed."""
    body: dict[str, Any] = {
        "model": load.model, "prompt": prompt, "max_tokens": load.new_tokens, "temperature": 0, "stream": True,
    }  # fmt: skip
    if load.ignore_eos:
        body |= {"ignore_eos": True, "stream_options": {"include_usage": True}}
    answer = Answer(prompt, time.perf_counter())
    connection = HTTPConnection(HOST, port, timeout=PATIENCE)
    try:
        connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            answer.error = f"{response.status}: {response.read(300).decode(errors='replace')}"
            return answer
        for line in response:
            if line.startswith(b"data: {"):
                _take(answer, json.loads(line[len(b"data: ") :]))
    except (OSError, HTTPException, ValueError) as error:
        answer.error = f"{type(error).__name__}: {error}"
    finally:
        connection.close()
    answer.tokens = answer.tokens or len(answer.arrived)
    if not answer.error and not answer.arrived:
        answer.error = "an answer without text"
    return answer


def _take(answer: Answer, event: dict[str, Any]) -> None:
    if usage := event.get("usage"):
        answer.tokens = usage.get("completion_tokens") or answer.tokens
    for choice in event.get("choices", ()):
        if text := choice.get("text"):
            answer.arrived.append(time.perf_counter())
            answer.text += text
    if error := event.get("error"):
        answer.error = str(error)


def summary(answers: Sequence[Answer]) -> dict[str, Any]:
    """Tokens a second over the whole load, and percentiles in ms: to the first token, and between tokens."""
    good = [answer for answer in answers if not answer.error]
    facts: dict[str, Any] = {"requests": len(answers), "failed": len(answers) - len(good)}
    if not good:
        return facts | {"error": answers[0].error if answers else "no request was begun"}
    took = max(answer.arrived[-1] for answer in good) - min(answer.sent for answer in good)
    first = [1e3 * (answer.arrived[0] - answer.sent) for answer in good]
    between = [1e3 * (b - a) for answer in good for a, b in zip(answer.arrived, answer.arrived[1:], strict=False)]
    tokens = sum(answer.tokens for answer in good)
    facts |= {"tokens": tokens, "seconds": round(took, 3), "tokens_per_s": round(tokens / took, 1)}
    for name, values in (("first_ms", first), ("between_ms", between)):
        facts |= {f"{name}_p50": percentile(values, 50), f"{name}_p99": percentile(values, 99)}
    if facts["failed"]:
        facts["error"] = next(answer.error for answer in answers if answer.error)
    return facts


def percentile(values: Sequence[float], percent: int) -> float | None:
    """The least of the values that `percent` of them do not exceed; None of none."""
    ordered = sorted(values)
    return round(ordered[max(0, -(-len(ordered) * percent // 100) - 1)], 3) if ordered else None
