"""A model through its providers, batches and modes: checked, timed as it is, and then profiled.

Providers are those of `halfbyte bench decode`: the same 4-bit weights through bitsandbytes and through halfbyte, and
the dense weights that they stand for in bf16. First come the logits, as there; a provider or mode whose logits are off
ends the whole run, so nothing is reported of a model that computes something else.

A GPU is profiled twice. One step runs with ranges around its modules, and tells what each kernel is for; several steps
then run without any, back to back, in the mode that is asked for, and align.py carries the labels over. A CPU's steps
are marked and timed in one go, for a mark costs little beside an operator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity

from halfbyte.measure import models
from halfbyte.measure.ab_run import ABRun, clock, empty_cache, enough, times
from halfbyte.measure.decoder import MODES as STEP_MODES
from halfbyte.measure.decoder import MOST_APART, STEPS, Decoder, errors_against_fp32
from halfbyte.measure.error import relative_error
from halfbyte.models.accelerate import accelerate, restore
from halfbyte.models.repacked import FASTER
from halfbyte.roofline import events
from halfbyte.roofline.attribution import (
    STEP,
    Profile,
    attribute_cpu,
    attribute_gpu,
    labels_by_launch,
    made_dense,
)
from halfbyte.roofline.names import SAMPLING, Label
from halfbyte.roofline.roles import PREFIX, Call, marked, range_of
from halfbyte.roofline.work import Amount, Shape, work_of

PROVIDERS = ("bitsandbytes", "halfbyte", "bf16")
MODES = {"cpu": ("eager", "prefill"), "cuda": ("eager", "graph", "fused graph", "prefill")}
TRIES, APART = 4, 0.02  # how often steps are profiled at most, and how far apart two clocks may be
LONG = 40.0  # ms that steps should take together, so that their beginning and end do not count


@dataclass(frozen=True)
class Settings:
    """batches: rows of text at once. context: tokens before the first new one. rounds: unprofiled samples.
    layers: of a named shape, 0 for all. providers, modes: which of PROVIDERS and MODES; all modes by default."""

    batches: Sequence[int] = (1, 8, 32)
    context: int = 256
    rounds: int = 5
    layers: int = 0
    providers: Sequence[str] = PROVIDERS
    modes: Sequence[str] = ()


@dataclass(frozen=True)
class Run:
    """A provider in a mode, at a batch. step: unprofiled ms of a step, as `times` has them. profiled: ms of a step
    under the profiler by the wall clock. profile: where they went. work: what each class had to do."""

    provider: str
    mode: str
    batch: int
    step: dict[str, Any]
    profiled: float
    profile: Profile
    work: dict[Label, Amount]
    relative_error: float


@dataclass(frozen=True)
class Repeated:
    """A step that can be repeated. reset: what comes before a series of them. tokens: new ones in a text."""

    run: Callable[[], Tensor]
    reset: Callable[[], None]
    tokens: int
    total: int
    most: int  # steps in a row


def facts_of(name: str, device: torch.device, settings: Settings, say: Callable[[str], None]) -> dict[str, Any]:
    """Facts of one model for its record, and under "runs" every Run. Raises ValueError where logits disagree."""
    dtype = torch.bfloat16
    say(f"{name}: logits against fp32")
    chosen = settings.modes or MODES[device.type]
    modes = [mode for mode in STEP_MODES if mode == "eager" or mode in chosen]
    errors = {", ".join(key): error for key, error in errors_against_fp32(name, device, dtype, modes).items()}
    for key, error in errors.items():
        if not error <= MOST_APART:
            raise ValueError(f"{name}: logits of {key} are {error:.3g} from those in fp32: nothing is reported")
    say(f"{name}: loading")
    empty_cache(device)
    start_profiler(device)
    model = models.load(name, device, dtype, layers=settings.layers)
    report = accelerate(model)
    if not set(report.skipped.values()) <= {FASTER}:
        raise ValueError(f"{name}: not every module was accelerated: {report}")
    restore(model)
    return {
        "model": name,
        "layers": model.config.get_text_config().num_hidden_layers,
        "context": settings.context,
        "errors_against_fp32": errors,
        "runs": list(_runs(name, model, device, settings, say)),
    }


def _runs(name: str, model: Any, device: torch.device, settings: Settings, say: Callable[[str], None]) -> Iterator[Run]:
    ab_run = ABRun(model)
    right: dict[int, dict[str, Tensor]] = {}
    for batch in settings.batches:
        with ab_run.providers["bitsandbytes"]() as theirs:
            right[batch] = _logits(Decoder(theirs, batch, settings.context, "eager"))
        for provider in ("bitsandbytes", "halfbyte"):
            if provider in settings.providers:
                say(f"{name}: batch {batch}, {provider}")
                with ab_run.providers[provider]() as running:
                    yield from _batch(running, provider, batch, settings, right[batch])
    if "bf16" in settings.providers:
        say(f"{name}: bf16")
        del ab_run
        models.make_dense(model, torch.bfloat16)
        for batch in settings.batches:
            say(f"{name}: batch {batch}, bf16")
            yield from _batch(model, "bf16", batch, settings, right[batch])


def _batch(model: Any, provider: str, batch: int, settings: Settings, right: dict[str, Tensor]) -> Iterator[Run]:
    eager = Decoder(model, batch, settings.context, "eager")
    known: dict[bool, tuple[list[tuple[str, Label]], list[Call]]] = {}
    for mode in settings.modes or MODES[model.device.type]:
        prefill = mode == "prefill"
        decoder = eager if mode in ("eager", "prefill") else Decoder(model, batch, settings.context, mode)
        apart = _checked(decoder, provider, mode, right)
        work = work_step(decoder, prefill)
        samples = _unprofiled(work, settings.rounds, model.device)
        steps = enough(min(samples), LONG, least=2, most=work.most)
        if model.device.type == "cuda":
            if prefill not in known:
                known[prefill] = labelled(model, work_step(eager, prefill))
            labels, calls = known[prefill]
            profiled, profile = _profiled(work, steps, model.device, partial(attribute_gpu, known=labels, steps=steps))
        else:
            with marked(model) as every_call:
                work.reset()
                work.run()
                calls = every_call.copy()
                profiled, profile = _profiled(work, steps, model.device, partial(attribute_cpu, steps=steps))
        shape = Shape.of(model, decoder.cache, batch, work.tokens, work.total)
        amounts = work_of(calls, shape, made_dense(profile))
        yield Run(provider, mode, batch, times(samples), profiled, profile, amounts, apart)


def work_step(decoder: Decoder, prefill: bool) -> Repeated:
    """A decoding step or a prefill, with a greedy choice of the next token."""

    def choose(logits: Tensor) -> Tensor:
        with range_of(SAMPLING):
            return logits[:, -1].argmax(-1)

    if prefill:
        return Repeated(lambda: choose(_prefill(decoder)), decoder.cache.reset, decoder.context, decoder.context, 1)
    return Repeated(lambda: choose(decoder.run().logits), decoder.reset, 1, decoder.context + 1, STEPS)


def _prefill(decoder: Decoder) -> Tensor:
    with torch.no_grad():
        output = decoder.model(decoder.ids, past_key_values=decoder.cache, use_cache=True, logits_to_keep=1)
    logits: Tensor = output.logits
    return logits


def _logits(decoder: Decoder) -> dict[str, Tensor]:
    """What a step and a prefill should give, kept on the host."""
    decoder.cache.reset()
    prefill = _prefill(decoder)[:, -1].cpu()
    return {"step": decoder.logits[:, -1].cpu(), "prefill": prefill}


def _checked(decoder: Decoder, provider: str, mode: str, right: dict[str, Tensor]) -> float:
    """How far the logits are from bitsandbytes'. Raises ValueError where that is more than rounding."""
    if mode == "prefill":
        decoder.cache.reset()
        logits, exact = _prefill(decoder), right["prefill"]
    else:
        logits, exact = decoder.logits, right["step"]
    apart = relative_error(logits[:, -1].cpu(), exact.double())
    if not apart <= MOST_APART:
        raise ValueError(f"logits of {provider}, {mode}, are {apart:.3g} from bitsandbytes': nothing is reported")
    return float(f"{apart:.4g}")


def _unprofiled(work: Repeated, rounds: int, device: torch.device) -> list[float]:
    """Milliseconds a step, a sample a round."""

    def sample(steps: int) -> float:
        work.reset()
        return clock(lambda: [work.run() for _ in range(steps)][-1], device) / steps

    steps = enough(sample(1), LONG, least=2, most=work.most)
    return [sample(steps) for _ in range(rounds)]


def labelled(model: Any, work: Repeated) -> tuple[list[tuple[str, Label]], list[Call]]:
    """The kernels of one step with their classes, and the calls of its modules."""
    with marked(model) as calls:
        _, trace = _traced(work, 1, [ProfilerActivity.CPU, ProfilerActivity.CUDA], model.device)
    return labels_by_launch(trace), calls


def _profiled(
    work: Repeated, steps: int, device: torch.device, attribute: Callable[[events.Trace], Profile]
) -> tuple[float, Profile]:
    """Milliseconds a step by the wall clock, and where they went by the profiler's.

    The profiler sets its clock by a few looks at the wall clock. A process that is interrupted meanwhile gets a clock
    that runs too fast or too slow, and another try; what agrees best is what counts.
    """
    activity = ProfilerActivity.CUDA if device.type == "cuda" else ProfilerActivity.CPU
    found = []
    for _ in range(TRIES):
        elapsed, trace = _traced(work, steps, [activity], device)
        profile = attribute(trace)
        found.append((abs(profile.total / 1e3 / elapsed - 1), elapsed, profile))
        if found[-1][0] < APART:
            break
    _, elapsed, profile = min(found, key=lambda one: one[0])
    return elapsed, profile


def _traced(
    work: Repeated, steps: int, activities: Sequence[ProfilerActivity], device: torch.device
) -> tuple[float, events.Trace]:
    """Milliseconds a step by the wall clock, and the trace of all of them."""
    work.reset()
    if device.type == "cuda":  # what the reset launched is not a part of the trace
        torch.cuda.synchronize(device)

    def run() -> Tensor:
        with torch.profiler.record_function(PREFIX + STEP):  # nothing but the steps, so that both clocks see the same
            return [work.run() for _ in range(steps)][-1]

    with torch.profiler.profile(activities=activities) as profiler:
        elapsed = clock(run, device)
    return elapsed / steps, events.read(profiler)


def start_profiler(device: torch.device) -> None:
    """The profiler's first use in a process takes long, and may miss what runs meanwhile."""
    if device.type == "cuda":
        with torch.profiler.profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]):
            torch.ones(1, dtype=torch.float32, device=device).sum()
            torch.cuda.synchronize(device)
