"""Which shape of kernel.cu is for a product: its constants, what it needs, and the planner that picks it."""

from __future__ import annotations

from dataclasses import dataclass, field

from halfbyte.kernels.common.device import DeviceProperties
from halfbyte.kernels.linear.tune import h200

WARPS = 4  # a CTA
PIECE = 16  # weights a lane takes at a time


@dataclass(frozen=True)
class SimtPlan:
    """The constants of kernel.cu, by the names of its Config, and the estimate."""

    tile_m: int  # rows of x that a warp multiplies at once
    tile_n: int  # of y, which are rows of W, a warp
    aligned: bool  # lanes load 16 weights and 8 numbers of x at once; else one by one
    microseconds: float = field(default=0.0, compare=False)

    def x_tiles(self, m: int) -> int:
        """Tiles of x [m, K] that launches are made for: they are the same for any m."""
        return 0


def is_valid(plan: SimtPlan, k: int, aligned: bool) -> bool:
    """True if kernel.cu computes the right thing under `plan`: planner, tuner and tests go by this."""
    loads = not plan.aligned or (aligned and k % PIECE == 0)
    return plan.tile_m in (1, 2, 4, 8) and plan.tile_n in (1, 2, 4) and loads


def simt_plan(m: int, n: int, k: int, aligned: bool, properties: DeviceProperties) -> SimtPlan:
    """The plan for x [m, k] and W [n, k]. aligned: W's bytes begin at a multiple of 8.

    A warp takes as many rows of W as leave every multiprocessor enough warps: each saves loads of x. The time is what
    all multiprocessors take together, or what reading W takes where they would be faster than memory.
    """
    aligned = aligned and k % PIECE == 0
    tile_m = 1 << min(max(m - 1, 0).bit_length(), 3)
    tiles = max(1, -(-m // tile_m))
    tile_n = 4 if aligned else 2  # loads one by one take registers of their own
    while tile_n > 1 and -(-n // tile_n) * tiles < properties.sms * h200.SIMT_WARPS_WANTED:
        tile_n //= 2
    rates, millions = properties.rates, n * k / 1e6
    busy = millions * (h200.SIMT_DECODE * tiles + h200.SIMT_MULTIPLY * m) / rates.cores
    reading = millions / 2 / (h200.MOST_BANDWIDTH * rates.bandwidth)
    return SimtPlan(tile_m, tile_n, aligned, h200.SIMT_START + max(busy, reading))
