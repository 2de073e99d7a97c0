"""`halfbyte bench decode`, `generate`, `train` and `recover`: whole models in one process."""

from __future__ import annotations

from functools import partial
from typing import Annotated

import typer

from halfbyte.bench.options import Out, Rounds, models_of
from halfbyte.options import Device, counts_of, device_to_measure, usage


def decode(
    model: Annotated[
        str, typer.Option(help="Folders of checkpoints, hub ids, or named shapes with random weights, comma-separated.")
    ] = "llama-3-8b",
    device: Device = None,
    batch: Annotated[str, typer.Option(help="Texts at once, comma-separated.")] = "1,8,32",
    context: Annotated[int, typer.Option(min=1, help="Tokens before the first new one.")] = 256,
    new_tokens: Annotated[int, typer.Option(min=4, help="That generate makes.")] = 64,
    layers: Annotated[int, typer.Option(min=0, help="Of a named shape; 0 for all of them.")] = 0,
    rounds: Annotated[int, typer.Option(min=3, help="Samples of each provider; medians are reported.")] = 5,
    out: Out = None,
) -> None:
    """A whole model: prefill, decoding steps and plain generate, beside bitsandbytes and bf16."""
    from halfbyte.bench import runs, whole_models
    from halfbyte.bench.decode import METHOD, Settings, decode_rows
    from halfbyte.terminal import say

    names, where = models_of(model), device_to_measure(device)
    settings = Settings(counts_of(batch), context, new_tokens, rounds, layers)
    rows_of = partial(decode_rows, device=where, settings=settings, say=say)
    runs.run_models("decode", METHOD, names, settings.label, rows_of, whole_models.terminal_table, where, out)


def generate(
    model: Annotated[str, typer.Option(help="As for decode.")] = "llama-3-8b",
    device: Device = None,
    prompt: Annotated[int, typer.Option(min=32, help="Tokens of a prompt.")] = 256,
    new_tokens: Annotated[int, typer.Option(min=8, help="That a call makes.")] = 64,
    layers: Annotated[int, typer.Option(min=0, help="Of a named shape; 0 for all of them.")] = 0,
    first: Annotated[bool, typer.Option(help="Also the first call of a process.")] = True,
    rounds: Rounds = 5,
    out: Out = None,
) -> None:
    """What a call costs beside its tokens: the first, a new length, a repeated one; and what speculation gains."""
    from halfbyte.bench import calls, runs
    from halfbyte.terminal import say

    if rounds >= prompt:
        raise typer.BadParameter(f"{rounds} prompts, each shorter than the last, need one of more than {prompt} tokens")
    names, where = models_of(model), device_to_measure(device)
    settings = calls.Settings(prompt, new_tokens, layers, rounds, first)
    rows_of = partial(calls.call_rows, device=where, settings=settings, say=say)
    runs.run_models("generate", calls.METHOD, names, settings.label, rows_of, calls.terminal_table, where, out)


def train(
    model: Annotated[str, typer.Option(help="As for decode.")] = "llama-3-8b",
    device: Device = None,
    tokens: Annotated[
        str | None,
        typer.Option(help="Of one text a step, or TEXTSxTOKENS; comma-separated. By default 512,2048,8192,2x4096."),
    ] = None,
    layers: Annotated[int, typer.Option(min=0, help="Of a named shape; 0 for all of them.")] = 0,
    experts: Annotated[bool, typer.Option("--experts", help="Adapters on the experts of a mixture, too.")] = False,
    checkpointing: Annotated[
        bool, typer.Option("--checkpointing/--no-checkpointing", help="Whether backward computes layers once more.")
    ] = True,
    rounds: Annotated[int, typer.Option(min=3, help="Samples of each provider; medians are reported.")] = 5,
    out: Out = None,
) -> None:
    """A QLoRA step with PEFT: forward, backward and optimizer, beside bitsandbytes, Unsloth's way and LoRA over bf16.

    With --experts also beside PEFT's own adapters of dense experts, and beside grouped products with those.
    """
    from halfbyte.bench import runs, whole_models
    from halfbyte.bench.train import LOADS, METHOD, Settings, loads_of, train_rows
    from halfbyte.terminal import say

    names, where = models_of(model), device_to_measure(device)
    with usage():
        loads = loads_of(tokens or LOADS)
    settings = Settings(loads, rounds, layers, experts, checkpointing)
    rows_of = partial(train_rows, device=where, settings=settings, say=say)
    table = partial(whole_models.terminal_table, key="tokens")
    runs.run_models("train", METHOD, names, settings.label, rows_of, table, where, out)


def recover(
    cases: Annotated[
        str | None, typer.Option(help="gpt2-small, gpt2-small-trained, mistral-7b, mistral-7b-nf4.")
    ] = None,
    device: Device = None,
    prompts: Annotated[int, typer.Option(min=0, help="Of each case; 0 for its own number.")] = 0,
    tokens: Annotated[int, typer.Option(min=0, help="Of each prompt; 0 for the case's own number.")] = 0,
    quick: Annotated[bool, typer.Option("--quick", help="Tiny models, in seconds: to see that it runs.")] = False,
    out: Out = None,
) -> None:
    """Prompts back from their hidden states, beside the plain loop over the vocabulary."""
    from halfbyte.bench import runs
    from halfbyte.bench.recover import cases_of

    where = device_to_measure(device)
    with usage():
        chosen = cases_of(cases, quick, prompts, tokens)
    runs.run_recovery(chosen, where, out)
