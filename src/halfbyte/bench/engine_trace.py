"""The kernels of a few steps of an engine: which ones run, how long, and with what gaps between them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

TOKENS_A_STEP = 8192  # of prompts, that an engine is told to compute at most
STEPS = 4  # that are recorded
SETTLED = 8  # steps from the last prompt to the first that is recorded, and from the last one to the first answer's end


def first_step(requests: int, prompt_tokens: int) -> int:
    """The first one, counted from 1, that surely computes no prompt."""
    return -(-requests * prompt_tokens // TOKENS_A_STEP) + SETTLED


def tokens_of(requests: int, prompt_tokens: int) -> int:
    """New tokens of each request while steps are recorded."""
    return first_step(requests, prompt_tokens) + STEPS + SETTLED


def trace(llm: Any, path: str, first: int, ask: Callable[[], object]) -> None:
    """Write [[name, start µs, µs], ...] to `path`, in order, from the first kernel's start on: of STEPS steps of what
    `ask` has the engine compute, from step `first` on. On a CPU they are torch's operators. The engine has to be in
    this process."""
    on_gpu = torch.cuda.is_available()
    profiler = profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU])
    step, number = llm.llm_engine.step, 0

    def counted() -> Any:
        nonlocal number
        number += 1
        if number == first:
            profiler.start()
        found = step()
        if number == first + STEPS - 1:
            if on_gpu:
                torch.cuda.synchronize()
            profiler.stop()
        return found

    llm.llm_engine.step = counted
    try:
        ask()
    finally:
        llm.llm_engine.step = step
    Path(path).write_text(json.dumps(kernels(profiler)), encoding="utf-8")


def kernels(profiler: Any) -> list[tuple[str, float, float]]:
    events = profiler.profiler.kineto_results.events()
    on_gpu = torch.cuda.is_available()
    spans = sorted(
        (event.start_ns(), event.duration_ns(), event.name())
        for event in events
        if ("CUDA" in str(event.device_type())) == on_gpu
    )
    begun = spans[0][0] if spans else 0
    return [(name, (start - begun) / 1e3, taken / 1e3) for start, taken, name in spans]
