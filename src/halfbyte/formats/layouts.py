"""Which layout keeps weights of a format: modules here that have FORMATS, keys, to_tensors and from_tensors."""

from __future__ import annotations

from types import ModuleType

from halfbyte.formats import bitsandbytes, compressed_tensors, gpt_oss

LAYOUTS: tuple[ModuleType, ...] = (bitsandbytes, compressed_tensors, gpt_oss)


def layout_of(format: str) -> ModuleType:
    """The layout in which weights of `format` are saved. Raises ValueError for a format that no library stores."""
    for layout in LAYOUTS:
        if format in layout.FORMATS:
            return layout
    known = [name for layout in LAYOUTS for name in layout.FORMATS]
    raise ValueError(f"format is {format!r}; checkpoints hold {', '.join(known)}")
