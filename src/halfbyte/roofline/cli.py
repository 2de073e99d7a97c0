"""`halfbyte profile`. What takes long to import is imported when the command runs."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from halfbyte.options import Device, counts_of, device_to_measure, usage

if TYPE_CHECKING:
    import torch


def profile(
    model: Annotated[
        str, typer.Option(help="A checkpoint's folder or hub id, or a shape with random weights: llama-3-8b.")
    ] = "qwen2.5-1.5b",
    batch: Annotated[str, typer.Option(help="Texts at once, comma-separated.")] = "1,8,32",
    out: Annotated[Path | None, typer.Option(help="A folder for the report: JSON, CSV, PNG and one HTML page.")] = None,
    device: Device = None,
    provider: Annotated[str, typer.Option(help="Comma-separated.")] = "bitsandbytes,halfbyte,bf16",
    mode: Annotated[
        str | None, typer.Option(help="eager, graph, fused graph, prefill; comma-separated. By default all.")
    ] = None,
    context: Annotated[int, typer.Option(min=1, help="Tokens before the first new one.")] = 256,
    layers: Annotated[int, typer.Option(min=0, help="Of a named shape; 0 for all of them.")] = 0,
    rounds: Annotated[int, typer.Option(min=3, help="Samples of the step without the profiler.")] = 5,
    measure: Annotated[bool, typer.Option("--measure", help="Measure the ceilings anew.")] = False,
    counters: Annotated[
        bool | None,
        typer.Option("--counters/--no-counters", help="Ask the hardware, through ncu; by default where it may."),
    ] = None,
    compare: Annotated[
        tuple[str, str] | None,
        typer.Option(metavar="A B", help="Set two reports side by side; FOLDER:bitsandbytes takes one provider of it."),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the report at OUT.")] = False,
) -> None:
    """Where decode time goes, kernel by kernel, against a roofline measured here.

    Weight products by the layer's role, attention, norms and the rest, and the gaps between kernels: what each takes,
    how near it is to what this machine can do, and what a step could take at least. Logits are checked first.
    """
    from halfbyte.terminal import console as terminal

    console = terminal()
    if compare is not None:
        from halfbyte.roofline.compare import table

        console.print(table(*compare))
        return
    # Some builds of torch report each start and stop of the profiler on stderr; this has to be said before its import.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    from halfbyte.measure.models import check as check_models

    with usage():
        check_models([model])
    where = device_to_measure(device)
    settings = _settings(where, batch, provider, mode, context, rounds, layers)
    if out is not None:
        from halfbyte.roofline.output import check

        check(out, overwrite)
    record, runs = _profile(model, where, settings, measure, counters)
    from halfbyte.roofline import render

    render.report(console, record)
    if out is not None:
        from halfbyte.roofline.output import write

        if missing := write(out, record, runs, overwrite):
            console.print(missing, soft_wrap=True, highlight=False)
        console.print(f"report in {out}: open {out / 'profile.html'}", soft_wrap=True, highlight=False)


def _settings(
    device: torch.device, batch: str, provider: str, mode: str | None, context: int, rounds: int, layers: int
) -> Any:
    from halfbyte.roofline.run import MODES, PROVIDERS, Settings

    providers = _chosen("provider", provider, PROVIDERS)
    modes = _chosen("mode", mode, MODES[device.type]) if mode else MODES[device.type]
    return Settings(counts_of(batch), context, rounds, layers, providers, modes)


def _chosen(what: str, text: str, accepted: Sequence[str]) -> tuple[str, ...]:
    """The parts of a comma-separated list, each of which must be accepted; in the order of `accepted`."""
    parts = [part.strip() for part in text.split(",")]
    for part in parts:
        if part not in accepted:
            raise typer.BadParameter(f"{what} {part!r} is not one of {', '.join(accepted)}, which this device has")
    return tuple(name for name in accepted if name in parts)


def _profile(
    name: str, device: torch.device, settings: Any, measure: bool, counters: bool | None
) -> tuple[dict[str, Any], Any]:
    import torch

    from halfbyte.roofline.ceilings import ceilings
    from halfbyte.roofline.counters import counted
    from halfbyte.roofline.record import make_record
    from halfbyte.roofline.run import facts_of
    from halfbyte.terminal import say

    torch.manual_seed(0)
    limits = ceilings(device, anew=measure, say=say)
    facts = facts_of(name, device, settings, say)
    record = make_record(facts, limits, device)
    if counters is not False:
        record = counted(record, device, required=bool(counters), say=say)
    return record, facts["runs"]
