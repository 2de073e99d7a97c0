"""Several products with the same x in one launch: how CTAs are dealt out to weights, and how that is launched."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch

from halfbyte.kernels.common import workspace
from halfbyte.kernels.common.device import properties_of
from halfbyte.kernels.linear import laid_out
from halfbyte.kernels.linear.fusion import ALONE, Fusion
from halfbyte.kernels.linear.kernel import FusedProduct, GroupProduct
from halfbyte.kernels.linear.laid_out import GroupPlan, LaidOutKernel, Told, WithPlan, scale_loads
from halfbyte.kernels.linear.problem import Addresses, Problem

MOST = 4  # weights of a launch: each has up to 512 bytes of its arguments


def are_alike(group: Sequence[Problem]) -> bool:
    """True if the weights differ in their rows alone, so that one kernel is for all."""
    return 1 < len(group) <= MOST and len({replace(o, n=0, bias=False) for o in group}) == 1


def are_a_pair(group: Sequence[Problem]) -> bool:
    """True if one launch may have gate and up in its tiles."""
    return len(group) == 2 and are_alike(group) and group[0].n == group[1].n


def in_common(group: Sequence[Problem]) -> Problem:
    """The weight whose kernel is for all that are alike: scales may always come one by one, but across multiples of 16
    bytes only where the last of them ends at one."""
    return next((o for o in group if scale_loads(o) == "one"), group[0])


def merged(group: Sequence[Problem]) -> Problem:
    """All rows as those of one weight."""
    return replace(group[0], n=sum(o.n for o in group))


def deal(units: Sequence[int], ctas: int) -> tuple[int, ...]:
    """How many of so many CTAs, at least one for each, take each weight's units of work, so that the busiest has as
    little as can be. None is without a unit."""
    if len(units) == 1:  # as the rest would find, a hundred times slower
        return (min(ctas, units[0]),)
    dealt = [1] * len(units)
    for _ in range(min(ctas, sum(units)) - len(units)):
        dealt[max(range(len(units)), key=lambda i: units[i] / dealt[i])] += 1
    return tuple(map(min, units, dealt))


def bind_group(
    kernel: LaidOutKernel,
    device: torch.device,
    m: int,
    group: Sequence[Problem],
    weights: Sequence[Addresses],
    plan: GroupPlan[Any],
) -> GroupProduct:
    """The products with several weights on the current device, of as many rows as there are tiles of x for m: in one
    launch, or in launches that follow each other, as planned."""
    bind: Callable[..., GroupProduct] = _bind_one_launch if plan.is_one_launch else laid_out.bind_group
    return bind(kernel, device, m, list(zip(group, weights, plan.plans, strict=True)))


def bind_fused(
    kernel: LaidOutKernel,
    device: torch.device,
    m: int,
    group: Sequence[Problem],
    weights: Sequence[Addresses],
    fusion: Fusion,
    plan: GroupPlan[Any],
) -> FusedProduct:
    """The products in one launch on the current device, of x that is normed, or of gate and up, of which one result is
    left."""
    multiply = _bind_one_launch(kernel, device, m, list(zip(group, weights, plan.plans, strict=True)), fusion)
    return lambda stream, x, norm, residual, m, results: multiply(stream, x, m, results, norm)


def _bind_one_launch(
    kernel: LaidOutKernel, device: torch.device, m: int, each: Sequence[WithPlan], fusion: Fusion = ALONE
) -> Callable[..., None]:
    """Called as a GroupProduct is, and with the norm's weights."""
    group, _, plans = zip(*each, strict=True)
    parts, properties = len(group), properties_of(device.index)
    compiled = kernel.variant(in_common(group), plans[0], properties, parts)
    prepared = [laid_out.fixed_arguments(kernel, m, *one, fusion) for one in each]
    plan = plans[0]
    first_ctas = (0, 0, plan.ctas) if plan.paired else (0, *accumulate(plan.ctas for plan in plans))
    ctas = first_ctas[-1]
    key = device.index, prepared[0].x_units, (plan, ctas), compiled
    lay_out, multiply = laid_out.launches.get(
        key, lambda: laid_out.make_launches(device.index, prepared[0].x_units, plan, compiled, ctas)
    )
    size = prepared[0].bytes
    memory = ctypes.create_string_buffer(parts * size)
    told = [
        Told(part, first, memory, place * size)
        for place, (part, first) in enumerate(zip(prepared, first_ctas, strict=False))
    ]
    partial = ctas * plan.sums if any(part.fixes_up for part in prepared) else 0
    room, x_bytes = [first * plan.sums * 4 for first in first_ctas], prepared[0].laid_out
    parameters = told[0].arguments.parameters

    def run(stream: int, x: int, m: int, results: Iterable[int], norm: int = 0) -> None:
        place = torch.empty(x_bytes, dtype=torch.uint8, device=device) if x_bytes else None
        at = 0 if place is None else place.data_ptr()
        sums_at, left, fours = workspace.take(device, stream, partial)
        addresses = iter(results)
        for part, before in zip(told, room, strict=False):
            bias, out = next(addresses), next(addresses)
            part.set(x, bias, out, at, sums_at + before if partial else 0, left, norm, fours, m)
        if place is not None:
            lay_out(stream, parameters)
        multiply(stream, parameters)

    return run
