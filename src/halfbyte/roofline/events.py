"""What torch's profiler recorded, as plain values: kernels with the moment of their launch, host ranges, operators.

The source is the Chrome trace, which is the profiler's public format. Times are µs of one clock.
"""

from __future__ import annotations

import json
import tempfile
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
CALLS = ("cuda_runtime", "cuda_driver")
WAITS = ("cudaDeviceSynchronize", "hipDeviceSynchronize")
PAUSES = ("Activity Buffer Request",)  # milliseconds of the profiler's own, within the first call that it records


@dataclass(frozen=True)
class Kernel:
    """Work of the GPU. start, duration: µs. launched: when the host asked for it, µs, or None where nobody saw."""

    name: str
    start: float
    duration: float
    launched: float | None = None

    @property
    def end(self) -> float:
        return self.start + self.duration


@dataclass(frozen=True)
class Span:
    """Something on the host, from start to end in µs: a range that was marked, an operator, a wait for the GPU."""

    name: str
    start: float
    end: float


@dataclass(frozen=True)
class Trace:
    """Everything in the order in which it began."""

    kernels: tuple[Kernel, ...] = ()
    ranges: tuple[Span, ...] = ()
    operators: tuple[Span, ...] = ()
    waits: tuple[Span, ...] = ()
    pauses: tuple[Span, ...] = ()


@dataclass(frozen=True)
class Segment:
    """A stretch of time, in µs, and the innermost span in it."""

    start: float
    end: float
    span: Span


def read(profiler: Any) -> Trace:
    """The trace of a torch.profiler.profile that has ended."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return parse(json.loads(path.read_text(encoding="utf-8"))["traceEvents"])


def parse(events: Iterable[Mapping[str, Any]], prefix: str = "halfbyte|") -> Trace:
    """The trace in a list of Chrome's complete events. prefix: of the ranges to keep; the host thread is theirs."""
    complete = [event for event in events if event.get("ph") == "X"]
    asked = _starts(complete, CALLS, "correlation")
    # A launch of a kind that the profiler does not list; the operator or range around it is known all the same.
    around = _starts(complete, ("cpu_op", "user_annotation"), "External id")
    kernels = []
    for event in complete:
        if event.get("cat") in DEVICE:
            facts = event.get("args", {})
            launched = asked.get(facts.get("correlation"), around.get(facts.get("External id")))
            kernels.append(Kernel(event["name"], event["ts"], event["dur"], launched))
    marked = [e for e in complete if e.get("cat") == "user_annotation" and e["name"].startswith(prefix)]
    threads = {event["tid"] for event in marked}

    def spans(category: tuple[str, ...], names: tuple[str, ...] | None = None) -> tuple[Span, ...]:
        found = (e for e in complete if e.get("cat") in category and (names is None or e["name"] in names))
        return _ordered(Span(e["name"], e["ts"], e["ts"] + e["dur"]) for e in found if names or e["tid"] in threads)

    ranges = _ordered(Span(e["name"].removeprefix(prefix), e["ts"], e["ts"] + e["dur"]) for e in marked)
    kernels.sort(key=lambda kernel: kernel.start)
    return Trace(tuple(kernels), ranges, spans(("cpu_op",)), spans(CALLS, WAITS), spans(("overhead",), PAUSES))


def _starts(events: Iterable[Mapping[str, Any]], categories: tuple[str, ...], key: str) -> dict[Any, float]:
    """A number that tells an event to the event's start."""
    return {
        event["args"][key]: event["ts"]
        for event in events
        if event.get("cat") in categories and key in event.get("args", {})
    }


def _ordered(spans: Iterable[Span]) -> tuple[Span, ...]:
    return tuple(sorted(spans, key=lambda span: (span.start, -span.end)))


def flatten(spans: Iterable[Span]) -> list[Segment]:
    """Nested spans of one thread cut where the innermost one changes; what no span covers is left out."""
    segments: list[Segment] = []
    open_spans: list[Span] = []
    now = float("-inf")

    def advance(moment: float) -> None:
        nonlocal now
        if open_spans and moment > now:
            segments.append(Segment(now, moment, open_spans[-1]))
        now = max(now, moment)

    for span in _ordered(spans):
        while open_spans and open_spans[-1].end <= span.start:
            advance(open_spans[-1].end)
            open_spans.pop()
        advance(span.start)
        # Rounded clocks let an inner span end a moment after the one around it.
        end = min(span.end, open_spans[-1].end) if open_spans else span.end
        open_spans.append(span if end == span.end else Span(span.name, span.start, end))
    while open_spans:
        advance(open_spans[-1].end)
        open_spans.pop()
    return segments


class Finder:
    """Says which span was the innermost at a moment."""

    def __init__(self, spans: Iterable[Span]) -> None:
        self.segments = flatten(spans)
        self.starts = [segment.start for segment in self.segments]

    def at(self, moment: float) -> Span | None:
        index = bisect_right(self.starts, moment) - 1
        return self.segments[index].span if index >= 0 and moment < self.segments[index].end else None


def exclusive(kernels: Sequence[Kernel]) -> list[float]:
    """µs of each kernel in which no earlier one still ran, so that they add up to the time the GPU was busy."""
    result, last = [], float("-inf")
    for kernel in kernels:
        result.append(max(0.0, kernel.end - max(kernel.start, last)))
        last = max(last, kernel.end)
    return result
