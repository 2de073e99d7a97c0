"""The product of many rows of x on Hopper's tensor cores: which variant of kernel.cu."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from functools import cache, lru_cache
from itertools import chain
from pathlib import Path

import torch

from halfbyte.formats.spec import FORMATS
from halfbyte.kernels.common.cuda_types import TYPES
from halfbyte.kernels.common.device import DeviceProperties
from halfbyte.kernels.common.nvrtc import Constant, Variant, read_source
from halfbyte.kernels.linear import laid_out, side_by_side
from halfbyte.kernels.linear.codebook import exact_codebook
from halfbyte.kernels.linear.fusion import Fusion
from halfbyte.kernels.linear.kernel import FusedProduct, GroupProduct, Product
from halfbyte.kernels.linear.laid_out import copies_x, scale_loads, span_of, supports
from halfbyte.kernels.linear.problem import Addresses, Problem
from halfbyte.kernels.linear.sm90_gemm.plan import GemmGroup, gemm_plan, group_plan, paired_plan
from halfbyte.kernels.linear.sm90_gemm.shape import (
    DECODING_REGISTERS,
    DIRECT,
    REGISTERS,
    SCATTERED_REGISTERS,
    USUAL_TILES_M,
    WIDE_REGISTERS,
    WIDE_TILES_M,
    GemmPlan,
    loads_words,
    quarters,
)

NAME = "sm90_gemm"


def plan(m: int, problem: Problem, properties: DeviceProperties, batch_invariant: bool) -> GemmPlan | None:
    """The plan for x [m, K], or None where this kernel does not support the problem."""
    return gemm_plan(m, problem, properties) if supports(problem) and not batch_invariant else None


def plan_back(m: int, problem: Problem, properties: DeviceProperties) -> GemmPlan | None:
    """The plan for the product of dy [m, N] with W itself, or None where this kernel does not support the problem."""
    return gemm_plan(m, problem, properties, back=True) if supports(problem) else None


def codebook(problem: Problem) -> tuple[float, bytes]:
    """The codebook that a GPU dequantizes with."""
    return 1.0, exact_codebook(problem.format)


def bind(device: torch.device, m: int, problem: Problem, weight: Addresses, plan: GemmPlan) -> Product:
    """The product with a weight on the current device, of as many rows as there are tiles of x for m; or, under a plan
    for the way back, the product of such rows with the weight transposed."""
    kernel, chunk = sys.modules[__name__], plan.chunk
    of_chunk = laid_out.bind(kernel, device, min(m, chunk), problem, weight, plan)
    if m <= chunk:
        return of_chunk
    of_rest = laid_out.bind(kernel, device, (m - 1) % chunk + 1, problem, weight, plan)
    row, out_row = (side * problem.dtype.itemsize for side in plan.sides(problem))

    def multiply(stream: int, x: int, bias: int, out: int, m: int) -> None:
        for first in range(0, m, chunk):
            rows = min(chunk, m - first)
            product = of_chunk if rows == chunk else of_rest
            product(stream, x + first * row, bias, out + first * out_row, rows)

    return multiply


def plan_group(m: int, group: Sequence[Problem], properties: DeviceProperties) -> GemmGroup | None:
    """The plans for x [m, K] and several weights, or None where x is not laid out in one way for all."""
    return group_plan(m, group, properties) if len(group) > 1 and all(map(supports, group)) else None


def plan_fused(m: int, group: Sequence[Problem], fusion: Fusion, properties: DeviceProperties) -> GemmGroup | None:
    """The plan for gate and up in one launch; None for all else that may be fused."""
    others = fusion.norm is not None or fusion.residual is not None
    if not fusion.activation or others or not all(map(supports, group)):
        return None
    return paired_plan(m, group, fusion.activation, properties)


def group_variant(group: Sequence[Problem], plan: GemmGroup, properties: DeviceProperties) -> Variant | None:
    """None where launches follow each other: each takes what it takes alone."""
    return variant(side_by_side.in_common(group), plan.plans[0], properties, len(group)) if plan.is_one_launch else None


def bind_group(
    device: torch.device, m: int, group: Sequence[Problem], weights: Sequence[Addresses], plan: GemmGroup
) -> GroupProduct:
    """The products with several weights on the current device, of as many rows as there are tiles of x for m; each
    chunk of x is laid out once."""
    kernel, chunk = sys.modules[__name__], plan.plans[0].chunk
    of_chunk = side_by_side.bind_group(kernel, device, min(m, chunk), group, weights, plan)
    if m <= chunk:
        return of_chunk
    of_rest = side_by_side.bind_group(kernel, device, (m - 1) % chunk + 1, group, weights, plan)
    row, out_rows = group[0].k * group[0].dtype.itemsize, [o.n * o.dtype.itemsize for o in group]

    def multiply(stream: int, x: int, m: int, results: Iterable[int]) -> None:
        addresses = list(results)
        for first in range(0, m, chunk):
            rows = min(chunk, m - first)
            outs = (out + first * side for out, side in zip(addresses[1::2], out_rows, strict=True))
            product = of_chunk if rows == chunk else of_rest
            product(stream, x + first * row, rows, chain.from_iterable(zip(addresses[::2], outs, strict=True)))

    return multiply


def bind_fused(
    device: torch.device,
    m: int,
    group: Sequence[Problem],
    weights: Sequence[Addresses],
    fusion: Fusion,
    plan: GemmGroup,
) -> FusedProduct:
    """The products with gate and up, of which one result is left, of as many rows as there are tiles of x for m."""
    multiply = bind_group(device, m, group, weights, plan)
    return lambda stream, x, norm, residual, m, results: multiply(stream, x, m, results)


@lru_cache(1 << 12)  # asked for by each weight
def variant(problem: Problem, plan: GemmPlan, properties: DeviceProperties, parts: int = 1) -> Variant:
    """What is compiled. parts: weights that one launch multiplies with."""
    return Variant.of(source(), "90a", constants(problem, plan) | {"parts": parts})


def constants(problem: Problem, plan: GemmPlan) -> dict[str, Constant]:
    """kernel.cu's Config."""
    loads = "one" if plan.back else scale_loads(problem)
    # A producer of a cluster knows which part is its own, for which only the widest tiles leave no room.
    alone = plan.cluster == 1 or (plan.tile_m == USUAL_TILES_M[-1] and not plan.back)
    usual = not plan.back and loads_words(problem) and alone
    registers = WIDE_REGISTERS if plan.tile_m in WIDE_TILES_M else REGISTERS[plan.warpgroups]
    producer, consumer = registers if usual else SCATTERED_REGISTERS
    if plan.decoders:
        producer, consumer = DECODING_REGISTERS[plan.decoders]
    quarter, half, three_quarters = quarters(plan.tile_m)
    return {
        "x": TYPES[problem.dtype], "low_first": problem.low_first,
        "scale": "Type::e8m0" if problem.has_exponents else TYPES[problem.scale],
        "flushes": FORMATS[problem.format].flushes, "log_block": problem.block_size.bit_length() - 1,
        "span": span_of(problem), "loads": f"Loads::{loads}", "tile_m": plan.tile_m, "warpgroups": plan.warpgroups,
        "w_stages": plan.w_stages, "x_stages": plan.x_stages, "direct": DIRECT, "numbers": f"Numbers::{plan.numbers}",
        "permutes": plan.permutes, "lane_spans": plan.lane_spans, "in_order": plan.in_order,
        "turn_k": plan.turn_k, "cluster": plan.cluster, "shares": plan.shares, "twins": plan.twins,
        "mates": plan.mates, "decoders": plan.decoders,
        "producer_registers": producer, "consumer_registers": consumer,
        "shared_bytes": plan.shared_bytes(span_of(problem)), "back": plan.back,
        "copies_x": copies_x(problem, plan),
        "activation": f"Activation::{plan.activation or 'none'}", "residual": False, "paired": plan.paired,
        "norm": False,
        "next_tile_m": 0, "next_span": 64,
        "grouped": False, "wide": False, "scatters": False, "orders": False, "parts": 1,
        "quarter": quarter, "half": half, "three_quarters": three_quarters,
    }  # fmt: skip


@cache
def source() -> str:
    path = Path(__file__).with_name("kernel.cu")
    return read_source(path, root=path.parents[1])
