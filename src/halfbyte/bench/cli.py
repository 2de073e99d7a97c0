"""`halfbyte bench ...`. What takes long to import is imported by the command that needs it."""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from halfbyte.bench import models_cli, serving_cli
from halfbyte.bench.options import (
    Dtype,
    Format,
    Nested,
    Out,
    Rounds,
    Shapes,
    check_dtype,
    check_short_dtype,
    shapes_of,
)
from halfbyte.options import NAMES, Device, counts_of, device_to_measure, usage

app = typer.Typer(
    no_args_is_help=True,
    help="Measure against the peers: correctness first, then time, in one run.",
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def bench() -> None:
    # As Ctrl-C does: benches end what they have started, delete what they have made, and keep what they have measured.
    signal.signal(signal.SIGTERM, signal.default_int_handler)


@app.command()
def dequantize(
    device: Device = None,
    shapes: Shapes = None,
    dtype: Dtype = "bfloat16",
    format: Format = "nf4",
    nested: Nested = True,
    rounds: Rounds = 15,
    out: Out = None,
) -> None:
    """Packed weights to dense ones, beside bitsandbytes, Unsloth's sequence and PEFT."""
    from halfbyte.bench.dequantize import dequantize_cases

    _run("dequantize", dequantize_cases, device, shapes, dtype, format, nested, rounds, out)


@app.command()
def quantize(
    device: Device = None,
    shapes: Shapes = None,
    dtype: Dtype = "bfloat16",
    format: Format = "nf4",
    nested: Nested = True,
    rounds: Rounds = 15,
    out: Out = None,
) -> None:
    """Dense weights to packed ones, beside bitsandbytes."""
    from halfbyte.bench.dequantize import quantize_cases

    _run("quantize", quantize_cases, device, shapes, dtype, format, nested, rounds, out)


@app.command()
def linear(
    device: Device = None,
    shapes: Shapes = None,
    rows: Annotated[str | None, typer.Option(help="Rows of x, comma-separated, such as 1,16,64.")] = None,
    dtype: Dtype = "bfloat16",
    format: Annotated[str, typer.Option(help="nf4, fp4 or int4.")] = "nf4",
    nested: Nested = True,
    target: Annotated[
        str | None, typer.Option(help="Take the kernels of another GPU than the one at hand, such as sm_80.")
    ] = None,
    sms: Annotated[int | None, typer.Option(min=1, help="With --target: on so many multiprocessors.")] = None,
    rounds: Rounds = 15,
    out: Out = None,
) -> None:
    """x @ W.T from 4-bit weights, beside dense weights, bitsandbytes, dequantize + linear, tinygemm and humming."""
    from halfbyte.bench.linear import COMPARED, CPU_ROWS, CPU_SHAPES, GPU_ROWS, GPU_SHAPES, another_gpu, linear_cases

    if target is None and sms is not None:
        raise typer.BadParameter("--sms limits another GPU's grids; say which with --target")
    as_another: list[str] = []
    of_another = None
    if target is not None:
        as_another = [target, *([] if sms is None else [f"{sms}-sms"])]
        with usage():
            of_another = another_gpu(target, sms)
    counts = counts_of(rows) or {"cpu": CPU_ROWS, "cuda": GPU_ROWS}[device_to_measure(device).type]
    cases = partial(linear_cases, rows=counts, properties=of_another)
    sizes = {"cpu": CPU_SHAPES, "cuda": GPU_SHAPES}
    _run("linear", cases, device, shapes, dtype, format, nested, rounds, out, sizes, COMPARED, as_another)


@app.command()
def gradients(
    device: Device = None,
    shapes: Shapes = None,
    rows: Annotated[str | None, typer.Option(help="Rows of dy, comma-separated, such as 128,1024.")] = None,
    dtype: Dtype = "bfloat16",
    format: Annotated[str, typer.Option(help="nf4, fp4 or int4.")] = "nf4",
    nested: Nested = True,
    rounds: Rounds = 15,
    out: Out = None,
) -> None:
    """dy @ W, the gradient of x, from 4-bit weights, beside dense weights and bitsandbytes' backward."""
    from halfbyte.bench.gradients import CPU_ROWS, GPU_ROWS, gradient_cases
    from halfbyte.bench.linear import COMPARED, CPU_SHAPES, GPU_SHAPES

    counts = counts_of(rows) or {"cpu": CPU_ROWS, "cuda": GPU_ROWS}[device_to_measure(device).type]
    sizes = {"cpu": CPU_SHAPES, "cuda": GPU_SHAPES}
    cases = partial(gradient_cases, rows=counts)
    _run("gradients", cases, device, shapes, dtype, format, nested, rounds, out, sizes, COMPARED)


@app.command()
def search(
    device: Device = None,
    shapes: Annotated[str | None, typer.Option(help="Comma-separated candidates, such as 32000x4096.")] = None,
    dtype: Annotated[str, typer.Option(help="Of the candidates in --shapes.")] = "bfloat16",
    rounds: Rounds = 15,
    out: Out = None,
) -> None:
    """L2 distances, nearest rows and token ranks, beside torch's norm, cdist, and logits with topk."""
    import torch

    from halfbyte.bench import runs
    from halfbyte.bench import search as searches

    check_dtype(dtype)
    where = device_to_measure(device)
    given = [(v, d, getattr(torch, dtype)) for v, d in shapes_of(shapes)]
    runs.run_cases("search", searches.search_cases(where, given), where, rounds, out)


@app.command()
def attention(
    device: Device = None,
    models: Annotated[
        str | None, typer.Option(help="Names, such as llama-3-8b, or HEADSxKEY_HEADSxSIZE, comma-separated.")
    ] = None,
    loads: Annotated[
        str | None, typer.Option(help="TEXTSxTOKENSxFILLED, or with xNEW behind it, such as 8x32768x16384x4.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="float16 or bfloat16.")] = "bfloat16",
    rounds: Rounds = 15,
    out: Out = None,
) -> None:
    """Attention of few new tokens over long caches, wholly and partly filled, beside torch's."""
    import torch

    from halfbyte.bench import attention as bench
    from halfbyte.bench import runs

    check_short_dtype(dtype)
    where = device_to_measure(device)
    with usage():
        heads = bench.MODELS if models is None else bench.models_of(models)
        chosen = bench.LOADS if loads is None else bench.loads_of(loads)
    cases = bench.attention_cases(where, heads, chosen, getattr(torch, dtype))
    runs.run_cases("attention", cases, where, rounds, out)


@app.command()
def pages(
    device: Device = None,
    models: Annotated[
        str, typer.Option(help="Names, comma-separated: llama-3-8b, qwen3-30b-a3b, gpt-oss-120b.")
    ] = "llama-3-8b",
    batches: Annotated[
        str | None, typer.Option(help="REQUESTSxTOKENS, or 8x300x32768 where one has more tokens, comma-separated.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="float16 or bfloat16.")] = "bfloat16",
    rounds: Rounds = 15,
    out: Out = None,
) -> None:
    """Attention of one new token of each request over vLLM's pages, beside its FlashAttention."""
    import torch

    from halfbyte.bench import pages as bench
    from halfbyte.bench import runs

    check_short_dtype(dtype)
    where = device_to_measure(device)
    with usage():
        heads = bench.models_of(models)
        chosen = bench.BATCHES if batches is None else bench.batches_of(batches)
    runs.run_cases("pages", bench.pages_cases(where, heads, chosen, getattr(torch, dtype)), where, rounds, out)


@app.command()
def experts(
    device: Device = None,
    models: Annotated[
        str | None, typer.Option(help="Names, such as mixtral-8x7b, or EXPERTSxTOP_KxHIDDENxINNER, comma-separated.")
    ] = None,
    tokens: Annotated[str | None, typer.Option(help="Tokens at once, comma-separated, such as 1,16,256.")] = None,
    formats: Annotated[
        str | None, typer.Option(help=f"Of the experts, comma-separated: {NAMES}. By default each model's own.")
    ] = None,
    rounds: Rounds = 15,
    out: Out = None,
) -> None:
    """Products with stacks of experts and whole blocks, beside torch's grouped_mm over bf16 experts and humming."""
    from halfbyte.bench import experts as bench
    from halfbyte.bench import mixtures, runs

    where = device_to_measure(device)
    on_gpu = where.type == "cuda"
    with usage():
        names = ",".join(mixtures.GPU_MODELS if on_gpu else mixtures.CPU_MODELS) if models is None else models
        chosen, kinds = mixtures.models_of(names), mixtures.formats_of(formats)
    counts = counts_of(tokens) or (mixtures.GPU_TOKENS if on_gpu else mixtures.CPU_TOKENS)
    runs.run_cases("experts", bench.experts_cases(where, chosen, counts, kinds), where, rounds, out)


@app.command()
def nearest(
    device: Device = None,
    processes: Annotated[int, typer.Option(min=2, help="GPUs, or processes on a CPU.")] = 2,
    shape: Annotated[str, typer.Option(help="Of the candidates.")] = "256000x4096",
    k: Annotated[int, typer.Option(min=1, max=128, help="Rows that are asked for.")] = 5,
    rounds: Rounds = 50,
    out: Out = None,
) -> None:
    """The nearest of rows that several GPUs hold between them, beside one GPU that holds all."""
    from halfbyte.bench import runs
    from halfbyte.bench.nearest import Settings

    shapes = shapes_of(shape)
    if len(shapes) != 1:
        raise typer.BadParameter(f"shape {shape!r} is not one shape; write 256000x4096")
    runs.run_nearest(Settings(shapes[0], k=k, processes=processes, rounds=rounds), device_to_measure(device), out)


app.command()(models_cli.decode)
app.command()(models_cli.generate)
app.command()(models_cli.train)
app.command()(models_cli.recover)
app.command(context_settings={"allow_extra_args": True})(serving_cli.serve)
app.command()(serving_cli.engine)


@app.command()
def check(
    device: Device = None,
    results: Annotated[Path, typer.Option(help="Where records are.")] = Path("benchmarks/results"),
) -> None:
    """Two minutes on a GPU: exit code 1 where a kernel is over 5 % slower, or less exact, than its record here."""
    from halfbyte.bench import runs

    runs.run_check(device_to_measure(device), results)


@app.command()
def predict(
    results: Annotated[Path, typer.Option(help="Where folders with estimates.csv are.")] = Path("benchmarks/results"),
    out: Annotated[Path | None, typer.Option(help="Keep the record as OUT/predictions.json.")] = None,
) -> None:
    """Times of `linear` that its planners predict for known GPUs. Nothing is measured, and no GPU is needed."""
    from halfbyte.bench import runs

    runs.run_predictions(results, out)


@app.command()
def puzzle(
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of three dequantizations.")] = 1000,
    repeats: Annotated[int, typer.Option(min=1, help="Runs of that many rounds; medians are reported.")] = 3,
    out: Out = None,
) -> None:
    """Unsloth's challenge A, whole: three MLPs, checks, 1000 rounds, and its marking scheme."""
    from halfbyte.bench import runs

    runs.run_puzzle(rounds, repeats, out)


def _run(
    bench: str,
    make_cases: Callable[..., Any],
    device_name: str | None,
    shapes: str | None,
    dtype: str,
    format: str,
    nested: bool,
    rounds: int,
    out: Path | None,
    defaults: Mapping[str, Sequence[tuple[int, int]]] | None = None,
    formats: Sequence[str] = ("nf4", "fp4"),
    as_another: Sequence[str] = (),
) -> None:
    """as_another: the GPU that this one is measured as, if another."""
    import torch

    from halfbyte.bench import runs
    from halfbyte.bench.dequantize import CPU_SHAPES, GPU_SHAPES

    check_dtype(dtype)
    if format not in formats:
        raise typer.BadParameter(f"format {format!r} is not {' or '.join(formats)}, the formats that the peers have")
    device = device_to_measure(device_name)
    sizes = shapes_of(shapes) or (defaults or {"cpu": CPU_SHAPES, "cuda": GPU_SHAPES})[device.type]
    has_nested = format != "int4"
    cases = make_cases(device, sizes, getattr(torch, dtype), format, nested and has_nested)
    # What is not measured as usual has a record of its own, whose name says so.
    name = [bench, *as_another]
    if as_another or dtype != "bfloat16":
        name.append(dtype)
    if format != "nf4":
        name.append(format)
    if has_nested and not nested:
        name.append("flat")
    runs.run_cases(bench, cases, device, rounds, out, "-".join(name))
