"""Writing a safetensors file tensor by tensor, in any order, with no more in memory than the tensor at hand.

The places of all tensors follow from their dtypes and shapes, which are known before the first is computed. The one
exception are small blobs of bytes whose length depends on their content (bitsandbytes' JSON holds a float): they are
kept until the end and go last. The header goes in last of all, into a place that was left for it, padded with spaces as
the format allows.

Readers view tensors in place, so each must start at a multiple of its dtype's size although the format allows no gaps:
as in the safetensors library, the wide dtypes come first and the header's length is a multiple of eight.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import torch

from halfbyte.checkpoints.reader import DTYPE_NAMES, DTYPES, Entry

_MAX_BLOB = 4096


@dataclass(frozen=True)
class Spec:
    """A tensor to come: its key, safetensors' name of its dtype, its shape and its bytes.

    A shape of None makes it a blob: uint8 of one dimension, up to 4096 bytes, as long as it will turn out to be.
    """

    name: str
    dtype: str
    shape: tuple[int, ...] | None
    nbytes: int = _MAX_BLOB

    @staticmethod
    def of(name: str, dtype: torch.dtype, shape: Iterable[int]) -> Spec:
        """A tensor of a torch dtype."""
        shape = tuple(shape)
        return Spec(name, DTYPE_NAMES[dtype], shape, dtype.itemsize * torch.Size(shape).numel())

    @staticmethod
    def blob(name: str) -> Spec:
        """Bytes whose number is not known yet."""
        return Spec(name, "U8", None)

    @property
    def alignment(self) -> int:
        return DTYPES[self.dtype].itemsize if self.dtype in DTYPES else 1


class SafetensorsWriter:
    """A safetensors file being written. Use as a context manager; the file is complete when the block ends."""

    def __init__(self, path: Path, specs: Iterable[Spec], metadata: Mapping[str, str] | None = None) -> None:
        # A stable sort: wide dtypes first, blobs last, otherwise in the order given.
        ordered = sorted(specs, key=lambda spec: (spec.shape is None, -spec.alignment))
        self._specs = {spec.name: spec for spec in ordered}
        if len(self._specs) != len(ordered):
            raise ValueError("two tensors have one name")
        self._metadata = dict(metadata or {})
        self._starts: dict[str, int] = {}
        self._blobs: dict[str, bytes] = {}
        self._end = 0
        for spec in ordered:
            if spec.shape is not None:
                self._starts[spec.name] = self._end
                self._end += spec.nbytes
        self._left = set(self._specs)
        longest = self._header(dict.fromkeys(self._blob_names(), _MAX_BLOB))
        self._data_start = 8 + -(-len(longest) // 8) * 8
        self._file = path.open("wb", buffering=0)

    def __enter__(self) -> SafetensorsWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            if kind is None:
                self._finish()
        finally:
            self._file.close()

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Write one tensor, from any device. Raises ValueError where it is not what its Spec said."""
        spec = self._take(name)
        dtype = DTYPE_NAMES.get(tensor.dtype)
        if dtype != spec.dtype or (spec.shape is not None and tuple(tensor.shape) != spec.shape):
            raise ValueError(f"{name!r} is {dtype} {list(tensor.shape)}; {spec.dtype} {spec.shape} was planned")
        data = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data
        if spec.shape is None:
            if len(data) > _MAX_BLOB:
                raise ValueError(f"{name!r} has {len(data)} bytes; {_MAX_BLOB} were planned at most")
            self._blobs[name] = data.tobytes()
        else:
            self._write_at(self._starts[name], data)

    def copy(self, name: str, entry: Entry) -> None:
        """Write a tensor of another file, bit for bit."""
        spec = self._take(name)
        if spec.nbytes != entry.nbytes:
            raise ValueError(f"{name!r} has {entry.nbytes} bytes; {spec.nbytes} were planned")
        start = self._starts[name]
        for chunk in entry.chunks():
            self._write_at(start, memoryview(chunk))
            start += len(chunk)

    def _take(self, name: str) -> Spec:
        if name not in self._left:
            raise ValueError(f"{name!r} was {'written before' if name in self._specs else 'not planned'}")
        self._left.discard(name)
        return self._specs[name]

    def _write_at(self, start: int, data: memoryview) -> None:
        self._file.seek(self._data_start + start)
        while data:
            data = data[self._file.write(data) :]

    def _finish(self) -> None:
        if self._left:
            raise ValueError(f"{min(self._left)!r} was planned and not written")
        end = self._end
        for name in self._blob_names():
            self._write_at(end, memoryview(self._blobs[name]))
            end += len(self._blobs[name])
        header = self._header({name: len(blob) for name, blob in self._blobs.items()})
        length = self._data_start - 8
        self._write_at(-self._data_start, memoryview(length.to_bytes(8, "little") + header.ljust(length)))

    def _blob_names(self) -> list[str]:
        return [name for name, spec in self._specs.items() if spec.shape is None]

    def _header(self, blobs: Mapping[str, int]) -> bytes:
        header: dict[str, object] = {"__metadata__": self._metadata} if self._metadata else {}
        end = self._end
        for name, spec in self._specs.items():
            if spec.shape is None:
                offsets, shape = [end, end + blobs[name]], [blobs[name]]
                end += blobs[name]
            else:
                offsets, shape = [self._starts[name], self._starts[name] + spec.nbytes], list(spec.shape)
            header[name] = {"dtype": spec.dtype, "shape": shape, "data_offsets": offsets}
        return json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
