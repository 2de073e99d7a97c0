"""The fuzzer draws what it says, finds what is wrong, and finds nothing in some dozens of problems on the CPU."""

import sys
import time
from typing import Any

import pytest
import torch

import halfbyte as hb

from . import fuzz


@pytest.mark.slow
def test_some_problems() -> None:
    told: list[str] = []
    assert fuzz.run(1, iter(range(60)), "cpu", told.append, time.monotonic() + 120) == 0, "\n".join(told)


def test_a_problem_can_be_had_again() -> None:
    assert fuzz.draw(3, 14) == fuzz.draw(3, 14) != fuzz.draw(3, 15)
    problems = [fuzz.draw(0, number) for number in range(400)]
    assert {p.layout for p in problems} == set(fuzz.LAYOUTS)
    assert {p.dtype for p in problems} == set(fuzz.DTYPES)
    assert any(p.invariant and p.nested and p.bias and p.odd_weight for p in problems)


def broken(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real: Any = getattr(hb, "dequantize" if name == "bits" else "linear")
    calls = iter(range(sys.maxsize))
    ways = {
        "error": lambda x, q, bias=None, **options: real(x, q, bias, **options) * 1.01,
        "again": lambda x, q, bias=None, **options: real(x, q, bias, **options) + next(calls) * 1e-3,
        "row": lambda x, q, bias=None, **options: real(x, q, bias, **options) + (len(x) == 2) * 1e-3,
        "bits": lambda q, *given, **options: real(q, *given, **options).mul_(1.25),
    }
    monkeypatch.setattr(hb, "dequantize" if name == "bits" else "linear", ways[name])


@pytest.mark.parametrize(
    ("name", "words"),
    [("error", "the error is"), ("again", "the same call"), ("row", "a row among 2"), ("bits", "dequantize differs")],
)
def test_what_is_wrong_is_found(name: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = fuzz.Problem(
        200, 256, 100, "nf4", 64, True, torch.float32, torch.float32, "contiguous", False, True, True
    )
    assert not list(fuzz.check(problem, "cpu", 0))
    broken(name, monkeypatch)
    assert any(words in wrong for wrong in fuzz.check(problem, "cpu", 0))
