"""Checkpoints from dense to 4-bit and back, tensor by tensor."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from halfbyte import hub, ops
from halfbyte.atomic import check_destination
from halfbyte.checkpoints import experts as experts_of
from halfbyte.checkpoints import select
from halfbyte.checkpoints.plan import (
    Weight,
    plan_dequantized,
    plan_quantized,
    plan_stack,
    quantized_names,
    read_quantized,
)
from halfbyte.checkpoints.reader import DTYPES, Checkpoint, open_checkpoint, read_json
from halfbyte.checkpoints.stream import Converted, Left, Output, Progress, Summary, stream
from halfbyte.formats import gpt_oss
from halfbyte.formats.layouts import layout_of
from halfbyte.formats.settings import DEFAULT, check_settings
from halfbyte.formats.spec import FORMATS
from halfbyte.formats.weight import FLOAT_DTYPES

_STACKS = tuple(f"experts.{name}" for name in experts_of.STACKS)


def quantize_checkpoint(
    source: str | Path,
    destination: str | Path,
    format: str = DEFAULT,
    *,
    block_size: int | None = None,
    group_size: int | None = None,
    nested: bool | None = None,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    only: Sequence[str] = (),
    experts: bool = True,
    device: torch.device | str = "cpu",
    max_shard_size: int | None = None,
    overwrite: bool = False,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> Summary:
    """Write `source` to `destination` with its linear layers in 4 bits.

    source: a .safetensors file, a directory with a model, or a repository's name on the Hugging Face hub ("org/name").
    format: "nf4" or "fp4", with bitsandbytes' keys, "int4", with those of compressed-tensors, "mxfp4", with gpt-oss'.
    block_size, nested: for nf4 and fp4, 64 and True by default. group_size: for int4, 128 by default.
    include, exclude, only: globs that choose the weights (`select.select` has the rule). The rest is copied bit for
        bit.
    experts: whether experts are quantized, without nested scales: of each layer all or none. transformers loads such a
        checkpoint with halfbyte's own quantization method. The summary names experts that stay dense. gpt-oss' own
        MXFP4 experts are copied as they are.
    device: where to quantize; tensors go there one at a time.
    max_shard_size: bytes of a file of the output; by default its files are those of the source.
    dry_run: check everything, and return the summary of what would be done; nothing is written, nor computed.

    In a directory the other files come along, but for weights of other kinds, and config.json gets the
    `quantization_config` with which transformers loads the result. Memory stays near twice the largest tensor. The
    output appears whole or not at all.

    Raises ValueError for a source that is damaged, quantized already, has nothing to quantize, or would become what
    nothing loads; FileNotFoundError, FileExistsError, PermissionError; OSError when the disk is full.
    """
    size, nested = check_settings(format, block_size, group_size, nested)
    spec, layout = FORMATS[format], layout_of(format)
    checkpoint, config = _open(source, destination, overwrite)
    kept = _refuse_quantized(checkpoint, config)
    if checkpoint.is_directory and config is None:
        raise ValueError(
            f"{checkpoint.path} has no config.json, without which nothing loads the result; put the model's beside its "
            "weights, or give a .safetensors file in place of the directory"
        )
    tied = bool(config and config.get("tie_word_embeddings"))
    layers = experts_of.layers(checkpoint.entries, config or {}) if experts else {}
    one_of = {name: layer for layer in layers.values() for name in layer.names}
    chosen = select.select(checkpoint.entries, include, exclude, only, tied, one_of)
    experts_of.check_whole(layers, chosen)
    misfits = set(experts_of.cut(layers.values(), format, size))
    misfits |= {n for n in chosen if n not in one_of and spec.along_k and checkpoint.entries[n].shape[1] % size}
    skipped = [name for name in chosen if name in misfits]
    chosen = [name for name in chosen if name not in misfits]
    if not chosen:
        raise ValueError(
            f"{checkpoint.path} has nothing to quantize among its {len(checkpoint.entries)} tensors"
            + (f" ({len(skipped)} have a K that {spec.size_name} {size} does not divide)" if skipped else "")
            + "; weights of linear layers are chosen by their names: add others with include"
        )
    settings: dict[str, Any] = {"format": format, spec.size_name: size}

    def plan(name: str) -> Weight:
        if not experts_of.is_stack(name):
            return plan_quantized(checkpoint, name, format, size, nested and name not in one_of)
        layer = one_of[name]
        return plan_stack(checkpoint, name, format, size, layer.shapes[layer.names.index(name)])

    def convert(weight: Weight) -> Converted:
        name = weight.name
        dense = checkpoint.read(name).to(device)
        if not experts_of.is_stack(name):
            q = ops.quantize(dense, nested=nested and name not in one_of, **settings)
            return Converted(layout.to_tensors(name, q), *_errors(dense, ops.dequantize(q)))
        q = experts_of.quantize_stack(dense, one_of[name].transposed, settings)
        back = experts_of.dequantize_stack(q, one_of[name].transposed)
        return Converted({name: q.packed, name + experts_of.SCALE: q.scale}, *_errors(dense, back))

    weights = [plan(name) for name in chosen]

    if config is not None:
        dtypes = Counter(checkpoint.entries[name].dtype for name in chosen)
        dtype = str(DTYPES[dtypes.most_common(1)[0][0]]).removeprefix("torch.")
        dense_modules = select.dense_modules(checkpoint.entries, chosen)
        config["quantization_config"] = select.quantization_config(
            format, size, nested, dtype, dense_modules, kept or not one_of.keys().isdisjoint(chosen)
        )
    output = Output(Path(destination), config, max_shard_size, overwrite, dry_run)
    left = Left(tuple(skipped), tuple(n for n in experts_of.dense_names(checkpoint.entries) if n not in set(chosen)))
    return stream(checkpoint, weights, convert, output, progress, left)


def dequantize_checkpoint(
    source: str | Path,
    destination: str | Path,
    dtype: torch.dtype | None = None,
    *,
    device: torch.device | str = "cpu",
    max_shard_size: int | None = None,
    overwrite: bool = False,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> Summary:
    """Write `source`, a checkpoint with NF4, FP4, INT4 or MXFP4 weights, to `destination` with dense ones.

    dtype: of the dense weights; by default the one each had before. The rest is as in `quantize_checkpoint`, and
    config.json loses its `quantization_config`.
    """
    if dtype is not None and dtype not in FLOAT_DTYPES:
        raise TypeError(f"dtype is {dtype}; torch.float16, torch.bfloat16 or torch.float32 is accepted")
    checkpoint, config = _open(source, destination, overwrite)
    saved = experts_of.SavedStacks.of(config)
    weights = [plan_dequantized(checkpoint, name, dtype, saved) for name in quantized_names(checkpoint)]
    if not weights:
        raise ValueError(
            f"{checkpoint.path} has no nf4, fp4, int4 or mxfp4 weight among its {len(checkpoint.entries)} tensors"
        )

    def convert(weight: Weight) -> Converted:
        q = read_quantized(checkpoint, weight.name, saved).to(device)
        transposed = saved.transposed and len(q.shape) == 3
        return Converted({weight.name: experts_of.dequantize_stack(q, transposed, dtype)})

    if config is not None:
        config.pop("quantization_config", None)
        if dtype is not None:
            config["dtype" if "dtype" in config else "torch_dtype"] = str(dtype).removeprefix("torch.")
    output = Output(Path(destination), config, max_shard_size, overwrite, dry_run)
    return stream(checkpoint, weights, convert, output, progress)


def _open(source: str | Path, destination: str | Path, overwrite: bool) -> tuple[Checkpoint, dict[str, Any] | None]:
    """The checkpoint, and its config.json where it has one."""
    checkpoint = open_checkpoint(hub.local(source))
    destination = Path(destination)
    if checkpoint.is_directory and destination.suffix == ".safetensors" and not destination.is_dir():
        raise ValueError(f"{destination} is the name of a file, and {source} is a whole model; name a directory")
    if not checkpoint.is_directory and destination.suffix != ".safetensors":
        raise ValueError(f"{destination} is to hold a single file, as {source} is one; end its name in .safetensors")
    check_destination(destination, directory=checkpoint.is_directory, overwrite=overwrite)
    config = None
    if checkpoint.is_directory and (checkpoint.path / "config.json").is_file():
        config = read_json(checkpoint.path / "config.json")
        select.check_model(config)
    return checkpoint, config


def _refuse_quantized(checkpoint: Checkpoint, config: dict[str, Any] | None) -> str | None:
    """Raise ValueError for what is quantized, but for gpt-oss' experts, whose format is returned."""
    marks = (".weight_packed", ".qweight", ".weight.absmax", ".weight_blocks", *(n + experts_of.SCALE for n in _STACKS))
    key = next((name for name in checkpoint.entries if name.endswith(marks)), None)
    said = (config or {}).get("quantization_config") or {}
    method = said.get("quant_method")
    if key is None and method in gpt_oss.FORMATS:  # transformers names it as we do
        return str(method)
    if key or (config and "quantization_config" in config):
        why = f"it holds {key!r}" if key else "its config.json has a quantization_config"
        raise ValueError(f"{checkpoint.path} is quantized already ({why}); dequantize it first")
    return None


def _errors(dense: torch.Tensor, back: torch.Tensor) -> tuple[float, float]:
    """The relative error in the Frobenius norm and the largest error.

    Done piece by piece in two small fp32 buffers: whole fp32 copies would be the largest tensors of the conversion.
    """
    size = 1 << 18
    w, difference = torch.empty((2, size), dtype=torch.float32, device=dense.device)
    sums = torch.zeros(3, dtype=torch.float64, device=dense.device)
    pieces = (torch.split(tensor.view(-1), size) for tensor in (dense, back))
    for dense_piece, back_piece in zip(*pieces, strict=True):
        count = dense_piece.numel()
        w, difference = w[:count], difference[:count]
        w.copy_(dense_piece)
        difference.copy_(back_piece).sub_(w)
        sums[0] += torch.dot(difference, difference)
        sums[1] += torch.dot(w, w)
        sums[2] = torch.maximum(sums[2], difference.abs_().max())
    error, norm, largest = sums.tolist()
    return math.sqrt(error / norm) if norm else math.sqrt(error), largest
