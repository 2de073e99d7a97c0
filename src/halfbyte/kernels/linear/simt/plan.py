"""Which shape of kernel.cu is for a product: its constants, what it needs, and the planner that picks it."""

from __future__ import annotations

from dataclasses import dataclass

from halfbyte.kernels.common.device import DeviceFacts
from halfbyte.kernels.linear.tune import h200

WARPS = 4  # a CTA
PIECE = 16  # weights a lane takes at a time


@dataclass(frozen=True)
class ExactPlan:
    """The constants of kernel.cu. rows: of x that a warp multiplies at once. columns: of y, which are rows of W,
    a warp. whole: lanes load 16 weights and 8 numbers of x at once, which asks for alignment; else one by one."""

    rows: int
    columns: int
    whole: bool

    def tiles(self, m: int) -> int:
        """Tiles of x [m, K] that launches are made for: they are the same for any m."""
        return 0


def is_valid(plan: ExactPlan, k: int, aligned: bool) -> bool:
    """True if kernel.cu computes the right thing under `plan`: planner, tuner and tests go by this."""
    return plan.rows in (1, 2, 4, 8) and plan.columns in (1, 2, 4) and (not plan.whole or (aligned and k % PIECE == 0))


def exact_plan(m: int, n: int, k: int, aligned: bool, facts: DeviceFacts) -> ExactPlan:
    """The plan for x [m, k] and W [n, k]. aligned: W's bytes begin at a multiple of 8, and x at one of 16.

    A warp takes as many rows of W as leave every multiprocessor enough warps: each saves loads of x.
    """
    whole = aligned and k % PIECE == 0
    rows = 1 << min(max(m - 1, 0).bit_length(), 3)
    tiles = max(1, -(-m // rows))
    columns = 4 if whole else 2  # loads one by one take registers of their own
    while columns > 1 and -(-n // columns) * tiles < facts.sms * h200.SIMT_WARPS_WANTED:
        columns //= 2
    return ExactPlan(rows, columns, whole)
