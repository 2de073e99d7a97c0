"""QuantizedWeight: the one object that carries a 4-bit weight, whoever wrote its bytes."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, NamedTuple, NoReturn

import torch

from halfbyte.formats.nested import NESTED_BLOCK_SIZE
from halfbyte.formats.settings import check_format
from halfbyte.formats.spec import FORMATS, PER_WORD, Format

FLOAT_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


# packed, scale, the nested code, absmax and offset or nothing, format, shape, block size, and nested block size or 0
Parts = tuple[torch.Tensor, torch.Tensor, Sequence[torch.Tensor], str, Sequence[int], int, int]


class NestedScale(NamedTuple):
    """What turns the one-byte scales of a "double quantized" weight into fp32 (formats/nested.py).

    code: fp32 [256], the value of each byte. absmax: fp32 [ceil(blocks / block_size)]. offset: fp32, one element, added
    last. block_size: how many scales share one entry of `absmax`; bitsandbytes uses 256.
    """

    code: torch.Tensor
    absmax: torch.Tensor
    offset: torch.Tensor
    block_size: int = NESTED_BLOCK_SIZE


@dataclass(frozen=True, eq=False, repr=False)
class QuantizedWeight:
    """A 4-bit weight: packed nibbles and their scales, checked to fit together when the object is made.

    format: its name; `spec` is what it means.
    packed: uint8 [(numel + 1) // 2], two weights a byte; for "mxfp4" uint8 [..., K / 2]; for "int4" int32 [..., K / 8],
        eight a word; contiguous.
    scale: for "nf4" and "fp4" fp32 [blocks], or uint8 [blocks] with `nested`; for "mxfp4" uint8 [..., K / 32], powers
        of two; for "int4" floats, [..., K / group].
    shape: the dense weight's shape, [N, K] or a stack [E, N, K]; "nf4" and "fp4" take any other too.
    dtype: the dense weight's dtype, which `dequantize` returns unless told otherwise.
    block_size: how many weights share a scale (for "int4", the group size along K).
    nested: how one-byte scales become fp32, or None where the scales are plain.

    Nothing is copied: tensors are kept as they are given. Raises ValueError or TypeError where they do not fit.

    `len(q)` is the first side of the shape. In a stack, `q[e]` is the weight [N, K] of an expert, counted from the end
    where e is negative, and `q[i:j]` a smaller stack; both share the stack's memory.
    """

    format: str
    packed: torch.Tensor
    scale: torch.Tensor
    shape: tuple[int, ...]
    dtype: torch.dtype
    block_size: int
    nested: NestedScale | None = None

    def __post_init__(self) -> None:
        if self.dtype not in FLOAT_DTYPES:
            raise TypeError(f"dtype is {self.dtype}; a dense weight is torch.float16, torch.bfloat16 or torch.float32")
        if any(side < 0 for side in self.shape):
            raise ValueError(f"shape is {list(self.shape)}; no side of a weight is negative")
        _check(self, check_format(self.format))

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("the weight has no sides, and so no length")
        return self.shape[0]

    def __bool__(self) -> bool:
        """A weight is there, whatever its length."""
        return True

    def __getitem__(self, index: int | slice) -> QuantizedWeight:
        """An expert of a stack [E, N, K], or a stack of those that follow each other, without a copy.

        Raises TypeError for a weight of other dimensions, IndexError for an expert that there is not, and ValueError
        for steps, or where an expert begins inside a scale block of "nf4" or "fp4", or inside a group of nested scales.
        """
        if len(self.shape) != 3:
            raise TypeError(f"the weight has shape {list(self.shape)}; only a stack [E, N, K] has experts, q[e]")
        count = self.shape[0]
        if not isinstance(index, slice):
            expert = operator.index(index)
            if not -count <= expert < count:
                raise IndexError(f"expert {expert} is out of range; the stack has {count}")
            return part_of(self, expert % count, expert % count + 1, self.shape[1:])
        first, last, step = index.indices(count)
        if step != 1:
            raise ValueError(f"the slice has step {step}; experts that share the stack's memory follow each other")
        return part_of(self, first, max(first, last))

    @property
    def spec(self) -> Format:
        """What the format means (formats/spec.py)."""
        return FORMATS[self.format]

    @property
    def device(self) -> torch.device:
        return self.packed.device

    @property
    def numel(self) -> int:
        """How many weights there are."""
        return prod(self.shape)

    @property
    def kind(self) -> tuple[str, int, int]:
        """Format, block size, and how many scales share an entry of the nested ones (0: they are not nested)."""
        return self.format, self.block_size, self.nested.block_size if self.nested else 0

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Every tensor the weight is made of."""
        if self.nested is None:
            return self.packed, self.scale
        # Not a slice of `nested`: torch 2.8 cannot trace one.
        return self.packed, self.scale, self.nested.code, self.nested.absmax, self.nested.offset

    @property
    def parts(self) -> Parts:
        """The weight as operators take it: tensors, lists, strings and numbers. `from_parts` puts it together again."""
        packed, scale, *nested = self.tensors
        format, block_size, nested_block_size = self.kind
        return packed, scale, nested, format, self.shape, block_size, nested_block_size

    @classmethod
    def from_parts(cls, parts: Parts, dtype: torch.dtype) -> QuantizedWeight:
        """The weight of its `parts`, standing for a dense one of `dtype`."""
        packed, scale, nested, format, shape, block_size, nested_block_size = parts
        nested_scale = NestedScale(nested[0], nested[1], nested[2], nested_block_size) if nested else None
        return cls(format, packed, scale, tuple(shape), dtype, block_size, nested_scale)

    @property
    def nbytes(self) -> int:
        """Bytes of all its tensors, scales included."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def to(
        self, device: torch.device | str | int, non_blocking: bool = False, *, dtype: torch.dtype | None = None
    ) -> QuantizedWeight:
        """The same weight on another device; itself if it is there already. Raises TypeError for a dtype."""
        if dtype is not None or any(isinstance(given, torch.dtype) for given in (device, non_blocking)):
            raise _no_cast("to")
        if not isinstance(device, (torch.device, str, int)):
            raise TypeError(f"device is a {type(device).__name__}; q.to takes a torch.device, or its name")
        packed, scale, *rest = (tensor.to(device, non_blocking=non_blocking) for tensor in self.tensors)
        if packed is self.packed:
            return self
        nested = NestedScale(rest[0], rest[1], rest[2], self.nested.block_size) if self.nested else None
        return replace(self, packed=packed, scale=scale, nested=nested)

    def cpu(self) -> QuantizedWeight:
        """The same weight on the CPU; itself if it is there already."""
        return self.to("cpu")

    def cuda(self, device: torch.device | str | int | None = None, non_blocking: bool = False) -> QuantizedWeight:
        """The same weight on a CUDA device, by default the current one; itself if it is there already."""
        return self.to("cuda" if device is None else device, non_blocking)

    def half(self) -> NoReturn:
        """Raises TypeError, as do the others: 4-bit weights have no other dtype."""
        raise _no_cast("half")

    def bfloat16(self) -> NoReturn:
        raise _no_cast("bfloat16")

    def float(self) -> NoReturn:
        raise _no_cast("float")

    def double(self) -> NoReturn:
        raise _no_cast("double")

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled as a call of the class, so that what comes out of a file is checked like everything else."""
        fields = self.format, self.packed, self.scale, tuple(self.shape), self.dtype, self.block_size, self.nested
        return type(self), fields

    def __setstate__(self, state: dict[str, Any]) -> None:
        """For pickles of halfbyte 0.1.0, which hold the fields by name."""
        self.__dict__.update(state)
        self.__post_init__()

    def __repr__(self) -> str:
        nested = ", nested" if self.nested else ""
        bits = 8 * self.nbytes / max(self.numel, 1)
        return (
            f"QuantizedWeight({self.format}, {list(self.shape)}, {self.spec.size_name}={self.block_size}{nested}, "
            f"{self.dtype}, {self.device}, {bits:.3f} bits a weight)"
        )


# What torch.load may make of a file with weights_only=True, its default: both do no more than hold what they are given.
torch.serialization.add_safe_globals([QuantizedWeight, NestedScale])


def part_of(q: QuantizedWeight, first: int, last: int, shape: tuple[int, ...] | None = None) -> QuantizedWeight:
    """What lies from `first` to before `last` along the first side of q, sharing its memory, as a weight of `shape`.

    Raises ValueError where it begins or ends inside a scale block, or begins inside a group of nested scales.
    """
    spec, nested = q.spec, q.nested
    shape = (last - first, *q.shape[1:]) if shape is None else shape
    if spec.along_k:
        packed, scale = q.packed[first:last], q.scale[first:last]
        return replace(
            q, packed=packed.view(spec.packed_shape(shape)), scale=scale.view(spec.scale_shape(shape, q.block_size)),
            shape=shape,
        )  # fmt: skip
    size, side = q.block_size, prod(q.shape[1:])
    begin, end = (first * side, last * side) if first < last else (0, 0)
    blocks = slice(begin // size, -(-end // size))
    if begin % size or (end % size and end < q.numel):
        raise _no_view(
            q,
            side,
            f"blocks of {size} reach from one into the next; quantize with a {spec.size_name} that divides {side}",
        )
    if nested is not None:
        if blocks.start % nested.block_size:
            unit = size * nested.block_size
            raise _no_view(q, side, f"nested scales share a number among {unit} weights; quantize with nested=False")
        absmax = nested.absmax[blocks.start // nested.block_size : -(-blocks.stop // nested.block_size)]
        nested = nested._replace(absmax=absmax)
    return replace(
        q, packed=q.packed.reshape(-1, 1)[begin // 2 : -(-end // 2)], scale=q.scale.view(-1)[blocks], shape=shape,
        nested=nested,
    )  # fmt: skip


def _no_view(q: QuantizedWeight, side: int, reason: str) -> ValueError:
    return ValueError(
        f"the experts of {list(q.shape)} have {side} weights each and cannot be views: {reason}, or each expert alone"
    )


def _no_cast(method: str) -> TypeError:
    return TypeError(
        f"q.{method} was asked for another dtype, and 4-bit weights have none: q.to moves between devices. Pass the "
        "dtype to dequantize(q, dtype); dataclasses.replace(q, dtype=...) changes the one that it returns by default"
    )


_UINT8, _INT32, _FLOAT32 = (torch.uint8,), (torch.int32,), (torch.float32,)


def _check(q: QuantizedWeight, spec: Format) -> None:
    """Raise ValueError or TypeError unless the tensors are what the format says."""
    spec.check_shape(q.shape, q.block_size)
    numel, nested = q.numel, q.nested
    blocks = -(-numel // q.block_size)
    if spec.words:
        _check_tensor(q, "packed", q.packed, _INT32, numel // PER_WORD, spec.packed_shape(q.shape))
    elif spec.along_k:
        _check_tensor(q, "packed", q.packed, _UINT8, numel // 2, spec.packed_shape(q.shape))
    else:
        _check_tensor(q, "packed", q.packed, _UINT8, (numel + 1) // 2)
    dtypes = _UINT8 if nested else FLOAT_DTYPES if spec.scale_dtype is None else (getattr(torch, spec.scale_dtype),)
    shape = spec.scale_shape(q.shape, q.block_size) if spec.along_k else None
    _check_tensor(q, "scale", q.scale, dtypes, blocks, shape)
    if nested:
        if not spec.nests:
            raise ValueError(f"nested is given, and {q.format} has scales of its own dtype")
        size = nested.block_size
        if size < 16 or size & (size - 1):
            raise ValueError(f"nested.block_size is {size}; it must be a power of two of at least 16 (usually 256)")
        _check_tensor(q, "nested.code", nested.code, _FLOAT32, 256)
        _check_tensor(q, "nested.absmax", nested.absmax, _FLOAT32, -(-blocks // size))
        _check_tensor(q, "nested.offset", nested.offset, _FLOAT32, 1)


def _check_tensor(
    q: QuantizedWeight,
    name: str,
    tensor: torch.Tensor,
    dtypes: tuple[torch.dtype, ...],
    numel: int,
    shape: tuple[int, ...] | None = None,
) -> None:
    """Raise unless `tensor` is contiguous, of a known dtype and size, and where the packed weight is.

    Weights are made on hot paths, so nothing is said, and no sentence built, while all is well.
    """
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} is a {type(tensor).__name__}; it must be a torch.Tensor")
    if tensor.dtype not in dtypes:
        raise TypeError(f"{name} has dtype {tensor.dtype}; it must be {' or '.join(map(str, dtypes))}")
    if tensor is not q.packed and tensor.device != q.packed.device:
        raise ValueError(f"{name} is on {tensor.device} and packed on {q.packed.device}; move both to one device")
    if tensor.numel() != numel or (shape is not None and tensor.shape != shape):
        needed = f"shape {list(shape)}" if shape else f"{numel} elements"
        raise ValueError(
            f"{name} has shape {list(tensor.shape)}; {q.format} of shape {list(q.shape)} with a scale for every "
            f"{q.block_size} weights needs {needed}"
        )
    if not tensor.is_contiguous():
        raise ValueError(f"{name} is not contiguous; pass {name}.contiguous()")
