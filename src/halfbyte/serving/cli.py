"""`halfbyte serve`. What takes long to import is imported when the command runs."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from halfbyte.options import NAMES, usage


def serve(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="The folder of a checkpoint, or its name on the hub, org/model.")],
    host: Annotated[
        str, typer.Option(help="The address to listen on; 0.0.0.0 is every one of this machine.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535)] = 8000,
    engine: Annotated[
        str | None, typer.Option(metavar="vllm|transformers", help="By default vLLM, if installed.")
    ] = None,
    format: Annotated[str | None, typer.Option(metavar=NAMES, help="Round a dense checkpoint while it loads.")] = None,
    name: Annotated[
        str | None, typer.Option(help="The model's name in the API; by default as it is given here.")
    ] = None,
    device: Annotated[str, typer.Option(help="transformers: auto, cpu, cuda or cuda:1.")] = "auto",
    dtype: Annotated[str, typer.Option(help="Of activations: auto, float16, bfloat16 or float32.")] = "auto",
) -> None:
    """Serve a model over HTTP, with the API of OpenAI: vLLM where it is installed, else transformers' own server.

    \b
    halfbyte serve org/model-bnb-4bit
    halfbyte serve org/model --format nf4 --port 8080
    halfbyte serve org/model-bnb-4bit -- --tensor-parallel-size 2

    What follows -- goes to vLLM as it is. GET /health says when requests are answered. SIGTERM or Ctrl-C ends it, after
    what is being answered.
    """
    from halfbyte.serving.choice import VLLM, check_format, check_port, choose, find_model

    more = list(context.args)
    with usage():
        if format is not None and format not in NAMES.split("|"):
            raise ValueError(f"format is {format!r}; {NAMES} are known")
        chosen = choose(engine)
        if chosen.name != VLLM and more:
            raise ValueError(f"{' '.join(more)}: what follows -- is for vLLM, and transformers serves here")
        if chosen.name == VLLM and device != "auto":
            raise ValueError(f"--device {device} is for transformers; vLLM takes the devices that it was built for")
    found = find_model(model)
    check_format(found, format)
    check_port(host, port)
    print(
        f"halfbyte: {chosen.title} ({chosen.reason}) serves {model} at http://{host}:{port}",
        file=sys.stderr,
        flush=True,
    )
    if chosen.name == VLLM:
        from halfbyte.serving.vllm.server import arguments, run

        run(arguments(found, name or model, host, port, format, ["--dtype", dtype, *more]))
    else:
        from halfbyte.serving.transformers_server import run as run_transformers

        run_transformers(found, name or model, host, port, device, dtype, format)
