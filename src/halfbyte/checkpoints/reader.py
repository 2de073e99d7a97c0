"""Reading safetensors checkpoints, one tensor at a time: a file, or a directory with or without an index.

A safetensors file is eight bytes that say how long the header is, the header (JSON: each tensor's dtype, shape and
place), and the tensors' bytes. The header is checked by the safetensors library; the bytes are then read with plain
reads, not mapped, so that a process never holds more than the tensor it asked for.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
}
FLOATS = ("F16", "BF16", "F32")  # of dense weights
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}

_CHUNK = 1 << 24


@dataclass(frozen=True)
class Entry:
    """Where one tensor lies: `nbytes` bytes from `start` in `path`; `dtype` is safetensors' name for it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    path: Path
    start: int
    nbytes: int

    def read(self) -> torch.Tensor:
        """The tensor, on the CPU, in memory of its own. Raises ValueError for a dtype that torch does not have."""
        if self.dtype not in DTYPES:
            raise ValueError(f"{self.name!r} has dtype {self.dtype}, which is not one of {', '.join(DTYPES)}")
        if not self.nbytes:
            return torch.empty(self.shape, dtype=DTYPES[self.dtype], device="cpu")
        raw = torch.empty(self.nbytes, dtype=torch.uint8, device="cpu")
        left = raw.numpy().data
        with self._open() as file:
            while left:
                left = left[self._some(file.readinto(left[:_CHUNK])) :]
        return raw.view(DTYPES[self.dtype]).view(self.shape)

    def chunks(self) -> Iterator[bytes]:
        """Its bytes as they are, a few megabytes at a time."""
        left = self.nbytes
        with self._open() as file:
            while left:
                chunk = file.read(min(left, _CHUNK))
                left -= self._some(len(chunk))
                yield chunk

    def _open(self) -> FileIO:
        with readable(self.path):
            file = FileIO(self.path)
        file.seek(self.start)
        return file

    def _some(self, count: int) -> int:
        if not count:
            raise ValueError(f"{self.path} ended inside {self.name!r}; it was cut short while being read")
        return count


@dataclass(frozen=True)
class Checkpoint:
    """The tensors of a checkpoint and the files they lie in.

    path: the file or directory it was opened from. entries: every tensor by name. shards: the names in each file, in
    the order of their bytes. metadata: each file's own (usually {"format": "pt"}). index: the index's name, or None.
    """

    path: Path
    entries: dict[str, Entry]
    shards: dict[str, list[str]]
    metadata: dict[str, dict[str, str]] = field(default_factory=dict)
    index: str | None = None

    @property
    def is_directory(self) -> bool:
        return self.path.is_dir()

    @property
    def nbytes(self) -> int:
        """Bytes of all its tensors."""
        return sum(entry.nbytes for entry in self.entries.values())

    def read(self, name: str) -> torch.Tensor:
        """One tensor. Raises KeyError where there is none of that name."""
        return self.entries[name].read()


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Open a .safetensors file, or a directory that holds a model in one or several of them.

    In a directory these are looked for in turn: model.safetensors; an index (*.safetensors.index.json) and the files it
    names; all *.safetensors. Only headers are read. Raises FileNotFoundError where there is nothing to read and
    ValueError where files are damaged, missing, or disagree with the index.
    """
    path = Path(path)
    if path.is_file():
        return _assemble(path, [path], None)
    if not path.is_dir():
        raise FileNotFoundError(f"{path} does not exist; give a .safetensors file or a directory that holds some")
    with readable(path):
        os.listdir(path)  # glob finds nothing in a directory that cannot be read, and says nothing
        single = (path / "model.safetensors").is_file()
    if single:
        return _assemble(path, [path / "model.safetensors"], None)
    indexes = sorted(path.glob("*.safetensors.index.json"))
    if len(indexes) > 1:
        indexes = [index for index in indexes if index.name == "model.safetensors.index.json"] or indexes
    if len(indexes) > 1:
        raise ValueError(f"{path} has several indexes ({', '.join(i.name for i in indexes)}); keep the one to be read")
    if indexes:
        return _open_indexed(path, indexes[0])
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"{path} holds no .safetensors file; other kinds of checkpoint are not read")
    _check_complete(path, [file.name for file in files])
    return _assemble(path, files, None)


def _check_complete(path: Path, names: list[str]) -> None:
    """Without an index, names such as "model-00002-of-00003.safetensors" tell whether all files are there."""
    told = [match for name in names if (match := re.fullmatch(r"(.*-)(\d+)(-of-)(\d+)(\.safetensors)", name))]
    for first, number, of, count, last in (match.groups() for match in told[:1]):
        wanted = [f"{first}{i:0{len(number)}}{of}{count}{last}" for i in range(1, int(count) + 1)]
        missing = [name for name in wanted if name not in names]
        if missing:
            raise ValueError(
                f"{path} lacks {', '.join(missing[:3])}{' ...' if missing[3:] else ''}, and has no index; the download "
                "is incomplete: get the missing files"
            )


def _open_indexed(path: Path, index: Path) -> Checkpoint:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{index} has no weight_map; it must say which file holds which tensor")
    names = sorted({str(name) for name in weight_map.values()})
    for name in names:
        if Path(name).name != name:
            raise ValueError(f"{index} names the file {name!r}; a file beside the index is expected")
    missing = [name for name in names if not (path / name).is_file()]
    if missing:
        raise ValueError(
            f"{path} lacks {', '.join(missing)}, which {index.name} names ({len(missing)} of {len(names)} files); "
            "the download is incomplete: get the missing files"
        )
    checkpoint = _assemble(path, [path / name for name in names], index.name)
    for name, file in weight_map.items():
        entry = checkpoint.entries.get(name)
        if entry is None or entry.path.name != file:
            raise ValueError(f"{path / file} does not hold {name!r}, though {index.name} says so; get both files again")
    unlisted = checkpoint.entries.keys() - weight_map.keys()
    if unlisted:
        raise ValueError(f"{index} does not list {min(unlisted)!r}, which one of its files holds; get it again")
    return checkpoint


def _assemble(path: Path, files: list[Path], index: str | None) -> Checkpoint:
    checkpoint = Checkpoint(path, {}, {}, {}, index)
    for file in files:
        metadata, entries = _read_header(file)
        for entry in entries:
            other = checkpoint.entries.get(entry.name)
            if other is not None:
                raise ValueError(f"{entry.name!r} is in both {other.path.name} and {file.name} of {path}; keep one")
            checkpoint.entries[entry.name] = entry
        checkpoint.shards[file.name] = [entry.name for entry in entries]
        checkpoint.metadata[file.name] = metadata
    return checkpoint


def _read_header(path: Path) -> tuple[dict[str, str], list[Entry]]:
    """A file's metadata and its tensors in the order of their bytes."""
    with readable(path), path.open("rb"):
        pass
    try:
        with safe_open(path, "np") as file:  # checks sizes, offsets and that the file is whole
            names = set(file.keys())
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
        metadata = header.pop("__metadata__", None) or {}
        entries = []
        for name, info in header.items():
            start, end = info["data_offsets"]
            entries.append(Entry(name, info["dtype"], tuple(info["shape"]), path, 8 + length + start, end - start))
        if names != header.keys():
            raise ValueError("its header names a tensor twice")
    except Exception as error:  # SafetensorError is a bare Exception, and an empty file gives others
        reason = str(error).removeprefix("Error while deserializing header: ")
        raise ValueError(
            f"{path} is not a whole safetensors file ({reason}); it may be cut short or of another kind: get it again"
        ) from error
    return metadata, sorted(entries, key=lambda entry: entry.start)


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Have a file or directory that may not be read called just that."""
    try:
        yield
    except PermissionError as error:
        raise PermissionError(
            error.errno, f"{path} cannot be read: permission denied; have its owner grant it (chmod +r)"
        ) from error


def read_json(path: Path) -> dict[str, Any]:
    """A JSON file that holds an object. Raises ValueError where it does not."""
    try:
        with readable(path):
            text = path.read_text(encoding="utf-8")
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON ({error}); get it again") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds a JSON {type(value).__name__}; an object is expected")
    return value
