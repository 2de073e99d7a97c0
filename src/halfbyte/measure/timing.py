"""Time functions fairly: cold inputs, medians, providers in rotated order.

On a GPU, a sample is one pass over all the inputs between two events, divided by their number. The inputs together are
several times the L2 cache and every output stays alive until the pass is over, so each call reads from memory and
writes to memory. A pass is queued behind a kernel that only waits, so that the host is always ahead: what is timed is
the GPU's work, launch gaps between kernels included, and not Python. A pass that the host was too slow for is measured
again behind a longer wait.

A provider that itself waits for the GPU cannot be queued like that. Then everything beside it is timed by the wall
clock too: one pass, from an idle GPU to an idle GPU, Python included, divided by the number of inputs.

On a CPU, a sample is one call on the next input, by the wall clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

Provider = Callable[[int], Any]


@dataclass(frozen=True)
class Timing:
    """Microseconds a call: median, 20th and 80th percentile of `samples` samples, by the "gpu" or the "wall" clock."""

    median: float
    p20: float
    p80: float
    samples: int
    clock: str


class Synchronizes(Exception):
    """A provider waits for the GPU in the middle of its work."""


def summarize(samples: list[float], clock: str) -> Timing:
    ordered = sorted(samples)
    last = len(ordered) - 1
    p20, median, p80 = (ordered[round(last * quantile)] for quantile in (0.2, 0.5, 0.8))
    return Timing(median, p20, p80, len(ordered), clock)


def time_all(providers: Mapping[str, Provider], sets: int, device: torch.device, rounds: int) -> dict[str, Timing]:
    """Time each provider `rounds` times on inputs 0 to sets - 1; the order rotates from round to round."""
    if device.type == "cuda":
        try:
            return _time_all(_QueuedSampler(providers, sets), "gpu", list(providers), rounds)
        except Synchronizes:
            return _time_all(_WallSampler(providers, sets), "wall", list(providers), rounds)
    return _time_all(_CpuSampler(providers, sets), "wall", list(providers), rounds)


def _time_all(sample: Callable[[str], float], clock: str, names: list[str], rounds: int) -> dict[str, Timing]:
    samples: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(rounds):
        for position in range(len(names)):
            name = names[(turn + position) % len(names)]
            samples[name].append(sample(name))
    return {name: summarize(values, clock) for name, values in samples.items()}


class _CpuSampler:
    def __init__(self, providers: Mapping[str, Provider], sets: int) -> None:
        self.providers, self.sets, self.calls = providers, sets, 0
        for provider in providers.values():
            provider(0)

    def __call__(self, name: str) -> float:
        self.calls += 1
        index = self.calls % self.sets
        start = time.perf_counter()
        result = self.providers[name](index)
        elapsed = time.perf_counter() - start
        del result  # freeing it belongs to nobody's time
        return 1e6 * elapsed


def _pass(provider: Provider, sets: int) -> list[Any]:
    """Call `provider` on every input; the results keep each other's memory from being used again."""
    return [provider(index) for index in range(sets)]


class _WallSampler:
    def __init__(self, providers: Mapping[str, Provider], sets: int) -> None:
        self.providers, self.sets = providers, sets
        for provider in providers.values():
            _pass(provider, sets)

    def __call__(self, name: str) -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        results = _pass(self.providers[name], self.sets)
        torch.cuda.synchronize()
        elapsed = time.perf_counter() - start
        del results
        return 1e6 * elapsed / self.sets


class _QueuedSampler:
    CYCLES_PER_SECOND = 2e9  # of the waiting kernel; a wait that is a little long does no harm
    LONGEST_WAIT = 0.5

    def __init__(self, providers: Mapping[str, Provider], sets: int) -> None:
        self.providers, self.sets = providers, sets
        self.wait: dict[str, float] = {}
        for name, provider in providers.items():
            _pass(provider, sets)
            _wait()
            start = time.perf_counter()
            _pass(provider, sets)
            self.wait[name] = min(1.5 * (time.perf_counter() - start) + 1e-3, self.LONGEST_WAIT)
            _wait()

    def __call__(self, name: str) -> float:
        while True:
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda._sleep(int(self.wait[name] * self.CYCLES_PER_SECOND))
            start.record()
            results = _pass(self.providers[name], self.sets)
            end.record()
            host_was_ahead = not start.query()
            _wait()
            del results
            if host_was_ahead:
                return 1e3 * float(start.elapsed_time(end)) / self.sets
            self.wait[name] *= 2
            if self.wait[name] > self.LONGEST_WAIT:
                raise Synchronizes(name)


def _wait() -> None:
    """For what this stream was given: others may belong to kernels that run as long as anything is timed, fewer.py."""
    torch.cuda.current_stream().synchronize()
