"""Which shape of kernel.cu is for a product: its constants, what it needs, and the planner that picks among them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch

from halfbyte.kernels.common.device import DeviceProperties
from halfbyte.kernels.linear.tune import h200

DTYPES = (torch.float16, torch.bfloat16)
TABLE_BYTES = 256 * 32 * 4 + 1024  # of shared memory: byte to weights, and the code of nested scales
RESERVED_BYTES = 1024  # of shared memory, which the system takes from each CTA


@dataclass(frozen=True)
class Sm75Plan:
    """The constants of kernel.cu, by the names of its Config, `splits`, and the estimate."""

    m_tiles: int  # groups of eight rows of x
    n_warps: int  # warps side by side along W's rows
    k_warps: int  # warps that share K
    splits: int  # CTAs that share K
    resident_ctas: int  # that share a multiprocessor
    span: int  # weights of a row at a time
    mma_k: int = 16
    microseconds: float = field(default=0.0, compare=False)

    @property
    def rows(self) -> int:
        """Rows of W in a tile."""
        return 16 * self.n_warps

    def x_tiles(self, m: int) -> int:
        """Tiles of x [m, K]."""
        return -(-m // (8 * self.m_tiles))

    @property
    def warps(self) -> int:
        return self.n_warps * self.k_warps

    @property
    def sum_bytes(self) -> int:
        """Dynamic shared memory, where the warps' sums meet: for each column 16 rows, padded to 20 floats."""
        return self.warps * 8 * self.m_tiles * 80

    @property
    def shared_bytes(self) -> int:
        return TABLE_BYTES + self.sum_bytes


def is_valid(plan: Sm75Plan, n: int, k: int, block_size: int, dtype: torch.dtype, properties: DeviceProperties) -> bool:
    """True if kernel.cu computes the right thing under `plan`, and fits: planner, tuner and tests go by this."""
    return (
        properties.ptx >= 75
        and dtype in DTYPES
        # sm_75 has no bf16 and only half of the step
        and (properties.ptx >= 80 or (plan.mma_k == 8 and dtype == torch.float16))
        and plan.mma_k in (8, 16)
        and plan.span in (32, 64)
        and k % plan.span == 0
        and block_size % plan.span == 0
        and 0 < n < 1 << 31
        and 0 < k < 1 << 26  # a tile of x is indexed with 32 bits
        and n * (k // plan.span) < 1 << 32  # and so are W's spans
        and plan.m_tiles in h200.SM75_WARPS
        and min(plan.n_warps, plan.k_warps, plan.resident_ctas) >= 1
        and plan.warps * plan.resident_ctas <= h200.SM75_WARPS[plan.m_tiles]
        and 1 <= plan.splits <= h200.SM75_SPLITS
        and plan.splits * plan.k_warps <= k // plan.span  # nobody without work
        and plan.resident_ctas * (plan.shared_bytes + RESERVED_BYTES) <= properties.shared_memory + RESERVED_BYTES
    )


def sm75_plan(
    m: int, n: int, k: int, block_size: int, dtype: torch.dtype, properties: DeviceProperties
) -> Sm75Plan | None:
    """The plan for x [m, k] of `dtype` and W [n, k], or None where this kernel is not for them.

    As few tiles of x as there can be, as many warps on a SM as fit, and splits only where there are fewer tiles of 16
    rows than SMs. Then the least time of the busiest SM, which is reckoned in cycles and was not measured: of a warp's
    span, what its loads take of the L1 pipe and what x takes of the L2's bandwidth, but never less than a lone warp
    needs; of a turn, what filling the pipeline and adding up take; of a second launch, that. No plan is faster than the
    bytes of W come from memory.
    """
    if m < 1:
        return None
    span = 64 if k % 64 == 0 and block_size % 64 == 0 else 32
    step = 8 if properties.ptx == 75 else 16

    def cost(plan: Sm75Plan) -> float:
        ctas = -(-n // plan.rows) * -(-m // (8 * plan.m_tiles)) * plan.splits
        tiles = -(-ctas // properties.sms)
        turns = -(-tiles // plan.resident_ctas)
        spans = -(-(k // plan.span) // (plan.k_warps * plan.splits))
        x = h200.SM75_SPAN_X * min(m, 8 * plan.m_tiles) / plan.n_warps
        busy = tiles * plan.warps * (h200.SM75_SPAN + h200.SM75_SPAN_M_TILE * plan.m_tiles + x)
        launch = h200.SM75_LAUNCH if plan.splits > 1 else 0
        return spans * max(busy, h200.SM75_LONE_SPAN * turns) + h200.SM75_TURN * turns + launch

    cycle = h200.SM75_CYCLE / properties.rates.clock
    reading = n * k / 2 / 1e6 / (h200.MOST_BANDWIDTH * properties.rates.bandwidth)
    enough = next((columns for columns in h200.SM75_WARPS if 8 * columns >= m), max(h200.SM75_WARPS))
    for columns in sorted((columns for columns in h200.SM75_WARPS if columns <= enough), reverse=True):
        most_splits = h200.SM75_SPLITS if -(-n // 16) * -(-m // (8 * columns)) < properties.sms else 1
        most = h200.SM75_WARPS[columns]
        for warps, resident in ((most // 2, 2), (most, 1)):
            plans = (
                Sm75Plan(columns, warps // k_warps, k_warps, splits, resident, span, step)
                for k_warps in range(1, warps + 1)
                if warps % k_warps == 0
                for splits in range(1, most_splits + 1)
            )
            valid = (plan for plan in plans if is_valid(plan, n, k, block_size, dtype, properties))
            if (best := min(valid, key=cost, default=None)) is not None:
                return replace(best, microseconds=h200.SM75_START + max(cycle * cost(best), reading))
    return None
