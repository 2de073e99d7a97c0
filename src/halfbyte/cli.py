"""The `halfbyte` command. Exit codes: 0 done, 1 failed, 2 wrong usage, 130 interrupted.

Whatever fails says so in one line on stderr. What takes long to import is imported by the command that needs it.
"""

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from halfbyte.bench.cli import Device
from halfbyte.bench.cli import app as bench_app
from halfbyte.command_group import Group
from halfbyte.recover.cli import recover
from halfbyte.roofline.cli import profile

if TYPE_CHECKING:
    from halfbyte.checkpoints import Summary
    from halfbyte.checkpoints.stream import Progress


app = typer.Typer(
    cls=Group,
    name="halfbyte",
    help="4-bit LLM weights (NF4, FP4, INT4), in and out at the speed of memory.",
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # plain help: nothing in brackets is lost, narrow terminals wrap it, and it is there at once
    context_settings={"help_option_names": ["-h", "--help"]},
)

app.add_typer(bench_app, name="bench")
app.command()(recover)
app.command()(profile)


class Format(str, Enum):
    nf4 = "nf4"
    fp4 = "fp4"
    int4 = "int4"


class Dtype(str, Enum):
    float16 = "float16"
    bfloat16 = "bfloat16"
    float32 = "float32"


Source = Annotated[Path, typer.Argument(metavar="SRC", help="A .safetensors file, or a directory with a model.")]
Destination = Annotated[Path, typer.Argument(metavar="DST", help="Where the result goes; of the same kind as SRC.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace DST; it stays whole until the new one is.")]
ShardSize = Annotated[
    str | None, typer.Option("--max-shard-size", metavar="SIZE", help="Largest file, as 5GB. By default as in SRC.")
]


@app.callback(invoke_without_command=True)
def main(
    context: typer.Context,
    version: bool = typer.Option(False, "--version", help="Print the version and leave."),
) -> None:
    if version:
        from halfbyte import __version__

        print(f"halfbyte {__version__}")
    elif context.invoked_subcommand is None:
        print(context.get_help())


@app.command()
def info() -> None:
    """Show devices, backends and versions, what is missing and how to get it."""
    from halfbyte import render, terminal
    from halfbyte.info import collect

    render.info(terminal.console(), collect())


@app.command(context_settings={"ignore_unknown_options": True})
def explain(
    value: float = typer.Argument(help="The weight, such as 0.347 or -1.2."),
    absmax: float = typer.Option(1.0, help="The largest magnitude in the weight's block."),
    format: Format = typer.Option(Format.nf4, help="How to store it."),
    offset: float | None = typer.Option(None, help="Nested scales: the mean of all scales of the tensor."),
    absmax2: float | None = typer.Option(None, help="Nested scales: the largest distance of a scale from the offset."),
) -> None:
    """Follow one number into 4 bits and back, step by step, with its bytes."""
    from halfbyte import render, terminal
    from halfbyte.explain import explain as follow

    with _usage():
        explanation = follow(value, absmax, format.value, offset=offset, absmax2=absmax2)
    render.explanation(terminal.console(), explanation, assumed=offset is None or absmax2 is None)


@app.command()
def quantize(
    source: Source,
    destination: Destination,
    format: Format = typer.Option(Format.nf4, help="nf4 and fp4 as bitsandbytes has them, int4 as compressed-tensors."),
    block_size: int | None = typer.Option(None, help="nf4, fp4: weights that share a scale, 32, [64], ... 4096."),
    group_size: int | None = typer.Option(None, help="int4: weights that share a scale, 32, 64 or [128]."),
    nested: bool | None = typer.Option(None, "--nested/--flat", help="nf4, fp4: scales in one byte [default] or four."),
    include: list[str] = typer.Option([], metavar="GLOB", help="Quantize the weights that match, and no others."),
    exclude: list[str] = typer.Option([], metavar="GLOB", help="Leave the weights that match as they are."),
    device: Device = None,
    max_shard_size: ShardSize = None,
    overwrite: Overwrite = False,
) -> None:
    """Write a checkpoint with its linear layers in 4 bits; transformers loads the result as it is.

    Embeddings, norms, routers and output layers stay as they are, unless --include names them. --include and --exclude
    are shell patterns on names such as "model.layers.0.mlp.*", and can be given several times.
    """
    from halfbyte import checkpoints
    from halfbyte.formats.settings import check_settings

    with _usage():
        check_settings(format.value, block_size, group_size, nested)
    with _progress() as progress:
        summary = checkpoints.quantize_checkpoint(
            source,
            destination,
            format.value,
            block_size=block_size,
            group_size=group_size,
            nested=nested,
            include=include,
            exclude=exclude,
            device=_device(device),
            max_shard_size=_size(max_shard_size),
            overwrite=overwrite,
            progress=progress,
        )
    _print_summary(summary)


@app.command()
def dequantize(
    source: Source,
    destination: Destination,
    dtype: Dtype | None = typer.Option(None, help="Of the dense weights. By default the one each had before."),
    device: Device = None,
    max_shard_size: ShardSize = None,
    overwrite: Overwrite = False,
) -> None:
    """Write a 4-bit checkpoint of bitsandbytes or compressed-tensors as a dense one."""
    import torch

    from halfbyte import checkpoints

    with _progress() as progress:
        summary = checkpoints.dequantize_checkpoint(
            source,
            destination,
            getattr(torch, dtype.value) if dtype else None,
            device=_device(device),
            max_shard_size=_size(max_shard_size),
            overwrite=overwrite,
            progress=progress,
        )
    _print_summary(summary)


@app.command()
def warm(
    checkpoint: Path | None = typer.Argument(None, help="A .safetensors file, or a directory with a model."),
    shape: list[str] = typer.Option([], metavar="NxK", help="A weight, such as 4096x14336. Can be given again."),
    format: Format = typer.Option(Format.nf4, help="Of --shape, and of what a checkpoint has in 16 or 32 bits."),
    block_size: int | None = typer.Option(None, help="nf4, fp4: weights that share a scale, 32, [64], ... 4096."),
    group_size: int | None = typer.Option(None, help="int4: weights that share a scale, 32, 64 or [128]."),
    nested: bool | None = typer.Option(
        None, "--nested/--flat", help="nf4, fp4: scales in one byte, the default, or four."
    ),
    bias: bool = typer.Option(False, "--bias", help="Of --shape: also with a bias."),
    dtype: list[Dtype] = typer.Option([Dtype.bfloat16], help="Of x. Can be given again."),
    rows: str = typer.Option("1-64", metavar="LIST", help="How many rows x may have, such as 1-16,64."),
    target: str | None = typer.Option(None, help="Another GPU than the one here, such as sm_90; none is needed."),
    sms: int | None = typer.Option(None, help="The target's multiprocessors; plans depend on them."),
) -> None:
    """Compile ahead the CUDA kernels that products with these weights take, so that no first call has to wait.

    Of a checkpoint only headers are read. A 4-bit one says itself what its weights are; of another, the weights are
    taken that `halfbyte quantize` would convert. Names tell which layers `accelerate` will compute in one launch, such
    as query, key and value; a --shape has none and is taken alone. What is compiled is kept in the user's cache, or in
    $HALFBYTE_CACHE.
    """
    import torch

    from halfbyte import warm as ahead
    from halfbyte.formats.settings import check_settings

    with _usage():
        size, is_nested = check_settings(format.value, block_size, group_size, nested)
        settings = ahead.Settings(format.value, size, is_nested)
        dtypes = [getattr(torch, name.value) for name in dict.fromkeys(dtype)]
        groups = ahead.of_shapes([ahead.parse_shape(text) for text in shape], dtypes, settings, bias)
        counts, facts = ahead.parse_rows(rows), ahead.facts_of_target(target, sms)
        if checkpoint is None and not shape:
            raise ValueError("nothing to compile for; give a checkpoint, or weights as --shape NxK")
    if checkpoint is not None:
        groups |= ahead.of_checkpoint(checkpoint, dtypes, settings)
    with _progress(counts=True) as progress:
        report = ahead.warm(ahead.variants(groups, counts, facts), progress)
    print(
        f"{report.variants} variants for sm_{facts.capability}, {report.cached} of them cached already, "
        f"{report.seconds:.1f} s; kept in {report.folder}"
    )


@contextmanager
def _usage() -> Iterator[None]:
    """A ValueError inside is the command line's fault: exit code 2."""
    try:
        yield
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def _print_summary(summary: "Summary") -> None:
    from halfbyte import render, terminal

    render.summary(terminal.console(), summary)


@contextmanager
def _progress(counts: bool = False) -> "Iterator[Progress]":
    """A progress bar on stderr, of bytes or counts, with SIGTERM made an ordinary exit so that temporary files go."""
    from halfbyte.terminal import progress

    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with progress(of_bytes=not counts) as bar:
        task = bar.add_task("", total=None)
        yield lambda name, done, total: bar.update(task, description=name, completed=done, total=total)


def _device(name: str | None) -> str:
    import torch

    if name is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(1, device=name)
    except Exception as error:  # RuntimeError for a wrong name, AssertionError where torch has no such backend
        reason = str(error).strip().partition("\n")[0]
        raise typer.BadParameter(f"device {name!r} cannot be used here ({reason}); cpu always can") from error
    return name


def _size(text: str | None) -> int | None:
    """Bytes from "5GB", "500 MB", "2GiB" or a plain number."""
    if text is None:
        return None
    compact = text.replace(" ", "").upper()
    units = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "B": 1, "": 1}
    number = compact.rstrip("KMGIB")
    try:
        size = int(float(number) * units[compact[len(number) :]])
    except (KeyError, ValueError, OverflowError):
        size = 0
    if size <= 0:
        raise typer.BadParameter(f"max-shard-size {text!r} is not a size; 5GB, 500MB or a number of bytes is expected")
    return size
