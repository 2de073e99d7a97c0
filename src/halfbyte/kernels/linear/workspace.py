"""Workspaces for the partial sums of CTAs that share tiles (sm90_streamk): a thread keeps its own, or a graph does."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

LEAST = 1 << 18  # sums that a kept workspace has room for


class Workspace:
    """Memory for partial sums, in two halves. A launch finds its half filled with the sentinel (see
    sm90_streamk/work.cuh). It leaves its sums behind for the next launch to clear, which works in the other half."""

    __slots__ = ("_addresses", "_left", "_tensor", "count")

    def __init__(self, count: int, device: torch.device) -> None:
        self.count = count
        self._tensor = sentinels((2, count), device)
        self._addresses = self._tensor[0].data_ptr(), self._tensor[1].data_ptr()
        self._left = 0

    def take(self, count: int) -> tuple[int, int, int]:
        """The address for so many sums; the address of those to be cleared, and how many these are."""
        partial, left = self._addresses
        self._addresses = left, partial
        taken = partial, left, self._left
        self._left = count
        return taken


class _Kept(threading.local):
    """Of this thread, by device and stream; and of the graph that it captures, if that has its own."""

    def __init__(self) -> None:
        self.by_stream: dict[tuple[torch.device, int], Workspace] = {}
        self.of_graph: list[Workspace] | None = None


kept = _Kept()


@contextmanager
def workspaces_of_graph() -> Iterator[list[Any]]:
    """Within, launches that this thread captures on one stream share a workspace, and need not each fill their own. The
    list must be kept as long as the graph."""
    before = kept.of_graph
    kept.of_graph = []
    try:
        yield kept.of_graph
    finally:
        kept.of_graph = before


def take(device: torch.device, stream: int, count: int) -> tuple[tuple[int, int, int], Tensor | None]:
    """What `Workspace.take` says, for a launch on this stream; and memory that must be held until after the launch."""
    if not torch.cuda.is_current_stream_capturing():
        return _find(device, stream, count, None).take(count), None
    if kept.of_graph is not None:
        return _find(device, stream, count, kept.of_graph).take(count), None
    # A graph may be replayed beside anything, and nobody would keep its workspace: the launch has one of its own.
    own = sentinels((count,), device)
    return (own.data_ptr(), 0, 0), own


def _find(device: torch.device, stream: int, count: int, of_graph: list[Workspace] | None) -> Workspace:
    """Launches of a thread on a stream, or of its graph, follow each other and share one."""
    found = kept.by_stream.get((device, stream)) if of_graph is None else of_graph[-1] if of_graph else None
    if found is None or found.count < count:
        count = max(count, LEAST)
        if of_graph is None:
            kept.by_stream[device, stream] = found = _lasting(count, device)
        else:
            of_graph.append(found := Workspace(count, device))
    return found


def _lasting(count: int, device: torch.device) -> Workspace:
    """A workspace for as long as this thread lives. torch.compile's graphs run a function once with all that its thread
    allocates in a pool of theirs, of which nothing may be left; so another thread allocates."""
    stream = torch.cuda.current_stream(device)

    def make() -> Workspace:
        with torch.cuda.device(device), torch.cuda.stream(stream):
            return Workspace(count, device)

    with ThreadPoolExecutor(1) as another:
        return another.submit(make).result()


def sentinels(shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Memory filled with the bits that no sum has."""
    return torch.full(shape, -1, dtype=torch.int32, device=device)
