"""Torch modules whose weights are 4-bit."""

from halfbyte.nn.experts import Experts4bit as Experts4bit
from halfbyte.nn.linear import Linear4bit as Linear4bit

__all__ = ["Experts4bit", "Linear4bit"]
