"""A function of tensors that stay where they are: on GPUs as CUDA graphs, on a CPU as it is.

Where the function goes on on another device (carrying.py), one graph ends and the next begins. A replay launches them
in turn, each on its device's current stream, with copies in between. A copy from device to device waits for both
streams and lets both wait for it, so the order is that of one stream, and the host waits for nothing.

The CPU gains nothing by it. It is there so that everything around a captured step runs, and is tested, without a GPU.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from halfbyte.kernels.common.capture import capture
from halfbyte.models.carrying import Carrier, carrying

ON_CPU = False  # tests set it


def can_replay(device: torch.device) -> bool:
    """True where functions can be captured."""
    return device.type == "cuda" or (ON_CPU and device.type == "cpu")


def current(device: torch.device) -> AbstractContextManager[Any]:
    """Within, a GPU is the current one."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


class Graph:
    """What a function does on one GPU until it goes on elsewhere."""

    def __init__(self, device: torch.device, pool: Any = None) -> None:
        self.device, self.graph, self.pool = device, torch.cuda.CUDAGraph(), pool
        self.nbytes = 0  # that it keeps for its intermediate results

    @contextmanager
    def capture(self) -> Iterator[None]:
        with current(self.device), capture(self.graph, self.pool):
            before = torch.cuda.memory_reserved(self.device)  # here, because a capture begins with an emptied cache
            yield
            self.nbytes = max(0, torch.cuda.memory_reserved(self.device) - before)

    def replay(self) -> None:
        with current(self.device):
            self.graph.replay()


GRAPHS: dict[str, type[Graph]] = {"cuda": Graph}  # by the type of the first device; tests have one for the CPU


class Captured(Carrier):
    """Replays `function`, which takes nothing and returns tensors that the next replay overwrites.

    On a GPU only its kernels run again; whatever Python does in `function` happened once, during the capture. Raises
    the RuntimeError with which CUDA refused the capture.

    pool: of memory for intermediate results, by default one of its own. Those that share it must not run at the same
    time, and overwrite each other's outputs.
    """

    def __init__(self, function: Callable[[], Any], device: torch.device, pool: Any = None) -> None:
        super().__init__()
        self.pool = pool
        self.stages: list[tuple[list[tuple[Tensor, Tensor]], Graph]] = []  # what is copied (from, to) ahead of which
        self.function: Callable[[], Any] | None = None
        if device.type not in GRAPHS:
            self.function = function
            return
        self.kind = GRAPHS[device.type]
        self.sent: list[tuple[Tensor, Tensor]] = []
        self.watched: tuple[torch.device, ...] = ()
        self.open = ExitStack()  # the graph that is being captured
        with carrying(self):
            try:
                self._begin(device, [])
                self.outputs = function()
                self._end()
            except BaseException:
                self.open.__exit__(*sys.exc_info())
                raise
        if self.sent:
            raise RuntimeError("something was sent to another device, and the step did not go there")
        self.carried.clear()  # `stages` holds what is needed

    @property
    def is_graph(self) -> bool:
        """False where a replay runs the function's Python again."""
        return self.function is None

    @property
    def nbytes(self) -> int:
        """What the graphs keep for their intermediate results, and what is copied between them."""
        return sum(graph.nbytes + sum(here.nbytes for _, here in copies) for copies, graph in self.stages)

    def replay(self) -> Any:
        if self.function is not None:
            self.outputs = self.function()
        for copies, graph in self.stages:
            with torch.no_grad():
                for there, here in copies:
                    here.copy_(there, non_blocking=True)
            graph.replay()
        return self.outputs

    def move(self, tensors: list[tuple[Hashable, Tensor]], device: torch.device) -> None:
        if not tensors and device == self.stages[-1][1].device:
            return
        self._end()
        copies, self.sent = self.sent, []
        with torch.inference_mode(False), torch.no_grad():
            for key, there in tensors:
                here = torch.empty_like(there, device=device, requires_grad=False)
                self.carried[key] = there, here
                copies.append((there, here))
        self._begin(device, copies)

    def send(self, there: Tensor, here: Tensor) -> None:
        self.sent.append((there, here))

    def watch(self, devices: Iterable[torch.device]) -> None:
        self.watched = tuple(devices)
        self.before = self._allocations()

    def _begin(self, device: torch.device, copies: list[tuple[Tensor, Tensor]]) -> None:
        graph = self.kind(device, self.pool)
        self.stages.append((copies, graph))
        self.open.enter_context(graph.capture())
        self.before = self._allocations()

    def _end(self) -> None:
        """End a graph. What ran on another device meanwhile ran once, and no replay would run it."""
        here = self.stages[-1][1].device
        after = self._allocations()
        if strays := [
            device for device in self.watched if device != here and after.get(device) != self.before.get(device)
        ]:
            raise RuntimeError(f"something is computed on {strays[0]} between parts of the model that are on {here}")
        self.open.close()

    def _allocations(self) -> dict[torch.device, int]:
        """How often memory was asked for on each GPU that is watched."""
        of = torch.cuda.memory_stats
        return {x: of(x).get("allocation.all.allocated", 0) for x in self.watched if x.type == "cuda"}
