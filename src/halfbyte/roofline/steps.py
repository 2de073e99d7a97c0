"""The steps whose kernels hardware counters look at, and the program that `ncu` runs for them.

One layer of a model tells what all of them do, and replaying a kernel for every counter takes long, so a named shape
gets one layer. The same steps are made twice: in the process that reports, with marks, to know which kernel is whose,
and in a child under `ncu`, where torch's profiler cannot run. A kernel of ours stands before each step in the child's
list.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch

from halfbyte.measure import models
from halfbyte.measure.ab_run import ABRun
from halfbyte.measure.decoder import Decoder
from halfbyte.roofline import run
from halfbyte.roofline.ceilings import triton_way

# Bytes of the copy that the roof is checked with, and how often a launch copies them: what is still in the cache when
# it ends is not counted, and should be little of the whole.
COPIED, COPIES = 2**30, 4


@dataclass(frozen=True)
class Plan:
    """model: as `models.load` takes it. providers, batches: every pair is a step. device: such as cuda:0."""

    model: str
    providers: tuple[str, ...]
    batches: tuple[int, ...]
    context: int
    device: str

    def to_text(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str) -> Plan:
        told = json.loads(text)
        return cls(**(told | {key: tuple(told[key]) for key in ("providers", "batches")}))


@dataclass(frozen=True)
class Step:
    provider: str
    batch: int
    model: Any
    decoder: Decoder
    work: run.Repeated


def steps(plan: Plan) -> Iterator[Step]:
    """Every step of the plan, in an order that both processes share."""
    device = torch.device(plan.device)
    torch.manual_seed(0)
    model = models.load(plan.model, device, torch.bfloat16, layers=1)
    ab_run = ABRun(model)
    for provider in run.PROVIDERS:
        if provider not in plan.providers:
            continue
        if provider == "bf16":
            models.make_dense(model, torch.bfloat16)
        for batch in plan.batches:
            with ab_run.providers[provider]() if provider in ab_run.providers else _as_it_is(model) as running:
                decoder = Decoder(running, batch, plan.context, "eager")
                work = run.work_step(decoder, prefill=False)
                work.reset()
                work.run()
                work.reset()
                yield Step(provider, batch, running, decoder, work)


@contextmanager
def _as_it_is(model: Any) -> Iterator[Any]:
    yield model


def main(text: str) -> None:
    """What runs under `ncu --profile-from-start off`: the copy, then every step behind a mark."""
    plan = Plan.from_text(text)
    device = torch.device(plan.device)
    torch.cuda.set_device(device)
    source = torch.ones(COPIED // 4, dtype=torch.int32, device=device)
    target = torch.empty_like(source)
    copy = triton_way("copy", source, target, COPIES)
    mark = triton_way("write", source[:4096], target[:4096])
    copy()
    mark()
    with _counted(device):
        copy()
    del source, target, copy
    for step in steps(plan):
        with _counted(device):
            mark()
            step.work.run()


@contextmanager
def _counted(device: torch.device) -> Iterator[None]:
    torch.cuda.synchronize(device)
    torch.cuda.profiler.start()
    try:
        yield
        torch.cuda.synchronize(device)
    finally:
        torch.cuda.profiler.stop()


if __name__ == "__main__":
    main(sys.argv[1])
