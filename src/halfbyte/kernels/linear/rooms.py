"""Room for the sums of CTAs that share tiles of hopper.cu: kept from launch to launch, of a thread or of a graph."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


class Room:
    """Room for the sums of CTAs that share tiles. A launch finds all of it MISSING (see hopper_work.cuh), and leaves
    its sums behind for the next one to clear, which meanwhile has a second half to write to."""

    __slots__ = ("_addresses", "_left", "_tensor", "count")

    def __init__(self, count: int, device: torch.device) -> None:
        self.count = count
        self._tensor = missing((2, count), device)
        self._addresses = self._tensor[0].data_ptr(), self._tensor[1].data_ptr()
        self._left = 0

    def take(self, count: int) -> tuple[int, int, int]:
        """For so many sums; the address of what is to be cleared, and how much that is."""
        partial, left = self._addresses
        self._addresses = left, partial
        taken = partial, left, self._left
        self._left = count
        return taken


class _Rooms(threading.local):
    """Of this thread, by device and stream; and of the graph that it captures, if that has its own."""

    def __init__(self) -> None:
        self.known: dict[tuple[torch.device, int], Room] = {}
        self.of_graph: list[Room] | None = None


of_this_thread = _Rooms()


@contextmanager
def room_of_graph() -> Iterator[list[Any]]:
    """Within, launches that this thread captures on one stream share room, and need not each fill their own. What is
    given must be kept as long as the graph."""
    before = of_this_thread.of_graph
    of_this_thread.of_graph = []
    try:
        yield of_this_thread.of_graph
    finally:
        of_this_thread.of_graph = before


def find(device: torch.device, stream: int, count: int, captured: bool) -> Room:
    """Launches of a thread on a stream, or of its graph, follow each other and share one."""
    of_graph = of_this_thread.of_graph if captured else None
    room = of_this_thread.known.get((device, stream)) if of_graph is None else of_graph[-1] if of_graph else None
    if room is None or room.count < count:
        count = max(count, 1 << 18)
        if of_graph is None:
            of_this_thread.known[device, stream] = room = _kept(count, device)
        else:
            of_graph.append(room := Room(count, device))
    return room


def _kept(count: int, device: torch.device) -> Room:
    """Room for as long as this thread lives. torch.compile's graphs run a function once with all that its thread
    allocates in a pool of theirs, of which nothing may be left; so another thread allocates."""
    stream = torch.cuda.current_stream(device)

    def make() -> Room:
        with torch.cuda.device(device), torch.cuda.stream(stream):
            return Room(count, device)

    with ThreadPoolExecutor(1) as another:
        return another.submit(make).result()


def missing(shape: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.full(shape, -1, dtype=torch.int32, device=device)
