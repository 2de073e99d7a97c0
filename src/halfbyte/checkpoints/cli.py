"""`halfbyte quantize` and `halfbyte dequantize`. What takes long to import is imported when a command runs."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from halfbyte.formats.settings import DEFAULT, check_settings
from halfbyte.options import NAMES, BlockSize, Device, Dtype, GroupSize, Nested, device_of, progress, size_of, usage

if TYPE_CHECKING:
    from halfbyte.checkpoints.stream import Progress, Summary

Source = Annotated[
    str,
    typer.Argument(metavar="SRC", help="A .safetensors file, a directory with a model, or a hub id (org/name)."),
]
Destination = Annotated[Path, typer.Argument(metavar="DST", help="Where the result goes; of the same kind as SRC.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace DST; it stays whole until the new one is.")]
Force = Annotated[bool, typer.Option("--force", help="With --overwrite: replace SRC itself without asking.")]
ShardSize = Annotated[
    str | None, typer.Option("--max-shard-size", metavar="SIZE", help="Largest file, as 5GB. By default as in SRC.")
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Say what would be done, and write nothing.")]
Json = Annotated[bool, typer.Option("--json", help="The summary as JSON on stdout.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="Print nothing but errors.")]


def quantize(
    source: Source,
    destination: Destination,
    format: Annotated[
        str,
        typer.Option(metavar=NAMES, help="nf4, fp4 as bitsandbytes has them, int4 as compressed-tensors, mxfp4."),
    ] = DEFAULT,
    block_size: BlockSize = None,
    group_size: GroupSize = None,
    nested: Nested = None,
    include: Annotated[
        list[str] | None, typer.Option(metavar="GLOB", help="Quantize the weights that match as well.")
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option(metavar="GLOB", help="Quantize the weights that match, and no others.")
    ] = None,
    exclude: Annotated[
        list[str] | None, typer.Option(metavar="GLOB", help="Leave the weights that match as they are.")
    ] = None,
    experts: Annotated[
        bool, typer.Option("--experts/--no-experts", help="Whether experts are quantized. halfbyte loads the result.")
    ] = True,
    device: Device = None,
    max_shard_size: ShardSize = None,
    overwrite: Overwrite = False,
    force: Force = False,
    dry_run: DryRun = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Write a checkpoint with its linear layers and experts in 4 bits; transformers loads the result.

    Embeddings, norms, routers and output layers stay as they are. --include adds weights such as "lm_head";
    what nothing could load in 4 bits is refused before anything is written. Patterns are those of a shell, on names
    such as "model.layers.0.mlp.*", and can be given several times.

    \b
    halfbyte quantize model model-nf4
    halfbyte quantize model model-int4 --format int4 --exclude "*.o_proj"
    """
    from halfbyte import checkpoints
    from halfbyte.checkpoints.select import check_globs

    with usage():
        check_settings(format, block_size, group_size, nested)
        check_globs(include or (), only or ())

    def convert(report: Progress) -> Summary:
        return checkpoints.quantize_checkpoint(
            source,
            destination,
            format,
            block_size=block_size,
            group_size=group_size,
            nested=nested,
            include=include or (),
            only=only or (),
            exclude=exclude or (),
            experts=experts,
            device=device_of(device),
            max_shard_size=size_of(max_shard_size),
            overwrite=overwrite,
            dry_run=dry_run,
            progress=report,
        )

    _confirm(source, destination, overwrite and not dry_run, force)
    _run(convert, as_json, quiet)


def dequantize(
    source: Source,
    destination: Destination,
    dtype: Annotated[
        Dtype | None, typer.Option(help="Of the dense weights. By default the one each had before.")
    ] = None,
    device: Device = None,
    max_shard_size: ShardSize = None,
    overwrite: Overwrite = False,
    force: Force = False,
    dry_run: DryRun = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Write a 4-bit checkpoint of bitsandbytes or compressed-tensors as a dense one.

    \b
    halfbyte dequantize model-nf4 model-bf16 --dtype bfloat16
    """
    import torch

    from halfbyte import checkpoints

    def convert(report: Progress) -> Summary:
        return checkpoints.dequantize_checkpoint(
            source,
            destination,
            getattr(torch, dtype.value) if dtype else None,
            device=device_of(device),
            max_shard_size=size_of(max_shard_size),
            overwrite=overwrite,
            dry_run=dry_run,
            progress=report,
        )

    _confirm(source, destination, overwrite and not dry_run, force)
    _run(convert, as_json, quiet)


def _confirm(source: str, destination: Path, overwrite: bool, force: bool) -> None:
    """Nothing brings SRC back once it is replaced, so that is asked for twice."""
    itself = overwrite and not force and destination.exists() and Path(source).exists()
    if not (itself and destination.samefile(source)):
        return
    if not _can_ask():
        raise typer.BadParameter(f"{destination} is SRC itself, and nothing brings it back; add --force to replace it")
    typer.confirm(f"Replace {destination}, which is SRC itself? Nothing brings it back.", abort=True, err=True)


def _can_ask() -> bool:
    return sys.stdin is not None and sys.stdin.isatty()


def _run(convert: Callable[[Progress], Summary], as_json: bool, quiet: bool) -> None:
    with progress(of_bytes=True, shown=False if quiet else None) as report:
        summary = convert(report)
    if as_json:
        print(json.dumps(asdict(summary), indent=2, default=str))
    elif not quiet:
        from halfbyte import terminal
        from halfbyte.checkpoints import render

        render.summary(terminal.console(), summary)
