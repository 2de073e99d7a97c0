"""Safetensors checkpoints with 4-bit weights: read, write, convert."""

from typing import TYPE_CHECKING

from halfbyte.lazy import names_of

if TYPE_CHECKING:
    from halfbyte.checkpoints.convert import dequantize_checkpoint as dequantize_checkpoint
    from halfbyte.checkpoints.convert import quantize_checkpoint as quantize_checkpoint
    from halfbyte.checkpoints.reader import Checkpoint as Checkpoint
    from halfbyte.checkpoints.reader import Entry as Entry
    from halfbyte.checkpoints.reader import open_checkpoint as open_checkpoint
    from halfbyte.checkpoints.stream import Layer as Layer
    from halfbyte.checkpoints.stream import Summary as Summary
    from halfbyte.checkpoints.writer import SafetensorsWriter as SafetensorsWriter
    from halfbyte.checkpoints.writer import Spec as Spec

__all__ = [
    "Checkpoint",
    "Entry",
    "Layer",
    "SafetensorsWriter",
    "Spec",
    "Summary",
    "dequantize_checkpoint",
    "open_checkpoint",
    "quantize_checkpoint",
]

if not TYPE_CHECKING:  # so that a checker still knows which names there are not
    __getattr__, __dir__ = names_of(
        __name__,
        {
            "halfbyte.checkpoints.convert": ("dequantize_checkpoint", "quantize_checkpoint"),
            "halfbyte.checkpoints.reader": ("Checkpoint", "Entry", "open_checkpoint"),
            "halfbyte.checkpoints.stream": ("Layer", "Summary"),
            "halfbyte.checkpoints.writer": ("SafetensorsWriter", "Spec"),
        },
    )
