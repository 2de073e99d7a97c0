"""The `halfbyte` command. Exit codes: 0 done, 1 failed, 2 wrong usage, 130 interrupted.

Whatever fails says so in one line on stderr. What takes long to import is imported by the command that needs it.
"""

from pathlib import Path

import typer

from halfbyte.bench.cli import app as bench_app
from halfbyte.checkpoints.cli import dequantize, quantize
from halfbyte.command_group import Group
from halfbyte.figures import report
from halfbyte.formats.settings import DEFAULT, check_settings
from halfbyte.options import NAMES, BlockSize, Dtype, GroupSize, Nested, progress, usage
from halfbyte.recover.cli import recover
from halfbyte.roofline.cli import profile
from halfbyte.serving.cli import serve

app = typer.Typer(
    cls=Group,
    name="halfbyte",
    help="4-bit LLM weights (NF4, FP4, INT4, MXFP4), in and out at the speed of memory.",
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # plain help: nothing in brackets is lost, narrow terminals wrap it, and it is there at once
    context_settings={"help_option_names": ["-h", "--help"]},
)

app.add_typer(bench_app, name="bench")
bench_app.command()(report)
app.command()(quantize)
app.command()(dequantize)
app.command()(recover)
app.command()(profile)
app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": False})(serve)


@app.callback(invoke_without_command=True)
def main(
    context: typer.Context,
    version: bool = typer.Option(False, "--version", help="Print the version and leave."),
) -> None:
    if version:
        from halfbyte.version import __version__

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
    value: float = typer.Argument(help="The weight; no larger than --absmax."),
    absmax: float = typer.Option(1.0, help="The largest magnitude in the weight's block."),
    format: str = typer.Option(DEFAULT, metavar=NAMES, help="How to store it."),
    offset: float | None = typer.Option(None, help="Nested scales: the mean of all scales of the tensor."),
    absmax2: float | None = typer.Option(None, help="Nested scales: the largest distance of a scale from the offset."),
) -> None:
    """Follow one number into 4 bits and back, step by step, with its bytes.

    \b
    halfbyte explain 0.347
    halfbyte explain -1.2 --absmax 3 --format fp4
    """
    from halfbyte import render, terminal
    from halfbyte.explain import explain as follow

    with usage():
        explanation = follow(value, absmax, format, offset=offset, absmax2=absmax2)
    render.explanation(terminal.console(), explanation, assumed=offset is None or absmax2 is None)


@app.command()
def warm(
    checkpoint: Path | None = typer.Argument(None, help="A .safetensors file, or a directory with a model."),
    shape: list[str] = typer.Option([], metavar="NxK", help="A weight, such as 4096x14336. Can be given again."),
    format: str = typer.Option(DEFAULT, metavar=NAMES, help="Of --shape, and of dense weights in a checkpoint."),
    block_size: BlockSize = None,
    group_size: GroupSize = None,
    nested: Nested = None,
    bias: bool = typer.Option(False, "--bias", help="Of --shape: also with a bias."),
    dtype: list[Dtype] = typer.Option([Dtype.bfloat16], help="Of x. Can be given again."),
    rows: str = typer.Option("1-64", metavar="LIST", help="How many rows x may have, such as 1-64,256,2048."),
    gradients: bool = typer.Option(False, "--gradients", help="Also what gradients of x with so many rows take."),
    target: str | None = typer.Option(None, help="Another GPU than the one here, such as sm_90; none is needed."),
    sms: int | None = typer.Option(None, help="The target's multiprocessors; plans depend on them."),
) -> None:
    """Compile ahead the CUDA kernels that products with these weights take, so that no first call has to wait.

    Of a checkpoint only headers are read. A 4-bit one says itself what its weights are; of another, the weights are
    taken that `halfbyte quantize` would convert. Names tell which layers `accelerate` will compute in one launch, such
    as query, key and value; a --shape has none and is taken alone. Blocks of experts count the tokens as rows; other
    kernels than for a few serve prompts, which --rows 1-64,256,2048 adds. What is compiled is kept in the user's cache,
    or in $HALFBYTE_CACHE.
    """
    import torch

    from halfbyte import warm as ahead
    from halfbyte.models.rehearsal import can_rehearse, rehearse
    from halfbyte.terminal import say

    with usage():
        size, is_nested = check_settings(format, block_size, group_size, nested)
        settings = ahead.Settings(format, size, is_nested)
        dtypes = [getattr(torch, name.value) for name in dict.fromkeys(dtype)]
        products: set[ahead.Product] = set()
        products |= ahead.of_shapes([ahead.parse_shape(text) for text in shape], dtypes, settings, bias)
        counts, properties = ahead.parse_rows(rows), ahead.properties_of_target(target, sms)
        if checkpoint is None and not shape:
            raise ValueError("nothing to compile for; give a checkpoint, or weights as --shape NxK")
    if checkpoint is not None:
        products |= (found := ahead.of_checkpoint(checkpoint, dtypes, settings))
        settings = ahead.settings_of(found)
    with progress(of_bytes=False) as report_to:
        report = ahead.warm(ahead.variants(products, counts, properties, gradients), report_to)
    seconds = 0.0
    if checkpoint is not None and target is None and can_rehearse(checkpoint):
        say("decoding with one layer of each kind, so that Triton and torch compile, too")
        with usage():
            seconds = sum(rehearse(checkpoint, kind, settings) for kind in dtypes)
    print(
        f"{report.variants} variants for sm_{properties.capability}, {report.cached} of them cached already, "
        f"{report.seconds + seconds:.1f} s; kept in {report.folder}"
    )
