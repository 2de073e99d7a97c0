"""Summaries of samples, the order in which providers take turns, and that nothing wrong is ever timed."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from halfbyte.bench import timing
from halfbyte.bench.case import Case, run, same_bits
from halfbyte.bench.ceiling import copy_bandwidth

CPU = torch.device("cpu")


def test_summary_of_known_samples() -> None:
    summary = timing.summarize([float(value) for value in (5, 3, 1, 2, 4, 0, 10, 9, 8, 7, 6)], "wall")
    assert summary == timing.Timing(median=5, p20=2, p80=8, samples=11, clock="wall")
    assert timing.summarize([3.0], "gpu") == timing.Timing(3, 3, 3, 1, "gpu")


@given(st.lists(st.floats(0, 1e9), min_size=1, max_size=50))
def test_summary_is_ordered(samples: list[float]) -> None:
    summary = timing.summarize(samples, "wall")
    assert min(samples) <= summary.p20 <= summary.median <= summary.p80 <= max(samples)
    assert summary.samples == len(samples)


def test_providers_take_turns() -> None:
    """Each is called once to warm up; then the order rotates, and so do the inputs."""
    calls: list[tuple[str, int]] = []
    providers = {name: lambda index, name=name: calls.append((name, index)) for name in "abc"}
    timings = timing.time_all(providers, 2, CPU, rounds=3)
    assert calls[:3] == [("a", 0), ("b", 0), ("c", 0)]
    assert "".join(name for name, _ in calls[3:]) == "abcbcacab"
    assert [index for _, index in calls[3:]] == [1, 0, 1, 0, 1, 0, 1, 0, 1]
    assert {name: result.samples for name, result in timings.items()} == {"a": 3, "b": 3, "c": 3}
    assert all(result.clock == "wall" and result.median > 0 for result in timings.values())


@pytest.mark.parametrize(
    ("result", "words"),
    [
        (torch.zeros(6), None),
        (torch.tensor([0.0, 0, 0, 1, 1, 0]), "2 of 6 values differ"),
        (-torch.zeros(6), "6 of 6 values differ"),
        (torch.zeros(6).half(), r"\[6\] torch.float16 instead of \[6\] torch.float32"),
        (torch.zeros(2, 3), r"\[2, 3\] torch.float32 instead of \[6\]"),
    ],
)
def test_same_bits(result: torch.Tensor, words: str | None) -> None:
    error = same_bits(result, torch.zeros(6))
    assert error is None if words is None else error is not None and re.search(words, error)


def test_same_bits_of_nan() -> None:
    assert same_bits(torch.full((3,), torch.nan), torch.full((3,), torch.nan)) is None


def test_what_is_wrong_is_never_timed(case: Callable[..., Case]) -> None:
    """Wrong on one input of two is wrong; what follows is timed all the same."""
    calls: list[str] = []

    def wrong(index: int) -> Any:
        calls.append("wrong")
        return torch.full((6,), 0.0)

    def right(index: int) -> Any:
        calls.append("right")
        return torch.full((6,), float(index))

    rows = {row.provider: row for row in run(case(wrong=wrong, right=right), rounds=5)}
    assert list(rows) == ["wrong", "right", "bitsandbytes"]
    assert (rows["wrong"].timing, rows["wrong"].gigabytes_per_second) == (None, None)
    assert rows["wrong"].error == "6 of 6 values differ"
    assert calls.count("wrong") == 2
    assert calls.count("right") == 2 + 1 + 5
    for name in ("right", "bitsandbytes"):
        row = rows[name]
        assert row.error is None
        assert row.timing is not None
        assert row.timing.samples == 5
        assert row.gigabytes_per_second == pytest.approx(6000 / row.timing.median / 1e3)


def test_the_copy_ceiling(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes read and written, over the median."""
    seconds = timing.Timing(1000.0, 900.0, 1100.0, 3, "wall")
    monkeypatch.setattr("halfbyte.bench.ceiling.time_all", lambda *_: {"copy": seconds})
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda numel, **keywords: empty(numel // 2**16, **keywords))
    speed, result = copy_bandwidth(CPU, rounds=3)
    assert result is seconds
    assert speed == 2 * 4 * 2**10 / 1000 / 1e3
