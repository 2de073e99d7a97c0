"""`halfbyte bench train`: one QLoRA step (forward, backward, optimizer) with PEFT, as fine-tuning runs it.

Rank 16 on every projection, adapters in fp32 under bf16 autocast, AdamW, with gradient checkpointing or without. The
very same model runs as bitsandbytes leaves it, accelerated, and in Unsloth's way: dequantize into memory, then torch's
product. Then its linear layers are dequantized, and PEFT puts the same adapters on the dense bf16 ones. The losses, the
gradients of all adapters, and the losses of twelve steps that learn are compared with bitsandbytes' before anything is
timed. A model with experts runs accelerated first; then they are dequantized, because bitsandbytes leaves experts
dense, and transformers multiplies with them by torch's grouped_mm.

Experts are frozen, or have adapters, too. Over dense experts these are PEFT's own, which adds B @ A to the whole stack,
and once more the grouped products of halfbyte's, with the dense stacks by grouped_mm.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from halfbyte.bench import baselines
from halfbyte.bench.train_ways import grouped_way, tell_orientation, unsloth_way
from halfbyte.measure import models, records
from halfbyte.measure.ab_run import ABRun, ab_runs, clock, dense_fits, empty_cache, peak_gb, times
from halfbyte.measure.error import relative_error
from halfbyte.measure.report import BASELINE, DENSE
from halfbyte.nn.experts import PROJECTIONS

RANK = 16
# ‖gradient - bitsandbytes'‖ / ‖bitsandbytes'‖ of all adapters together: bf16 noise of the layers. Where two experts
# have nearly the same score, that noise also chooses between them, and another expert has another gradient.
MOST_APART, MOST_APART_OF_EXPERTS = 0.05, 0.6
MOST_LOSS_APART = 0.01  # of a loss and bitsandbytes', by the first loss: later ones may fall by a seventh a step
STEPS, LEARNING_RATE = 12, 1e-4  # of the steps that learn
GROUPED = "bf16 grouped_mm"  # the provider whose adapters of dense experts are grouped products

Ways = Mapping[str, Callable[[], AbstractContextManager[Any]]]  # by provider: within, its model computes its way


class Load(NamedTuple):
    """What a step trains on: so many texts, of so many tokens each."""

    texts: int
    tokens: int

    def __str__(self) -> str:
        return f"{self.tokens} tokens" if self.texts == 1 else f"{self.texts} × {self.tokens} tokens"

    def facts(self) -> dict[str, int]:
        """What a row says of it."""
        return {"tokens": self.tokens} if self.texts == 1 else {"texts": self.texts, "tokens": self.tokens}


LOADS = "512,2048,8192,2x4096"
METHOD = (
    "wall clock of a step: rank 16 on every projection, bf16 autocast, AdamW, gradient checkpointing unless the "
    "model's name says otherwise"
)


def loads_of(text: str) -> Sequence[Load]:
    """Of comma-separated TOKENS or TEXTSxTOKENS. Raises ValueError for others."""
    loads = []
    for part in text.lower().replace("×", "x").split(","):
        numbers = [number.strip() for number in part.split("x")]
        if len(numbers) > 2 or not all(number.isdigit() and int(number) > 0 for number in numbers):
            raise ValueError(f"{part!r} is no number of tokens; write 512, or 2x4096 for two texts of 4096 each")
        loads.append(Load(*map(int, ["1", *numbers][-2:])))
    return tuple(loads)


@dataclass(frozen=True)
class Settings:
    """loads: a step each. rounds: samples of each provider. layers: of a named shape, 0 for all. experts: whether these
    have adapters, too. checkpointing: whether backward computes layers once more instead of keeping what it needs."""

    loads: Sequence[Load] = loads_of(LOADS)
    rounds: int = 5
    layers: int = 0
    experts: bool = False
    checkpointing: bool = True

    def label(self, name: str) -> str:
        """What a record calls a model."""
        adapted = "experts adapted" if self.experts else ""
        return records.label(name, self.layers, adapted, "" if self.checkpointing else "no checkpointing")


class Found(NamedTuple):
    """gradients: of all adapters together, in host memory, so that no peak has them. losses: of the steps that learn,
    if they were made."""

    loss: float
    gradients: Tensor
    losses: Sequence[float] = ()


def train_rows(name: str, device: torch.device, settings: Settings, say: Callable[[str], None]) -> Iterator[Any]:
    """Rows of a record for one model, a provider and a load each. Raises ValueError for a model without experts to
    adapt, and for wrong losses or gradients."""
    say(f"{name}: loading")
    empty_cache(device)
    dtype = torch.bfloat16
    model = models.load(name, device, dtype, layers=settings.layers)
    targets = _targets(model, settings.experts)
    most_apart = MOST_APART_OF_EXPERTS if models.experts_of(model) else MOST_APART
    facts = {"model": settings.label(name), "layers": model.config.num_hidden_layers}
    model = _adapted(model, targets, settings.checkpointing)
    adapters = _draw_adapters(model)
    results: dict[Load, dict[str, Found]] = {load: {} for load in settings.loads}
    waiting: dict[Load, list[dict[str, Any]]] = {load: [] for load in settings.loads}  # for bitsandbytes' gradients

    def measure(ways: Ways, steps: Mapping[str, Step]) -> Iterator[dict[str, Any]]:
        for load in settings.loads:
            say(f"{name}: {load}, {' and '.join(steps)}")
            generator = torch.Generator().manual_seed(0)
            ids = torch.randint(3, 1000, load, generator=generator, dtype=torch.int64, device="cpu").to(device)
            found = _results(ways, steps, ids, load == min(settings.loads, key=lambda load: load.texts * load.tokens))
            for provider in steps.keys() - found.keys():
                say(f"{name}: {load} without {provider}: there is no memory for a step")
            results[load] |= found
            _agree(results[load], most_apart)
            fitting = {provider: step for provider, step in steps.items() if provider in found}
            waiting[load] += _rows(ways, fitting, ids, settings.rounds, device)
            if BASELINE in results[load]:
                yield from told(load)

    def told(load: Load) -> Iterator[dict[str, Any]]:
        while waiting[load]:
            row = waiting[load].pop(0)
            yield facts | load.facts() | row | _compared(row["provider"], results[load])

    for ab_run in ab_runs(model, dtype, say):
        if device.type == "cuda" and BASELINE in ab_run.providers:
            ab_run.providers["unsloth's way"] = partial(unsloth_way, model)
        if settings.experts and BASELINE in ab_run.providers:
            for one in (ab_run.ours, ab_run.theirs):
                tell_orientation(one)
            ab_run.providers[GROUPED] = partial(grouped_way, ab_run.ours)
        yield from measure(ab_run.providers, _steps(ab_run))
    del ab_run
    if settings.experts:
        say(f"{name}: without {DENSE}, which is measured where experts have no adapters")
    elif dense_fits(model, dtype, say):
        model = _dense(model, targets, adapters, settings.checkpointing)
        yield from measure({DENSE: nullcontext}, {DENSE: Step(model)})
    for load in settings.loads:  # what bitsandbytes had no memory for
        yield from told(load)


def _compared(provider: str, results: Mapping[str, Found]) -> dict[str, Any]:
    """What a row says of a provider's losses and gradients."""
    own = results[provider]
    row: dict[str, Any] = {"loss": round(own.loss, 5)}
    if own.losses:
        row["losses"] = [round(loss, 5) for loss in own.losses]
    if BASELINE in results:
        row["gradients_apart"] = _apart(own.gradients, results[BASELINE].gradients)
    return row


def _rows(
    ways: Ways, steps: Mapping[str, Step], ids: Tensor, rounds: int, device: torch.device
) -> Iterator[dict[str, Any]]:
    peaks: dict[str, float | None] = {}
    samples: dict[str, list[float]] = {provider: [] for provider in steps}
    for provider, step in steps.items():
        with ways[provider]():
            step(ids)
            empty_cache(device)
            step(ids)
            peaks[provider] = peak_gb(device)
    for turn in range(rounds):
        for provider in sorted(steps, reverse=bool(turn % 2)):
            with ways[provider]():
                steps[provider](ids)  # untimed: the first one since `accelerate` looks at each weight anew
                samples[provider].append(clock(partial(steps[provider], ids), device))
    for provider, measured in samples.items():
        row = times(measured)
        speed = round(1e3 * ids.numel() / row["median_ms"], 1)
        yield {"provider": provider, "mode": "step", **row, "tokens_per_s": speed, "peak_gb": peaks[provider]}


class Step:
    """A training step of the adapters, which starts from the same adapters each time it is made."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        # A rate of zero: the optimizer does all its work and every step is the same.
        self.optimizer = torch.optim.AdamW(self.parameters, lr=0.0, fused=True)

    def __call__(self, ids: Tensor) -> None:
        self.gradients(ids)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def gradients(self, ids: Tensor) -> Tensor:
        """Makes them, and returns the loss."""
        with torch.autocast(ids.device.type, torch.bfloat16):
            loss: Tensor = self.model(ids, labels=ids, use_cache=False).loss
        loss.backward()
        return loss.detach()

    def found(self, ids: Tensor, learns: bool) -> Found:
        """What a step computes and, if it `learns`, what the loss of its text becomes from step to step."""
        loss = self.gradients(ids)
        gradients = [p.grad.flatten().cpu() for p in self.parameters if p.grad is not None]
        # From here on the optimizer has its state, so that a step later on needs no more memory than this one.
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return Found(loss.item(), torch.cat(gradients), self._losses(ids) if learns else ())

    def _losses(self, ids: Tensor) -> list[float]:
        """By an optimizer that learns. Afterwards the adapters are what they were."""
        before = [parameter.detach().clone() for parameter in self.parameters]
        optimizer = torch.optim.AdamW(self.parameters, lr=LEARNING_RATE, fused=True)
        losses = []
        try:
            for _ in range(STEPS):
                losses.append(self.gradients(ids).item())
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
        finally:
            with torch.no_grad():
                for parameter, value in zip(self.parameters, before, strict=True):
                    parameter.copy_(value)
        return losses


class Targets(NamedTuple):
    """What has adapters: names of linear layers, and of stacks of experts within their modules."""

    linears: list[str]
    stacks: list[str] | None


def _targets(model: Any, experts: bool) -> Targets:
    names = sorted({path.rpartition(".")[2] for path, _ in models.four_bit(model)})
    stacks = sorted({f"{path.rpartition('.')[2]}.{name}" for path in models.experts_of(model) for name in PROJECTIONS})
    if experts and not stacks:
        raise ValueError("the model has no experts in 4 bits to adapt: leave --experts out")
    return Targets(names, stacks if experts else None)


def _adapted(model: Any, targets: Targets, checkpointing: bool) -> Any:
    peft = baselines.require("peft")
    model.requires_grad_(False)
    config = peft.LoraConfig(r=RANK, lora_alpha=RANK, target_modules=targets.linears, target_parameters=targets.stacks)
    adapted = peft.get_peft_model(model, config)
    adapted.train()
    if checkpointing:
        adapted.enable_input_require_grads()
        adapted.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return adapted


def _draw_adapters(adapted: Any) -> dict[str, Tensor]:
    """Values for adapters B, which are zeros at first: adapters A would have no gradient to compare. Returns a copy of
    all adapters, by their names, in host memory."""
    generator = torch.Generator().manual_seed(0)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float32, device="cpu")
            parameter.data.copy_(1e-2 * noise)
    trained = ((name, parameter) for name, parameter in adapted.named_parameters() if parameter.requires_grad)
    return {name: parameter.detach().to("cpu", copy=True) for name, parameter in trained}


def _dense(adapted: Any, targets: Targets, adapters: Mapping[str, Tensor], checkpointing: bool) -> Any:
    """The model with dense linear layers and the same adapters. What it was is gone: there may be no memory for both.

    PEFT adapts it anew, for its wrappers of 4-bit layers do more than those of dense ones.
    """
    model = adapted.unload()
    vars(model).pop("peft_config", None)  # some versions of PEFT leave it, and take what follows for second adapters
    models.make_dense(model, torch.bfloat16)
    dense = _adapted(model, targets, checkpointing)
    for name, parameter in dense.named_parameters():
        if parameter.requires_grad:
            parameter.data.copy_(adapters[name])
    return dense


def _steps(ab_run: ABRun) -> dict[str, Step]:
    """One optimizer where there is one model: its state is in everybody's peak of memory."""
    ours = Step(ab_run.ours)
    theirs = ours if ab_run.theirs is ab_run.ours else Step(ab_run.theirs)
    return {provider: theirs if provider == BASELINE else ours for provider in ab_run.providers}


def _results(ways: Ways, steps: Mapping[str, Step], ids: Tensor, learns: bool) -> dict[str, Found]:
    """Of those providers that have the memory for a step."""
    results: dict[str, Found] = {}
    for provider, step in steps.items():
        try:
            with ways[provider]():
                results[provider] = step.found(ids, learns)
        except torch.OutOfMemoryError:
            step.optimizer.zero_grad(set_to_none=True)
        empty_cache(ids.device)
    return results


def _agree(results: Mapping[str, Found], most_apart: float) -> None:
    """Raise ValueError unless all agree with bitsandbytes', once these are there. A record has no rows before."""
    if BASELINE not in results:
        return
    theirs = results[BASELINE]
    losses = {provider: abs(found.loss / theirs.loss - 1) for provider, found in results.items()}
    apart = {provider: _apart(found.gradients, theirs.gradients) for provider, found in results.items()}
    learned = {provider: _losses_apart(found.losses, theirs.losses) for provider, found in results.items()}
    for what, errors, most in (
        ("losses", losses, MOST_LOSS_APART),
        ("gradients", apart, most_apart),
        (f"losses of {STEPS} steps", learned, MOST_LOSS_APART),
    ):
        if wrong := {provider: error for provider, error in errors.items() if not error <= most}:
            raise ValueError(f"{what} differ from bitsandbytes' by {wrong}, more than {most}: nothing is timed")


def _apart(found: Tensor, right: Tensor) -> float:
    return float(f"{relative_error(found, right.double()):.3g}")


def _losses_apart(found: Sequence[float], right: Sequence[float]) -> float:
    """Of the step where they are furthest apart, by the loss that they begin with."""
    return max((abs(one - other) / right[0] for one, other in zip(found, right, strict=True)), default=0.0)
