"""The public functions: check the arguments, pick the backend for the tensor's device, run it.

Called eagerly, they go straight to the kernel: the dispatcher alone costs tens of microseconds, more than most of these
kernels. Under torch.compile, torch.export or any other tracing they become one `torch.ops.halfbyte` call each.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib import import_module
from types import ModuleType

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from halfbyte.formats import blockwise, grouped
from halfbyte.formats.weight import FLOAT_DTYPES, FORMAT_NAMES, NestedScale, QuantizedWeight
from halfbyte.kernels.common.device import has_triton


def quantize(
    weight: Tensor,
    format: str = "nf4",
    *,
    block_size: int | None = None,
    group_size: int | None = None,
    nested: bool | None = None,
) -> QuantizedWeight:
    """Round a dense weight to 4 bits.

    weight: fp16, bf16 or fp32, on any device; any shape for "nf4" and "fp4", [N, K] for "int4". A weight that is not
        contiguous is read through a contiguous copy.
    format: "nf4" or "fp4", whose bytes and scales are those that bitsandbytes 0.50 makes on the same device, or "int4",
        symmetric groups as compressed-tensors stores them.
    block_size: for nf4 and fp4, how many weights share a scale: 32, 64 (the default), 128, ..., 4096.
    group_size: for int4, how many weights along K share a scale: 32, 64 or 128 (the default); it must divide K.
    nested: for nf4 and fp4, whether the scales are themselves 8-bit ("double quantization"); True by default.

    Returns a QuantizedWeight on the weight's device. Raises TypeError or ValueError for arguments that do not fit.
    Sources: QLoRA, arXiv 2305.14314; compressed-tensors, "pack-quantized".
    """
    block_size, nested = _check_quantize(weight, format, block_size, group_size, nested)
    if _is_tracing():
        parts = torch.ops.halfbyte.quantize(weight, format, block_size, nested)
    else:
        parts = _quantize(weight, format, block_size, nested)
    packed, scale, *rest = parts
    nested_scale = NestedScale(rest[0], rest[1], rest[2]) if nested else None
    return QuantizedWeight(format, packed, scale, tuple(weight.shape), weight.dtype, block_size, nested_scale)


def dequantize(q: QuantizedWeight, dtype: torch.dtype | None = None, out: Tensor | None = None) -> Tensor:
    """The dense weight that `q` stands for, [*q.shape], on q's device; bit for bit what bitsandbytes returns.

    dtype: torch.float16, torch.bfloat16 or torch.float32; by default that of `out`, and without `out` q.dtype.
    out: a contiguous tensor of q's shape and device to write into; it is returned.

    Values are codebook[nibble] * scale in fp32, rounded once. Raises TypeError or ValueError for what does not fit.
    """
    if type(q) is not QuantizedWeight:
        raise TypeError(
            f"q is a {type(q).__name__}; dequantize takes a QuantizedWeight, from halfbyte.quantize, "
            "halfbyte.from_bitsandbytes or halfbyte.from_compressed_tensors"
        )
    if out is not None and not isinstance(out, Tensor):
        raise TypeError(f"out is a {type(out).__name__}; it must be a torch.Tensor, or None for a new one")
    if dtype is None:
        dtype = q.dtype if out is None else out.dtype
    if dtype not in FLOAT_DTYPES:
        raise TypeError(f"dtype is {dtype}; dequantize returns torch.float16, torch.bfloat16 or torch.float32")
    if out is not None:
        _check_out(out, q, dtype)
    if _is_tracing():
        nested = list(q.nested[:3]) if q.nested else []
        nested_size = q.nested.block_size if q.nested else 0
        result = torch.ops.halfbyte.dequantize(
            q.packed, q.scale, nested, q.format, q.shape, q.block_size, nested_size, dtype
        )
        return result if out is None else out.copy_(result)
    if out is None:
        out = q.scale.new_empty(q.shape, dtype=dtype)
        _dequantize(q, out)
    else:
        _dequantize(q, out)
        increment_version(out)  # kernels write through a pointer, and autograd would not know
    return out


def _dequantize(q: QuantizedWeight, out: Tensor) -> None:
    device = q.packed.device
    if device.type == "cuda" and device.index != torch._C._cuda_getDevice():
        with torch.cuda.device(device):
            _dequantize(q, out)
            return
    kernels = _backend("dequantize", device.type)
    if q.format == grouped.NAME:
        kernels.dequantize_grouped(q.packed, q.scale, q.block_size, out)
    else:
        codebook = blockwise.codebook_tensor(q.format, device)
        kernels.dequantize_blockwise(q.packed, q.scale, q.nested, codebook, q.block_size, out)


def _quantize(weight: Tensor, format: str, block_size: int, nested: bool) -> list[Tensor]:
    """[packed, scale], or [packed, scale, code, absmax, offset] with nested scales."""
    device = weight.device
    if device.type == "cuda" and device.index != torch._C._cuda_getDevice():
        with torch.cuda.device(device):
            return _quantize(weight, format, block_size, nested)
    weight = weight.detach().contiguous().resolve_neg()
    kernels = _backend("quantize", device.type)
    packed, scale = _empty_quantized(weight, format, block_size)
    if format == grouped.NAME:
        kernels.quantize_grouped(weight, block_size, packed, scale)
        return [packed, scale]
    kernels.quantize_blockwise(weight, blockwise.FORMATS[format], block_size, packed, scale)
    if not nested:
        return [packed, scale]
    # The offset must be known before the first scale can be written, and must be torch's own sum to the last bit.
    offset = scale.mean()
    codes, absmax = kernels.quantize_scales(scale, offset)
    return [packed, codes, blockwise.dynamic_code(device), absmax, offset]


def _empty_quantized(weight: Tensor, format: str, block_size: int) -> tuple[Tensor, Tensor]:
    if format == grouped.NAME:
        n, k = weight.shape
        packed = weight.new_empty((n, k // grouped.PER_WORD), dtype=torch.int32)
        return packed, weight.new_empty((n, k // block_size))
    numel = weight.numel()
    packed = weight.new_empty(((numel + 1) // 2, 1), dtype=torch.uint8)
    return packed, weight.new_empty((-(-numel // block_size),), dtype=torch.float32)


@cache
def _backend(operation: str, device_type: str) -> ModuleType:
    """The module with the kernels of `operation` for a kind of device; the torch reference where there is none."""
    if device_type == "cpu":
        name = "cpu"
    elif device_type == "cuda" and has_triton():
        name = "triton"
    else:
        name = "reference"
    return import_module(f"halfbyte.kernels.{operation}.{name}")


def _is_tracing() -> bool:
    return torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0


def _check_quantize(
    weight: Tensor, format: str, block_size: int | None, group_size: int | None, nested: bool | None
) -> tuple[int, bool]:
    """The block (or group) size and whether scales are nested, or an error that says what would do."""
    if not isinstance(weight, Tensor):
        raise TypeError(f"weight is a {type(weight).__name__}; quantize takes a torch.Tensor")
    if weight.dtype not in FLOAT_DTYPES:
        raise TypeError(
            f"weight has dtype {weight.dtype}; quantize takes torch.float16, torch.bfloat16 or torch.float32"
        )
    if weight.layout != torch.strided:
        raise TypeError(f"weight has layout {weight.layout}; quantize takes a dense one, such as weight.to_dense()")
    if format == grouped.NAME:
        if block_size is not None or nested:
            raise ValueError("block_size and nested are for nf4 and fp4; int4 takes group_size")
        size = 128 if group_size is None else group_size
        grouped.check_shape(weight.shape, size)
        return size, False
    if not isinstance(format, str) or format not in blockwise.FORMATS:
        raise ValueError(f"format is {format!r}; known formats are {', '.join(map(repr, FORMAT_NAMES))}")
    if group_size is not None:
        raise ValueError(f"group_size is for int4; {format} takes block_size")
    size = 64 if block_size is None else block_size
    blockwise.check_block_size(format, size)
    return size, True if nested is None else nested


def _check_out(out: Tensor, q: QuantizedWeight, dtype: torch.dtype) -> None:
    if out.dtype != dtype:
        raise TypeError(
            f"out has dtype {out.dtype} and dtype is {dtype}; leave dtype away, or pass an out of that dtype"
        )
    if tuple(out.shape) != tuple(q.shape):
        raise ValueError(f"out has shape {list(out.shape)}; the weight needs {list(q.shape)}")
    if out.device != q.packed.device:
        raise ValueError(f"out is on {out.device} and the weight on {q.packed.device}; they must be on one device")
    if not out.is_contiguous():
        raise ValueError("out is not contiguous; dequantize writes a contiguous tensor")
    if out.requires_grad and torch.is_grad_enabled():
        raise ValueError("out requires gradients, and none flow through 4-bit weights; pass out.detach()")


# What tracing sees. The schemas stand here once; eager calls never come through them.
_library = torch.library.Library("halfbyte", "DEF")
_library.define("quantize(Tensor weight, str format, int block_size, bool nested) -> Tensor[]")
_library.define(
    "dequantize(Tensor packed, Tensor scale, Tensor[] nested, str format, SymInt[] shape, int block_size, "
    "int nested_block_size, ScalarType dtype) -> Tensor"
)


def _quantize_op(weight: Tensor, format: str, block_size: int, nested: bool) -> list[Tensor]:
    parts = _quantize(weight, format, block_size, nested)
    if nested:
        parts[2] = parts[2].clone()  # an operator may not return the same tensor twice
    return parts


def _dequantize_op(
    packed: Tensor,
    scale: Tensor,
    nested: Sequence[Tensor],
    format: str,
    shape: Sequence[int],
    block_size: int,
    nested_block_size: int,
    dtype: torch.dtype,
) -> Tensor:
    nested_scale = NestedScale(nested[0], nested[1], nested[2], nested_block_size) if nested else None
    q = QuantizedWeight(format, packed, scale, tuple(shape), dtype, block_size, nested_scale)
    out = packed.new_empty(q.shape, dtype=dtype)
    _dequantize(q, out)
    return out


def _dequantize_fake(
    packed: Tensor,
    scale: Tensor,
    nested: Sequence[Tensor],
    format: str,
    shape: Sequence[int],
    block_size: int,
    nested_block_size: int,
    dtype: torch.dtype,
) -> Tensor:
    return packed.new_empty(shape, dtype=dtype)


def _quantize_fake(weight: Tensor, format: str, block_size: int, nested: bool) -> list[Tensor]:
    packed, scale = _empty_quantized(weight, format, block_size)
    if not nested:
        return [packed, scale]
    absmax = scale.new_empty((-(-scale.numel() // blockwise.NESTED_BLOCK_SIZE),))
    return [
        packed,
        scale.new_empty(scale.shape, dtype=torch.uint8),
        scale.new_empty((256,)),
        absmax,
        scale.new_empty(()),
    ]


for _name, _real, _fake in (
    ("quantize", _quantize_op, _quantize_fake),
    ("dequantize", _dequantize_op, _dequantize_fake),
):
    _library.impl(_name, _real, "CompositeExplicitAutograd")
    torch.library.register_fake(f"halfbyte::{_name}", _fake, lib=_library)
