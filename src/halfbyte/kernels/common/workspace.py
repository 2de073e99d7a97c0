"""Workspaces for the partial sums of CTAs that share a result, in products and in attention: a thread keeps its own,
and each CUDA graph that it captures has one."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from halfbyte.kernels.common.driver import capture_of

LEAST = 1 << 18  # sums that a workspace has room for


class Workspace:
    """Memory for partial sums, in two halves. A launch finds its half filled with the sentinel (see
    linear/device/partials.cuh). It leaves its sums behind for the next launch, which works in the other half, to clear.
    """

    __slots__ = ("_addresses", "_left", "_tensor", "count")

    def __init__(self, count: int, device: torch.device) -> None:
        self.count = count
        self._tensor = sentinels((2, count), device)
        self._addresses = self._tensor[0].data_ptr(), self._tensor[1].data_ptr()
        self._left = 0

    def take(self, count: int) -> tuple[int, int, int]:
        """The address for so many sums, a multiple of four; the address of those to be cleared, and how many times four
        these are."""
        partial, left = self._addresses
        self._addresses = left, partial
        taken = partial, left, self._left // 4
        self._left = count
        return taken


class _Kept(threading.local):
    """Of this thread, by device and stream; and of the capture that it is in, by its number."""

    def __init__(self) -> None:
        self.by_stream: dict[tuple[torch.device, int], Workspace] = {}
        self.capture = 0
        self.of_capture: dict[tuple[torch.device, int], Workspace] = {}


kept = _Kept()


def take(device: torch.device, stream: int, count: int) -> tuple[int, int, int]:
    """What `Workspace.take` says, for a launch on this stream; zeros for one that wants no sums.

    Launches of a thread on a stream follow each other and share a workspace. So do those that one capture sees on a
    stream, but with nobody else: the graph may be replayed beside anything. It fills its workspace itself, once in
    every replay, in memory of its own; to keep that is necessary only until the capture ends. Where nothing may be kept
    even so long, each launch has a workspace.
    """
    if count == 0:
        return 0, 0, 0
    make: Callable[[int, torch.device], Workspace]
    if torch.cuda.is_current_stream_capturing():
        if _is_of_graph_trees(device):
            return Workspace(max(count, LEAST), device).take(count)
        capture = capture_of(stream)
        if capture != kept.capture:
            kept.capture, kept.of_capture = capture, {}
        there, make = kept.of_capture, Workspace
    else:
        if kept.capture:
            forget_capture()
        there, make = kept.by_stream, _lasting
    found = there.get((device, stream))
    if found is None or found.count < count:
        there[device, stream] = found = make(max(count, LEAST), device)
    return found.take(count)


def forget_capture() -> None:
    """A capture of this thread has ended: its graph keeps the memory of its workspaces, the thread need not."""
    kept.capture, kept.of_capture = 0, {}


def _is_of_graph_trees(device: torch.device) -> bool:
    """True if torch.compile is recording a graph of its own, in whose pool it wants nothing but the graph's results."""
    trees = sys.modules.get("torch._inductor.cudagraph_trees")
    manager = None if trees is None else trees.get_manager(device.index, create_if_none_exists=False)
    return manager is not None and manager.stream == torch.cuda.current_stream(device)


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
