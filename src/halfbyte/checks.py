"""What public functions ask of a matrix of numbers and of a 4-bit weight, each said once."""

from __future__ import annotations

import torch
from torch import Tensor

from halfbyte.formats.weight import FLOAT_DTYPES


def not_a_weight(q: object, function: str, name: str = "q") -> TypeError:
    return TypeError(
        f"{name} is a {type(q).__name__}; {function} takes a QuantizedWeight, from halfbyte.quantize, "
        "halfbyte.from_bitsandbytes, halfbyte.from_compressed_tensors or halfbyte.from_gpt_oss"
    )


def check_floats(tensor: object, name: str, function: str) -> None:
    """Raise TypeError unless it is a dense tensor of fp16, bf16 or fp32."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} is a {type(tensor).__name__}; {function} takes a torch.Tensor")
    if tensor.dtype not in FLOAT_DTYPES:
        raise TypeError(
            f"{name} has dtype {tensor.dtype}; {function} takes torch.float16, torch.bfloat16 or torch.float32"
        )
    if tensor.layout != torch.strided:
        raise TypeError(f"{name} has layout {tensor.layout}; {function} takes a dense one, such as {name}.to_dense()")


def check_bias(bias: Tensor | None, x: Tensor, shape: tuple[int, ...], weight: tuple[int, ...], name: str) -> None:
    """Raise TypeError or ValueError unless there is no bias, or one of `shape`, of x's dtype and device."""
    if bias is None:
        return
    if not isinstance(bias, Tensor):
        raise TypeError(f"{name} is a {type(bias).__name__}; it must be a torch.Tensor, or None")
    if bias.dtype != x.dtype:
        raise TypeError(f"{name} has dtype {bias.dtype} and x {x.dtype}; pass {name}.to(x.dtype)")
    if tuple(bias.shape) != shape:
        raise ValueError(f"{name} has shape {list(bias.shape)}; a weight of shape {list(weight)} takes {list(shape)}")
    if bias.device != x.device:
        raise ValueError(f"{name} is on {bias.device} and x on {x.device}; they must be on one device")
