"""Many rows of x on tensor cores from sm_80 on, forward and back: how a shape of kernel.cu is launched."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, Protocol

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
from halfbyte.kernels.linear.kernel import GroupedProduct, Product
from halfbyte.kernels.linear.problem import Addresses, Problem
from halfbyte.kernels.linear.sm80_gemm.plan import DTYPES, ManyPlan, is_arithmetic, many_plan

NAME = "sm80_gemm"
# Arguments in work.cuh: x, the same with aligned rows, bias, y, routes, workspace, stale, their count and m change.
LAYOUT = ("5Q", "7QII", "8I64s")
launches: ThreadCache[Hashable, tuple[Launch, Launch]] = ThreadCache()


class OfExperts(Protocol):
    """What this kernel knows of the Grouping that linear/grouped.py binds a product with a stack by."""

    @property
    def experts(self) -> int: ...
    @property
    def activation(self) -> str: ...
    @property
    def wide(self) -> bool: ...
    @property
    def scatters(self) -> bool: ...


def plan(m: int, problem: Problem, properties: DeviceProperties, batch_invariant: bool) -> ManyPlan | None:
    """The plan for x [m, K], or None where this kernel does not support the problem.

    It supports every format, x of 16 bits, K % 32 == 0, any N and any rows of x.
    """
    return None if batch_invariant or not supports(problem) else many_plan(m, problem, properties, back=False)


def plan_back(m: int, problem: Problem, properties: DeviceProperties) -> ManyPlan | None:
    """The plan for the product of dy [m, N] with W itself, or None where this kernel does not support the problem."""
    return many_plan(m, problem, properties, back=True) if supports(problem) else None


def supports(problem: Problem) -> bool:
    """True for weights, and stacks, of formats and dtypes that the kernel knows."""
    return problem.dtype in DTYPES and problem.has_decodable_scales and problem.align_packed >= 16


def bind(device: torch.device, m: int, problem: Problem, weight: Addresses, plan: ManyPlan) -> Product:
    """The product with a weight on the current device, of as many rows as there are tiles of x for m."""
    index = device.index
    compiled = variant(problem, plan, properties_of(index))
    multiplies, aligns = launches.get((index, plan, compiled), lambda: make_launches(index, plan, compiled))
    told, partial = Arguments(LAYOUT, *arguments(m, problem, weight, plan)), plan.partial_sums(m, problem)
    length, pitch = row_and_pitch(problem, plan)

    def multiply(stream: int, x: int, bias: int, out: int, m: int) -> None:
        sums, stale, fours = workspace.take(device, stream, partial)
        copy = None
        if pitch != length:
            copy = torch.empty(m * pitch, dtype=problem.dtype, device=device)
        told.set(x, x if copy is None else copy.data_ptr(), bias, out, 0, sums, stale, fours, m)
        if copy is not None:
            aligns(stream, told.parameters)
        multiplies(stream, told.parameters)
        del copy  # the launches are in the stream

    return multiply


def bind_grouped(
    device: torch.device, problem: Problem, weight: Addresses, grouping: OfExperts, plan: ManyPlan
) -> GroupedProduct:
    """The products of sorted pairs with the experts of a stack on the current device, or with their transposes. The
    rows of the problem are those of all experts."""
    o, index, side = problem, device.index, problem.n // grouping.experts
    compiled = grouped_variant(o, grouping, plan, properties_of(index))
    multiplies, aligns = launches.get((index, plan, compiled), lambda: make_launches(index, plan, compiled))
    told = Arguments(LAYOUT, *grouped_arguments(o, weight, side, plan))
    length, pitch = row_and_pitch(replace(o, n=side), plan)

    def multiply(stream: int, x: int, routes: int, bias: int, out: int, rows: int, per_row: int) -> None:
        copy = None if pitch == length else torch.empty(rows * pitch, dtype=o.dtype, device=device)
        if copy is not None:
            told.set(x, copy.data_ptr(), 0, 0, 0, 0, 0, 0, rows)
            aligns(stream, told.parameters)
        told.set(x, x if copy is None else copy.data_ptr(), bias, out, routes, 0, 0, 0, per_row)
        multiplies(stream, told.parameters)
        del copy  # the launches are in the stream

    return multiply


def row_and_pitch(problem: Problem, plan: ManyPlan) -> tuple[int, int]:
    """Numbers in a row of x, and from one row to the next where rows are aligned."""
    length = problem.n if plan.back else problem.k
    return length, pitch_of(length)


def arguments(m: int, problem: Problem, weight: Addresses, plan: ManyPlan) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """What work.cuh's Arguments hold before what changes, and after it."""
    o = problem
    shift = (o.block_size // 32).bit_length() - 1
    return weight, (o.n, o.k, row_and_pitch(o, plan)[1], shift, *plan.sizes(m, o), plan.ctas, exact_codebook(o.format))


def grouped_arguments(
    problem: Problem, weight: Addresses, side: int, plan: ManyPlan
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """The same for a stack whose experts have `side` rows each, under a plan for so many tiles of pairs."""
    one = replace(problem, n=side)
    row_tiles, _, depth = plan.sizes(1, one)
    weight, (n, k, pitch, shift, *_, codebook) = arguments(1, one, weight, plan)
    return weight, (n, k, pitch, shift, row_tiles, plan.grouped_tiles, depth, plan.ctas, codebook)


def variant(problem: Problem, plan: ManyPlan, properties: DeviceProperties) -> Variant:
    """What is compiled."""
    return Variant.of(source(), properties.capability, constants(problem, plan))


def grouped_variant(problem: Problem, grouping: OfExperts, plan: ManyPlan, properties: DeviceProperties) -> Variant:
    """What is compiled for a stack."""
    return Variant.of(source(), properties.capability, grouped_constants(problem, grouping, plan))


def constants(problem: Problem, plan: ManyPlan) -> dict[str, Constant]:
    """kernel.cu's Config."""
    return {
        "x": TYPES[problem.dtype], "scale": "Type::e8m0" if problem.has_exponents else TYPES[problem.scale],
        "low_first": problem.low_first, "flushes": FORMATS[problem.format].flushes, "mma_k": 16,
        "arithmetic": is_arithmetic(problem), "back": plan.back, "w_warps": plan.w_warps, "m_warps": plan.m_warps,
        "columns": plan.columns, "stages": plan.stages, "resident_ctas": plan.resident_ctas, "direct": plan.direct,
        "shared_bytes": plan.shared_bytes(problem), "cluster": 1, "twins": 1, "mates": 1,
        "grouped": plan.grouped_tiles > 0, "activation": "Activation::none", "wide": False, "scatters": False,
    }  # fmt: skip


def grouped_constants(problem: Problem, grouping: OfExperts, plan: ManyPlan) -> dict[str, Constant]:
    """The same for a stack."""
    return constants(problem, plan) | {
        "activation": f"Activation::{grouping.activation or 'none'}", "wide": grouping.wide,
        "scatters": grouping.scatters,
    }  # fmt: skip


@cache
def source() -> str:
    path = Path(__file__).with_name("kernel.cu")
    return read_source(path, root=path.parents[1])
