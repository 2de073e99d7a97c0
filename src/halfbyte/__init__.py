"""halfbyte: 4-bit LLM weights, in and out at the speed of memory."""

from typing import Any

from halfbyte import autograd as autograd  # the operators and their gradients
from halfbyte import nn
from halfbyte.formats.bitsandbytes import from_bitsandbytes, to_bitsandbytes
from halfbyte.formats.compressed_tensors import from_compressed_tensors
from halfbyte.formats.weight import NestedScale, QuantizedWeight
from halfbyte.models.accelerate import accelerate, restore
from halfbyte.ops import dequantize, linear, quantize
from halfbyte.recover import recover_tokens
from halfbyte.search import Fidelity, distances, fidelity, nearest, token_ranks

__version__ = "0.1.0"

__all__ = [
    "Fidelity",
    "NestedScale",
    "QuantizedWeight",
    "accelerate",
    "dequantize",
    "distances",
    "fidelity",
    "from_bitsandbytes",
    "from_compressed_tensors",
    "linear",
    "nearest",
    "nn",
    "quantize",
    "recover_tokens",
    "restore",
    "to_bitsandbytes",
    "token_ranks",
]


def __getattr__(name: str) -> Any:
    """HalfbyteConfig, for transformers' `quantization_config`; transformers is imported when it is asked for."""
    if name == "HalfbyteConfig":
        from halfbyte.models.quantizer import HalfbyteConfig

        return HalfbyteConfig
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
