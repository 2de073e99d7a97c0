"""`halfbyte bench serve` and `halfbyte bench engine`: models as servers run them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from halfbyte.bench.options import Nested, Out, check_dtype
from halfbyte.options import counts_of, usage


def serve(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="A folder, a name on the hub, or a named shape such as llama-3-8b.")],
    engine: Annotated[
        str | None, typer.Option(metavar="vllm|transformers", help="By default vLLM, if installed.")
    ] = None,
    baseline: Annotated[
        str | None, typer.Option(help="What the engine serves without halfbyte; by default the same. '': nothing.")
    ] = None,
    clients: Annotated[str, typer.Option(help="At once, comma-separated, 64 at most.")] = "1,8,32,64",
    requests: Annotated[int, typer.Option(min=1, max=100, help="Of each client.")] = 4,
    prompt_tokens: Annotated[
        int, typer.Option(min=1, help="The mean; from half to one and a half times as many.")
    ] = 128,
    new_tokens: Annotated[int, typer.Option(min=2, help="Of each answer.")] = 64,
    seconds: Annotated[float, typer.Option(min=1, max=3600, help="After so long a load begins no request.")] = 600,
    dtype: Annotated[str, typer.Option(help="Of activations: auto, float16, bfloat16 or float32.")] = "auto",
    seed: Annotated[int, typer.Option(help="Of prompts and their order.")] = 0,
    out: Out = None,
) -> None:
    """A served model, tokens a second and latency, beside the same engine without halfbyte. -- precedes its options."""
    from halfbyte.bench import runs
    from halfbyte.bench.engine_models import MODELS, Checkpoints
    from halfbyte.bench.serve import Settings
    from halfbyte.serving.choice import choose, find_model

    counts = counts_of(clients)
    if max(counts) > 64:
        raise typer.BadParameter(f"{max(counts)} clients are more than 64, the most that one machine is asked with")
    with usage():
        chosen = choose(engine)
    name = "" if Path(model).is_dir() else model
    with Checkpoints(0, nested=True) as checkpoints:
        path = str(checkpoints.served(name) if name in MODELS else find_model(model).path)
        settings = Settings(
            chosen.name, counts, requests, prompt_tokens, new_tokens, seconds, dtype, seed,
            path if baseline is None else baseline, tuple(context.args), name,
        )  # fmt: skip
        runs.run_serving(path, settings, out)


def engine(
    model: Annotated[str, typer.Option(help="Named shapes with random weights, comma-separated.")] = "llama-3-8b",
    providers: Annotated[
        str | None,
        typer.Option(
            help="bitsandbytes, halfbyte, bf16, marlin, machete, halfbyte-int4, halfbyte-tp2; by default all."
        ),
    ] = None,
    requests: Annotated[str, typer.Option(help="At once, comma-separated.")] = "1,8,32,64,256",
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Of each request.")] = 128,
    new_tokens: Annotated[int, typer.Option(min=2, help="Of each answer.")] = 128,
    layers: Annotated[int, typer.Option(min=0, help="Of a model; 0 for all of them.")] = 0,
    nested: Nested = True,
    dtype: Annotated[str, typer.Option(help="Of activations: float16, bfloat16 or float32.")] = "bfloat16",
    eager: Annotated[bool, typer.Option("--eager", help="Without torch.compile and CUDA graphs.")] = False,
    limit: Annotated[float, typer.Option(min=1, help="Seconds of each engine, its start among them.")] = 600,
    logs: Annotated[Path | None, typer.Option(help="Keep what engines say in this folder.")] = None,
    trace: Annotated[
        Path | None, typer.Option(help="Also write the kernels of a few steps; of one provider and --requests.")
    ] = None,
    out: Out = None,
) -> None:
    """vLLM's engine over random weights of a model's shape: halfbyte beside vLLM's own kernels, 4-bit and bf16."""
    from halfbyte.bench import engine as bench
    from halfbyte.bench import runs
    from halfbyte.serving.choice import is_installed

    check_dtype(dtype)
    settings = bench.Settings(
        counts_of(requests), prompt_tokens, new_tokens, limit, layers, nested, dtype, eager, logs, trace
    )
    names = [name.strip() for name in model.split(",")]
    chosen = bench.by_default() if providers is None else [name.strip() for name in providers.split(",")]
    with usage():
        bench.check(names, chosen, settings)
    if not is_installed("vllm"):
        raise ImportError("the bench runs vLLM's engine, which is not installed: pip install vllm")
    runs.run_engine(names, chosen, settings, out)
