"""CUDA graphs played on a CPU: a `Recording` notes the operations of torch and repeats them into the same memory.

As with a graph, nothing that Python does in between is repeated, the next replay overwrites results, and a capture
leaves all memory as it was. Unlike a graph it refuses an operation that is not on its device. torch's "meta" device
stands for a second GPU there: a step can be captured for it but not replayed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from halfbyte.models import captured

SYNCHRONIZES = ("aten::_local_scalar_dense", "aten::nonzero")


class Recording(TorchDispatchMode):
    """In the place of captured.Graph."""

    def __init__(self, device: torch.device, pool: Any = None) -> None:
        super().__init__()
        self.device, self.nbytes = device, 0
        self.operations: list[tuple[Callable[..., Any], Any, Any, Any]] = []
        self.before: list[tuple[Tensor, Tensor]] = []  # what was written to, and what it was

    @contextmanager
    def capture(self) -> Iterator[None]:
        state = torch.get_rng_state()
        with self:
            yield
        torch.set_rng_state(state)
        for tensor, value in reversed(self.before):
            tensor.copy_(value)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func._schema.name in SYNCHRONIZES:
            raise RuntimeError("operation not permitted when stream is capturing")
        written = [x for x in func._schema.arguments if x.alias_info is not None and x.alias_info.is_write]
        names = [x.name for x in func._schema.arguments]
        given = dict(zip(names, args, strict=False)) | kwargs
        self.before += [(given[x.name], given[x.name].clone()) for x in written if x.name in given]
        outputs = func(*args, **kwargs)
        for x in pytree.tree_leaves((args, kwargs, outputs)):
            number = isinstance(x, Tensor) and x.dim() == 0 and x.device.type == "cpu"
            if isinstance(x, Tensor) and x.device != self.device and not number:
                raise RuntimeError(f"{func} has a tensor on {x.device} in a stage on {self.device}")
        self.operations.append((func, args, kwargs, outputs))
        return outputs

    def replay(self) -> None:
        with torch.no_grad():
            for func, args, kwargs, outputs in self.operations:
                found = func(*args, **kwargs)
                if func._schema.returns and all(x.alias_info is None for x in func._schema.returns):
                    pairs = zip(pytree.tree_leaves(outputs), pytree.tree_leaves(found), strict=True)
                    for mine, new in pairs:
                        if isinstance(mine, Tensor):
                            mine.copy_(new)


@contextmanager
def recordings() -> Iterator[list[Recording]]:
    """Within, what is captured on the CPU is recorded; gives all recordings that were made."""
    made: list[Recording] = []

    def make(device: torch.device, pool: Any = None) -> Recording:
        made.append(Recording(device, pool))
        return made[-1]

    with mock.patch.dict(captured.GRAPHS, {"cpu": make}):
        yield made
