"""Tensors by their keys, wherever they lie."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

Tensors = Mapping[str, torch.Tensor] | Callable[[str], torch.Tensor | None]
"""A mapping of keys to tensors, or a function that returns None, or raises KeyError, for a key that is not there."""


def find(tensors: Tensors, key: str) -> torch.Tensor | None:
    """The tensor of `key`, or None."""
    if isinstance(tensors, Mapping):
        return tensors.get(key)
    try:
        return tensors(key)
    except KeyError:
        return None
