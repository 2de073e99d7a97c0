"""`halfbyte bench train`: one QLoRA step (forward, backward, optimizer) with PEFT, as fine-tuning runs it.

Rank 16 on every projection, adapters in fp32 under bf16 autocast, gradient checkpointing, AdamW. The very same model
runs as bitsandbytes leaves it, accelerated, and in Unsloth's way: dequantize into memory, then torch's product. The
gradients of all adapters are compared with bitsandbytes' before anything is timed. A model with experts, which are
frozen, runs accelerated first; then they are dequantized, because bitsandbytes leaves experts dense.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor

from halfbyte.bench import baselines
from halfbyte.measure import models
from halfbyte.measure.ab_run import THEIRS, ABRun, ab_runs, clock, empty_cache, peak_gb, times
from halfbyte.measure.error import relative_error

RANK = 16
# ‖gradient - bitsandbytes'‖ / ‖bitsandbytes'‖ of all adapters together: bf16 noise of the layers. Where two experts
# have nearly the same score, that noise also chooses between them, and another expert has another gradient.
MOST_APART, MOST_APART_OF_EXPERTS = 0.05, 0.6
TOKENS = (512, 2048, 8192)


@dataclass(frozen=True)
class Settings:
    """tokens: of one text, a step each. rounds: samples of each provider. layers: of a named shape, 0 for all."""

    tokens: Sequence[int] = TOKENS
    rounds: int = 5
    layers: int = 0


def train_rows(name: str, device: torch.device, settings: Settings, say: Callable[[str], None]) -> Iterator[Any]:
    """Rows of a record for one model, a provider and a number of tokens each. Raises ValueError for wrong gradients."""
    say(f"{name}: loading")
    empty_cache(device)
    dtype = torch.bfloat16
    model = _adapted(models.load(name, device, dtype, layers=settings.layers))
    most_apart = MOST_APART_OF_EXPERTS if models.experts_of(model) else MOST_APART
    gradients: dict[int, dict[str, Tensor]] = {tokens: {} for tokens in settings.tokens}
    rows: list[dict[str, Any]] = []
    for ab_run in ab_runs(model, dtype, say):
        if device.type == "cuda" and THEIRS in ab_run.providers:
            ab_run.providers["unsloth's way"] = partial(_unsloth_way, model)
        steps = _steps(ab_run)
        for tokens in settings.tokens:
            say(f"{name}: {tokens} tokens, {' and '.join(steps)}")
            generator = torch.Generator().manual_seed(0)
            ids = torch.randint(3, 1000, (1, tokens), generator=generator, dtype=torch.int64, device="cpu").to(device)
            gradients[tokens] |= _gradients(ab_run, steps, ids)
            _agree(gradients[tokens], most_apart)
            for row in _rows(ab_run, steps, ids, settings.rounds, device):
                rows.append({"model": name, "layers": model.config.num_hidden_layers, "tokens": tokens} | row)
    for row in rows:
        found = gradients[row["tokens"]]
        if THEIRS in found:
            row["gradients_apart"] = _apart(found[row["provider"]], found[THEIRS])
        yield row


def _rows(
    ab_run: ABRun, steps: Mapping[str, Step], ids: Tensor, rounds: int, device: torch.device
) -> Iterator[dict[str, Any]]:
    peaks: dict[str, float | None] = {}
    samples: dict[str, list[float]] = {provider: [] for provider in steps}
    for provider, step in steps.items():
        with ab_run.providers[provider]():
            step(ids)
            empty_cache(device)
            step(ids)
            peaks[provider] = peak_gb(device)
    for turn in range(rounds):
        for provider in sorted(steps, reverse=bool(turn % 2)):
            with ab_run.providers[provider]():
                samples[provider].append(clock(partial(steps[provider], ids), device))
    for provider, measured in samples.items():
        row = times(measured)
        speed = round(1e3 * ids.shape[1] / row["median_ms"], 1)
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

    def gradients(self, ids: Tensor) -> None:
        with torch.autocast(ids.device.type, torch.bfloat16):
            loss = self.model(ids, labels=ids, use_cache=False).loss
        loss.backward()


def _adapted(model: Any) -> Any:
    peft = baselines.require("peft")
    names = sorted({path.rpartition(".")[2] for path, _ in models.four_bit(model)})
    model.requires_grad_(False)
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=RANK, lora_alpha=RANK, target_modules=names))
    generator = torch.Generator().manual_seed(0)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:  # zeros at first; then adapters A would have no gradient to compare
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float32, device="cpu")
            parameter.data.copy_(1e-2 * noise)
    adapted.train()
    adapted.enable_input_require_grads()
    adapted.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return adapted


def _steps(ab_run: ABRun) -> dict[str, Step]:
    """One optimizer where there is one model: its state is in everybody's peak of memory."""
    ours = Step(ab_run.ours)
    theirs = ours if ab_run.theirs is ab_run.ours else Step(ab_run.theirs)
    return {provider: theirs if provider == THEIRS else ours for provider in ab_run.providers}


def _gradients(ab_run: ABRun, steps: Mapping[str, Step], ids: Tensor) -> dict[str, Tensor]:
    """Of all adapters together, by provider."""
    gradients: dict[str, Tensor] = {}
    for provider, step in steps.items():
        with ab_run.providers[provider]():
            step.gradients(ids)
        gradients[provider] = torch.cat([p.grad.flatten() for p in step.parameters if p.grad is not None])
        step.optimizer.zero_grad(set_to_none=True)
    return gradients


def _agree(gradients: Mapping[str, Tensor], most_apart: float) -> None:
    """Raise ValueError unless all agree with bitsandbytes', once these are there. A record has no rows before."""
    if THEIRS not in gradients:
        return
    apart = {provider: _apart(found, gradients[THEIRS]) for provider, found in gradients.items()}
    if wrong := {provider: error for provider, error in apart.items() if not error <= most_apart}:
        raise ValueError(f"gradients differ from bitsandbytes' by {wrong}, more than {most_apart}: nothing is timed")


def _apart(found: Tensor, right: Tensor) -> float:
    return float(f"{relative_error(found, right.double()):.3g}")


@contextmanager
def _unsloth_way(model: Any) -> Iterator[Any]:
    """Every 4-bit layer as Unsloth multiplies in training: its sequence to dequantize, torch's product, twice."""
    dequantize = baselines.Unsloth().dequantize
    layers = [module for _, module in models.four_bit(model)]
    for module in layers:
        module.forward = MethodType(partial(_DequantizedLinear.run, dequantize), module)
    try:
        yield model
    finally:
        for module in layers:
            del module.forward


class _DequantizedLinear(torch.autograd.Function):
    @staticmethod
    def run(dequantize: Callable[..., Tensor], module: Any, x: Tensor) -> Tensor:
        return _apply(x.to(module.compute_dtype), module.weight, dequantize)

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Any, dequantize: Callable[..., Tensor]) -> Tensor:
        ctx.weight, ctx.dequantize = weight, dequantize
        return x @ dequantize(weight, weight.quant_state).t()

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return grad @ ctx.dequantize(ctx.weight, ctx.weight.quant_state), None, None


_apply: Callable[..., Tensor] = _DequantizedLinear.apply
