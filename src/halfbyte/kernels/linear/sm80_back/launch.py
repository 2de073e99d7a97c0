"""The product of a gradient with W itself on tensor cores from sm_80 on: how a shape of kernel.cu is launched."""

from __future__ import annotations

from collections.abc import Hashable
from functools import cache
from pathlib import Path
from typing import Any

import torch

from halfbyte.formats.spec import FORMATS
from halfbyte.kernels.common import workspace
from halfbyte.kernels.common.cuda_types import TYPES
from halfbyte.kernels.common.device import DeviceProperties, properties_of
from halfbyte.kernels.common.driver import Arguments, Launch
from halfbyte.kernels.common.nvrtc import Constant, Variant, read_source
from halfbyte.kernels.common.thread_cache import ThreadCache
from halfbyte.kernels.linear.aligned import make_launches, pitch_of
from halfbyte.kernels.linear.codebook import exact_codebook
from halfbyte.kernels.linear.kernel import Product
from halfbyte.kernels.linear.problem import Addresses, Problem
from halfbyte.kernels.linear.sm80_back.plan import DTYPES, BackPlan, back_plan

NAME = "sm80_back"
# Arguments in kernel.cu: dy, the same with aligned rows, dx, workspace, stale, their count and m change.
LAYOUT = ("5Q", "5QII", "8I64s")
launches: ThreadCache[Hashable, tuple[Launch, Launch]] = ThreadCache()


def plan(m: int, problem: Problem, properties: DeviceProperties, batch_invariant: bool) -> BackPlan | None:
    """None: this kernel is for the way back alone."""
    return None


def plan_back(m: int, problem: Problem, properties: DeviceProperties) -> BackPlan | None:
    """The plan for the product of dy [m, N] with W itself, or None where this kernel does not support the problem.

    It supports every format, dy of 16 bits, K % 32 == 0, any N and any rows of dy.
    """
    o = problem
    if o.dtype not in DTYPES or not o.has_decodable_scales or o.align_packed < 16:
        return None
    return back_plan(m, o, properties)


def bind(device: torch.device, m: int, problem: Problem, weight: Addresses, plan: BackPlan) -> Product:
    """The product with a weight on the current device, of as many rows as there are tiles of dy for m."""
    index = device.index
    compiled = variant(problem, plan, properties_of(index))
    multiplies, aligns = launches.get((index, plan, compiled), lambda: make_launches(index, plan, compiled))
    told, partial = Arguments(LAYOUT, *arguments(m, problem, weight, plan)), plan.partial_sums(m, problem)
    pitch = pitch_of(problem.n)

    def multiply(stream: int, dy: int, bias: int, dx: int, m: int) -> None:
        sums, stale, fours = workspace.take(device, stream, partial)
        copy = None
        if pitch != problem.n:
            copy = torch.empty(m * pitch, dtype=problem.dtype, device=device)
        told.set(dy, dy if copy is None else copy.data_ptr(), dx, sums, stale, fours, m)
        if copy is not None:
            aligns(stream, told.parameters)
        multiplies(stream, told.parameters)
        del copy  # the launches are in the stream

    return multiply


def arguments(m: int, problem: Problem, weight: Addresses, plan: BackPlan) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """What kernel.cu's Arguments hold before what changes, and after it."""
    o = problem
    shift = (o.block_size // 32).bit_length() - 1
    return weight, (o.n, o.k, pitch_of(o.n), shift, *plan.sizes(m, o), plan.ctas, exact_codebook(o.format))


def variant(problem: Problem, plan: BackPlan, properties: DeviceProperties) -> Variant:
    """What is compiled."""
    return Variant.of(source(), properties.capability, constants(problem, plan))


def constants(problem: Problem, plan: BackPlan) -> dict[str, Constant]:
    """kernel.cu's Config."""
    return {
        "x": TYPES[problem.dtype], "scale": "Type::e8m0" if problem.has_exponents else TYPES[problem.scale],
        "low_first": problem.low_first, "flushes": FORMATS[problem.format].flushes, "mma_k": 16,
        "columns": plan.columns, "stages": plan.stages, "resident_ctas": plan.resident_ctas, "direct": plan.direct,
        "shared_bytes": plan.shared_bytes(problem), "cluster": 1, "twins": 1, "mates": 1, "grouped": False,
        "activation": "Activation::none",
    }  # fmt: skip


@cache
def source() -> str:
    path = Path(__file__).with_name("kernel.cu")
    return read_source(path, root=path.parents[1])
