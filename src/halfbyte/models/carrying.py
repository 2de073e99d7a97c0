"""Tensors that follow a step from device to device.

A model on several devices says where it goes on (stages.py), and a `Carrier` has its tensors there. As a step runs they
are copied at once (`Copies`). While it is captured (captured.py) one graph ends there, another begins on the other
device, and the copies in between are noted for every replay.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

_current: ContextVar[Carrier | None] = ContextVar("_current", default=None)


class Carrier:
    """Has each tensor on a device once, however many layers there ask for it: what is known of a mask by its identity
    holds for all of them."""

    def __init__(self) -> None:
        self.carried: dict[Hashable, tuple[Tensor, Tensor]] = {}  # both, so that no other tensor has the first's id

    def carry(self, value: Any, device: torch.device, cuts: bool = False) -> Any:
        """A structure of tensors, on the device on which the step goes on.

        cuts: to be moved even where nothing has to, as tests want it on one device.
        """
        leaves = [x for x in pytree.tree_leaves(value) if isinstance(x, Tensor)]
        missing = {self._key(x, device): x for x in leaves if cuts or x.device != device}
        self.move([(key, x) for key, x in missing.items() if key not in self.carried], device)
        return pytree.tree_map_only(Tensor, lambda x: self.carried.get(self._key(x, device), (x, x))[1], value)

    def move(self, tensors: list[tuple[Hashable, Tensor]], device: torch.device) -> None:
        """Go on on `device`, with copies of these tensors, none of them carried before."""
        raise NotImplementedError

    def send(self, there: Tensor, here: Tensor) -> None:
        """Copy a tensor, as it is now, to another one, before the step goes on on the other one's device."""
        raise NotImplementedError

    def watch(self, devices: Iterable[torch.device]) -> None:
        """The step will go to these devices and to no other."""

    @staticmethod
    def _key(tensor: Tensor, device: torch.device) -> Hashable:
        """What a tensor is on a device, until it is written to. Inference tensors do not tell."""
        return id(tensor), device, None if tensor.is_inference() else tensor._version


class Copies(Carrier):
    """Of a step that runs as it is. Copies wait for both devices' streams and the host for neither."""

    def move(self, tensors: list[tuple[Hashable, Tensor]], device: torch.device) -> None:
        if device.type == "cuda" and _current.get() is self:
            torch.cuda.set_device(device)  # until `carrying` ends: kernels are launched on the current one
        for key, tensor in tensors:
            self.carried[key] = tensor, tensor.to(device, non_blocking=True, copy=True)

    def send(self, there: Tensor, here: Tensor) -> None:
        here.copy_(there, non_blocking=True)


@contextmanager
def carrying(carrier: Carrier) -> Iterator[None]:
    """Within, this thread's steps have their tensors carried by it."""
    token = _current.set(carrier)
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
    try:
        yield
    finally:
        _current.reset(token)
        if device is not None and torch.cuda.current_device() != device:
            torch.cuda.set_device(device)


def carrier() -> Carrier:
    """Of this thread's step, or one that copies for a call of the model outside of any."""
    return _current.get() or Copies()


@contextmanager
def carried_at_once() -> Iterator[None]:
    """Within, copies are made at once, unless a step is being captured."""
    if _current.get() is not None:
        yield
        return
    with carrying(Copies()):
        yield


class Mirrored:
    """A tensor that a step writes on its first device, and tensors for the same on the others."""

    def __init__(self, tensor: Tensor, devices: Iterable[torch.device]) -> None:
        self.tensor = tensor
        with torch.inference_mode(False), torch.no_grad():
            self.others = {
                device: torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device).zero_()
                for device in dict.fromkeys(devices)
                if device != tensor.device
            }

    def on(self, device: torch.device) -> Tensor:
        return self.others.get(device, self.tensor)

    def send(self) -> None:
        """Have what was written on the other devices too."""
        for other in self.others.values():
            carrier().send(self.tensor, other)
