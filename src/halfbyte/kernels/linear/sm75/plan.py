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

    def grid(self, n: int, x_tiles: int, sms: int) -> tuple[int, int]:
        """CTAs for `x_tiles` tiles of x: along x these times the splits, along y those that stride over the tiles of W,
        as many as the SMs hold at once."""
        across, tiles = x_tiles * self.splits, -(-n // self.rows)
        return across, min(tiles, max(1, sms * self.resident_ctas // across))

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
    rows than SMs. Of these the plan that asks least of the busiest SM's L1 pipe. By the estimate others are faster, but
    nobody has measured them: the times that it was fitted to are those of the plans that are chosen so.
    """
    if m < 1:
        return None
    span = 64 if k % 64 == 0 and block_size % 64 == 0 else 32
    step = 8 if properties.ptx == 75 else 16
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
            best = min(valid, key=lambda plan: _cycles(plan, m, n, k, properties.sms, 0), default=None)
            if best is not None:
                return replace(best, microseconds=_microseconds(best, m, n, k, properties))
    return None


def _microseconds(plan: Sm75Plan, m: int, n: int, k: int, properties: DeviceProperties) -> float:
    """The estimated time: of the busiest SM, or of reading W's nibbles where that takes longer, as with `simt`.

    A warp takes a span step by step, each of which waits for the one before: for x, and for one MMA after the other.
    So it is as slow by itself as among others, as long as these leave the L1 pipe time.
    """
    lone = h200.SM75_LONE_SPAN[plan.span] * (1 + h200.SM75_LONE_M_TILE * plan.m_tiles)
    busy = h200.SM75_CYCLE / properties.rates.clock * _cycles(plan, m, n, k, properties.sms, lone)
    reading = n * k / 2 / 1e6 / (h200.MOST_BANDWIDTH * properties.rates.bandwidth)
    return h200.SM75_START + max(reading, busy)


def _cycles(plan: Sm75Plan, m: int, n: int, k: int, sms: int, lone: float) -> float:
    """Of the busiest SM: for each span of its warps what loads take of the L1 pipe, but never less than a warp needs by
    itself, `lone`; for each turn filling the pipeline and adding up; and a second launch.

    CTAs take a tile of W and of x each turn. In the last one there may be fewer of them, and of warps on a SM.
    """
    across, down = plan.grid(n, plan.x_tiles(m), sms)
    at_once = min(across * down, sms * plan.resident_ctas)
    turns, left = divmod(across * -(-n // plan.rows), at_once)
    x = h200.SM75_SPAN_X * min(m, 8 * plan.m_tiles) / plan.n_warps
    pipe = h200.SM75_SPAN + h200.SM75_SPAN_M_TILE * plan.m_tiles + x
    spans = -(-(k // plan.span) // (plan.k_warps * plan.splits))

    def turn(ctas: int) -> float:
        return spans * max(lone, -(-ctas // sms) * plan.warps * pipe) + h200.SM75_TURN

    launch = h200.SM75_LAUNCH if plan.splits > 1 else 0
    return turns * turn(at_once) + (turn(left) if left else 0) + launch
