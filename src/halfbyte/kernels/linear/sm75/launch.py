"""The CUDA product for tensor cores from sm_75 on: how a shape of kernel.cu is launched."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from functools import cache
from pathlib import Path

import torch

from halfbyte.kernels.common.cuda_types import TYPES
from halfbyte.kernels.common.device import DeviceProperties, properties_of
from halfbyte.kernels.common.driver import Arguments, Launch, kernels
from halfbyte.kernels.common.nvrtc import Constant, Variant, read_source
from halfbyte.kernels.common.thread_cache import ThreadCache
from halfbyte.kernels.linear.codebook import unit_and_codebook
from halfbyte.kernels.linear.kernel import Product
from halfbyte.kernels.linear.problem import Addresses, Problem
from halfbyte.kernels.linear.sm75.plan import DTYPES, Sm75Plan, sm75_plan

NAME = "sm75"
PREFETCH = 4  # spans of W on their way to a warp
# Rows of x that a plan is for where the sums of a row must not depend on how many there are.
INVARIANT_ROWS = 16
LAYOUT = ("5Q", "4QI", "4If64s")  # Arguments in kernel.cu: x, bias, out, partial and m change
launches: ThreadCache[Hashable, tuple[Launch, Launch]] = ThreadCache()


def plan(m: int, problem: Problem, properties: DeviceProperties, batch_invariant: bool) -> Sm75Plan | None:
    """The plan for x [m, K], or None where this kernel does not support the problem.

    It supports every format, x of 16 bits (on sm_75 fp16), K % 32 == 0, any N and any rows of x. With batch_invariant
    the plan is the same for all of them: a row's sums are then always made in the same order.
    """
    o = problem
    if o.dtype not in DTYPES or not (o.has_known_scales and o.has_usual_nesting) or o.align_packed < 8:
        return None
    if not batch_invariant or m == 0:
        return sm75_plan(m, o.n, o.k, o.block_size, o.dtype, properties)
    found = sm75_plan(INVARIANT_ROWS, o.n, o.k, o.block_size, o.dtype, properties)
    return None if found is None else replace(found, microseconds=-(-m // INVARIANT_ROWS) * found.microseconds)


def bind(device: torch.device, m: int, problem: Problem, weight: Addresses, plan: Sm75Plan) -> Product:
    """The product with a weight on the current device, of as many rows as there are tiles of x for m."""
    o, index = problem, device.index
    x_tiles = plan.x_tiles(m)
    compiled = variant(o, plan, properties_of(index))
    key = index, x_tiles, o.n, plan, compiled
    launch, combine = launches.get(key, lambda: _launches(index, x_tiles, o.n, plan, compiled))
    shift = (o.block_size // plan.span).bit_length() - 1
    arguments = Arguments(LAYOUT, weight, (o.n, o.k, plan.splits, shift, *unit_and_codebook(o.format, o.dtype)))

    def multiply(stream: int, x: int, bias: int, out: int, m: int) -> None:
        if plan.splits == 1:
            arguments.set(x, bias, out, 0, m)
            launch(stream, arguments.parameters)
            return
        partial = torch.empty(plan.splits * m * o.n, dtype=torch.float32, device=device)
        arguments.set(x, bias, out, partial.data_ptr(), m)
        launch(stream, arguments.parameters)
        combine(stream, arguments.parameters)

    return multiply


def _launches(index: int, x_tiles: int, n: int, plan: Sm75Plan, compiled: Variant) -> tuple[Launch, Launch]:
    """The product, and what adds up its partial sums, of as many rows as the tiles of x may hold."""
    product, combine = kernels(index, compiled, (("product", plan.sum_bytes), ("combine", 0)))
    sums = -(-x_tiles * 8 * plan.m_tiles * n // 256)
    return (
        Launch(product, plan.grid(n, x_tiles, properties_of(index).sms), 32 * plan.warps, plan.sum_bytes),
        Launch(combine, (sums, 1), 256),
    )


def variant(problem: Problem, plan: Sm75Plan, properties: DeviceProperties) -> Variant:
    """What is compiled."""
    return Variant.of(source(), properties.capability, constants(problem, plan))


def constants(problem: Problem, plan: Sm75Plan) -> dict[str, Constant]:
    """kernel.cu's Config."""
    return {
        "x": TYPES[problem.dtype], "scale": TYPES[problem.scale], "low_first": problem.low_first, "span": plan.span,
        "mma_k": plan.mma_k, "m_tiles": plan.m_tiles, "n_warps": plan.n_warps, "k_warps": plan.k_warps,
        "prefetch": PREFETCH, "resident_ctas": plan.resident_ctas,
    }  # fmt: skip


@cache
def source() -> str:
    path = Path(__file__).with_name("kernel.cu")
    return read_source(path, root=path.parents[1])
