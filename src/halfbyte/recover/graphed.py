"""A function of tensors as a CUDA graph: one launch a call, however many kernels it has."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from halfbyte.kernels.common.capture import capture

WARMUPS = 2  # calls before a capture: kernels are compiled and memory is made


class Graphed:
    """Calls `function`, whose work depends on nothing but its tensors and on memory that stays where it is.

    A graph is captured for each set of shapes and replayed from then on; what it returns lives until the next call.
    Where a capture fails, a warning says why and the function runs as it is.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.graphs: dict[Any, tuple[torch.cuda.CUDAGraph, tuple[Tensor, ...], Any]] = {}
        self.works = True

    def __call__(self, *inputs: Tensor) -> Any:
        if not self.works:
            return self.function(*inputs)
        key = tuple((x.shape, x.dtype) for x in inputs)
        if key not in self.graphs:
            try:
                self.graphs[key] = self._capture(inputs)
            except RuntimeError as error:
                self.works = False
                warnings.warn(f"halfbyte: recovery goes on without CUDA graphs: {error}", stacklevel=2)
                return self.function(*inputs)
        graph, kept, results = self.graphs[key]
        for mine, given in zip(kept, inputs, strict=True):
            mine.copy_(given)
        graph.replay()
        return results

    def _capture(self, inputs: tuple[Tensor, ...]) -> tuple[torch.cuda.CUDAGraph, tuple[Tensor, ...], Any]:
        kept = tuple(x.clone() for x in inputs)
        device = inputs[0].device
        with torch.cuda.device(device):
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(WARMUPS):
                    self.function(*kept)
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with capture(graph):
                results = self.function(*kept)
        return graph, kept, results
