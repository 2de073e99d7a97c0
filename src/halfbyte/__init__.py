"""halfbyte: 4-bit LLM weights, in and out at the speed of memory.

Importing it costs little: each name below is looked up, and torch with it, when it is first asked for.

The operators `torch.ops.halfbyte`, which a program of torch.export or torch.compile calls by name, are registered as
soon as halfbyte and torch are both there: by `import halfbyte` where torch was imported before, and otherwise by the
first use of any name below. A program that does nothing but load an exported one imports torch first.
"""

import sys
from typing import TYPE_CHECKING

from halfbyte.lazy import names_of
from halfbyte.version import __version__ as __version__

if TYPE_CHECKING:
    from halfbyte import nn as nn
    from halfbyte.experts import grouped_linear as grouped_linear
    from halfbyte.experts import moe as moe
    from halfbyte.formats.bitsandbytes import from_bitsandbytes as from_bitsandbytes
    from halfbyte.formats.bitsandbytes import to_bitsandbytes as to_bitsandbytes
    from halfbyte.formats.compressed_tensors import from_compressed_tensors as from_compressed_tensors
    from halfbyte.formats.gpt_oss import from_gpt_oss as from_gpt_oss
    from halfbyte.formats.weight import NestedScale as NestedScale
    from halfbyte.formats.weight import QuantizedWeight as QuantizedWeight
    from halfbyte.models.accelerate import accelerate as accelerate
    from halfbyte.models.accelerate import release as release
    from halfbyte.models.accelerate import restore as restore
    from halfbyte.models.quantizer import HalfbyteConfig as HalfbyteConfig
    from halfbyte.ops import dequantize as dequantize
    from halfbyte.ops import linear as linear
    from halfbyte.ops import quantize as quantize
    from halfbyte.recover.search import recover_tokens as recover_tokens
    from halfbyte.search import Fidelity as Fidelity
    from halfbyte.search import distances as distances
    from halfbyte.search import fidelity as fidelity
    from halfbyte.search import nearest as nearest
    from halfbyte.search import token_ranks as token_ranks

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
    "from_gpt_oss",
    "grouped_linear",
    "linear",
    "moe",
    "nearest",
    "nn",
    "quantize",
    "recover_tokens",
    "release",
    "restore",
    "to_bitsandbytes",
    "token_ranks",
]

# HalfbyteConfig is not in __all__: it needs transformers, which `from halfbyte import *` must not.
if not TYPE_CHECKING:  # so that a checker still knows which names there are not
    __getattr__, __dir__ = names_of(
        __name__,
        {
            "halfbyte.experts": ("grouped_linear", "moe"),
            "halfbyte.formats.bitsandbytes": ("from_bitsandbytes", "to_bitsandbytes"),
            "halfbyte.formats.compressed_tensors": ("from_compressed_tensors",),
            "halfbyte.formats.gpt_oss": ("from_gpt_oss",),
            "halfbyte.formats.weight": ("NestedScale", "QuantizedWeight"),
            "halfbyte.models.accelerate": ("accelerate", "release", "restore"),
            "halfbyte.models.quantizer": ("HalfbyteConfig",),
            "halfbyte.nn": ("nn",),
            "halfbyte.ops": ("dequantize", "linear", "quantize"),
            "halfbyte.recover.search": ("recover_tokens",),
            "halfbyte.search": ("Fidelity", "distances", "fidelity", "nearest", "token_ranks"),
        },
    )

if "torch" in sys.modules:
    from halfbyte import library as library
