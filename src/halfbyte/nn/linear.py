"""A linear layer whose weight is 4-bit: a plain torch module.

Its state_dict has the keys of bitsandbytes ("weight", "weight.absmax", ...) or, for int4, of compressed-tensors
("weight_packed", ...), so either library's checkpoints load, and its own load there. mxfp4 weights have the two keys
that gpt-oss has for them ("weight_blocks", "weight_scales").
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from operator import is_
from typing import Any

import torch
from torch import Tensor

from halfbyte import library as library  # torch.compile supports a layer's product as an operator
from halfbyte.autocast import cast
from halfbyte.formats.layouts import layout_of
from halfbyte.formats.settings import DEFAULT
from halfbyte.formats.weight import NestedScale, QuantizedWeight
from halfbyte.ops import linear, quantize

NAMES = ("packed", "scale", "nested_code", "nested_absmax", "nested_offset")


class Linear4bit(torch.nn.Module):
    """x @ W.T + bias, with W [out_features, in_features] in 4 bits; as torch.nn.Linear in everything else.

    in_features, out_features: K and N. bias: whether there is one. format, and block_size and nested or group_size: as
    `halfbyte.quantize` takes them.
    device, dtype: of the bias, and of the dense weight that is made, as torch.nn.Linear makes it, and then rounded.

    Casting the module (`.half()`, `.to(dtype)`) casts the bias and leaves the packed weight and its scales as they are.
    The weight takes no gradients; x and bias do. Raises TypeError or ValueError for arguments that do not fit.
    """

    bias: torch.nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        format: str = DEFAULT,
        *,
        block_size: int | None = None,
        group_size: int | None = None,
        nested: bool | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        dense = torch.nn.Linear(in_features, out_features, bias, device, dtype)
        q = quantize(dense.weight, format, block_size=block_size, group_size=group_size, nested=nested)
        self._hold(q, dense.bias)

    @classmethod
    def from_linear(
        cls,
        linear: torch.nn.Linear,
        format: str = DEFAULT,
        *,
        block_size: int | None = None,
        group_size: int | None = None,
        nested: bool | None = None,
    ) -> Linear4bit:
        """The layer that `linear` becomes when its weight is rounded; the bias is the same parameter."""
        if not isinstance(linear, torch.nn.Linear):
            raise TypeError(f"linear is a {type(linear).__name__}; from_linear takes a torch.nn.Linear")
        q = quantize(linear.weight, format, block_size=block_size, group_size=group_size, nested=nested)
        return cls.from_quantized(q, linear.bias).train(linear.training)

    @classmethod
    def from_quantized(cls, q: QuantizedWeight, bias: torch.nn.Parameter | None = None) -> Linear4bit:
        """The layer around a weight that is quantized already, whose memory it shares."""
        if len(q.shape) != 2:
            raise ValueError(f"the weight has shape {list(q.shape)}; a layer takes one of two dimensions [N, K]")
        layer = cls.__new__(cls)
        torch.nn.Module.__init__(layer)
        layer._hold(q, bias)
        return layer

    def _hold(self, q: QuantizedWeight, bias: torch.nn.Parameter | None) -> None:
        self.out_features, self.in_features = q.shape
        for name in NAMES:
            self.register_buffer(name, None, persistent=False)
        if q.nested:  # all weights that halfbyte quantizes share one code, and state_dicts are copied into this one
            q = replace(q, nested=q.nested._replace(code=q.nested.code.clone()))
        self._set(q)
        self.register_parameter("bias", bias)

    def _set(self, q: QuantizedWeight) -> None:
        for name, tensor in zip(NAMES, q.tensors, strict=False):
            self._buffers[name] = tensor
        self._weight = q

    @property
    def weight(self) -> QuantizedWeight:
        """The weight, sharing the memory of the buffers."""
        q = self._weight
        if all(map(is_, map(self._buffers.get, NAMES), q.tensors)):
            return q
        packed, scale, *rest = (tensor for name in NAMES if (tensor := self._buffers[name]) is not None)
        nested = NestedScale(rest[0], rest[1], rest[2], q.nested.block_size) if q.nested else None
        self._weight = replace(q, packed=packed, scale=scale, nested=nested)
        return self._weight

    def forward(self, x: Tensor) -> Tensor:
        """x [..., K] in the dtype of the bias -> [..., N]; under autocast in any dtype, as torch.nn.Linear takes it."""
        x, bias = cast(x, self.bias)
        return linear(x, self.weight, bias)

    def extra_repr(self) -> str:
        q = self._weight
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"format={q.format}, {q.spec.size_name}={q.block_size}{', nested' if q.nested else ''}"
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Linear4bit:
        """Move the weight as `fn` does, but leave its dtypes, which are those of the format, alone."""

        def move(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            return moved if moved.dtype == tensor.dtype else tensor.to(moved.device)

        weight = {name: tensor for name in NAMES if (tensor := self._buffers.pop(name)) is not None}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name in NAMES:
            self._buffers[name] = move(weight[name]) if name in weight else None
        return self

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination.update(layout_of(self._weight.format).to_tensors(f"{prefix}weight", self.weight))
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(
        self,
        state_dict: Any,
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        name, here = f"{prefix}weight", self.weight
        library = layout_of(here.format)
        keys = library.keys(name, here)
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        unexpected_keys[:] = [key for key in unexpected_keys if key not in keys]
        missing = [key for key in keys if key not in state_dict]
        if missing:
            missing_keys += missing if strict else []
            return
        try:
            there = library.from_tensors(name, state_dict)
            if local_metadata.get("assign_to_params_buffers", False):
                _check_same(name, there, here)
                self._set(there)
            else:
                _check_same(name, there, here, copied=True)
                for target, source in zip(here.tensors, there.tensors, strict=True):
                    target.copy_(source.view_as(target))
                self._weight = replace(here, dtype=there.dtype)
        except ValueError as error:
            error_msgs.append(str(error))


def _check_same(name: str, there: QuantizedWeight, here: QuantizedWeight, copied: bool = False) -> None:
    """Raise ValueError unless what was saved as `name` is a weight like that of the layer."""
    for fact, given, accepted in (
        ("shape", list(there.shape), list(here.shape)),
        ("block_size", there.block_size, here.block_size),
        ("nested.block_size", *(q.nested.block_size if q.nested else None for q in (there, here))),
    ):
        if given != accepted:
            raise ValueError(f"{name!r} has {fact} {given} and the layer {accepted}; make the layer like its weight")
    if not copied:
        return
    if here.device.type == "meta":
        raise ValueError(f"{name!r} would be copied to a layer without memory; pass assign=True to load_state_dict")
    if there.scale.dtype != here.scale.dtype:
        raise ValueError(
            f"{name!r} has scales in {there.scale.dtype} and the layer in {here.scale.dtype}; make the layer with "
            f"dtype={there.scale.dtype}, or pass assign=True to load_state_dict"
        )
