"""Which shape of kernel.cu is for a product: its constants, what it needs, and the planner that picks among them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from halfbyte.kernels.common.device import DeviceFacts
from halfbyte.kernels.linear.tune import h200

DTYPES = (torch.float16, torch.bfloat16)
TABLE_BYTES = 256 * 32 * 4 + 1024  # of shared memory: byte to weights, and the code of nested scales
RESERVED_BYTES = 1024  # of shared memory, which the system takes from each CTA


@dataclass(frozen=True)
class TensorPlan:
    """The constants of kernel.cu, and `splits`. columns: groups of eight rows of x. row_warps, k_warps: how a CTA's
    warps share a tile. splits: CTAs that share K. resident: CTAs a SM. span: weights of a row at a time. step: the
    MMA's k."""

    columns: int
    row_warps: int
    k_warps: int
    splits: int
    resident: int
    span: int
    step: int = 16

    @property
    def rows(self) -> int:
        """Rows of W in a tile."""
        return 16 * self.row_warps

    def tiles(self, m: int) -> int:
        """Tiles of x [m, K]."""
        return -(-m // (8 * self.columns))

    @property
    def warps(self) -> int:
        return self.row_warps * self.k_warps

    @property
    def sum_bytes(self) -> int:
        """Dynamic shared memory, where the warps' sums meet: for each column 16 rows, padded to 20 floats."""
        return self.warps * 8 * self.columns * 80

    @property
    def shared_bytes(self) -> int:
        return TABLE_BYTES + self.sum_bytes


def is_valid(plan: TensorPlan, n: int, k: int, block_size: int, dtype: torch.dtype, facts: DeviceFacts) -> bool:
    """True if kernel.cu computes the right thing under `plan`, and fits: planner, tuner and tests go by this."""
    return (
        facts.ptx >= 75
        and dtype in DTYPES
        # sm_75 has no bf16 and only half of the step
        and (facts.ptx >= 80 or (plan.step == 8 and dtype == torch.float16))
        and plan.step in (8, 16)
        and plan.span in (32, 64)
        and k % plan.span == 0
        and block_size % plan.span == 0
        and 0 < n < 1 << 31
        and 0 < k < 1 << 26  # a tile of x is indexed with 32 bits
        and n * (k // plan.span) < 1 << 32  # and so are W's spans
        and plan.columns in h200.SM80_WARPS
        and min(plan.row_warps, plan.k_warps, plan.resident) >= 1
        and plan.warps * plan.resident <= h200.SM80_WARPS[plan.columns]
        and 1 <= plan.splits <= h200.SM80_SPLITS
        and plan.splits * plan.k_warps <= k // plan.span  # nobody without work
        and plan.resident * (plan.shared_bytes + RESERVED_BYTES) <= facts.shared_memory + RESERVED_BYTES
    )


def tensor_plan(m: int, n: int, k: int, block_size: int, dtype: torch.dtype, facts: DeviceFacts) -> TensorPlan | None:
    """The plan for x [m, k] of `dtype` and W [n, k], or None where this kernel is not for them.

    As few tiles of x as there can be, as many warps on a SM as fit, and splits only where there are fewer tiles of 16
    rows than SMs. Then the least time of the busiest SM, which is reckoned in cycles and was not measured: of a warp's
    span, what its loads take of the L1 pipe and what x takes of the L2's bandwidth, but never less than a lone warp
    needs; of a turn, what filling the pipeline and adding up take; of a second launch, that.
    """
    if m < 1:
        return None
    span = 64 if k % 64 == 0 and block_size % 64 == 0 else 32
    step = 8 if facts.ptx == 75 else 16

    def cost(plan: TensorPlan) -> float:
        ctas = -(-n // plan.rows) * -(-m // (8 * plan.columns)) * plan.splits
        tiles = -(-ctas // facts.sms)
        turns = -(-tiles // plan.resident)
        spans = -(-(k // plan.span) // (plan.k_warps * plan.splits))
        x = h200.SM80_SPAN_X * min(m, 8 * plan.columns) / plan.row_warps
        busy = tiles * plan.warps * (h200.SM80_SPAN + h200.SM80_SPAN_COLUMNS * plan.columns + x)
        launch = h200.SM80_LAUNCH if plan.splits > 1 else 0
        return spans * max(busy, h200.SM80_LONE_SPAN * turns) + h200.SM80_TURN * turns + launch

    enough = next((columns for columns in h200.SM80_WARPS if 8 * columns >= m), max(h200.SM80_WARPS))
    for columns in sorted((columns for columns in h200.SM80_WARPS if columns <= enough), reverse=True):
        most_splits = h200.SM80_SPLITS if -(-n // 16) * -(-m // (8 * columns)) < facts.sms else 1
        most = h200.SM80_WARPS[columns]
        for warps, resident in ((most // 2, 2), (most, 1)):
            plans = (
                TensorPlan(columns, warps // k_warps, k_warps, splits, resident, span, step)
                for k_warps in range(1, warps + 1)
                if warps % k_warps == 0
                for splits in range(1, most_splits + 1)
            )
            valid = (plan for plan in plans if is_valid(plan, n, k, block_size, dtype, facts))
            if (best := min(valid, key=cost, default=None)) is not None:
                return best
    return None
