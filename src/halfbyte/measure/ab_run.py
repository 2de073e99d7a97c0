"""What the benches of whole models share: one model run by several providers, wall clocks, and peaks of memory."""

from __future__ import annotations

import copy
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import ceil
from typing import Any

import torch
from torch import Tensor

from halfbyte.kernels.common.switched import no_collection
from halfbyte.measure.models import experts_of, four_bit, make_experts_dense
from halfbyte.measure.report import BASELINE, DENSE, OURS
from halfbyte.measure.timing import summarize
from halfbyte.models.accelerate import accelerate, restore


class ABRun:
    """A model and the ways to run it, by provider: each gives a context within which its model computes.

    only: one of the providers, where a model cannot be as both have it.
    """

    def __init__(self, model: Any, only: str | None = None) -> None:
        # On some CPUs bitsandbytes repacks the weights that it runs, with rounded scales, and there `accelerate` leaves
        # layers to it. So each has its own copy, and the model stays as it is.
        on_gpu = model.device.type == "cuda"
        self.ours, self.theirs = (model, model) if on_gpu else (copy.deepcopy(model), copy.deepcopy(model))
        ways: dict[str, Callable[[], Any]] = {BASELINE: self._plain, OURS: self._accelerated}
        self.providers = {provider: way for provider, way in ways.items() if only in (None, provider)}

    @contextmanager
    def _plain(self) -> Iterator[Any]:
        yield self.theirs

    @contextmanager
    def _accelerated(self) -> Iterator[Any]:
        accelerate(self.ours)
        try:
            yield self.ours
        finally:
            restore(self.ours)


def ab_runs(model: Any, dtype: torch.dtype, say: Callable[[str], None]) -> Iterator[ABRun]:
    """One run with both providers; or one after the other, where the model has experts.

    halfbyte has those in 4 bits. bitsandbytes leaves experts dense, so for its turn they are dequantized where they
    are, if there is memory for that. Each run has to be over, and its providers' graphs gone, before the next begins.
    """
    experts = experts_of(model)
    if not experts:
        yield ABRun(model)
        return
    yield ABRun(model, OURS)
    need = sum(
        dtype.itemsize * q.numel - q.nbytes for module in experts.values() for q in (module.gate_up, module.down)
    )
    del experts
    if not _fits(need, model.device):
        say(f"without {BASELINE} and dense weights: there is no memory for {need / 1e9:.0f} GB of dense experts")
        return
    make_experts_dense(model, dtype)
    empty_cache(model.device)
    yield ABRun(model, BASELINE)


def dense_fits(model: Any, dtype: torch.dtype, say: Callable[[str], None]) -> bool:
    """Whether there is memory for all 4-bit weights dequantized, one after the other, where they are. Says so if not.

    Where `ab_runs` has left 4-bit experts, there was none for them, and it has said that.
    """
    if experts_of(model):
        return False
    need = sum(dtype.itemsize * module.in_features * module.out_features for _, module in four_bit(model))
    if not _fits(need, model.device):
        say(f"without {DENSE}: there is no memory for {need / 1e9:.0f} GB of dense weights")
        return False
    return True


def _fits(need: int, device: torch.device) -> bool:
    """Whether a GPU has memory for so many bytes, with a tenth of what is free to spare. A CPU always has."""
    empty_cache(device)
    return device.type != "cuda" or need <= 0.9 * torch.cuda.mem_get_info(device)[0]


def random_ids(model: Any, texts: int, tokens: int, seed: int) -> Tensor:
    """Tokens [texts, tokens] on the model's device, the same on every device."""
    generator = torch.Generator().manual_seed(seed)
    vocabulary = model.config.get_text_config().vocab_size
    ids = torch.randint(3, vocabulary, (texts, tokens), generator=generator, dtype=torch.int64, device="cpu")
    return ids.to(model.device)


def written(model: Any, ids: Tensor, tokens: int, **options: Any) -> Tensor:
    """The prompts [texts, tokens], none of them padded, and so many tokens behind each, as a user has them written."""
    mask = torch.ones_like(ids)
    found: Tensor = model.generate(ids, attention_mask=mask, max_new_tokens=tokens, do_sample=False, **options)
    return found


def clock(run: Callable[[], Any], device: torch.device) -> float:
    """Milliseconds by the wall clock, from an idle device to an idle device. Python collects no garbage meanwhile: a
    whole model's takes long, and what came before would decide when it does."""
    with no_collection:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        result = run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        elapsed = time.perf_counter() - start
    del result
    return 1e3 * elapsed


def enough(ms: float, long: float, least: int, most: int) -> int:
    """How many steps of so many milliseconds make a sample of at least `long`, within these bounds."""
    return min(most, max(least, ceil(long / ms)))


def times(samples: Sequence[float]) -> dict[str, Any]:
    """What a row says of samples in milliseconds."""
    found = summarize(list(samples), "wall")
    return {
        "median_ms": round(found.median, 3), "p20_ms": round(found.p20, 3), "p80_ms": round(found.p80, 3),
        "samples": found.samples,
    }  # fmt: skip


def empty_cache(device: torch.device) -> None:
    """Begin to measure a peak of memory anew."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def peak_gb(device: torch.device) -> float | None:
    """The most memory in use since then, in GB, where torch counts it."""
    return round(torch.cuda.max_memory_allocated(device) / 1e9, 3) if device.type == "cuda" else None
