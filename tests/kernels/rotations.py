"""Rotations (models/rotation.py) of a store whose layers have no memory: masks and slots alone."""

from __future__ import annotations

import torch

from halfbyte.models.carrying import Mirrored
from halfbyte.models.rotation import SLIDING, Rotation


def rotation(names: tuple[str, ...] | str, tokens: int, window: int, layers: int, device: torch.device) -> Rotation:
    """names: of the masks, which layers have in turn."""
    each = [names] if isinstance(names, str) else names
    slides = [each[i % len(each)] == SLIDING for i in range(layers)]
    found = Rotation.__new__(Rotation)
    found.names, found.floats, found.tokens = names, None, tokens
    found.slides_any = any(slides)
    found.window = window if found.slides_any else tokens
    with device:
        found.lengths = torch.tensor([window if one else tokens for one in slides])
        found.slides, found.shift = torch.tensor(slides).long(), torch.zeros((), dtype=torch.int64)
        found.slots = Mirrored(torch.zeros((layers, 2), dtype=torch.int64)[:, 0], ())
        found.places = torch.arange(max(tokens, window))
    return found
