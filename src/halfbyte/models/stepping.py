"""A step that is made again and again: compiled in its first run, captured in its second, replayed in all others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from halfbyte.models.attention import attention_of_steps
from halfbyte.models.captured import Captured, current
from halfbyte.models.fused import fused_layers
from halfbyte.models.graphs import building, warn_of_no_graph
from halfbyte.models.regions import compiled_regions
from halfbyte.models.stages import staged


class Stepper:
    """Runs `step`, of tensors that stay where they are, in this call of `generate` and in later ones.

    retried: calls a function again where memory was short, once there is more.
    """

    def __init__(self, model: Any, device: torch.device, retried: Callable[[Callable[[], Captured]], Captured]) -> None:
        self.model, self.device, self.retried = model, device, retried
        self.captured: Captured | None = None
        self.is_compiled, self.works = False, True
        self.outputs: Any = None

    def step(self) -> Any:
        raise NotImplementedError

    @property
    def nbytes(self) -> int:
        return self.captured.nbytes if self.captured is not None else 0

    @property
    def is_graph(self) -> bool:
        """True where no Python of the model runs any more."""
        return self.captured is not None and self.captured.is_graph

    def close(self) -> None:
        """Let go of what a step keeps."""
        self.captured = self.outputs = None

    def try_again(self) -> None:
        """In a new call of `generate`, a step that could not be captured is tried once more."""
        self.works = True

    def advance(self) -> None:
        """Make the step. `outputs` then holds its results, until the next one."""
        with current(self.device):
            if self.captured is None and self.is_compiled and self.works:
                self._capture()
            if self.captured is not None:
                self.outputs = self.captured.replay()
                return
            self.outputs = self._built_step()
            self.is_compiled = True

    def _built_step(self) -> Any:
        with built(self.model):
            return self.step()

    def _capture(self) -> None:
        try:
            self.captured = self.retried(self._captured)
        except RuntimeError as error:
            self.works = False
            warn_of_no_graph(self.model, error)

    def _captured(self) -> Captured:
        with building:  # before the capture begins: all threads' captures are on one stream
            return Captured(self._built_step, self.device)


@contextmanager
def built(model: Any) -> Iterator[None]:
    """Within, a step computes what is captured of it."""
    with (
        building,
        staged(model),
        attention_of_steps() as attention,
        fused_layers(model, attention),
        compiled_regions(model),
    ):
        yield
