"""Guesses from the text itself, in captured steps: the text is that of a greedy search, in fewer steps."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from halfbyte.models import driven, guessing, loop
from halfbyte.models.guessing import WIDTH, look_up

from .families import DEVICE, counted, generate, hooked, make, plainly, prompt

pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("captures")


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by one with every step that guesses."""
    return counted(monkeypatch, guessing.GuessingStep, "advance")


@pytest.fixture
def driven_steps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by one with every step that transformers' loop drives, and with those that guess."""
    return counted(monkeypatch, driven.DrivenStep, "advance")


def found_by_hand(text: list[int], ngram: int, count: int) -> list[int]:
    for size in range(ngram, 0, -1):
        for begin in range(len(text) - size - 1, -1, -1):
            if text[begin : begin + size] == text[-size:]:
                follows = text[begin + size :]
                return (follows * count)[:count]
    return [text[-1]] * count


@pytest.mark.parametrize("ngram", [1, 2, 3])
def test_what_is_looked_up(ngram: int) -> None:
    draw = random.Random(ngram)
    for _ in range(300):
        text = [draw.randrange(draw.choice((2, 4, 50))) for _ in range(draw.randint(1, 30))]
        behind = [draw.randrange(3) for _ in range(draw.randint(0, 12))]  # what is there of a longer text before
        ids = torch.tensor(text + behind, device=DEVICE)
        found = look_up(ids, torch.tensor(len(text), device=DEVICE), ngram, 7)
        assert found.tolist() == found_by_hand(text, ngram, 7), (text, ngram)


@pytest.mark.parametrize("family", ["llama", "qwen3", "phi3"])
@pytest.mark.parametrize("most", [1, 2, 7, 40])
def test_the_text_of_a_greedy_search(family: str, most: int, steps: list[int]) -> None:
    """Also of padded prompts, and of a bucket that other calls have used."""
    model = hooked(make(family))
    for inputs in (prompt(1, 9), prompt(1, 12, 3), prompt(1, 30), prompt(1, 9)):
        found = generate(model, inputs, prompt_lookup_num_tokens=5, max_new_tokens=most)
        assert torch.equal(found, plainly(model, inputs, max_new_tokens=most))
        assert torch.equal(found, generate(model, inputs, max_new_tokens=most))
    assert bool(steps) is (most > 1)


def test_steps(steps: list[int]) -> None:
    """The text of a small model soon repeats itself: eight tokens a step, and those that were launched ahead."""
    model, inputs = hooked(make("llama")), prompt(1, 9)
    right = plainly(model, inputs, max_new_tokens=100)
    found = generate(model, inputs, prompt_lookup_num_tokens=10, max_new_tokens=100)
    assert torch.equal(found, right)
    text, at, needed = right[0].tolist(), inputs["input_ids"].shape[1] + 1, 0
    while at < len(text):
        guesses = found_by_hand(text[:at], guessing.NGRAM, WIDTH - 1)
        agrees = [a == b for a, b in zip(guesses, text[at:], strict=False)]
        at, needed = at + 1 + [*agrees, False].index(False), needed + 1
    assert needed <= len(steps) < 30


def test_narrow_steps_while_guesses_are_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few wide ones in the beginning and those that were launched before the host knew; and soon wide ones again."""
    model, inputs = hooked(make("llama")), prompt(1, 9)
    right = plainly(model, inputs, max_new_tokens=100)
    begin, end = 20, 60  # of the places where guesses are wrong
    text = torch.cat((right[0], right[0, :20]))
    widths: list[tuple[int, int]] = []

    def guesses(ids: Tensor, length: Tensor, ngram: int, count: int) -> Tensor:
        places = length + torch.arange(count, device=DEVICE)
        return torch.where((places < begin) | (places >= end), text[places], (text[places] + 1) % 64)

    advance = guessing.GuessingStep.advance

    def counted_advance(self: guessing.GuessingStep) -> None:
        widths.append((int(self.buffers.length), self.width))
        advance(self)

    monkeypatch.setattr(guessing, "look_up", guesses)
    monkeypatch.setattr(guessing.GuessingStep, "advance", counted_advance)
    found = generate(model, inputs, prompt_lookup_num_tokens=7, max_new_tokens=100)
    assert torch.equal(found, right)
    most = 6 + loop.AHEAD  # until the rate is low
    assert all(width == WIDTH for at, width in widths if at < begin or at > end + 2 + loop.AHEAD)
    assert all(width == 1 for at, width in widths if begin + most < at < end)
    assert sum(width == 1 for _, width in widths) > 20


def test_ends(steps: list[int]) -> None:
    """Wherever the token that ends the text stands among those of a step."""
    model, inputs = hooked(make("llama")), prompt(1, 9)
    free = plainly(model, inputs, max_new_tokens=60)[0, 9:].tolist()
    for token in sorted(set(free), key=free.index):
        settings: dict[str, Any] = {"max_new_tokens": 60, "eos_token_id": [token, 10**6]}
        found = generate(model, inputs, prompt_lookup_num_tokens=7, **settings)
        assert found[0, 9:].tolist() == free[: free.index(token) + 1]
    assert steps


def test_a_streamer_gets_every_token_once(steps: list[int]) -> None:
    model, inputs = hooked(make("llama")), prompt(1, 9)
    seen: list[Tensor] = []

    class Streamer:
        def put(self, value: Tensor) -> None:
            assert value.device.type == "cpu"
            seen.append(value.flatten())

        def end(self) -> None:
            seen.append(torch.tensor([-1]))

    found = generate(model, inputs, prompt_lookup_num_tokens=7, max_new_tokens=40, streamer=Streamer())
    assert torch.cat(seen).tolist() == [*found[0].tolist(), -1]
    assert len(seen) < 40
    assert steps


@pytest.mark.parametrize(
    "options", [{"repetition_penalty": 1.2}, {"return_dict_in_generate": True}, {"do_sample": True, "top_k": 1}]
)
def test_calls_that_transformers_loop_drives(
    options: dict[str, Any], steps: list[int], driven_steps: list[int]
) -> None:
    """Processors need each guess in the text before they see the next; other results are more than a text."""
    model, inputs = hooked(make("llama")), prompt(1, 9)
    found = generate(model, inputs, prompt_lookup_num_tokens=4, **options)
    greedy = {name: value for name, value in options.items() if name == "repetition_penalty"}
    assert torch.equal(getattr(found, "sequences", found), plainly(model, inputs, **greedy))
    assert driven_steps
    assert not steps


def test_a_capture_of_each_width_serves_all_lengths(monkeypatch: pytest.MonkeyPatch, steps: list[int]) -> None:
    captured = counted(monkeypatch, guessing.GuessingStep, "_capture")
    model = hooked(make("llama"))
    for length in (9, 20, 33):
        inputs = prompt(1, length)
        found = generate(model, inputs, prompt_lookup_num_tokens=4, max_new_tokens=30)
        assert torch.equal(found, plainly(model, inputs, max_new_tokens=30))
    assert len(captured) == 2
