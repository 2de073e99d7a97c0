"""The others: what a user would call today, through their own packages."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import torch

from halfbyte.formats.bitsandbytes import to_bitsandbytes
from halfbyte.formats.weight import QuantizedWeight
from halfbyte.kernels.experts.reference import activate
from halfbyte.ops import dequantize


def require(package: str) -> Any:
    """The package, or an error that says how to get it."""
    try:
        return import_module(package)
    except ImportError as error:
        raise ImportError(
            f"the bench compares with {package}, which cannot be imported ({error}); pip install 'halfbyte[bench]'"
        ) from error


class Bitsandbytes:
    """`bitsandbytes.functional.dequantize_4bit` and `quantize_4bit`, `matmul_4bit`, and its module."""

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

    def linear(self, x: torch.Tensor, weight: torch.Tensor, state: Any) -> torch.Tensor:
        """`bitsandbytes.matmul_4bit`."""
        product: torch.Tensor = require("bitsandbytes").matmul_4bit(x, weight, state)
        return product

    def why_no_linear(self, q: QuantizedWeight) -> str | None:
        """Why its product with `q` on a GPU cannot be asked for; None where it can."""
        if q.shape[0] % 2 and q.device.type == "cuda":
            return "its product with 4 rows of x ends in a misaligned address where N is odd"  # 0.50.2, N = 14337
        return None

    def module(self, q: QuantizedWeight) -> torch.nn.Module:
        """A bitsandbytes Linear4bit around the bytes of `q`."""
        bitsandbytes = require("bitsandbytes")
        packed, state = to_bitsandbytes(q)
        n, k = q.shape
        with torch.device("meta"):
            module: torch.nn.Module = bitsandbytes.nn.Linear4bit(k, n, bias=False, quant_type=q.format)
        module.weight = bitsandbytes.nn.Params4bit(
            packed, requires_grad=False, quant_state=state, quant_type=q.format, bnb_quantized=True
        )
        return module

    def why_not_repacked(self, q: QuantizedWeight, dtype: torch.dtype) -> str | None:
        """Why its module, in eval mode on this CPU, does not pack a weight anew for AVX512-BF16; None where it does."""
        has = getattr(import_module("bitsandbytes.functional"), "has_avx512bf16", lambda: False)
        if not has():
            return "this CPU has no AVX512-BF16, without which bitsandbytes repacks nothing"
        if dtype != torch.bfloat16:
            return "it computes in bf16 whatever the dtype of x"
        (n, k), size = q.shape, q.block_size
        return f"it fails with N = {n}, K = {k} and blocks of {size}" if n % 32 or k % size else None

    def repacked(self, q: QuantizedWeight) -> torch.nn.Module:
        """Its module in eval mode, which packs a copy of `q` anew when it is first called."""
        return self.module(deepcopy(q)).eval()


class Tinygemm:
    """torch's own int4 product, `torch.ops.aten._weight_int4pack_mm`, on the integers and scales of an int4 weight."""

    INNER_K_TILES = 8

    @staticmethod
    def fits(shape: torch.Size) -> bool:
        return shape[0] % 64 == 0 and shape[1] % (16 * Tinygemm.INNER_K_TILES) == 0

    def __init__(self, q: QuantizedWeight) -> None:
        n, k = q.shape
        octets = q.packed.view(torch.uint8)
        self.group_size = q.block_size
        scale = q.scale.to(torch.bfloat16).t()
        self.scales_and_zeros = torch.stack((scale, torch.zeros_like(scale)), dim=-1).contiguous()
        aten = torch.ops.aten
        if q.device.type == "cpu":
            integers = torch.stack((octets & 15, octets >> 4), dim=-1).view(n, k).int()
            self.weight = aten._convert_weight_to_int4pack_for_cpu(integers, 1)
            self.product = aten._weight_int4pack_mm_for_cpu
        else:
            swapped = (octets << 4) | (octets >> 4)  # it has the first of two in the high nibble
            self.weight = aten._convert_weight_to_int4pack(swapped, self.INNER_K_TILES)
            self.product = aten._weight_int4pack_mm

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.product(x, self.weight, self.group_size, self.scales_and_zeros)
        return result


class Marlin:
    """Marlin's layer (github.com/IST-DASLab/marlin, Apache-2.0) on the integers and scales of an int4 weight. It is
    built from its source, for fp16 x and an NVIDIA GPU from sm_80 on."""

    GROUP_SIZE = 128

    @staticmethod
    def fits(shape: torch.Size, device: torch.device) -> bool:
        """True where it is installed and takes such a weight."""
        is_here = device.type == "cuda" and find_spec("marlin") is not None
        return is_here and shape[0] % 256 == 0 and shape[1] % Marlin.GROUP_SIZE == 0

    def __init__(self, q: QuantizedWeight) -> None:
        n, k = q.shape
        self.layer = require("marlin").Layer(k, n, q.block_size).to(q.device)
        with torch.device("meta"):
            dense = torch.nn.Linear(k, n, bias=False)
        dense.weight = torch.nn.Parameter(dequantize(q, torch.float16), requires_grad=False)
        self.layer.pack(dense, q.scale.half())

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.layer(x)
        return result


class GroupedMm:
    """The "grouped_mm" experts of transformers: torch's grouped product over dense stacks [E, N, K]."""

    def __init__(self) -> None:
        require("transformers")
        functions = import_module("transformers.integrations.moe")
        self.product, self.block = functions._grouped_linear, functions.grouped_mm_experts_forward

    def linear(self, rows: torch.Tensor, stack: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """rows [S, K], sorted by expert, whose rows end at offsets, int32 [E] -> [S, N]."""
        result: torch.Tensor = self.product(rows, stack, offsets)
        return result

    def experts(
        self,
        gate_up: torch.Tensor,
        down: torch.Tensor,
        gate_up_bias: torch.Tensor | None,
        down_bias: torch.Tensor | None,
        activation: str,
    ) -> Callable[..., torch.Tensor]:
        """What computes a block of x [T, H], ids and weights [T, k] as a model's experts do."""
        # What the function reads of a module of experts.
        module = SimpleNamespace(
            num_experts=len(gate_up),
            gate_up_proj=gate_up,
            down_proj=down,
            gate_up_proj_bias=gate_up_bias,
            down_proj_bias=down_bias,
            has_gate=True,
            has_bias=gate_up_bias is not None,
            has_post_expert_norm=False,
            is_transposed=False,
            _is_expert_parallel=False,
            _apply_gate=partial(activate, activation=activation),
        )
        return partial(self.block, module)


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
        self.module = Bitsandbytes().module
        self.dequantize = import_module("peft.utils.integrations").dequantize_module_weight


def _pointer(tensor: torch.Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())
