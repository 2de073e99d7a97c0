"""The libraries that accelerate works on. `accelerate` applies what is listed here, `restore` undoes the same.

A new library is a file in this folder and its name below, or in linears.py. Every `undo` leaves alone what its `apply`
did not change.
"""

from __future__ import annotations

from typing import Protocol

from torch import nn

from halfbyte.models import (
    compressed_tensors,
    heads,
    norms,
    paged,
    peft,
    peft_experts,
    prompt_layers,
    rotary,
    transformers,
    unsloth,
)  # fmt: skip
from halfbyte.models.linears import LAYERS


class Others(Protocol):
    """Modules around those layers that get a forward of ours where a layer was taken."""

    def supports(self, module: nn.Module) -> bool: ...

    def apply(self, module: nn.Module) -> None: ...

    def undo(self, module: nn.Module) -> None: ...


class Library(Protocol):
    """Functions of a library, replaced for as long as any model is accelerated."""

    def apply_to_library(self) -> None: ...

    def undo_in_library(self) -> None: ...


OTHERS: tuple[Others, ...] = (peft, peft_experts, norms, prompt_layers)
LIBRARIES: tuple[Library, ...] = (peft, unsloth, rotary, transformers, paged)


def apply_around(model: nn.Module) -> str:
    """What follows where layers were taken; returns in words what `generate` does from now on."""
    for module in model.modules():
        for library in OTHERS:
            if library.supports(module):
                library.apply(module)
    compressed_tensors.keep_packed(model)
    for functions in LIBRARIES:
        functions.apply_to_library()
    paged.apply(model)
    return transformers.apply(model)


def undo_everything(model: nn.Module) -> None:
    """Undo `apply_around`, and `apply` of LAYERS; functions of libraries stay."""
    transformers.undo(model)
    paged.undo(model)
    for module in model.modules():
        for layers in LAYERS:
            layers.undo(module)
        for library in OTHERS:
            library.undo(module)
    heads.undo(model)
    compressed_tensors.let_unpack(model)
