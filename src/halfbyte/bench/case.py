"""A case is one problem, solved by several providers that must agree before any of them is timed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from halfbyte.measure import records
from halfbyte.measure.timing import Timing, time_all


@dataclass(frozen=True)
class Case:
    """name: what a reader sees. bytes: what any solution must move, in bytes, or what each provider must. sets: how
    many independent inputs there are, enough of them that none is still in a cache when its turn comes. providers: name
    to function of an input's number. reference: the provider whose result is right, or what gives each provider's right
    result. check: None if (result, right result) agree, else what is wrong. measure: facts of (result, right result).
    left_out: peers that cannot take part here, and why.
    """

    name: str
    bytes: int | Mapping[str, int]
    sets: int
    providers: Mapping[str, Callable[[int], Any]]
    reference: str | Mapping[str, Callable[[int], Any]]
    check: Callable[[Any, Any], str | None]
    device: torch.device
    facts: Mapping[str, Any] = field(default_factory=dict)
    measure: Callable[[Any, Any], Mapping[str, Any]] = lambda result, right: {}
    left_out: Mapping[str, str] = field(default_factory=dict)

    def bytes_of(self, provider: str) -> int:
        return self.bytes if isinstance(self.bytes, int) else self.bytes[provider]

    def right(self, provider: str, index: int) -> Any:
        """What `provider` should make of input number `index`."""
        known = self.providers[self.reference] if isinstance(self.reference, str) else self.reference[provider]
        return known(index)


@dataclass(frozen=True)
class Row:
    """One provider's line: times in µs, or `error` where its result was wrong and nothing was timed."""

    case: str
    provider: str
    bytes: int
    timing: Timing | None
    error: str | None
    facts: Mapping[str, Any]

    @property
    def gigabytes_per_second(self) -> float | None:
        return self.bytes / self.timing.median / 1e3 if self.timing else None


def same_bits(result: torch.Tensor, right: torch.Tensor) -> str | None:
    """A check: shape, dtype and every bit equal."""
    if result.shape != right.shape or result.dtype != right.dtype:
        return f"{list(result.shape)} {result.dtype} instead of {list(right.shape)} {right.dtype}"
    width = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[right.itemsize]
    wrong = int((result.contiguous().view(width) != right.contiguous().view(width)).sum())
    return f"{wrong} of {right.numel()} values differ" if wrong else None


def first_line(error: Exception) -> str:
    """Of what a peer failed with."""
    return f"{type(error).__name__}: {error}".splitlines()[0]


def run(case: Case, rounds: int) -> list[Row]:
    """Check every provider on every input, then time those that are right, in rotated order."""
    checked = _checked(case)
    right = {name: provider for name, provider in case.providers.items() if checked[name][0] is None}
    timings = time_all(right, case.sets, case.device, rounds) if right else {}
    return [
        Row(case.name, name, case.bytes_of(name), timings.get(name), error, {**case.facts, **measured})
        for name, (error, measured) in checked.items()
    ]


def _checked(case: Case) -> dict[str, tuple[str | None, Mapping[str, Any]]]:
    """The first error of each provider, and what is measured of its first result.

    All of them take one input after the other, so that a right result that several have need not be kept for long.
    """
    errors: dict[str, str | None] = dict.fromkeys(case.providers)
    measured: dict[str, Mapping[str, Any]] = {name: {} for name in case.providers}
    for index in range(case.sets):
        for name, provider in case.providers.items():
            if errors[name] is not None:
                continue
            result, right = provider(index), case.right(name, index)
            errors[name] = case.check(result, right)
            if errors[name] is None and index == 0:
                measured[name] = case.measure(result, right)
    return {name: (errors[name], measured[name]) for name in case.providers}


def make_record(bench: str, device: torch.device, rows: Sequence[Row], copy: float) -> dict[str, Any]:
    """copy: the measured ceiling in GB/s."""
    return {
        "bench": bench,
        "environment": records.environment(device),
        "copy_gb_per_s": round(copy, 1),
        "rows": [_row(row, copy) for row in rows],
    }


def _row(row: Row, copy: float) -> dict[str, Any]:
    line: dict[str, Any] = {"case": row.case, "provider": row.provider, **row.facts, "bytes": row.bytes}
    if row.timing is None:
        return line | {"error": row.error}
    speed = row.gigabytes_per_second or 0.0
    timing = row.timing
    return line | {
        "median_us": round(timing.median, 3),
        "p20_us": round(timing.p20, 3),
        "p80_us": round(timing.p80, 3),
        "samples": timing.samples,
        "clock": timing.clock,
        "gb_per_s": round(speed, 1),
        "of_copy": round(speed / copy, 4),
    }
