"""The public functions: check the arguments, pick the backend for the tensor's device, run it.

Called eagerly, they go straight to the kernel: the dispatcher alone costs tens of microseconds, more than most of these
kernels. Under torch.compile, torch.export or any other tracing they become one `torch.ops.halfbyte` call each
(library.py); gradients of eager calls have a way of their own (autograd.py).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.nn import Parameter

from halfbyte import autograd, eager, transforms
from halfbyte.checks import check_bias, check_floats, not_a_weight
from halfbyte.formats.parts import group_parts
from halfbyte.formats.settings import DEFAULT, check_settings
from halfbyte.formats.spec import FORMATS
from halfbyte.formats.weight import FLOAT_DTYPES, NestedScale, QuantizedWeight


def quantize(
    weight: Tensor,
    format: str = DEFAULT,
    *,
    block_size: int | None = None,
    group_size: int | None = None,
    nested: bool | None = None,
) -> QuantizedWeight:
    """Round a dense weight to 4 bits.

    weight: fp16, bf16 or fp32, on any device; [N, K] or a stack [E, N, K], for "nf4" and "fp4" of any shape. A weight
        that is not contiguous is read through a contiguous copy. A stack is quantized as its experts would be one after
        the other, but for nested scales, which share numbers, and blocks of "nf4" and "fp4" that reach across experts.
    format: "nf4" or "fp4", whose bytes and scales are those that bitsandbytes 0.50 makes on the same device; "int4",
        symmetric groups as compressed-tensors stores them; or "mxfp4", blocks of 32 along K with scales that are powers
        of two, as the OCP Microscaling specification defines them and gpt-oss stores them. There, 32 must divide K.
    block_size: for nf4 and fp4, how many weights share a scale: 32, 64 (the default), 128, ..., 4096; for mxfp4 32.
    group_size: for int4, how many weights along K share a scale: 32, 64 or 128 (the default); it must divide K.
    nested: for nf4 and fp4, whether the scales are themselves 8-bit ("double quantization"); True by default.

    Returns a QuantizedWeight on the weight's device. Raises TypeError or ValueError for arguments that do not fit.
    Sources: QLoRA, arXiv 2305.14314; compressed-tensors, "pack-quantized"; OCP MX specification 1.0.
    """
    if not (tracing := transforms.is_tracing()):
        transforms.refuse_script("quantize")
        transforms.refuse("quantize", "the weight", weight)
    check_floats(weight, "weight", "quantize")
    block_size, nested = check_settings(format, block_size, group_size, nested)
    FORMATS[format].check_shape(weight.shape, block_size)
    if tracing:
        parts = torch.ops.halfbyte.quantize(weight, format, block_size, nested)
    else:
        parts = eager.quantize(weight, format, block_size, nested)
    packed, scale, *rest = parts
    nested_scale = NestedScale(rest[0], rest[1], rest[2]) if nested else None
    return QuantizedWeight(format, packed, scale, tuple(weight.shape), weight.dtype, block_size, nested_scale)


def dequantize(q: QuantizedWeight, dtype: torch.dtype | None = None, out: Tensor | None = None) -> Tensor:
    """The dense weight that `q` stands for, [*q.shape], on q's device.

    On a GPU it has the bits that bitsandbytes' CUDA kernels give; on a CPU those of the format's definition, from which
    bitsandbytes' CPU paths deviate in four documented cases (docs/kernels/dequantize.md).

    dtype: torch.float16, torch.bfloat16 or torch.float32; by default that of `out`, and without `out` q.dtype.
    out: a contiguous tensor of q's shape and device to write into; it is returned.

    Values are codebook[nibble] * scale in fp32, rounded once. Raises TypeError or ValueError for what does not fit.
    """
    if type(q) is not QuantizedWeight:
        raise not_a_weight(q, "dequantize")
    if out is not None and not isinstance(out, Tensor):
        raise TypeError(f"out is a {type(out).__name__}; it must be a torch.Tensor, or None for a new one")
    if dtype is None:
        dtype = q.dtype if out is None else out.dtype
    if dtype not in FLOAT_DTYPES:
        raise TypeError(f"dtype is {dtype}; dequantize returns torch.float16, torch.bfloat16 or torch.float32")
    if out is not None:
        _check_out(out, q, dtype)
    if transforms.is_tracing():
        result = torch.ops.halfbyte.dequantize(*q.parts, dtype)
        return result if out is None else out.copy_(result)
    transforms.refuse_script("dequantize")
    if transforms.is_active():
        transforms.refuse("dequantize", "q or out", out, *q.tensors)
        with transforms.outside():
            return _dequantized(q, dtype, out)
    return _dequantized(q, dtype, out)


def _dequantized(q: QuantizedWeight, dtype: torch.dtype, out: Tensor | None) -> Tensor:
    if out is None:
        out = q.scale.new_empty(q.shape, dtype=dtype)
        eager.dequantize(q, out)
    else:
        eager.dequantize(q, out)
        increment_version(out)  # kernels write through a pointer, and autograd would not know
    return out


def linear(x: Tensor, q: QuantizedWeight, bias: Tensor | None = None, batch_invariant: bool = False) -> Tensor:
    """x @ W.T + bias, of the dense W that `q` stands for.

    x: fp16, bf16 or fp32, [..., K], with any strides. q: a weight of two dimensions [N, K]. bias: [N], of x's dtype.
    batch_invariant: a row's bits depend neither on the other rows nor on how many there are.

    Returns [..., N], contiguous, in x's dtype. Sums are fp32 or better and rounded once; the same input gives the same
    bits every time. Gradients and tangents flow to x and bias, inside torch.func too. Raises TypeError or
    ValueError for arguments that do not fit.
    """
    if transforms.is_tracing():
        _check_linear(x, q, bias)
        result: Tensor = torch.ops.halfbyte.linear(x, *q.parts, bias, batch_invariant)
        return result
    transforms.refuse_script("linear")
    if transforms.is_active():
        _check_linear(x, q, bias)
        transforms.refuse("linear", "the weight", *q.tensors)
        return autograd.linear(x, q, bias, batch_invariant)
    if not (_is_plain(x) and (bias is None or _is_plain(bias)) and type(q) is QuantizedWeight):
        _check_linear(x, q, bias)
        return autograd.linear(x, q, bias, batch_invariant)
    found = eager.ready_linear(x, q, bias, batch_invariant)
    if found is None:
        _check_linear(x, q, bias)
        found = eager.linear_anew(x, q, bias, batch_invariant)
    return found


def linear_group(
    x: Tensor,
    weights: Sequence[QuantizedWeight],
    biases: Sequence[Tensor | None] | None = None,
    one_launch: bool = False,
) -> list[Tensor] | None:
    """[linear(x, q, bias) for each q and its bias], in one launch where the kernels can do that. A sum may then be made
    in another order than alone; it is always the same one. With one_launch None where they cannot."""
    biases = [None] * len(weights) if biases is None else biases
    for q, bias in zip(weights, biases, strict=True):
        _check_linear(x, q, bias)
    tensors = [x, *(bias for bias in biases if bias is not None)]
    if not autograd.wants_gradients(*tensors):
        if transforms.is_tracing():
            if len({q.kind for q in weights}) == 1 and not one_launch:
                traced: list[Tensor] = torch.ops.halfbyte.linear_group(x, *group_parts(weights), biases)
                return traced
        elif all(map(_is_plain, tensors)) and (found := eager.linear_group(x, weights, biases)) is not None:
            return found
    return None if one_launch else [linear(x, q, bias) for q, bias in zip(weights, biases, strict=True)]


def _is_plain(tensor: object) -> bool:
    """Whether it is a tensor and no more, without gradients that somebody will ask for."""
    return type(tensor) in (Tensor, Parameter) and not (tensor.requires_grad and torch.is_grad_enabled())  # type: ignore[attr-defined]


def _check_linear(x: Tensor, q: QuantizedWeight, bias: Tensor | None) -> None:
    if type(q) is not QuantizedWeight:
        raise not_a_weight(q, "linear")
    check_floats(x, "x", "linear")
    if len(q.shape) != 2:
        stack = "; grouped_linear multiplies with stacks, and linear with one expert, q[e]" if len(q.shape) == 3 else ""
        raise ValueError(f"the weight has shape {list(q.shape)}; linear takes one of two dimensions [N, K]{stack}")
    n, k = q.shape
    if x.dim() == 0 or x.shape[-1] != k:
        raise ValueError(f"x has shape {list(x.shape)}; a weight of shape {[n, k]} takes [..., {k}]")
    if x.device != q.packed.device:
        raise ValueError(f"x is on {x.device} and the weight on {q.packed.device}; they must be on one device")
    check_bias(bias, x, (n,), (n, k), "bias")


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
