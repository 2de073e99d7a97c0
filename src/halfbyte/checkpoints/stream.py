"""A checkpoint from one place to another, tensor by tensor: some converted on the way, the rest copied bit for bit."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from halfbyte.atomic import atomic_output, check_space
from halfbyte.checkpoints.plan import Weight
from halfbyte.checkpoints.reader import Checkpoint, Entry, readable
from halfbyte.checkpoints.writer import SafetensorsWriter, Spec

Progress = Callable[[str, int, int], None]
"""Called before each tensor with its name, the bytes read so far and those to read in all; at the end with name ""."""

# Weights of other kinds stay behind: they would be the dense ones beside their 4-bit copy.
_OTHER_WEIGHTS = (".safetensors", ".index.json", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".ot")


@dataclass(frozen=True)
class Layer:
    """One converted weight. Errors are of the 4-bit weight against the dense one, None where it was dequantized.

    relative_error: the norm of the difference over the norm of the weight. max_error: the largest difference.
    """

    name: str
    shape: tuple[int, ...]
    bytes_before: int
    bytes_after: int
    relative_error: float | None
    max_error: float | None


@dataclass(frozen=True)
class Summary:
    """What was done. Bytes are those of all tensors; `layers` were converted, `copied` tensors were not.

    skipped: weights that would have been quantized but whose K is no multiple of int4's group size.
    experts: weights of experts, which stay dense, and their bytes. files: what was written, below `destination`.
    dry_run: nothing was; errors are unknown, and `bytes_after` lacks the few bytes of JSON beside each NF4 weight.
    """

    source: Path
    destination: Path
    bytes_before: int
    bytes_after: int
    layers: tuple[Layer, ...]
    copied: int
    skipped: tuple[str, ...]
    experts: tuple[str, ...]
    experts_bytes: int
    files: tuple[str, ...]
    dry_run: bool


@dataclass(frozen=True)
class Converted:
    """The tensors of a converted weight, as planned, and its errors."""

    tensors: dict[str, torch.Tensor]
    relative_error: float | None = None
    max_error: float | None = None


@dataclass(frozen=True)
class Output:
    """Where a checkpoint goes. config: config.json's new content, None where the source has none."""

    path: Path
    config: dict[str, Any] | None = None
    max_shard_size: int | None = None
    overwrite: bool = False
    dry_run: bool = False


@dataclass(frozen=True)
class Left:
    """Weights that stay dense and that the summary names: see there."""

    skipped: tuple[str, ...] = ()
    experts: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Shard:
    name: str
    items: list[Weight | Entry]
    metadata: dict[str, str]


def stream(
    checkpoint: Checkpoint,
    weights: list[Weight],
    convert: Callable[[Weight], Converted],
    output: Output,
    progress: Progress | None = None,
    left: Left = Left(),
) -> Summary:
    """Write `checkpoint` to `output` with `weights` converted. The output appears whole or not at all."""
    shards = _shards(checkpoint, weights, output.max_shard_size)
    specs = [spec for shard in shards for item in shard.items for spec in _specs(item)]
    others = _other_files(checkpoint)
    index = _index_name(checkpoint, shards)
    files = _file_names(checkpoint, shards, others, output, index)

    def summary(layers: list[Layer], copied: int, written: int) -> Summary:
        return Summary(
            checkpoint.path, output.path, checkpoint.nbytes, written, tuple(layers), copied, left.skipped, left.experts,
            sum(checkpoint.entries[name].nbytes for name in left.experts), files, output.dry_run,
        )  # fmt: skip

    needed = sum(s.nbytes + 200 + len(s.name) for s in specs) + sum(path.stat().st_size for path in others)
    check_space(output.path.resolve().parent, needed)

    for other in others:
        with readable(other), other.open("rb"):
            pass
    if output.dry_run:
        layers = [_planned(checkpoint, weight) for weight in weights]
        converted = {key for weight in weights for key in weight.keys}
        return summary(
            layers, len(checkpoint.entries.keys() - converted), sum(s.nbytes for s in specs if s.shape is not None)
        )

    layers = []
    weight_map: dict[str, str] = {}
    copied = done = written = 0
    with atomic_output(output.path, directory=checkpoint.is_directory, overwrite=output.overwrite) as place:
        for shard in shards:
            path = place / shard.name if checkpoint.is_directory else place
            shard_specs = [spec for item in shard.items for spec in _specs(item)]
            with SafetensorsWriter(path, shard_specs, {"format": "pt", **shard.metadata}) as writer:
                for item in shard.items:
                    if progress:
                        progress(item.name, done, checkpoint.nbytes)
                    if isinstance(item, Entry):
                        writer.copy(item.name, item)
                        before = after = item.nbytes
                        copied += 1
                    else:
                        before = sum(checkpoint.entries[key].nbytes for key in item.keys)
                        layers.append(_convert(item, convert, writer, before))
                        after = layers[-1].bytes_after
                    done += before
                    written += after
            weight_map.update((spec.name, shard.name) for spec in shard_specs)
        if checkpoint.is_directory:
            for other in others:
                target = place / other.relative_to(checkpoint.path)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(other, target)
            if output.config is not None:
                _write_json(place / "config.json", output.config)
            if index is not None:
                content = {"metadata": {"total_size": written}, "weight_map": dict(sorted(weight_map.items()))}
                _write_json(place / index, content)
        if progress:
            progress("", done, checkpoint.nbytes)
    return summary(layers, copied, written)


def _planned(checkpoint: Checkpoint, weight: Weight) -> Layer:
    before = sum(checkpoint.entries[key].nbytes for key in weight.keys)
    after = sum(spec.nbytes for spec in weight.specs if spec.shape is not None)
    return Layer(weight.name, weight.shape, before, after, None, None)


def _index_name(checkpoint: Checkpoint, shards: list[_Shard]) -> str | None:
    """Of the output's index. Where there are several files, or one of another name, nothing loads them without."""
    if not checkpoint.is_directory:
        return None
    alone = [shard.name for shard in shards] == ["model.safetensors"]
    return checkpoint.index or (None if alone else "model.safetensors.index.json")


def _file_names(
    checkpoint: Checkpoint, shards: list[_Shard], others: list[Path], output: Output, index: str | None
) -> tuple[str, ...]:
    if not checkpoint.is_directory:
        return (output.path.name,)
    names = {shard.name for shard in shards} | {other.relative_to(checkpoint.path).as_posix() for other in others}
    return tuple(sorted(names | {name for name in (index, "config.json" if output.config else None) if name}))


def _convert(weight: Weight, convert: Callable[[Weight], Converted], writer: SafetensorsWriter, before: int) -> Layer:
    converted = convert(weight)
    for name, tensor in converted.tensors.items():
        writer.write(name, tensor)
    after = sum(tensor.nbytes for tensor in converted.tensors.values())
    return Layer(weight.name, weight.shape, before, after, converted.relative_error, converted.max_error)


def _specs(item: Weight | Entry) -> tuple[Spec, ...]:
    if isinstance(item, Entry):
        return (Spec(item.name, item.dtype, item.shape, item.nbytes),)
    return item.specs


def _shards(checkpoint: Checkpoint, weights: list[Weight], max_size: int | None) -> list[_Shard]:
    """The files to write. A weight goes, whole, where the first of its keys was; the order is the source's."""
    by_key = {key: weight for weight in weights for key in weight.keys}

    def items(names: list[str]) -> Iterator[Weight | Entry]:
        for name in names:
            weight = by_key.get(name)
            if weight is None:
                yield checkpoint.entries[name]
            elif name == weight.keys[0]:
                yield weight

    shards = [_Shard(file, list(items(names)), checkpoint.metadata[file]) for file, names in checkpoint.shards.items()]
    if max_size is None:
        return [shard for shard in shards if shard.items] or shards[:1]
    if not checkpoint.is_directory:
        raise ValueError("max_shard_size cuts a checkpoint into several files; the source must be a directory then")
    if max_size <= 0:
        raise ValueError(f"max_shard_size is {max_size}; a number of bytes is expected")
    return _reshard([item for shard in shards for item in shard.items], shards[0].metadata, max_size)


def _reshard(items: list[Weight | Entry], metadata: dict[str, str], max_size: int) -> list[_Shard]:
    groups: list[list[Weight | Entry]] = [[]]
    size = 0
    for item in items:
        nbytes = sum(spec.nbytes for spec in _specs(item))
        if groups[-1] and size + nbytes > max_size:
            groups.append([])
            size = 0
        groups[-1].append(item)
        size += nbytes
    count = len(groups)
    names = [
        f"model-{i:05}-of-{count:05}.safetensors" if count > 1 else "model.safetensors" for i in range(1, count + 1)
    ]
    return [_Shard(name, group, metadata) for name, group in zip(names, groups, strict=True)]


def _other_files(checkpoint: Checkpoint) -> list[Path]:
    """What else lies in the directory: tokenizer, generation settings and the like; nothing hidden."""
    if not checkpoint.is_directory:
        return []
    found = []
    for path in sorted(checkpoint.path.rglob("*")):
        inside = path.relative_to(checkpoint.path)
        top = len(inside.parts) == 1
        if any(part.startswith(".") for part in inside.parts) or not path.is_file():
            continue
        if inside.name.endswith(_OTHER_WEIGHTS[1:]) or (top and inside.suffix == ".safetensors"):
            continue
        found.append(path)
    return found


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
