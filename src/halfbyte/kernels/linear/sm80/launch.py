"""The CUDA product for tensor cores from sm_80 on: how a shape of kernel.cu is launched."""

from __future__ import annotations

from collections.abc import Hashable
from functools import cache
from pathlib import Path
from typing import Any

import torch

from halfbyte.kernels.common import workspace
from halfbyte.kernels.common.cuda_types import TYPES
from halfbyte.kernels.common.device import DeviceProperties, properties_of
from halfbyte.kernels.common.driver import Arguments, Launch, kernels
from halfbyte.kernels.common.nvrtc import Constant, Variant, read_source
from halfbyte.kernels.common.thread_cache import ThreadCache
from halfbyte.kernels.linear.codebook import unit_and_codebook
from halfbyte.kernels.linear.kernel import Product
from halfbyte.kernels.linear.problem import Addresses, Problem
from halfbyte.kernels.linear.sm80.invariant import invariant_plan
from halfbyte.kernels.linear.sm80.plan import DTYPES, Sm80Plan, folds, has_integers, is_crossed, sm80_plan

NAME = "sm80"
LAYOUT = ("5Q", "5QII", "7If64s")  # Arguments in work.cuh: x, bias, y, workspace, stale, their count and m change
launches: ThreadCache[Hashable, tuple[Launch]] = ThreadCache()


def plan(m: int, problem: Problem, properties: DeviceProperties, batch_invariant: bool) -> Sm80Plan | None:
    """The plan for x [m, K], or None where this kernel does not support the problem.

    It supports every format, x of 16 bits, K % 32 == 0, any N and any rows of x.
    """
    o = problem
    if o.dtype not in DTYPES or not o.has_decodable_scales or o.align_packed < 16:
        return None
    return (invariant_plan if batch_invariant else sm80_plan)(m, o, properties)


def bind(device: torch.device, m: int, problem: Problem, weight: Addresses, plan: Sm80Plan) -> Product:
    """The product with a weight on the current device, of as many rows as there are tiles of x for m."""
    index = device.index
    compiled = variant(problem, plan, properties_of(index))
    (launch,) = launches.get((index, plan, compiled), lambda: (_launch(index, plan, compiled),))
    told, partial = Arguments(LAYOUT, *arguments(m, problem, weight, plan)), plan.partial_sums(m, problem)

    def multiply(stream: int, x: int, bias: int, out: int, m: int) -> None:
        sums, stale, fours = workspace.take(device, stream, partial)
        told.set(x, bias, out, sums, stale, fours, m)
        launch(stream, told.parameters)

    return multiply


def arguments(m: int, problem: Problem, weight: Addresses, plan: Sm80Plan) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """What work.cuh's Arguments hold before what changes, and after it."""
    o = problem
    shift = (o.block_size // plan.span).bit_length() - 1
    sizes = (o.n, o.k, shift, *plan.sizes(m, o.n, o.k), plan.ctas)
    return weight, (*sizes, *unit_and_codebook(o.format, o.dtype))


def _launch(index: int, plan: Sm80Plan, compiled: Variant) -> Launch:
    shared = int(dict(compiled.constants)["shared_bytes"])
    (multiply,) = kernels(index, compiled, (("multiply", shared),), carveout=100)
    return Launch(multiply, (plan.ctas, 1), 32 * plan.warps, shared)


def variant(problem: Problem, plan: Sm80Plan, properties: DeviceProperties) -> Variant:
    """What is compiled."""
    return Variant.of(source(), properties.capability, constants(problem, plan))


def constants(problem: Problem, plan: Sm80Plan) -> dict[str, Constant]:
    """kernel.cu's Config."""
    return {
        "x": TYPES[problem.dtype], "scale": "Type::e8m0" if problem.has_exponents else TYPES[problem.scale],
        "low_first": problem.low_first, "arithmetic": has_integers(problem),
        "folds": folds(problem, plan.decoding_columns), "crossed": is_crossed(problem, plan.decoding_columns),
        "mma_k": 16, "row_groups": plan.row_groups, "columns": plan.columns, "n_warps": plan.n_warps,
        "k_warps": plan.k_warps,
        "tile_k": plan.tile_k, "span": plan.span, "stages": plan.stages, "resident_ctas": plan.resident_ctas,
        "direct": plan.direct, "shared_bytes": plan.shared_bytes(problem), "cluster": 1, "twins": 1, "mates": 1,
        "grouped": False, "activation": "Activation::none",
    }  # fmt: skip


@cache
def source() -> str:
    path = Path(__file__).with_name("kernel.cu")
    return read_source(path, root=path.parents[1])
