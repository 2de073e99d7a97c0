"""bitsandbytes' tensors seen as a QuantizedWeight, and back, without a copy; and the keys they have in a checkpoint.

In memory, bitsandbytes keeps a weight as a packed tensor and a `QuantState` beside it (a `Params4bit` carries both).
In a safetensors file the same weight is a handful of tensors:

    NAME                                         the packed bytes, [bytes, 1], in any dtype ("quant_storage")
    NAME.absmax                                  fp32 [blocks], or uint8 [blocks] when nested
    NAME.quant_map                               fp32 [16], the codebook
    NAME.nested_absmax, NAME.nested_quant_map    fp32 [ceil(blocks / 256)] and [256], when nested
    NAME.quant_state.bitsandbytes__nf4           JSON as bytes (or __fp4): block size, dtype, shape, the nested offset

None of this imports bitsandbytes, but for `to_bitsandbytes`, which makes one of its objects.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch

from halfbyte.formats.fp4 import FP4
from halfbyte.formats.lookup import Tensors, find
from halfbyte.formats.nf4 import NF4
from halfbyte.formats.spec import codebook_tensor
from halfbyte.formats.weight import FLOAT_DTYPES, NestedScale, QuantizedWeight

FORMATS = {format.name: format for format in (NF4, FP4)}
UNSAID = FP4.name  # what its configuration means where it names no format
STATE_KEY = ".quant_state.bitsandbytes__"
SUFFIXES = (".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map", *(STATE_KEY + f for f in FORMATS))

_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in FLOAT_DTYPES}
_NO_TORCH_FUNCTION = torch._C.DisableTorchFunctionSubclass


def from_bitsandbytes(packed: torch.Tensor, quant_state: Any = None) -> QuantizedWeight:
    """A bitsandbytes 4-bit weight as a QuantizedWeight that shares its memory.

    packed: the packed weight, [bytes, 1] or its transpose [1, bytes], in any quant_storage dtype. A Params4bit may be
        given alone: its own quant_state is taken. A transposed `packed` is the same weight: the shape is the state's.
    quant_state: bitsandbytes' QuantState, or the nested list that stood for it before version 0.41.

    Raises ValueError or TypeError where the two do not fit together or bitsandbytes would read them with other numbers.
    """
    state = quant_state
    if state is None:
        state = getattr(packed, "quant_state", None)
        if state is None:
            raise _no_state(packed)
    if isinstance(state, (list, tuple)):
        state = _ListState(state)
    try:
        with _NO_TORCH_FUNCTION():  # Params4bit hooks every torch call, and the hook costs more than the calls
            data = packed.data
            if data.dtype is not torch.uint8:
                data = data.view(torch.uint8)
        state2 = state.state2
        nested = None
        if state2 is not None:
            if state2.dtype is not torch.float32:
                raise TypeError(f"state2.dtype is {state2.dtype}")
            nested = NestedScale(state2.code, state2.absmax, state.offset, state2.blocksize)
        return QuantizedWeight(state.quant_type, data, state.absmax, state.shape, state.dtype, state.blocksize, nested)
    except (AttributeError, RuntimeError, TypeError, ValueError) as error:
        raise _misfit(packed, state, error) from error


def to_bitsandbytes(q: QuantizedWeight) -> tuple[torch.Tensor, Any]:
    """The packed tensor, uint8 [bytes, 1], and the QuantState with which bitsandbytes reads `q`; nothing is copied.

    Only the sixteen values of the codebook are the state's own, as safetensors refuses to save shared tensors.
    Raises ValueError for an int4 weight and ImportError without bitsandbytes.
    """
    _require_blockwise(q)
    try:
        from bitsandbytes.functional import QuantState
    except ImportError as error:
        raise ImportError(
            "to_bitsandbytes makes a bitsandbytes.functional.QuantState and bitsandbytes cannot be imported "
            f"({error}); install it with: pip install 'halfbyte[transformers]'"
        ) from error
    state2 = offset = None
    if q.nested:
        offset = q.nested.offset.view(())
        state2 = QuantState(
            absmax=q.nested.absmax, code=q.nested.code, blocksize=q.nested.block_size, dtype=torch.float32
        )
    state = QuantState(
        absmax=q.scale,
        shape=torch.Size(q.shape),
        code=_quant_map(q.format, q.device),
        blocksize=q.block_size,
        quant_type=q.format,
        dtype=q.dtype,
        offset=offset,
        state2=state2,
    )
    return q.packed.view(-1, 1), state


def keys(name: str, q: QuantizedWeight) -> list[str]:
    """The keys under which bitsandbytes saves a weight like `q` as `name`."""
    nested = [f"{name}.nested_absmax", f"{name}.nested_quant_map"] if q.nested else []
    return [name, f"{name}.absmax", f"{name}.quant_map", *nested, name + STATE_KEY + q.format]


def to_tensors(name: str, q: QuantizedWeight) -> dict[str, torch.Tensor]:
    """The tensors, by their keys, under which bitsandbytes saves `q` as `name` ("...weight"); byte for byte its own.

    Raises ValueError for an int4 weight.
    """
    _require_blockwise(q)
    state: dict[str, Any] = {
        "quant_type": q.format,
        "blocksize": q.block_size,
        "dtype": str(q.dtype).removeprefix("torch."),
        "shape": list(q.shape),
    }
    tensors = {
        name: q.packed.view(-1, 1),
        f"{name}.absmax": q.scale,
        f"{name}.quant_map": _quant_map(q.format, q.device),
    }
    if q.nested:
        tensors[f"{name}.nested_absmax"] = q.nested.absmax
        tensors[f"{name}.nested_quant_map"] = q.nested.code.clone()
        state["nested_blocksize"] = q.nested.block_size
        state["nested_dtype"] = "float32"
        state["nested_offset"] = 0.0 if q.device.type == "meta" else q.nested.offset.item()
    tensors[name + STATE_KEY + q.format] = torch.tensor(
        list(json.dumps(state).encode()), dtype=torch.uint8, device="cpu"
    )
    return tensors


def is_complete(name: str, tensors: Mapping[str, torch.Tensor]) -> bool:
    """Whether all keys of the weight `name` are there, for those who get them one by one and in any order."""
    for format in FORMATS:
        key = name + STATE_KEY + format
        if key in tensors:
            nested = _State(key, tensors[key]).has("nested_offset")
            suffixes = ("", ".absmax", ".quant_map", *((".nested_absmax", ".nested_quant_map") if nested else ()))
            return all(name + suffix in tensors for suffix in suffixes)
    return False


def from_tensors(name: str, tensors: Tensors) -> QuantizedWeight:
    """The weight that bitsandbytes saved as `name`, from a mapping of keys to tensors or a function that looks them up.

    A function returns None, or raises KeyError, for a key that is not there. Raises ValueError, saying which key is at
    fault, where one is missing or the parts do not fit.
    """

    def need(key: str) -> torch.Tensor:
        tensor = find(tensors, key)
        if tensor is None:
            raise ValueError(
                f"key {key!r} is missing and a bitsandbytes weight needs it; the checkpoint is incomplete: get it again"
            )
        return tensor

    formats = [format for format in FORMATS if find(tensors, name + STATE_KEY + format) is not None]
    if len(formats) != 1:
        raise ValueError(
            f"{name!r} has {'no' if not formats else 'more than one'} quant_state key; exactly one of "
            f"{', '.join(name + STATE_KEY + format for format in FORMATS)} is expected"
        )
    key = name + STATE_KEY + formats[0]
    state = _State(key, need(key))
    if state.get("quant_type", str) != formats[0]:
        raise ValueError(f"{key!r} holds quant_type {state.get('quant_type', str)!r}; the key says {formats[0]!r}")
    _check_quant_map(f"{name}.quant_map", need(f"{name}.quant_map"), formats[0])
    nested = None
    if state.has("nested_offset") or find(tensors, f"{name}.nested_absmax") is not None:
        if state.get("nested_dtype", str) != "float32":
            raise ValueError(f"{key!r} holds nested_dtype {state.get('nested_dtype', str)!r}; float32 is accepted")
        absmax2 = need(f"{name}.nested_absmax")
        offset = torch.tensor(state.get("nested_offset", float), dtype=torch.float32, device=absmax2.device)
        nested = NestedScale(need(f"{name}.nested_quant_map"), absmax2, offset, state.get("nested_blocksize", int))
    dtype = _DTYPES.get(state.get("dtype", str))
    if dtype is None:
        raise ValueError(f"{key!r} holds dtype {state.get('dtype', str)!r}; one of {', '.join(_DTYPES)} is accepted")
    packed, absmax = need(name), need(f"{name}.absmax")
    if not packed.is_contiguous():
        raise ValueError(f"{name!r} is not contiguous; pass its .contiguous()")
    try:
        packed = packed.view(-1).view(torch.uint8)
        return QuantizedWeight(formats[0], packed, absmax, state.shape(), dtype, state.get("blocksize", int), nested)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name!r} does not fit together: {error}") from error


class _ListState:
    """The QuantState of bitsandbytes before 0.41, a list: absmax, shape, dtype, block size, nested or None, type, ...

    nested is [offset, [absmax, code, block size, ...]].
    """

    def __init__(self, state: list[Any] | tuple[Any, ...]) -> None:
        try:
            self.absmax, shape, self.dtype, self.blocksize, nested, self.quant_type = state[:6]
            self.shape = tuple(shape)
            offset, state2 = nested if nested is not None else (None, None)
            self.offset: torch.Tensor | None = offset
            self.state2 = None if state2 is None else _ListState2(*state2[:3])
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"quant_state is a list of {len(state)}; the old form is [absmax, shape, dtype, blocksize, nested, "
                "quant_type, ...], nested being None or [offset, [absmax, code, blocksize, ...]]"
            ) from error


class _ListState2:
    def __init__(self, absmax: torch.Tensor, code: torch.Tensor, blocksize: int) -> None:
        self.absmax, self.code, self.blocksize, self.dtype = absmax, code, blocksize, torch.float32


class _State:
    """The JSON of a quant_state key, read with care: it comes from a file."""

    def __init__(self, key: str, tensor: torch.Tensor) -> None:
        self.key = key
        try:
            if tensor.dtype is not torch.uint8:
                raise ValueError(f"its dtype is {tensor.dtype}, not torch.uint8")
            self.values = json.loads(bytes(tensor.cpu().view(-1).tolist()))
            if not isinstance(self.values, dict):
                raise ValueError(f"it is a {type(self.values).__name__}, not an object")
        except (ValueError, RecursionError) as error:
            raise ValueError(
                f"{key!r} is not the JSON that bitsandbytes writes ({error}); the checkpoint is damaged: get it again"
            ) from error

    def has(self, field: str) -> bool:
        return field in self.values

    def get(self, field: str, kind: type) -> Any:
        value = self.values.get(field)
        if kind is float and isinstance(value, int):
            value = float(value)
        if not isinstance(value, kind) or isinstance(value, bool):
            raise ValueError(f"{self.key!r} holds {field} {value!r}; {kind.__name__} is expected")
        return value

    def shape(self) -> tuple[int, ...]:
        shape = self.get("shape", list)
        if not all(isinstance(size, int) and not isinstance(size, bool) and size >= 0 for size in shape):
            raise ValueError(f"{self.key!r} holds shape {shape!r}; a list of sizes is expected")
        return tuple(shape)


def _quant_map(format: str, device: torch.device) -> torch.Tensor:
    """A fresh codebook as bitsandbytes keeps it; adding 0.0 makes both of FP4's zeros positive, as in its tables."""
    return codebook_tensor(FORMATS[format], device) + 0.0


def _check_quant_map(key: str, quant_map: torch.Tensor, format: str) -> None:
    """bitsandbytes saves the codebook but decodes with its own; one that differs would be read wrongly, in silence."""
    expected = torch.tensor(FORMATS[format].codebook, dtype=torch.float32, device="cpu")
    if quant_map.numel() != 16 or not torch.allclose(quant_map.cpu().float().view(-1), expected, atol=1e-3):
        raise ValueError(f"{key!r} is not the codebook of {format!r}; weights of another codebook are not accepted")


def _require_blockwise(q: QuantizedWeight) -> None:
    if q.format not in FORMATS:
        raise ValueError(f"format is {q.format!r}; bitsandbytes has 'nf4' and 'fp4': dequantize, then quantize")


def _no_state(packed: object) -> Exception:
    if not isinstance(packed, torch.Tensor):
        return _no_tensor(packed)
    return ValueError(
        "quant_state is None and packed carries none; pass weight.quant_state. A Params4bit gets its state when its "
        "module is first moved to a device, as in module.to('cuda')"
    )


def _no_tensor(packed: object) -> TypeError:
    kind = type(packed).__name__
    if not isinstance(packed, torch.nn.Module):
        return TypeError(f"packed is a {kind}; a torch.Tensor or a Params4bit is accepted")
    if isinstance(getattr(packed, "weight", None), QuantizedWeight):
        return TypeError(f"packed is a {kind}, a module whose weight is a QuantizedWeight already: take layer.weight")
    return TypeError(f"packed is a {kind}, a module; pass its weight: from_bitsandbytes(layer.weight)")


def _misfit(packed: object, state: Any, error: Exception) -> Exception:
    """What is wrong with a state that made no QuantizedWeight, in words of bitsandbytes' names."""
    if not isinstance(packed, torch.Tensor):
        return _no_tensor(packed)
    absmax = getattr(state, "absmax", None)
    if getattr(state, "packing_format_for_cpu", False):
        return ValueError(
            "bitsandbytes repacked this weight for its AVX-512 kernels when its module first ran on the CPU, rounding "
            "its scales to bfloat16; take weights before the first forward pass, or load the checkpoint again"
        )
    if isinstance(error, AttributeError):
        return TypeError(f"quant_state is a {type(state).__name__} and {error}; a bitsandbytes QuantState is accepted")
    if isinstance(error, RuntimeError):
        return ValueError(f"packed is not contiguous ({error}); pass packed.contiguous()")
    if getattr(state, "shape", None) is None:
        return ValueError("quant_state.shape is None; set it to the shape of the dense weight")
    if isinstance(absmax, torch.Tensor) and absmax.dtype in (torch.float16, torch.bfloat16):
        return TypeError(
            f"quant_state.absmax has dtype {absmax.dtype}, as in old checkpoints or after a cast of the whole model; "
            "scales are float32: set quant_state.absmax = quant_state.absmax.float()"
        )
    if str(error).startswith("state2.dtype"):
        return TypeError(
            f"quant_state.{error}: bitsandbytes would round nested scales to it first; torch.float32 is accepted. "
            "Dequantize with bitsandbytes and quantize again"
        )
    return type(error)(f"quant_state does not fit the packed weight: {error}")
