"""The product on Hopper's tensor cores: which variant of kernel.cu, and how weights share x."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import cache, lru_cache
from pathlib import Path

import torch

from halfbyte.kernels.common.cuda_types import TYPES
from halfbyte.kernels.common.device import DeviceProperties
from halfbyte.kernels.common.nvrtc import Constant, Variant, read_source
from halfbyte.kernels.linear import laid_out, side_by_side
from halfbyte.kernels.linear.codebook import unit_and_codebook
from halfbyte.kernels.linear.fusion import Fusion
from halfbyte.kernels.linear.kernel import FusedProduct, GroupProduct, MlpProduct, Product
from halfbyte.kernels.linear.laid_out import scale_loads, span_of, supports
from halfbyte.kernels.linear.problem import Addresses, Problem
from halfbyte.kernels.linear.sm90_streamk.plan import StreamKGroup, fused_plan, group_plan, streamk_plan
from halfbyte.kernels.linear.sm90_streamk.shape import StreamKPlan

NAME = "sm90_streamk"


def plan(m: int, problem: Problem, properties: DeviceProperties, batch_invariant: bool) -> StreamKPlan | None:
    """The plan for x [m, K], or None where this kernel does not support the problem."""
    return streamk_plan(m, problem, properties, batch_invariant) if supports(problem) else None


def plan_group(m: int, group: Sequence[Problem], properties: DeviceProperties) -> StreamKGroup | None:
    """The plans for x [m, K] and several weights, or None where x is not laid out in one way for all."""
    return group_plan(m, group, properties) if len(group) > 1 and all(map(supports, group)) else None


def plan_fused(m: int, group: Sequence[Problem], fusion: Fusion, properties: DeviceProperties) -> StreamKGroup | None:
    """The plans for x [m, K], one weight or two, and what their launches do besides; None where they cannot."""
    return fused_plan(m, group, fusion, properties) if all(map(supports, group)) else None


def group_variant(group: Sequence[Problem], plan: StreamKGroup, properties: DeviceProperties) -> Variant | None:
    """That of one launch for all; that of the last, where it combines with what others have left; else each takes what
    it takes alone."""
    if plan.is_one_launch:
        return variant(side_by_side.in_common(group), plan.plans[0], properties, len(group))
    last = plan.plans[-1]
    return variant(group[-1], last, properties) if last.activation or last.residual or last.norm else None


def codebook(problem: Problem) -> tuple[float, bytes]:
    return unit_and_codebook(problem.format, problem.dtype)


def bind(device: torch.device, m: int, problem: Problem, weight: Addresses, plan: StreamKPlan) -> Product:
    """The product with a weight on the current device, of as many rows as there are tiles of x for m."""
    return laid_out.bind(sys.modules[__name__], device, m, problem, weight, plan)


def bind_group(
    device: torch.device, m: int, group: Sequence[Problem], weights: Sequence[Addresses], plan: StreamKGroup
) -> GroupProduct:
    """The products with several weights on the current device, of as many rows as there are tiles of x for m."""
    return side_by_side.bind_group(sys.modules[__name__], device, m, group, weights, plan)


def bind_fused(
    device: torch.device,
    m: int,
    group: Sequence[Problem],
    weights: Sequence[Addresses],
    fusion: Fusion,
    plan: StreamKGroup,
) -> FusedProduct:
    """The product with a weight or a gated pair, and what is fused, of as many rows as there are tiles of x for m."""
    kernel = sys.modules[__name__]
    if plan.is_one_launch:
        return side_by_side.bind_fused(kernel, device, m, group, weights, fusion, plan)
    return laid_out.bind_fused(kernel, device, m, group, weights, fusion, plan.plans)


def bind_mlp(
    device: torch.device,
    m: int,
    group: Sequence[Problem],
    weights: Sequence[Addresses],
    fusion: Fusion,
    plan: StreamKGroup,
    down: StreamKPlan,
    after: Fusion,
) -> MlpProduct:
    """The products with gate and up, and with down, on the current device, of as many rows as there are tiles of x for
    m. group, weights: of all three. plan: of `handed_over`."""
    kernel = sys.modules[__name__]
    first = side_by_side.bind_fused(kernel, device, m, group[:2], weights[:2], fusion, plan)
    second = laid_out.prepare(kernel, device, m, group[2], weights[2], down, after)

    def multiply(stream: int, x: int, norm: int, residual: int, m: int, biases: Sequence[int], out: int) -> None:
        between = torch.empty(second.laid_out, dtype=torch.uint8, device=device)
        first(stream, x, norm, 0, m, (biases[0], between.data_ptr(), biases[1], 0))
        second(stream, 0, biases[2], out, between.data_ptr(), m, is_laid_out=True, other=residual)

    return multiply


@lru_cache(1 << 12)  # asked for by each weight
def variant(problem: Problem, plan: StreamKPlan, properties: DeviceProperties, parts: int = 1) -> Variant:
    """What is compiled. parts: weights that one launch multiplies with."""
    return Variant.of(source(), "90a", constants(problem, plan) | {"parts": parts})


def constants(problem: Problem, plan: StreamKPlan) -> dict[str, Constant]:
    """kernel.cu's Config."""
    registers, producer, consumer = plan.registers
    return {
        "x": TYPES[problem.dtype], "low_first": problem.low_first,
        "scale": "Type::e8m0" if problem.has_exponents else TYPES[problem.scale],
        "log_block": problem.block_size.bit_length() - 1, "span": span_of(problem),
        "loads": f"Loads::{scale_loads(problem)}", "tile_m": plan.tile_m, "warpgroups": plan.warpgroups,
        "stages": plan.stages, "resident": plan.resident, "cluster": plan.cluster, "twins": 1, "mates": 1,
        "shares": plan.shares, "direct": plan.direct, "paired": plan.paired, "norm": plan.norm,
        "registers": registers, "producer_registers": producer, "consumer_registers": consumer,
        "shared_bytes": plan.shared_bytes(span_of(problem)), "residual": plan.residual, "back": False,
        "scales_in_table": plan.scales_in_table, "copies_x": False,
        "activation": f"Activation::{plan.activation or 'none'}",
        "next_tile_m": plan.next_tile_m, "next_span": plan.next_span or 64,
        "grouped": False, "wide": False, "scatters": False, "orders": False, "parts": 1,
    }  # fmt: skip


@cache
def source() -> str:
    path = Path(__file__).with_name("kernel.cu")
    return read_source(path, root=path.parents[1])
