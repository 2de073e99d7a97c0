"""The product on Hopper's tensor cores: how a shape of kernel.cu is launched."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch

from halfbyte.kernels.common.device import DeviceProperties, properties_of
from halfbyte.kernels.common.driver import Arguments, Launch, kernels
from halfbyte.kernels.common.nvrtc import Constant, Variant, read_source
from halfbyte.kernels.common.tensor_map import tensor_map
from halfbyte.kernels.common.thread_cache import ThreadCache
from halfbyte.kernels.linear import workspace
from halfbyte.kernels.linear.codebook import unit_and_codebook
from halfbyte.kernels.linear.constants import TYPES
from halfbyte.kernels.linear.kernel import GroupProduct, Product
from halfbyte.kernels.linear.problem import Addresses, Problem
from halfbyte.kernels.linear.sm90_streamk.plan import (
    DEPTH,
    REGISTERS,
    GroupPlan,
    StreamKPlan,
    group_plan,
    loads_scales_at_once,
    span_of,
    streamk_plan,
    supports,
)

NAME = "sm90_streamk"
# Arguments in kernel.cu, aligned to 64 bytes: x, bias, out, x laid out, partial, left, its length and m change.
LAYOUT = ("128s4Q", "6Q2I", "6If64s12x")
launches: ThreadCache[Hashable, tuple[Launch, Launch]] = ThreadCache()


def plan(m: int, problem: Problem, properties: DeviceProperties, batch_invariant: bool) -> StreamKPlan | None:
    """The plan for x [m, K], or None where this kernel does not support the problem."""
    return streamk_plan(m, problem, properties, batch_invariant) if supports(problem) else None


def plan_group(m: int, group: Sequence[Problem], properties: DeviceProperties) -> GroupPlan | None:
    """The plans for x [m, K] and several weights, or None where x is not laid out in one way for all."""
    return group_plan(m, group, properties) if len(group) > 1 and all(map(supports, group)) else None


def group_variant(group: Sequence[Problem], plan: GroupPlan, properties: DeviceProperties) -> None:
    """Each takes what it takes alone."""


def bind(device: torch.device, m: int, problem: Problem, weight: Addresses, plan: StreamKPlan) -> Product:
    """The product with a weight on the current device, of as many rows as there are tiles of x for m."""
    part = _prepare(device, m, problem, weight, plan)

    def multiply(stream: int, x: int, bias: int, out: int, m: int) -> None:
        laid_out = torch.empty(part.laid_out, dtype=torch.uint8, device=device) if part.laid_out else None
        part(stream, x, bias, out, 0 if laid_out is None else laid_out.data_ptr(), m)

    return multiply


def bind_group(
    device: torch.device, m: int, group: Sequence[Problem], weights: Sequence[Addresses], plan: GroupPlan
) -> GroupProduct:
    """The products of m rows of x with several weights, one after the other; x is laid out once."""
    parts = [_prepare(device, m, *each) for each in zip(group, weights, plan.plans, strict=True)]
    first = parts[0]

    def multiply(stream: int, x: int, results: Iterable[int]) -> None:
        laid_out = torch.empty(first.laid_out, dtype=torch.uint8, device=device)
        addresses = iter(results)
        for part in parts:
            bias, out = next(addresses), next(addresses)
            part(stream, x, bias, out, laid_out.data_ptr(), m, is_laid_out=part is not first)

    return multiply


class _Part(NamedTuple):
    """The launches of a product and their arguments. laid_out: bytes of x laid out, or 0 where CTAs keep x. partial:
    sums that CTAs leave for others."""

    device: torch.device
    lay_out: Launch
    multiply: Launch
    arguments: Arguments
    laid_out: int
    partial: int

    def __call__(
        self, stream: int, x: int, bias: int, out: int, laid_out: int, m: int, is_laid_out: bool = False
    ) -> None:
        (partial, left, count), held = (0, 0, 0), None
        if self.partial:
            (partial, left, count), held = workspace.take(self.device, stream, self.partial)
        self.arguments.set(x, bias, out, laid_out, partial, left, count // 4, m)
        if self.laid_out and not is_laid_out:
            self.lay_out(stream, self.arguments.parameters)
        self.multiply(stream, self.arguments.parameters)
        del held  # the launch is in the stream


def _prepare(device: torch.device, m: int, problem: Problem, weight: Addresses, plan: StreamKPlan) -> _Part:
    o, index = problem, device.index
    row_tiles, x_tiles, units = -(-o.n // plan.rows), plan.x_tiles(m), -(-o.k // DEPTH)
    compiled = variant(o, plan, properties_of(index))
    key = index, x_tiles * units, plan, compiled
    both = launches.get(key, lambda: _launches(index, x_tiles * units, plan, compiled))
    fixes_up = plan.cluster == 1 and plan.ctas != row_tiles * x_tiles
    partial = plan.ctas * plan.rows * plan.tile_m if fixes_up else 0
    packed, *scales = weight
    sizes = (o.n, o.k, row_tiles, x_tiles, units, plan.ctas)
    weights = tensor_map(packed, (o.k // 2, o.n), (o.k // 2,), (DEPTH // 2, plan.rows))
    arguments = Arguments(LAYOUT, (weights, *scales), (*sizes, *unit_and_codebook(o.format, o.dtype)))
    laid_out = 0 if plan.resident else x_tiles * units * plan.tile_m * DEPTH * 2
    return _Part(device, *both, arguments, laid_out, partial)


def _launches(index: int, x_units: int, plan: StreamKPlan, compiled: Variant) -> tuple[Launch, Launch]:
    """What lays x out, and the product."""
    shared = int(dict(compiled.constants)["shared_bytes"])
    lay_out, multiply = kernels(index, compiled, (("lay_out", 0), ("multiply", shared)), carveout=100)
    pieces = x_units * plan.tile_m * DEPTH // 8
    return (
        Launch(lay_out, (plan.ctas + -(-pieces // 128), 1), 128, overlaps=True),
        Launch(
            multiply,
            (plan.ctas // plan.cluster, plan.cluster),
            plan.threads,
            shared,
            cluster=plan.cluster if plan.cluster > 1 else 0,
            overlaps=True,
        ),
    )


def variant(problem: Problem, plan: StreamKPlan, properties: DeviceProperties) -> Variant:
    """What is compiled."""
    return Variant.of(source(), "90a", constants(problem, plan))


def constants(problem: Problem, plan: StreamKPlan) -> dict[str, Constant]:
    """kernel.cu's Config."""
    producer, consumer = REGISTERS[plan.warpgroups]
    return {
        "x": TYPES[problem.dtype], "scale": TYPES[problem.scale], "low_first": problem.low_first,
        "log_block": problem.block_size.bit_length() - 1, "span": span_of(problem),
        "vector": loads_scales_at_once(problem), "tile_m": plan.tile_m, "warpgroups": plan.warpgroups,
        "stages": plan.stages, "resident": plan.resident, "cluster": plan.cluster, "direct": plan.direct,
        "producer_registers": producer, "consumer_registers": consumer,
        "shared_bytes": plan.shared_bytes(span_of(problem)),
    }  # fmt: skip


@cache
def source() -> str:
    path = Path(__file__).with_name("kernel.cu")
    return read_source(path, root=path.parents[1])
