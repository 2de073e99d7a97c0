"""The operations of ops.py without checks of arguments: a kernel is picked and runs, on the device of the tensors.

Nothing here knows of tracing or gradients: library.py makes operators of these functions, autograd.py adds gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache, wraps
from importlib import import_module
from math import prod
from types import ModuleType
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from halfbyte.formats.nested import dynamic_code
from halfbyte.formats.spec import FORMATS
from halfbyte.formats.weight import QuantizedWeight
from halfbyte.kernels.common import slow
from halfbyte.kernels.common.device import cpu_capability, properties_of
from halfbyte.kernels.common.fused_rows import dense_dtype
from halfbyte.kernels.linear import cpu_ready, halves
from halfbyte.kernels.linear import reference as products
from halfbyte.kernels.linear.plan import plan as plan_linear
from halfbyte.kernels.linear.problem import ALIGNMENT

Function = TypeVar("Function", bound=Callable[..., Any])


def is_elsewhere(device: torch.device) -> bool:
    """True for a GPU that is not the current one."""
    return device.type == "cuda" and device.index != torch._C._cuda_getDevice()


def on(device: torch.device) -> AbstractContextManager[object]:
    """Within, `device` is the current one: that is where kernels are launched."""
    return torch.cuda.device(device) if is_elsewhere(device) else nullcontext()


def on_its_device(function: Function) -> Function:
    """The function, with the device of its first argument as the current one."""

    @wraps(function)
    def run(first: Tensor, *arguments: Any) -> Any:
        with on(first.device):
            return function(first, *arguments)

    return cast(Function, run)


@cache
def backend(operation: str, device_type: str) -> ModuleType:
    """The module with the kernels of `operation` for a kind of device; the torch reference where there is none."""
    reason = slow.no_kernels(device_type)
    if reason is None:
        name = "cpu" if device_type == "cpu" else "triton"
    else:
        name = "reference"
        if device_type != "meta":  # where nothing is computed
            slow.warn(f"kernels for {device_type}", reason)
    return import_module(f"halfbyte.kernels.{operation}.{name}")


@cache
def cuda_products() -> ModuleType:
    """The CUDA kernels of `linear`, which say themselves whether one is for a product."""
    return import_module("halfbyte.kernels.linear.cuda")


@on_its_device
def quantize(weight: Tensor, format: str, block_size: int, nested: bool) -> list[Tensor]:
    """[packed, scale], or [packed, scale, code, absmax, offset] with nested scales."""
    weight = plain(weight.detach())
    kernels = backend("quantize", weight.device.type)
    packed, scale = empty_quantized(weight, format, block_size)
    kernels.quantize(weight, FORMATS[format], block_size, packed, scale)
    if not nested:
        return [packed, scale]
    # The offset must be known before the first scale can be written, and must be torch's own sum to the last bit.
    offset = scale.mean()
    codes, absmax = kernels.quantize_scales(scale, offset)
    return [packed, codes, dynamic_code(weight.device), absmax, offset]


def empty_quantized(weight: Tensor, format: str, block_size: int) -> tuple[Tensor, Tensor]:
    """Packed and scale of a weight, to be filled in. Nested scales are made from this one."""
    spec, shape = FORMATS[format], tuple(weight.shape)
    packed = weight.new_empty(spec.packed_shape(shape), dtype=getattr(torch, spec.packed_dtype))
    scale_dtype = weight.dtype if spec.scale_dtype is None else getattr(torch, spec.scale_dtype)
    return packed, weight.new_empty(spec.scale_shape(shape, block_size), dtype=scale_dtype)


def dequantize(q: QuantizedWeight, out: Tensor) -> Tensor:
    """Fill `out`, contiguous, with the dense weight [*q.shape] in out's dtype, and return it."""
    with on(q.packed.device):
        kernels = backend("dequantize", q.packed.device.type)
        kernels.dequantize(q.packed, q.scale, q.nested, q.spec, q.block_size, out)
    return out


def linear(x: Tensor, q: QuantizedWeight, bias: Tensor | None, batch_invariant: bool) -> Tensor:
    """x @ W.T + bias, of x and bias with any strides."""
    found = ready_linear(x, q, bias, batch_invariant)
    return linear_anew(x, q, bias, batch_invariant) if found is None else found


def ready_linear(x: Tensor, q: QuantizedWeight, bias: Tensor | None, batch_invariant: bool) -> Tensor | None:
    """What `linear` gives, where an earlier call has prepared all and x is as kernels take it; else None."""
    if x.is_cuda:
        found: Tensor | None = cuda_products().ready(x, q, bias, batch_invariant)
        return found
    return cpu_ready.ready(x, q, bias, batch_invariant) if x.is_cpu else None


def linear_anew(x: Tensor, q: QuantizedWeight, bias: Tensor | None, batch_invariant: bool) -> Tensor:
    """What `linear` gives, for those who have asked `ready_linear` and got None."""
    given, given_bias = x.detach(), None if bias is None else bias.detach()
    elsewhere = is_elsewhere(x.device)
    with on(x.device):
        if x.is_cuda and cuda_products().takes_halves(x, q, batch_invariant):
            return halves.multiply(given, given_bias, lambda x: linear(x, q, None, False))
        x, bias = plain(given), None if given_bias is None else plain(given_bias)
        if x.is_cuda:
            x, bias = aligned(x), None if bias is None else aligned(bias)
            # What another device, strides or address had kept from being ready may be so by now.
            changed = elsewhere or x is not given or bias is not given_bias
            found = ready_linear(x, q, bias, batch_invariant) if changed else None
            if found is None:
                found = cuda_products().linear(x, q, bias, batch_invariant)
            if found is not None:
                return found
        return _linear_elsewhere(given, x, q, bias, batch_invariant)


def _linear_elsewhere(
    given: Tensor, x: Tensor, q: QuantizedWeight, bias: Tensor | None, batch_invariant: bool
) -> Tensor:
    """The product where no CUDA kernel is for it. x: `given`, contiguous."""
    n, k = q.shape
    rows = x.view(prod(x.shape[:-1]), k)
    device_type = x.device.type
    kind = device_type if slow.no_kernels(device_type) is None else "other"
    if kind == "cuda":
        kind = properties_of(x.get_device()).kind
    kernel = plan_linear(len(rows), n, k, x.dtype, kind, batch_invariant, cpu_capability()).kernel
    if kernel == "fused":
        out = rows.new_empty((len(rows), n))
        kernels = backend("linear", device_type)
        kernels.linear(rows, q.packed, q.scale, q.nested, q.spec, q.block_size, bias, out, batch_invariant)
        if kind == "cpu":
            cpu_ready.keep(len(rows), x, q, bias, batch_invariant, kernels.bind)
    elif kernel == "dense" and (wide := dense_dtype_for(x)) is not x.dtype:
        return linear(given.to(wide), q, None if bias is None else bias.to(wide), False).to(x.dtype)
    elif kernel == "dense" and kind == "cpu" and (panel := _panel_rows(q)) < n:
        return _linear_in_panels(given, q, bias, panel)
    else:
        weight = dequantize(q, rows.new_empty((n, k)))
        if kernel == "dense":  # of x as it is given: in which order torch adds up, and how well, depends on its strides
            return products.linear(given, weight, bias).contiguous()
        out = products.linear_in_tiles(rows, weight, bias)
    return out.view(*x.shape[:-1], n)


def dense_dtype_for(x: Tensor) -> torch.dtype:
    """The dtype in which a dense weight is multiplied with x."""
    return dense_dtype(x.dtype, cpu_capability()) if x.device.type == "cpu" else x.dtype


def _panel_rows(q: QuantizedWeight) -> int:
    """Rows of a W [N, K] on the CPU that are dense at a time; N where it is small."""
    grain: int = backend("dequantize", "cpu").GRAIN
    rows: int = _panels().panel_rows(*q.shape, q.block_size, grain * torch.get_num_threads())
    return rows


def _linear_in_panels(x: Tensor, q: QuantizedWeight, bias: Tensor | None, rows: int) -> Tensor:
    """torch's product, of a W on the CPU of which `rows` rows are dense at a time."""
    out, dequantize = x.new_empty((*x.shape[:-1], q.shape[0])), backend("dequantize", "cpu").dequantize
    weight = q.packed, q.scale, q.nested, q.spec, q.block_size
    _panels().linear(x, lambda panel, first: dequantize(*weight, panel, first), bias, out, rows)
    return out


@cache
def _panels() -> ModuleType:
    return import_module("halfbyte.kernels.linear.panels")


def linear_backward(grad: Tensor, q: QuantizedWeight) -> Tensor:
    """grad [..., N] @ W -> [..., K], of grad with any strides."""
    with on(grad.device):
        grad = grad.detach()
        if grad.is_cuda and cuda_products().takes_halves_back(grad, q):
            return halves.multiply(grad, None, lambda grad: linear_backward(grad, q))
        multiply = cuda_products().backward(grad, q) if grad.is_cuda else None
        if multiply is not None:
            return cast(Tensor, multiply(aligned(plain(grad))))
        wide = dense_dtype_for(grad)
        weight = dequantize(q, q.scale.new_empty(q.shape, dtype=wide))
        return products.linear(grad.to(wide), weight.t(), None).to(grad.dtype).contiguous()


def linear_group(x: Tensor, weights: Sequence[QuantizedWeight], biases: Sequence[Tensor | None]) -> list[Tensor] | None:
    """[linear(x, q, bias) for each q and its bias] in one launch, or None where no kernel does that."""
    if not x.is_cuda or len(weights) < 2:
        return None
    with on(x.device):
        given = [None if bias is None else aligned(plain(bias.detach())) for bias in biases]
        found: list[Tensor] | None = cuda_products().linear_group(aligned(plain(x.detach())), weights, given)
    return found


def plain(tensor: Tensor) -> Tensor:
    """Contiguous, and without torch's lazy sign; the tensor itself where it is so already."""
    return tensor.contiguous().resolve_neg()


def is_aligned(tensor: Tensor) -> bool:
    """True for an address that CUDA kernels can load 16 bytes from."""
    return tensor.data_ptr() % ALIGNMENT == 0


def aligned(tensor: Tensor) -> Tensor:
    """The tensor, or a copy at such an address."""
    return tensor if is_aligned(tensor) else tensor.clone()
