"""`halfbyte bench decode`: a whole model, prefill and decoding, as bitsandbytes and as halfbyte compute it.

Both run the same weights: on a GPU the very same model, `accelerate` and `restore` going to and fro. First come the
logits: of the model's first layers against the same layers in dequantized fp32, and of the whole model against
bitsandbytes'. A step is timed as it is, as a CUDA graph, and as a graph whose small kernels torch.compile has fused;
`generate` is timed as a user calls it.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from statistics import median
from typing import Any

import torch
from torch import Tensor

from halfbyte.bench import models
from halfbyte.bench.contest import Contest, clock, empty_cache, enough, peak_gb, random_ids, times
from halfbyte.bench.linear import relative_error
from halfbyte.models.accelerate import accelerate, is_accelerated, restore
from halfbyte.models.caches import COUNTER
from halfbyte.models.graphs import Step, capturable
from halfbyte.models.regions import compiled_regions
from halfbyte.models.repacked import FASTER

CHECKED_LAYERS = 4  # that the fp32 reference has: all of a 70B model would not fit
STEPS, LONG = 16, 200.0  # in a sample at most; ms that are enough for one of fewer
MOST_APART = 0.1  # ‖ours - bitsandbytes'‖ / ‖bitsandbytes'‖ of a whole model's logits: bf16 noise of all its layers
BATCHES = (1, 8, 32)
MODES = ("eager", "graph", "fused graph")  # of a step


@dataclass(frozen=True)
class Settings:
    """batches: rows of text at once. context: tokens before the first new one. new_tokens: that `generate` makes.
    rounds: samples of each provider. layers: of a named shape, 0 for all."""

    batches: Sequence[int] = BATCHES
    context: int = 256
    new_tokens: int = 64
    rounds: int = 5
    layers: int = 0


def decode_rows(name: str, device: torch.device, settings: Settings, say: Callable[[str], None]) -> Iterator[Any]:
    """Rows of a record for one model: a provider, a mode and a batch each. Raises ValueError where logits disagree."""
    dtype = torch.bfloat16
    say(f"{name}: logits against fp32")
    errors = errors_against_fp32(name, device, dtype)
    say(f"{name}: loading")
    empty_cache(device)
    model = models.load(name, device, dtype, layers=settings.layers)
    weights = round(torch.cuda.memory_allocated(device) / 1e9, 3) if device.type == "cuda" else None
    started = time.perf_counter()
    report = accelerate(model)
    seconds = time.perf_counter() - started
    if not set(report.skipped.values()) <= {FASTER}:
        raise ValueError(f"{name}: not every module was accelerated: {report}")
    restore(model)
    facts = {
        "model": name, "layers": model.config.num_hidden_layers, "context": settings.context,
        "weight_gb": weights, "accelerate_s": round(seconds, 3),
    }  # fmt: skip
    if device.type == "cpu":
        facts |= {"left_to_bitsandbytes": len(report.skipped)}
        if report.skipped:
            say(f"{name}: {len(report.skipped)} modules left alone, for {FASTER}")
    contest = Contest(model)
    for batch in settings.batches:
        say(f"{name}: batch {batch}")
        for row in _batch_rows(contest, batch, settings, device):
            yield facts | {"batch": batch} | row | {"relative_error": errors[row["provider"], _checked(row, device)]}
    need = 2 * sum(module.out_features * module.in_features for _, module in models.four_bit(model))
    if device.type == "cuda" and need < 0.9 * torch.cuda.mem_get_info(device)[0]:
        say(f"{name}: dense")
        models.make_dense(model, dtype)
        for batch in settings.batches:
            for row in _dense_rows(model, batch, settings, device):
                yield facts | {"batch": batch} | row


def _checked(row: Mapping[str, Any], device: torch.device) -> str:
    """The mode of which the logits were held against fp32 for a row."""
    mode: str = row["mode"]
    if mode == "generate" and row["provider"] == "halfbyte" and device.type == "cuda":
        return MODES[-1]
    return mode if mode in MODES else MODES[0]


def _modes(device: torch.device) -> Sequence[str]:
    return MODES if device.type == "cuda" else MODES[:1]


def _batch_rows(contest: Contest, batch: int, settings: Settings, device: torch.device) -> Iterator[dict[str, Any]]:
    modes = _modes(device)
    decoders: dict[tuple[str, str], Decoder] = {}
    for provider, run_by in contest.providers.items():
        with run_by() as model:
            for mode in modes:
                decoders[provider, mode] = Decoder(model, batch, settings, mode)
    _agree({key: decoder.logits for key, decoder in decoders.items()})
    samples: dict[tuple[str, str], list[float]] = {key: [] for key in decoders}
    prefills: dict[str, list[float]] = {provider: [] for provider in contest.providers}
    for turn in range(settings.rounds):
        for provider in sorted(contest.providers, reverse=bool(turn % 2)):
            with contest.providers[provider]():
                for mode in modes:
                    samples[provider, mode].append(decoders[provider, mode].sample())
                prefills[provider].append(decoders[provider, "eager"].prefill())
    for (provider, mode), measured in samples.items():
        yield {"provider": provider, "mode": mode, **times(measured), **_speed(batch, measured)}
    for provider, measured in prefills.items():
        yield {"provider": provider, "mode": "prefill", **times(measured)}
    del decoders
    for provider, run_by in contest.providers.items():
        with run_by() as model:
            yield {"provider": provider, "mode": "generate", **_generate(model, batch, settings, device)}


def _dense_rows(model: Any, batch: int, settings: Settings, device: torch.device) -> Iterator[dict[str, Any]]:
    for mode in MODES:
        decoder = Decoder(model, batch, settings, mode)
        measured = [decoder.sample() for _ in range(settings.rounds)]
        yield {"provider": "bf16", "mode": mode, **times(measured), **_speed(batch, measured)}
    yield {"provider": "bf16", "mode": "generate", **_generate(model, batch, settings, device)}


def step_inputs(model: Any, cache: Any, ids: Tensor, length: int) -> dict[str, Any]:
    """What `generate` gives the model for the token [texts, 1] behind `length` others, but for the cache: with masks
    made beforehand, which depend on numbers that Python counts."""
    inputs: dict[str, Any] = model.prepare_inputs_for_generation(
        ids,
        next_sequence_length=1,
        past_key_values=cache,
        attention_mask=torch.ones((len(ids), length + 1), dtype=torch.long, device=ids.device),
        position_ids=torch.full((len(ids), 1), length, dtype=torch.long, device=ids.device),
        use_cache=True,
    )
    del inputs["past_key_values"]
    return inputs


@contextmanager
def as_captured(model: Any, cache: Any, mode: str) -> Iterator[None]:
    """Within, a step computes what it does in one of the modes, captured or not."""
    if mode == "eager":
        yield
        return
    regions = compiled_regions(model) if mode == "fused graph" else nullcontext()
    with regions, capturable(cache, is_accelerated(model)):
        yield


class Decoder:
    """A model with a static cache, `context` tokens in it, that decodes one token a step in one of three modes."""

    def __init__(self, model: Any, batch: int, settings: Settings, mode: str) -> None:
        from transformers import StaticCache

        self.model, self.context, self.device = model, settings.context, model.device
        self.ids = random_ids(model, batch, settings.context, seed=0)
        self.cache = StaticCache(config=model.config, max_cache_len=settings.context + 2 * STEPS)
        self.prefill()
        self.inputs = step_inputs(model, self.cache, self.ids[:, :1], settings.context)
        self.run: Callable[[], Any] = self._eager
        if mode != "eager":
            with torch.no_grad(), as_captured(model, self.cache, mode):
                for _ in range(2):
                    self._eager()
                leaves, structure = torch.utils._pytree.tree_flatten(self.inputs)
                self.run = Step(model, self.cache, leaves, structure, is_accelerated(model)).replay
        self.reset()
        self.logits: Tensor = self.run().logits

    def _eager(self) -> Any:
        with torch.no_grad():
            return self.model(past_key_values=self.cache, **self.inputs)

    def reset(self) -> None:
        """Back to where the context ends; later entries of the cache are masked."""
        for layer in self.cache.layers:
            layer.cumulative_length.fill_(self.context)
            if hasattr(layer, COUNTER):
                setattr(layer, COUNTER, self.context)

    def prefill(self) -> float:
        """Milliseconds that the context takes."""
        self.cache.reset()
        with torch.no_grad():
            return clock(
                lambda: self.model(self.ids, past_key_values=self.cache, use_cache=True, logits_to_keep=1), self.device
            )

    @cached_property
    def steps(self) -> int:
        """In a sample: fewer of slow ones."""
        self.reset()
        return enough(clock(self.run, self.device), LONG, least=4, most=STEPS)

    def sample(self) -> float:
        """Milliseconds a step."""
        steps = self.steps
        self.reset()
        return clock(lambda: [self.run() for _ in range(steps)][-1], self.device) / steps


def _generate(model: Any, batch: int, settings: Settings, device: torch.device) -> dict[str, Any]:
    """A plain `generate`: milliseconds a token, prefill and capture included, and the peak of memory in GB."""
    ids = random_ids(model, batch, settings.context, seed=1)
    mask = torch.ones_like(ids)

    def run(tokens: int) -> Any:
        return model.generate(ids, attention_mask=mask, max_new_tokens=tokens, do_sample=False)

    run(4)  # what is compiled once, is compiled now
    empty_cache(device)
    elapsed = clock(lambda: run(settings.new_tokens), device)
    speed = 1e3 * batch * settings.new_tokens / elapsed
    return {
        "median_ms": round(elapsed / settings.new_tokens, 3), "samples": 1, "new_tokens": settings.new_tokens,
        "tokens_per_s": round(speed, 1), "peak_gb": peak_gb(device),
    }  # fmt: skip


def errors_against_fp32(
    name: str, device: torch.device, dtype: torch.dtype, modes: Sequence[str] = ()
) -> dict[tuple[str, str], float]:
    """‖logits - exact‖ / ‖exact‖ by provider and mode of a step, the exact ones being of dequantized weights in fp32.
    modes: all that the device has by default.

    Over the first layers; a prompt and then single tokens, so that every kernel that decoding takes has its part.
    """
    model = models.load(name, device, dtype, layers=CHECKED_LAYERS)
    ids = random_ids(model, 4, 48, seed=2)
    results = {}
    contest = Contest(model)
    # On a CPU a provider may leave its weights repacked, with other scales.
    model = model if device.type == "cuda" else copy.deepcopy(model)
    for provider, run_by in contest.providers.items():
        with run_by() as contestant:
            for mode in modes or _modes(device):
                results[provider, mode] = _logits(contestant, ids, mode)
    models.make_dense(model, torch.float32)
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    exact = _logits(model, ids, "eager").double()
    torch.set_float32_matmul_precision(precision)
    return {key: float(f"{relative_error(result, exact):.4g}") for key, result in results.items()}


def _logits(model: Any, ids: Tensor, mode: str) -> Tensor:
    """Of a prompt of 32 tokens, of each further token of four texts, and of one text alone. A graph would compute what
    its step does while it is captured, so none is made."""
    from transformers import StaticCache

    parts = []
    with torch.no_grad():
        for texts in (ids, ids[:1]):
            cache = StaticCache(config=model.config, max_cache_len=texts.shape[1])
            parts.append(model(texts[:, :32], past_key_values=cache, use_cache=True).logits)
            for position in range(32, texts.shape[1]):
                inputs = step_inputs(model, cache, texts[:, position : position + 1], position)
                with as_captured(model, cache, mode):
                    parts.append(model(past_key_values=cache, **inputs).logits)
    return torch.cat([part.flatten(0, 1) for part in parts])


def _agree(logits: Mapping[tuple[str, str], Tensor]) -> None:
    right = logits["bitsandbytes", "eager"].double()
    for (provider, mode), result in logits.items():
        apart = relative_error(result, right)
        if not apart <= MOST_APART:
            raise ValueError(f"logits of {provider}, {mode}, are {apart:.3g} from bitsandbytes': nothing is timed")


def _speed(batch: int, samples: Sequence[float]) -> dict[str, Any]:
    return {"tokens_per_s": round(1e3 * batch / median(samples), 1)}
