"""The planner of experts: which shape of kernel.cu is for a few pairs of a token and an expert."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from halfbyte.kernels.common.device import DeviceProperties
from halfbyte.kernels.linear.problem import Problem
from halfbyte.kernels.linear.sm90_decode.plan import (
    BLOCK,
    NARROW_CHUNK,
    ROWS,
    SWIGLU_OAI,
    DecodePlan,
    Scales,
    is_valid,
    weight_chunk,
)
from halfbyte.kernels.linear.spread import usual_tiles
from halfbyte.kernels.linear.tune import h200

PAIRS = (32, 128, 512)  # of a token and an expert, that there is room for
MOST_EXPERTS = 1024


def room_for(pairs: int) -> int:
    """The pairs that there is room for where so many are wanted, or 0."""
    return next((room for room in PAIRS if pairs <= room), 0)


class Kind(NamedTuple):
    """Of a product with a stack. activation: of interleaved rows, or of gate rows that come before the up rows of an
    expert. wide: results are fp32. early: ids are there when the kernel begins, if not x, so that all stages of W are
    asked for before x is there. combines: experts of a token, where the launch adds up what they give."""

    activation: str = ""
    wide: bool = False
    early: bool = False
    combines: int = 0


def routed_plan(
    pairs: int, experts: int, n: int, k: int, scales: Scales, kind: Kind, properties: DeviceProperties
) -> DecodePlan | None:
    """The plan for so many pairs of a token and one of the experts [n, k], or None where this kernel is not for them.

    As many CTAs share a multiprocessor as fit with enough stages: one that changes its x waits for it. A warp holds x
    of two units, or, where K is long enough, of twice as many blocks of one unit.
    """
    room = room_for(pairs)
    halves = 2 if kind.activation not in ("", SWIGLU_OAI) else 1
    if not (0 < pairs <= room and 0 < experts <= MOST_EXPERTS) or n % (ROWS * halves):
        return None
    is_long = k // BLOCK > h200.ROUTED_LONG and weight_chunk(k) > NARROW_CHUNK
    slices = (h200.ROUTED_LONG_SLICE, h200.ROUTED_SLICE) if is_long else (h200.ROUTED_SLICE,)
    has_few = n // (ROWS * halves) <= h200.ROUTED_FEW_TILES
    neighbours = h200.ROUTED_FEW_NEIGHBOURS if has_few else h200.ROUTED_NEIGHBOURS
    found = DecodePlan(
        1, warps=0, slice=0, stages=2, cluster=1, activation=kind.activation,
        experts=-(-experts // 32) * 32, pairs=room, wide=kind.wide, neighbours=neighbours,
    )  # fmt: skip
    plans = (plan for width in slices for plan in _routed_shapes(found, width, k, scales))
    plan = next((plan for plan in plans if is_valid(plan, experts * n, k, scales, properties)), None)
    if plan is None:
        return None
    plan = replace(plan, combines=kind.combines)
    return replace(plan, static_weights=True, first_stages=plan.stages) if kind.early and h200.ROUTED_EARLY else plan


def combined(tokens: int, top_k: int) -> int:
    """The experts of a token whose results are added up in the launch that makes them, or 0: with more tokens, those of
    one are made too far apart, and a launch of its own takes less time."""
    return top_k if tokens <= top_k <= h200.ROUTED_COMBINES else 0


def _routed_shapes(plan: DecodePlan, width: int, k: int, scales: Scales) -> Iterator[DecodePlan]:
    """The plan with so many blocks of K a warp, the best first."""
    blocks = k // BLOCK
    cluster = -(-blocks // (width * h200.ROUTED_WARPS))
    warps = -(-blocks // (width * cluster))
    unaligned = scales.bytes_of(blocks) % 16 != 0 or (cluster > 1 and scales.bytes_of(warps * width) % 16 != 0)
    plan = replace(
        plan, warps=warps, slice=width, steps=width // 4, cluster=cluster, bulk_scales=unaligned and cluster == 1,
        window_scales=unaligned and cluster > 1,
        bulk_weights=cluster == 1 and weight_chunk(k) == NARROW_CHUNK,
    )  # fmt: skip
    most = max(1, min(h200.ROUTED_RESIDENT, h200.ROUTED_SM_WARPS // (warps + 2)))
    for fewest, last in ((h200.ROUTED_FEWEST_STAGES, h200.ROUTED_STAGES), (2, h200.ROUTED_FEWEST_STAGES - 1)):
        for resident in range(most, 0, -1):
            for number in range(last, fewest - 1, -1):
                yield replace(plan, resident_ctas=resident, stages=number)


def routed_microseconds(pairs: int, experts: int, problem: Problem) -> float:
    """The estimated time of so many pairs with a stack: each expert is read for every eight of its pairs. The rows of
    the problem are those of all experts."""
    reading = (
        usual_tiles(pairs, experts, 8)
        * problem.megabytes
        / experts
        / h200.ROUTED_BANDWIDTH[64 if problem.block_size >= 64 else 32]
    )
    return h200.ROUTED_START + reading
