"""Summaries of samples, and the order in which providers take turns."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from halfbyte.measure import timing

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
