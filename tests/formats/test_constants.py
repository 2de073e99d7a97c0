"""Constants of a device are made once, by another thread, whatever the caller's has set."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from halfbyte.formats.constants import kept

CPU = torch.device("cpu")


def test_once_and_elsewhere() -> None:
    made: list[tuple[Any, ...]] = []

    @kept
    def constant(name: str, device: torch.device) -> torch.Tensor:
        """Says what it is."""
        made.append((name, threading.get_ident(), torch.is_inference_mode_enabled()))
        return torch.zeros(2, device=device)

    with torch.inference_mode():
        first = constant("a", CPU)
    assert not first.is_inference()
    assert constant("a", CPU) is first
    assert constant("b", CPU) is not first
    assert [name for name, *_ in made] == ["a", "b"]
    assert all(thread != threading.get_ident() and not inference for _, thread, inference in made)
    assert constant.__doc__ == "Says what it is."


def test_an_error_is_the_callers() -> None:
    @kept
    def constant(device: torch.device) -> torch.Tensor:
        raise ValueError("no such constant")

    for _ in range(2):
        with pytest.raises(ValueError, match="no such constant"):
            constant(CPU)
