"""Which tiles the distance kernels take: a pure function of sizes and device, from measurements on an H200.

One query: a program sums `rows` candidates, `dims` of their elements side by side. Several: `queries` of them meet a
tile of candidates in tensor cores.
"""

from __future__ import annotations

from dataclasses import dataclass

from halfbyte.kernels.common.device import DeviceProperties

PRODUCTS = 80  # the first target whose tensor cores Triton knows
GROUP = 16  # candidates that share a bound, where several queries look for the nearest
EXAMINERS = 8  # programs of a multiprocessor that examine groups, about: 1024 on an H200


@dataclass(frozen=True)
class DirectPlan:
    """rows: candidates a program. dims: elements of each at a time."""

    rows: int
    dims: int
    warps: int


@dataclass(frozen=True)
class ProductsPlan:
    """rows: candidates a program. queries: that it meets. dims: elements at a time. stages: loads under way."""

    rows: int
    queries: int
    dims: int
    warps: int
    stages: int


def is_valid(plan: DirectPlan | ProductsPlan) -> bool:
    """True if the kernels compute the right thing under `plan`."""
    sides = [getattr(plan, name) for name in plan.__dataclass_fields__ if name != "stages"]
    powers = all(side > 0 and side & (side - 1) == 0 for side in sides)
    if isinstance(plan, DirectPlan):
        return powers and plan.rows * plan.dims <= 2**15
    return powers and plan.rows % GROUP == 0 and min(plan.queries, plan.dims) >= 16 and plan.stages >= 1


def direct(dims: int, itemsize: int) -> DirectPlan:
    """The plan for one query, or a few."""
    width = min(power_of_two(dims), 2048 // itemsize)
    return DirectPlan(4096 // itemsize // width if width >= 128 else 16, width, 4)


def products(queries: int, itemsize: int, properties: DeviceProperties) -> ProductsPlan:
    """The plan for several queries; itemsize: bytes of an element as tensor cores see it."""
    width = max(16, min(64, power_of_two(queries)))
    large = properties.shared_memory >= 160_000
    return ProductsPlan(
        128, width, 64 if large and itemsize == 2 else 16 if itemsize == 4 else 32, 4, 4 if large else 2
    )


def examiners(properties: DeviceProperties) -> int:
    """Programs that examine groups, of all queries together, about."""
    return max(64, EXAMINERS * properties.sms // 64 * 64)


def power_of_two(value: int) -> int:
    """The least that is not below."""
    return 1 << max(0, value - 1).bit_length()
