"""Traces become plain values; nested spans and overlapping kernels are counted once."""

import math

import pytest
import torch
from synthetic import events, trace

from halfbyte.roofline.events import Finder, Kernel, Span, exclusive, flatten, parse, read


def test_kernels_know_when_they_were_launched() -> None:
    found = trace(("products|q", "gemm", 10, 30, 5), ("", "add", 12, 35, 2), waits=[(0, 1), (20, 40)])
    assert [kernel.launched for kernel in found.kernels] == [10, 12]
    assert [span.name for span in found.ranges] == ["products|q"]
    assert [wait.end for wait in found.waits] == [1, 40]


def test_a_kernel_without_a_launch_is_kept() -> None:
    lost = [event for event in events([("", "gemm", 10, 30, 5)], []) if event["cat"] == "kernel"]
    (kernel,) = parse(lost).kernels
    assert kernel == Kernel("gemm", 30, 5, None)


def test_a_launch_that_is_not_listed_is_known_by_what_was_around_it() -> None:
    around = {"ph": "X", "cat": "user_annotation", "name": "halfbyte|products|q", "tid": 1, "ts": 5.0, "dur": 9.0}
    kernel = {"ph": "X", "cat": "kernel", "name": "decode", "ts": 30.0, "dur": 2.0}
    found = parse([around | {"args": {"External id": 3}}, kernel | {"args": {"External id": 3, "correlation": 8}}])
    assert found.kernels[0].launched == 5.0


def test_memory_operations_are_kernels_too() -> None:
    event = {"ph": "X", "cat": "gpu_memcpy", "name": "Memcpy DtoD", "ts": 1.0, "dur": 2.0, "args": {"correlation": 9}}
    assert parse([event]).kernels == (Kernel("Memcpy DtoD", 1.0, 2.0, None),)


def test_flatten() -> None:
    spans = [Span("a", 0, 10), Span("b", 2, 5), Span("c", 3, 4), Span("d", 12, 13)]
    assert [(s.start, s.end, s.span.name) for s in flatten(spans)] == [
        (0, 2, "a"), (2, 3, "b"), (3, 4, "c"), (4, 5, "b"), (5, 10, "a"), (12, 13, "d"),
    ]  # fmt: skip


def test_flatten_when_an_inner_span_ends_late() -> None:
    """By a rounded clock; no time is counted twice."""
    segments = flatten([Span("a", 0, 10), Span("b", 8, 10.001), Span("c", 10, 11)])
    assert math.isclose(sum(s.end - s.start for s in segments), 11)


def test_finder() -> None:
    finder = Finder([Span("a", 0, 10), Span("b", 2, 5)])
    names = [span.name if (span := finder.at(moment)) else None for moment in (-1, 0, 2, 4.9, 5, 10)]
    assert names == [None, "a", "b", "b", "a", None]


def test_overlapping_kernels_add_up_to_busy_time() -> None:
    kernels = [Kernel("a", 0, 10), Kernel("b", 5, 10), Kernel("c", 6, 1), Kernel("d", 20, 5)]
    assert exclusive(kernels) == [10, 5, 0, 5]


@pytest.mark.filterwarnings("ignore")
def test_a_real_trace() -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        with torch.profiler.record_function("halfbyte|norms|"):
            torch.ones(4) + 1
        torch.zeros(3)
    found = read(profiler)
    assert [span.name for span in found.ranges] == ["norms|"]
    assert "aten::add" in [span.name for span in found.operators]
