"""The libraries whose 4-bit linear layers get a forward of ours. A new one is a file here and its name below."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor, nn

from halfbyte.formats.weight import QuantizedWeight
from halfbyte.models import bitsandbytes, compressed_tensors, own
from halfbyte.models.projections import Inputs


class Layers(Protocol):
    """4-bit linear layers of a library, which get a forward of ours. It is a `projections.Host` too."""

    def supports(self, module: nn.Module) -> bool: ...

    def apply(self, module: nn.Module) -> str | None:
        """None, or why the module was left alone."""

    def undo(self, module: nn.Module) -> None: ...

    def is_applied(self, module: nn.Module) -> bool: ...

    def weight_of(self, module: Any) -> QuantizedWeight | None: ...

    def stored(self, module: Any) -> tuple[Tensor, ...]:
        """The tensors of a module's weight."""

    def operands(self, module: Any, x: Tensor) -> Inputs | None: ...


LAYERS: tuple[Layers, ...] = (bitsandbytes, compressed_tensors, own)


def layers_of(module: nn.Module) -> Layers | None:
    """The one of LAYERS that a module is of."""
    return next((library for library in LAYERS if library.supports(module)), None)
