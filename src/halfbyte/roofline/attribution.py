"""A profiled step: every microsecond of it in one class, and what lies between kernels as a class of its own."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from halfbyte.roofline.align import align
from halfbyte.roofline.events import Finder, Segment, Trace, exclusive, flatten
from halfbyte.roofline.names import FREE, GAPS, OURS, Label, base, classify
from halfbyte.roofline.roles import label_in

STEP = "step"  # the range around all steps on a CPU
OUTSIDE = "outside torch"  # the name of what runs in a module, and in no operator


@dataclass(frozen=True)
class Piece:
    """A stretch of one step. start: µs after the step's start. duration: µs. calls: kernels that begin with it."""

    name: str
    start: float
    duration: float
    label: Label
    calls: int = 1


@dataclass(frozen=True)
class Profile:
    """A step, averaged over several. total: µs from start to end by the profiler's clock; busy and gaps add up to it.
    classes: label to (µs, kernels). names: label to the bare names of its kernels, with (µs, kernels) of each.
    timeline: the pieces of one step."""

    total: float
    classes: dict[Label, tuple[float, float]]
    names: dict[Label, dict[str, tuple[float, float]]] = field(default_factory=dict)
    timeline: tuple[Piece, ...] = ()


def labels_by_launch(trace: Trace) -> list[tuple[str, Label]]:
    """(name, label) of every kernel of a step whose modules ran in marked ranges.

    A kernel whose launch nobody saw is taken for a neighbour of the one before it.
    """
    finder, labels, last = Finder(trace.ranges), [], float("-inf")
    for kernel in trace.kernels:
        last = kernel.launched if kernel.launched is not None else last
        span = finder.at(last)
        labels.append((kernel.name, classify(kernel.name, label_in(span.name) if span else None)))
    return labels


def attribute_gpu(trace: Trace, known: Sequence[tuple[str, Label]], steps: int) -> Profile:
    """A profile of `steps` equal steps that followed each other without marks; known: of one marked step.

    Raises ValueError for a trace without kernels.
    """
    kernels = trace.kernels
    if not kernels:
        raise ValueError(
            "the profiler recorded no kernel; another profiler may hold the GPU: end it and run again, with "
            "KINETO_LOG_LEVEL=0 to see what torch says"
        )
    labels: list[Label] = []
    bounds = _bounds(kernels, steps)
    done: dict[tuple[str, ...], list[Label]] = {}
    for first, last in bounds:
        names = tuple(kernel.name for kernel in kernels[first:last])
        if names not in done:
            done[names] = align(known, names)
        labels += done[names]
    times = exclusive(kernels)
    start, end = _extent(trace)
    middle = bounds[len(bounds) // 2]
    timeline = [
        Piece(kernels[i].name, kernels[i].end - times[i] - kernels[middle[0]].start, times[i], labels[i])
        for i in range(*middle)
    ]
    pieces = [Piece(kernel.name, 0, us, label) for kernel, us, label in zip(kernels, times, labels, strict=True)]
    return _sum(pieces, timeline, end - start, steps)


def attribute_cpu(trace: Trace, steps: int) -> Profile:
    """A profile of `steps` marked steps on a CPU, from the time that each operator spends in itself.

    In the range of a projection or a norm, what no operator claims is a kernel called without torch's dispatcher, as
    halfbyte's are. Elsewhere it is Python, which is a gap. Raises ValueError where no step was marked.
    """
    whole = [span for span in trace.ranges if span.name == STEP]
    if not whole:
        raise ValueError("the profiler recorded no step; end other profilers in this process and run again")
    start, end = whole[0].start, whole[-1].end
    ranges = [span for span in trace.ranges if span.name != STEP]
    finder = Finder(ranges)
    seen: set[tuple[str, float]] = set()
    pieces = []
    for segment in flatten([*whole, *ranges, *trace.operators]):
        span, length = segment.span, segment.end - segment.start
        label, counts = _on_cpu(segment, finder)
        name = span.name if label_in(span.name) is None else OUTSIDE
        new = counts and (span.name, span.start) not in seen
        seen.add((span.name, span.start))
        pieces.append(Piece(name, segment.start - start, length, label, int(new)))
    named = [piece for piece in pieces if piece.label != GAPS]
    first, last = _bounds(named, steps)[steps // 2]
    timeline = [replace(piece, start=piece.start - named[first].start) for piece in named[first:last]]
    return _sum(named, timeline, end - start, steps)


def _on_cpu(segment: Segment, finder: Finder) -> tuple[Label, bool]:
    """The class of a segment, and whether its span counts: a module's call in products and norms, an operator
    elsewhere."""
    name, span = segment.span.name, finder.at(segment.start)
    within = label_in(span.name) if span else None
    is_operator = name != STEP and label_in(name) is None
    if within is not None and within.group in ("products", "norms"):
        return (classify(name, within), False) if is_operator else (within, True)
    if not is_operator or FREE.search(name):
        return GAPS, False
    return classify(name, within), True


def _bounds(pieces: Sequence[object], steps: int) -> list[tuple[int, int]]:
    """Where each step begins and ends; steps that are not equal are cut into equal numbers of pieces."""
    edges = [round(len(pieces) * step / steps) for step in range(steps + 1)]
    return list(pairwise(edges))


def _extent(trace: Trace) -> tuple[float, float]:
    """From the end of the last wait for an idle GPU, or of the profiler, before the first kernel, to the end of the
    first wait after the last kernel."""
    first, last = trace.kernels[0].start, max(kernel.end for kernel in trace.kernels)
    # The host's wait ends a moment after the GPU's work, by clocks that agree to a microsecond or two.
    before = [wait.end for wait in (*trace.waits, *trace.pauses) if wait.end <= first]
    after = [wait.end for wait in trace.waits if wait.end >= last - 5]
    return max(before, default=first), max(last, min(after, default=last))


def _sum(pieces: Iterable[Piece], timeline: Sequence[Piece], total: float, steps: int) -> Profile:
    names: dict[Label, dict[str, tuple[float, float]]] = defaultdict(dict)
    for piece in pieces:
        kernels, name = names[piece.label], base(piece.name)
        us, calls = kernels.get(name, (0.0, 0.0))
        kernels[name] = (us + piece.duration / steps, calls + piece.calls / steps)
    classes = {
        label: (sum(us for us, _ in kernels.values()), sum(calls for _, calls in kernels.values()))
        for label, kernels in names.items()
    }
    classes[GAPS] = (total / steps - sum(us for us, _ in classes.values()), 0.0)
    return Profile(total / steps, classes, dict(names), tuple(timeline))


def made_dense(profile: Profile) -> dict[str, bool]:
    """Role to whether its weights were made dense before they were multiplied, going by the kernels it took."""
    dequantized = {label.role for label in profile.classes if label.group == "dequantize" and label.role}
    return {
        label.role: label.role in dequantized and not any(_reads_four_bits(name) for name in profile.names[label])
        for label in profile.classes
        if label.group == "products"
    }


def _reads_four_bits(name: str) -> bool:
    return name in OURS or "4bit" in name
