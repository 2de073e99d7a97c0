"""A case is one problem, solved by several providers that must agree before any of them is timed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from halfbyte.bench.timing import Timing, time_all


@dataclass(frozen=True)
class Case:
    """name: what a reader sees. bytes: what any solution must move, in bytes. sets: how many independent inputs there
    are, enough of them that none is still in a cache when its turn comes. providers: name to function of an input's
    number. reference: the provider whose result is right. check: None if (result, right result) agree, else what is
    wrong.
    """

    name: str
    bytes: int
    sets: int
    providers: Mapping[str, Callable[[int], Any]]
    reference: str
    check: Callable[[Any, Any], str | None]
    device: torch.device
    facts: Mapping[str, Any] = field(default_factory=dict)


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


def run(case: Case, rounds: int) -> list[Row]:
    """Check every provider on every input, then time those that are right, in rotated order."""
    errors = {name: _first_error(case, provider) for name, provider in case.providers.items()}
    right = {name: provider for name, provider in case.providers.items() if errors[name] is None}
    timings = time_all(right, case.sets, case.device, rounds) if right else {}
    return [Row(case.name, name, case.bytes, timings.get(name), errors[name], case.facts) for name in case.providers]


def _first_error(case: Case, provider: Callable[[int], Any]) -> str | None:
    for index in range(case.sets):
        if error := case.check(provider(index), case.providers[case.reference](index)):
            return error
    return None
