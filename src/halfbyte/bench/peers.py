"""The others: what a user would call today, through their own packages."""

from __future__ import annotations

import ctypes
from importlib import import_module
from typing import Any

import torch

from halfbyte.formats.bitsandbytes import to_bitsandbytes
from halfbyte.formats.weight import QuantizedWeight


def require(package: str) -> Any:
    """The package, or an error that says how to get it."""
    try:
        return import_module(package)
    except ImportError as error:
        raise ImportError(
            f"the bench compares with {package}, which cannot be imported ({error}); pip install 'halfbyte[bench]'"
        ) from error


class Bitsandbytes:
    """`bitsandbytes.functional.dequantize_4bit` and `quantize_4bit`."""

    def __init__(self) -> None:
        self.functional = require("bitsandbytes").functional

    def dequantize(self, weight: torch.Tensor, state: Any) -> torch.Tensor:
        dense: torch.Tensor = self.functional.dequantize_4bit(weight, state)
        return dense

    def quantize(self, weight: torch.Tensor, format: str, block_size: int, nested: bool) -> tuple[torch.Tensor, Any]:
        quantized: tuple[torch.Tensor, Any] = self.functional.quantize_4bit(
            weight, blocksize=block_size, quant_type=format, compress_statistics=nested
        )
        return quantized


class Unsloth:
    """Unsloth's way to dequantize (`unsloth.kernels.utils.fast_dequantize`): bitsandbytes' C functions called directly,
    one for the scales, torch's add for the offset, one for the weights. GPU only, nested scales only."""

    def __init__(self) -> None:
        library = require("bitsandbytes").functional.lib
        self.scales = library.cdequantize_blockwise_fp32
        self.weights = {
            (format, dtype): getattr(library, f"cdequantize_blockwise_{name}_{format}")
            for format in ("nf4", "fp4")
            for dtype, name in ((torch.float16, "fp16"), (torch.bfloat16, "bf16"), (torch.float32, "fp32"))
        }

    def dequantize(self, weight: torch.Tensor, state: Any) -> torch.Tensor:
        nested, blocks = state.state2, state.absmax.numel()
        stream = ctypes.c_void_p(torch._C._cuda_getCurrentRawStream(weight.get_device()))
        out = torch.empty(state.shape, dtype=state.dtype, device=weight.device)
        absmax = torch.empty(blocks, dtype=torch.float32, device=weight.device)
        self.scales(
            _pointer(nested.code), _pointer(state.absmax), _pointer(nested.absmax), _pointer(absmax),
            ctypes.c_int(nested.blocksize), ctypes.c_int(blocks), stream,
        )  # fmt: skip
        absmax += state.offset
        self.weights[state.quant_type, state.dtype](
            None, _pointer(weight), _pointer(absmax), _pointer(out),
            ctypes.c_int(state.blocksize), ctypes.c_int(out.numel()), stream,
        )  # fmt: skip
        return out


class Peft:
    """`peft.utils.integrations.dequantize_module_weight`, which merging a LoRA adapter goes through."""

    def __init__(self) -> None:
        require("peft")
        self.bitsandbytes = require("bitsandbytes")
        self.dequantize = import_module("peft.utils.integrations").dequantize_module_weight

    def module(self, q: QuantizedWeight) -> torch.nn.Module:
        """A bitsandbytes Linear4bit around the bytes of `q`."""
        packed, state = to_bitsandbytes(q)
        n, k = q.shape
        with torch.device("meta"):
            module: torch.nn.Module = self.bitsandbytes.nn.Linear4bit(k, n, bias=False, quant_type=q.format)
        parameter = self.bitsandbytes.nn.Params4bit(
            packed, requires_grad=False, quant_state=state, quant_type=q.format, bnb_quantized=True
        )
        module.weight = parameter
        return module


def _pointer(tensor: torch.Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())
