"""`halfbyte bench train`: one QLoRA step (forward, backward, optimizer) with PEFT, as fine-tuning runs it.

Rank 16 on every projection, adapters in fp32 under bf16 autocast, gradient checkpointing, AdamW. The very same model
runs as bitsandbytes leaves it, accelerated, and in Unsloth's way: dequantize into memory, then torch's product. The
losses, and the gradients of all adapters, are compared with bitsandbytes' before anything is timed. A model with
experts runs accelerated first; then they are dequantized, because bitsandbytes leaves experts dense, and transformers
multiplies with them by torch's grouped_mm.

Experts are frozen, or have adapters, too. Over dense experts these are PEFT's own, which adds B @ A to the whole stack,
and once more the grouped products of halfbyte's, with the dense stacks by grouped_mm.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from halfbyte.autocast import autocast_dtype
from halfbyte.bench import baselines
from halfbyte.measure import models, records
from halfbyte.measure.ab_run import THEIRS, ABRun, ab_runs, clock, empty_cache, peak_gb, times
from halfbyte.measure.error import relative_error
from halfbyte.models import peft_experts
from halfbyte.models.experts import Facts, facts_of, is_experts
from halfbyte.nn.experts import BIAS, PROJECTIONS

RANK = 16
# ‖gradient - bitsandbytes'‖ / ‖bitsandbytes'‖ of all adapters together: bf16 noise of the layers. Where two experts
# have nearly the same score, that noise also chooses between them, and another expert has another gradient.
MOST_APART, MOST_APART_OF_EXPERTS = 0.05, 0.6
MOST_LOSS_APART = 0.01  # of a loss and bitsandbytes', relative
GROUPED = "bf16 grouped_mm"  # the provider whose adapters of dense experts are grouped products
TOKENS = (512, 2048, 8192)


@dataclass(frozen=True)
class Settings:
    """tokens: of one text, a step each. rounds: samples of each provider. layers: of a named shape, 0 for all. experts:
    whether these have adapters, too."""

    tokens: Sequence[int] = TOKENS
    rounds: int = 5
    layers: int = 0
    experts: bool = False

    def label(self, name: str) -> str:
        """What a record calls a model."""
        return records.label(name, self.layers, "experts adapted" if self.experts else "")


class Found(NamedTuple):
    """gradients: of all adapters together, in host memory, so that no peak has them."""

    loss: float
    gradients: Tensor


def train_rows(name: str, device: torch.device, settings: Settings, say: Callable[[str], None]) -> Iterator[Any]:
    """Rows of a record for one model, a provider and a number of tokens each. Raises ValueError for a model without
    experts to adapt, and for wrong losses or gradients."""
    say(f"{name}: loading")
    empty_cache(device)
    dtype = torch.bfloat16
    model = _adapted(models.load(name, device, dtype, layers=settings.layers), settings.experts)
    most_apart = MOST_APART_OF_EXPERTS if models.experts_of(model) else MOST_APART
    results: dict[int, dict[str, Found]] = {tokens: {} for tokens in settings.tokens}
    rows: list[dict[str, Any]] = []
    for ab_run in ab_runs(model, dtype, say):
        if device.type == "cuda" and THEIRS in ab_run.providers:
            ab_run.providers["unsloth's way"] = partial(_unsloth_way, model)
        if settings.experts and THEIRS in ab_run.providers:
            for one in (ab_run.ours, ab_run.theirs):
                _tell_orientation(one)
            ab_run.providers[GROUPED] = partial(_grouped_way, ab_run.ours)
        steps = _steps(ab_run)
        for tokens in settings.tokens:
            say(f"{name}: {tokens} tokens, {' and '.join(steps)}")
            generator = torch.Generator().manual_seed(0)
            ids = torch.randint(3, 1000, (1, tokens), generator=generator, dtype=torch.int64, device="cpu").to(device)
            results[tokens] |= _results(ab_run, steps, ids)
            _agree(results[tokens], most_apart)
            facts = {"model": settings.label(name), "layers": model.config.num_hidden_layers, "tokens": tokens}
            rows += [facts | row for row in _rows(ab_run, steps, ids, settings.rounds, device)]
    for row in rows:
        found = results[row["tokens"]]
        row["loss"] = round(found[row["provider"]].loss, 5)
        if THEIRS in found:
            row["gradients_apart"] = _apart(found[row["provider"]].gradients, found[THEIRS].gradients)
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

    def gradients(self, ids: Tensor) -> Tensor:
        """Makes them, and returns the loss."""
        with torch.autocast(ids.device.type, torch.bfloat16):
            loss: Tensor = self.model(ids, labels=ids, use_cache=False).loss
        loss.backward()
        return loss.detach()


def _adapted(model: Any, experts: bool) -> Any:
    peft = baselines.require("peft")
    names = sorted({path.rpartition(".")[2] for path, _ in models.four_bit(model)})
    stacks = sorted({f"{path.rpartition('.')[2]}.{name}" for path in models.experts_of(model) for name in PROJECTIONS})
    if experts and not stacks:
        raise ValueError("the model has no experts in 4 bits to adapt: leave --experts out")
    model.requires_grad_(False)
    config = peft.LoraConfig(
        r=RANK, lora_alpha=RANK, target_modules=names, target_parameters=stacks if experts else None
    )
    adapted = peft.get_peft_model(model, config)
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


def _results(ab_run: ABRun, steps: Mapping[str, Step], ids: Tensor) -> dict[str, Found]:
    results: dict[str, Found] = {}
    for provider, step in steps.items():
        with ab_run.providers[provider]():
            loss = step.gradients(ids)
        gradients = [p.grad.flatten().cpu() for p in step.parameters if p.grad is not None]
        results[provider] = Found(loss.item(), torch.cat(gradients))
        step.optimizer.zero_grad(set_to_none=True)
    return results


def _agree(results: Mapping[str, Found], most_apart: float) -> None:
    """Raise ValueError unless all agree with bitsandbytes', once these are there. A record has no rows before."""
    if THEIRS not in results:
        return
    theirs = results[THEIRS]
    losses = {provider: abs(found.loss / theirs.loss - 1) for provider, found in results.items()}
    apart = {provider: _apart(found.gradients, theirs.gradients) for provider, found in results.items()}
    for what, errors, most in (("losses", losses, MOST_LOSS_APART), ("gradients", apart, most_apart)):
        if wrong := {provider: error for provider, error in errors.items() if not error <= most}:
            raise ValueError(f"{what} differ from bitsandbytes' by {wrong}, more than {most}: nothing is timed")


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


def _dense_wrappers(model: Any) -> list[Any]:
    """PEFT's wrappers of dense experts, those within others included."""
    wrappers = (module for module in model.modules() if peft_experts.is_wrapper(module))
    return [wrapper for wrapper in wrappers if is_experts(wrapper.get_base_layer())]


def _tell_orientation(model: Any) -> None:
    """PEFT noted how parameters lie when it wrapped the 4-bit experts, [E, N, K]; gpt-oss' dense ones are [E, K, N]."""
    for wrapper in _dense_wrappers(model):
        wrapper._did_swap_in_out_features = not wrapper.get_base_layer().is_transposed


@contextmanager
def _grouped_way(model: Any) -> Iterator[Any]:
    """Adapters of dense experts as halfbyte computes those of 4-bit ones."""
    wrappers = _dense_wrappers(model)
    for wrapper in wrappers:
        facts = facts_of(wrapper.get_base_layer())
        assert not isinstance(facts, str), facts
        wrapper.forward = MethodType(partial(_grouped_experts, facts), wrapper)
    try:
        yield model
    finally:
        for wrapper in wrappers:
            del wrapper.forward


def _grouped_experts(
    facts: Facts, wrapper: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    experts, dtype = wrapper.get_base_layer(), autocast_dtype(hidden_states) or hidden_states.dtype
    rows = peft_experts.Rows(top_k_index.reshape(-1), facts.count)

    def multiply(x: Tensor, name: str, rows: peft_experts.Rows) -> Tensor:
        stack, bias = experts._parameters[name], experts._parameters.get(name + BIAS)
        y = peft_experts.product(x, stack if facts.transposed else stack.transpose(1, 2), rows)
        return y if bias is None else y + bias.to(dtype)[rows.expert.clamp(max=facts.count - 1)]

    adapters = peft_experts.adapters_of(wrapper, facts.shapes, dtype)
    return peft_experts.adapted(hidden_states.to(dtype), top_k_weights, rows, facts.activation, multiply, adapters)


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
