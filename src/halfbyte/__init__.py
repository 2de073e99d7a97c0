"""halfbyte: 4-bit LLM weights, in and out at the speed of memory."""

__version__ = "0.1.0"
