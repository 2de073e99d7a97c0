"""Safetensors checkpoints with 4-bit weights: read, write, convert."""

from halfbyte.checkpoints.convert import dequantize_checkpoint, quantize_checkpoint
from halfbyte.checkpoints.reader import Checkpoint, Entry, open_checkpoint
from halfbyte.checkpoints.stream import Layer, Summary
from halfbyte.checkpoints.writer import SafetensorsWriter, Spec

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
