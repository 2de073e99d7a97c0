"""`halfbyte bench decode`: a whole model, prefill and decoding, as bitsandbytes and as halfbyte compute it.

Both run the same weights: on a GPU the very same model, `accelerate` and `restore` going to and fro. A model with
experts runs with one after the other, because bitsandbytes leaves experts dense: after halfbyte's turn they are
dequantized. First come the logits: of the model's first layers against the same layers in dequantized fp32, and of the
whole model against bitsandbytes'. A step is timed as it is, as a CUDA graph, and as a graph whose small kernels
torch.compile has fused; `generate` is timed as a user calls it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor

from halfbyte.measure import models, records
from halfbyte.measure.ab_run import ABRun, ab_runs, clock, dense_fits, empty_cache, peak_gb, random_ids, times, written
from halfbyte.measure.decoder import (
    MODES,
    MOST_APART,
    MOST_APART_OF_EXPERTS,
    Decoder,
    errors_against_fp32,
    modes_of,
)
from halfbyte.measure.error import relative_error
from halfbyte.measure.report import BASELINE, DENSE, OURS
from halfbyte.models.accelerate import accelerate, restore
from halfbyte.models.repacked import FASTER

BATCHES = (1, 8, 32)
SLOW = 1500.0  # ms of a call of `generate` that one sample is enough for: some 30 are the driver's

Logits = dict[tuple[str, str], Tensor]  # by provider and mode


@dataclass(frozen=True)
class Settings:
    """batches: rows of text at once. context: tokens before the first new one. new_tokens: that `generate` makes.
    rounds: samples of each provider. layers: of a named shape, 0 for all."""

    batches: Sequence[int] = BATCHES
    context: int = 256
    new_tokens: int = 64
    rounds: int = 5
    layers: int = 0

    def label(self, name: str) -> str:
        """What a record calls a model."""
        context = "" if self.context == Settings.context else f"{self.context} tokens of context"
        new_tokens = "" if self.new_tokens == Settings.new_tokens else f"{self.new_tokens} new tokens"
        return records.label(name, self.layers, context, new_tokens)


METHOD = (
    "wall clock, static cache; generate as a user calls it, everything included; "
    f"{Settings.context} tokens of context and {Settings.new_tokens} new ones unless the model's name says otherwise"
)


def decode_rows(name: str, device: torch.device, settings: Settings, say: Callable[[str], None]) -> Iterator[Any]:
    """Rows of a record for one model: a provider, a mode and a batch each. Raises ValueError where logits disagree."""
    dtype = torch.bfloat16
    say(f"{name}: logits against fp32")
    errors = errors_against_fp32(name, device, dtype)
    say(f"{name}: loading")
    empty_cache(device)
    model = models.load(name, device, dtype, layers=settings.layers)
    weights, has_experts = _allocated_gb(device), bool(models.experts_of(model))
    started = time.perf_counter()
    report = accelerate(model)
    seconds = time.perf_counter() - started
    if not set(report.skipped.values()) <= {FASTER}:
        raise ValueError(f"{name}: not every module was accelerated: {report}")
    restore(model)
    facts = {
        "model": settings.label(name), "layers": model.config.num_hidden_layers, "context": settings.context,
        "weight_gb": weights, "accelerate_s": round(seconds, 3),
    }  # fmt: skip
    if device.type == "cpu":
        facts |= {"left_to_bitsandbytes": len(report.skipped)}
        if report.skipped:
            say(f"{name}: {len(report.skipped)} modules left alone, for {FASTER}")
    most_apart = MOST_APART_OF_EXPERTS if has_experts else MOST_APART
    logits: dict[int, Logits] = {batch: {} for batch in settings.batches}
    for ab_run in ab_runs(model, dtype, say):
        if has_experts:
            facts["weight_gb"] = _allocated_gb(device)
        for batch in settings.batches:
            say(f"{name}: batch {batch}, {' and '.join(ab_run.providers)}")
            for row in _batch_rows(ab_run, batch, settings, device, logits[batch], most_apart):
                error = errors[row["provider"], _checked(row, device)]
                yield facts | {"batch": batch} | row | {"relative_error": error}
    if device.type == "cuda" and dense_fits(model, dtype, say):
        say(f"{name}: dense")
        models.make_dense(model, dtype)
        for batch in settings.batches:
            for row in _dense_rows(model, batch, settings, device):
                yield facts | {"batch": batch} | row


def _allocated_gb(device: torch.device) -> float | None:
    return round(torch.cuda.memory_allocated(device) / 1e9, 3) if device.type == "cuda" else None


def _checked(row: Mapping[str, Any], device: torch.device) -> str:
    """The mode of which the logits were held against fp32 for a row."""
    mode: str = row["mode"]
    if mode == "generate" and row["provider"] == OURS and device.type == "cuda":
        return MODES[-1]
    return mode if mode in MODES else MODES[0]


def _batch_rows(
    ab_run: ABRun, batch: int, settings: Settings, device: torch.device, logits: Logits, most_apart: float
) -> Iterator[dict[str, Any]]:
    """logits: those of earlier runs at this batch, which this one's are added to."""
    modes = modes_of(device)
    decoders: dict[tuple[str, str], Decoder] = {}
    for provider, run_by in ab_run.providers.items():
        with run_by() as model:
            for mode in modes:
                decoders[provider, mode] = Decoder(model, batch, settings.context, mode)
    logits.update({key: decoder.logits.clone() for key, decoder in decoders.items()})
    _agree(logits, most_apart)
    samples: dict[tuple[str, str], list[float]] = {key: [] for key in decoders}
    prefills: dict[str, list[float]] = {provider: [] for provider in ab_run.providers}
    for turn in range(settings.rounds):
        for provider in sorted(ab_run.providers, reverse=bool(turn % 2)):
            with ab_run.providers[provider]():
                for mode in modes:
                    samples[provider, mode].append(decoders[provider, mode].sample())
                for _ in range(2):  # the first one after `accelerate` compares every layer, the second one is captured
                    decoders[provider, "eager"].prefill()
                prefills[provider].append(decoders[provider, "eager"].prefill())
    for (provider, mode), measured in samples.items():
        yield {"provider": provider, "mode": mode, **times(measured), **_speed(batch, measured)}
    for provider, measured in prefills.items():
        yield {"provider": provider, "mode": "prefill", **times(measured)}
    del decoders
    for provider, run_by in ab_run.providers.items():
        with run_by() as model:
            yield {"provider": provider, "mode": "generate", **_generate(model, batch, settings, device)}


def _dense_rows(model: Any, batch: int, settings: Settings, device: torch.device) -> Iterator[dict[str, Any]]:
    prefills: list[float] = []
    for mode in modes_of(device):
        decoder = Decoder(model, batch, settings.context, mode)
        measured = [decoder.sample() for _ in range(settings.rounds)]
        if mode == "eager":
            prefills = [decoder.prefill() for _ in range(settings.rounds)]
        yield {"provider": DENSE, "mode": mode, **times(measured), **_speed(batch, measured)}
    yield {"provider": DENSE, "mode": "prefill", **times(prefills)}
    yield {"provider": DENSE, "mode": "generate", **_generate(model, batch, settings, device)}


def _generate(model: Any, batch: int, settings: Settings, device: torch.device) -> dict[str, Any]:
    """A plain `generate`: milliseconds a token, prefill included, of calls like others before them; the first one's
    milliseconds in all, with what is compiled and captured once, are `first_ms`; and the peak of memory in GB."""
    run = partial(written, model, random_ids(model, batch, settings.context, seed=1), settings.new_tokens)
    first = clock(run, device)
    empty_cache(device)
    again = clock(run, device)  # which asks the driver for memory once more
    peak = peak_gb(device)
    measured = [again] if again > SLOW else [clock(run, device) for _ in range(settings.rounds)]
    elapsed = median(measured)
    speed = 1e3 * batch * settings.new_tokens / elapsed
    return {
        "median_ms": round(elapsed / settings.new_tokens, 3), "samples": len(measured),
        "new_tokens": settings.new_tokens, "first_ms": round(first, 1), "tokens_per_s": round(speed, 1),
        "peak_gb": peak,
    }  # fmt: skip


def _agree(logits: Logits, most_apart: float) -> None:
    """Raise ValueError unless all agree with bitsandbytes', once these are there. A record has no rows before."""
    if (BASELINE, MODES[0]) not in logits:
        return
    right = logits[BASELINE, MODES[0]].double()
    for (provider, mode), result in logits.items():
        apart = relative_error(result, right)
        if not apart <= most_apart:
            raise ValueError(f"logits of {provider}, {mode}, are {apart:.3g} from bitsandbytes': nothing is timed")


def _speed(batch: int, samples: Sequence[float]) -> dict[str, Any]:
    return {"tokens_per_s": round(1e3 * batch / median(samples), 1)}
