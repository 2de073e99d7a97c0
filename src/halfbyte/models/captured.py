"""A function of tensors that stay where they are: on a GPU as a CUDA graph, on a CPU as it is.

The CPU gains nothing by it. It is there so that everything around a captured step runs, and is tested, without a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from halfbyte.kernels.common.capture import capture
from halfbyte.kernels.linear.workspace import workspaces_of_graph

ON_CPU = False  # tests set it


def can_replay(device: torch.device) -> bool:
    """True where functions can be captured."""
    return device.type == "cuda" or (ON_CPU and device.type == "cpu")


def current(device: torch.device) -> AbstractContextManager[Any]:
    """Within, a GPU is the current one."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


class Captured:
    """Replays `function`, which takes nothing and returns tensors that the next replay overwrites.

    On a GPU only its kernels run again; whatever Python does in `function` happened once, during the capture. Raises
    the RuntimeError with which CUDA refused the capture.
    """

    def __init__(self, function: Callable[[], Any], device: torch.device) -> None:
        self.graph = torch.cuda.CUDAGraph() if device.type == "cuda" else None
        self.nbytes = 0  # that the graph keeps for its intermediate results
        self.function: Callable[[], Any] | None = None
        if self.graph is None:
            self.function = function
            return
        with workspaces_of_graph() as self.workspaces, capture(self.graph):
            before = torch.cuda.memory_reserved(device)  # here, because a capture begins with an emptied cache
            self.outputs = function()
            self.nbytes = max(0, torch.cuda.memory_reserved(device) - before)

    def replay(self) -> Any:
        if self.graph is not None:
            self.graph.replay()
        elif self.function is not None:
            self.outputs = self.function()
        return self.outputs
