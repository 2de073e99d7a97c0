"""`halfbyte bench dequantize` and `halfbyte bench quantize`: the cases and their providers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from halfbyte import ops
from halfbyte.bench import baselines
from halfbyte.bench.case import Case, same_bits
from halfbyte.formats.bitsandbytes import to_bitsandbytes

# k_proj of Llama-3 8B, its q_proj, up_proj and down_proj, and those two of the 70B.
GPU_SHAPES = ((1024, 4096), (4096, 1024), (4096, 4096), (14336, 4096), (4096, 14336), (28672, 8192), (8192, 28672))
CPU_SHAPES = ((4096, 1024), (4096, 4096), (14336, 4096))

# Inputs of a case are together this many times larger than the last cache, within what a laptop's memory holds.
CACHE_BYTES = {"cuda": 60 << 20, "cpu": 32 << 20}
TIMES_THE_CACHE = 8
MOST_SETS = 64


def dequantize_cases(
    device: torch.device, shapes: Sequence[tuple[int, int]], dtype: torch.dtype, format: str, nested: bool
) -> Iterator[Case]:
    """One case a shape: halfbyte, bitsandbytes, and where they apply Unsloth's sequence and PEFT's function."""
    bitsandbytes = baselines.Bitsandbytes()
    peft = baselines.Peft()
    unsloth = baselines.Unsloth() if device.type == "cuda" and nested and format != "int4" else None
    for shape in shapes:
        numel = shape[0] * shape[1]
        scale_bytes = numel // 64 + 4 * -(-numel // (64 * 256)) if nested else numel // 16
        moved = numel // 2 + scale_bytes + numel * dtype.itemsize
        sets = input_sets(moved, device)
        weights = [_quantized(shape, dtype, format, nested, device) for _ in range(sets)]
        states = [to_bitsandbytes(q) for q in weights]
        modules = [peft.module(q) for q in weights]
        providers: dict[str, Any] = {
            "halfbyte": lambda i, weights=weights: ops.dequantize(weights[i]),
            "bitsandbytes": lambda i, states=states: bitsandbytes.dequantize(*states[i]),
            "peft": lambda i, modules=modules: peft.dequantize(modules[i]),
        }
        if unsloth:
            providers["unsloth"] = lambda i, states=states: unsloth.dequantize(*states[i])
        facts = _facts(shape, dtype, format, nested, sets)
        yield Case(_name(shape), moved, sets, providers, "bitsandbytes", same_bits, device, facts)


def quantize_cases(
    device: torch.device, shapes: Sequence[tuple[int, int]], dtype: torch.dtype, format: str, nested: bool
) -> Iterator[Case]:
    """One case a shape: halfbyte and bitsandbytes, nibbles and every scale compared."""
    bitsandbytes = baselines.Bitsandbytes()
    for shape in shapes:
        numel = shape[0] * shape[1]
        # The fp32 scales are written and, where nested, read twice: for their mean, and to be quantized.
        scale_bytes = numel // 16 * (3 if nested else 1) + (numel // 64 if nested else 0)
        moved = numel * dtype.itemsize + numel // 2 + scale_bytes
        sets = input_sets(moved, device)
        weights = [torch.randn(shape, dtype=torch.float32, device=device).to(dtype) for _ in range(sets)]
        providers = {
            "halfbyte": lambda i, weights=weights: ops.quantize(weights[i], format, nested=nested),
            "bitsandbytes": lambda i, weights=weights: bitsandbytes.quantize(weights[i], format, 64, nested),
        }
        facts = _facts(shape, dtype, format, nested, sets)
        yield Case(_name(shape), moved, sets, providers, "bitsandbytes", _same_quantized, device, facts)


def _same_quantized(result: Any, right: Any) -> str | None:
    for ours, theirs in zip(_parts(result), _parts(right), strict=True):
        if error := same_bits(ours.reshape(-1), theirs.reshape(-1)):
            return error
    return None


def _parts(quantized: Any) -> Iterable[torch.Tensor]:
    """Packed bytes and scales of a QuantizedWeight or of bitsandbytes' (packed, state)."""
    packed, state = quantized if isinstance(quantized, tuple) else to_bitsandbytes(quantized)
    nested = (state.state2.absmax, state.state2.code, state.offset) if state.state2 is not None else ()
    return (packed, state.absmax, *nested)


def _quantized(shape: tuple[int, int], dtype: torch.dtype, format: str, nested: bool, device: torch.device) -> Any:
    return ops.quantize(torch.randn(shape, dtype=torch.float32, device=device).to(dtype), format, nested=nested)


def input_sets(moved: int, device: torch.device) -> int:
    """How many inputs of `moved` bytes each are together larger than any cache."""
    return min(MOST_SETS, max(2, -(-TIMES_THE_CACHE * CACHE_BYTES[device.type] // moved)))


def _name(shape: tuple[int, int]) -> str:
    return f"{shape[0]}×{shape[1]}"


def _facts(shape: tuple[int, int], dtype: torch.dtype, format: str, nested: bool, sets: int) -> dict[str, Any]:
    return {
        "shape": list(shape), "dtype": str(dtype).removeprefix("torch."), "format": format, "block_size": 64,
        "nested": nested, "inputs": sets,
    }  # fmt: skip
