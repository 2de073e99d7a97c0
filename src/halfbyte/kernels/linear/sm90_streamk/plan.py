"""Which shape of kernel.cu is for a product: its constants, what it needs, and the planner that picks among them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from halfbyte.kernels.common.device import MOST_CLUSTER, DeviceFacts
from halfbyte.kernels.linear.operands import INVARIANT_ROWS, Operands
from halfbyte.kernels.linear.tune import h200

DEPTH = 256  # of K, a unit of work
WIDTHS = (8, 16, 32, 64)
REGISTERS = {2: (120, 192), 3: (80, 144), 4: (96, 96)}  # fetching, multiplying; by groups


@dataclass(frozen=True)
class HopperPlan:
    """The constants of kernel.cu. width: rows of x a tile. groups: warpgroups that multiply, 64 rows of W each.
    stages: units on their way. ctas: how many share the work. held: units of x that a CTA holds all of, which are all
    that it multiplies, or 0 where x is laid out ahead and comes with W. cluster: CTAs of a tile that add up among
    themselves, which are all of that tile, or 1 where those of any tile meet in memory. invariant: the sums of a row
    are made in the same order whatever the width."""

    width: int
    groups: int
    stages: int
    ctas: int
    held: int = 0
    cluster: int = 1
    invariant: bool = False

    @property
    def direct(self) -> int:
        """The most parts of a tile that its first CTA adds up one by one; of more, others add some up first. The CTA of
        a narrow tile loads several parts at once, so another's help pays later."""
        return h200.INVARIANT_DIRECT if self.invariant else 6 + max(1, 32 // self.width)

    @property
    def rows(self) -> int:
        """Rows of W in a tile."""
        return 64 * self.groups

    def shared_bytes(self, span: int) -> int:
        """Dynamic shared memory. kernel.cu lays it out, and does not compile where this sum is another than its own."""
        stage = self.rows * DEPTH // 2 + DEPTH // span * self.rows * 4
        x = (self.held or self.stages) * self.width * DEPTH * 2
        return 256 * 256 + 1024 + self.stages * stage + x

    def tiles(self, m: int) -> int:
        """Tiles of x [m, K]."""
        return -(-m // self.width)

    @property
    def threads(self) -> int:
        return 128 * (self.groups + 1)


@dataclass(frozen=True)
class Kind:
    """What a weight and x are, as far as kernel.cu is compiled for it. scales: their dtype, uint8 where they are
    nested. vector: the scales of a row can be loaded 16 bytes at a time."""

    dtype: torch.dtype
    scales: torch.dtype
    log_block: int
    span: int
    vector: bool
    low_first: bool


def find_kind(operands: Operands) -> Kind | None:
    """None where kernel.cu is not for such operands."""
    o = operands
    span = min(o.block_size, 64)
    if o.dtype not in (torch.float16, torch.bfloat16) or o.k % span or o.k == 0 or not o.has_usual_nesting:
        return None
    if min(o.align_packed, o.align_x) < 16:
        return None
    size = o.scale.itemsize
    vector = (
        DEPTH // o.block_size * size in (4, 8, 16)
        and o.k % DEPTH == 0
        and o.k // o.block_size * size % 16 == 0
        and o.align_scale == 16
    )
    scales = torch.uint8 if o.nested else o.scale
    return Kind(o.dtype, scales, o.block_size.bit_length() - 1, span, vector, o.low_first)


def is_valid(plan: HopperPlan, m: int, n: int, k: int, span: int, facts: DeviceFacts) -> bool:
    """True if kernel.cu computes the right thing under `plan`, and fits: planner, tuner and tests go by this."""
    tiles, depth = -(-n // plan.rows) * plan.tiles(m), -(-k // DEPTH)
    units = tiles * depth
    return (
        facts.ptx == 90
        and plan.width in WIDTHS
        and plan.groups in REGISTERS
        and 2 <= plan.stages <= 8
        and 1 <= plan.ctas <= units
        and units * plan.ctas < 1 << 32
        and m * k < 1 << 31
        and n < 1 << 31
        and (plan.held == 0 or (plan.ctas % tiles == 0 and plan.held >= -(-depth * tiles // plan.ctas)))
        and (plan.cluster == 1 or (plan.held > 0 and plan.ctas == tiles * plan.cluster and _can_exchange(plan)))
        and plan.shared_bytes(span) <= facts.shared_memory
    )


def _can_exchange(plan: HopperPlan) -> bool:
    """CTAs exist in clusters of so many everywhere, and sums take no more room than the stages of W."""
    groups = -(-(plan.width // 8) // plan.cluster) * plan.cluster  # of columns; each CTA has room for as many
    return 1 < plan.cluster <= MOST_CLUSTER and groups * plan.groups * 2048 <= plan.stages * plan.rows * DEPTH // 2


def hopper_plan(m: int, n: int, k: int, span: int, facts: DeviceFacts, batch_invariant: bool) -> HopperPlan | None:
    """The plan for x [m, k] and W [n, k], or None where this kernel is not for them.

    Where a CTA can hold all of x that it needs, it does. Else either every SM takes an equal part of all units, or
    every tile is cut into the same number of parts, whichever lets the busiest CTA be done first. With batch_invariant
    a row's sums are made in one order, whatever m is.
    """
    if min(m, n, k) < 1 or facts.ptx != 90:
        return None
    if batch_invariant:
        return _invariant_plan(m, n, k, span, facts)
    width = _tile_width(m, n, k)
    if (held := _held_plan(width, m, n, k, span, facts)) is not None:
        return held
    depth, columns = -(-k // DEPTH), -(-m // width)
    found = []
    for (other, groups), (stages, cost) in h200.STREAMK_TILES.items():
        if other != width:
            continue
        tiles = -(-n // (64 * groups)) * columns
        part = h200.STREAMK_PART[width] * groups
        time, shares = _best_shares(tiles, depth, cost, h200.STREAMK_CUT[width], part, facts.sms)
        found.append((time, HopperPlan(width, groups, stages, tiles * shares)))
        ctas = min(facts.sms, tiles * depth)
        time = -(-tiles * depth // ctas) * cost + h200.STREAMK_RUN[width] + (ctas / tiles + 1) * part
        found.append((time, HopperPlan(width, groups, stages, ctas)))
    valid = [pair for pair in found if is_valid(pair[1], m, n, k, span, facts)]
    return min(valid, key=lambda pair: pair[0])[1] if valid else None


def _invariant_plan(m: int, n: int, k: int, span: int, facts: DeviceFacts) -> HopperPlan | None:
    """The plan of which only width and the number of tiles depend on m: how a tile is cut along K and in which order
    its parts are added up does not, nor does whether there is a plan."""
    row_tiles = -(-n // (64 * h200.INVARIANT_GROUPS))
    costs = h200.INVARIANT_UNIT, h200.INVARIANT_CUT, h200.INVARIANT_PART
    shares = _best_shares(row_tiles, -(-k // DEPTH), *costs, facts.sms)[1]

    def plan(m: int) -> HopperPlan:
        width = _tile_width(m, n, k)
        stages, _ = h200.STREAMK_TILES[width, h200.INVARIANT_GROUPS]
        return HopperPlan(width, h200.INVARIANT_GROUPS, stages, row_tiles * -(-m // width) * shares, invariant=True)

    every = (*WIDTHS, max(m, INVARIANT_ROWS))
    return plan(m) if all(is_valid(plan(rows), rows, n, k, span, facts) for rows in every) else None


def _tile_width(m: int, n: int, k: int) -> int:
    """The narrowest that holds all rows of x, or the widest."""
    if 32 < m <= 64 and n * k <= h200.STREAMK_NARROW_SIZE:
        return 32
    return next((width for width in WIDTHS if width >= m), WIDTHS[-1])


def _held_plan(width: int, m: int, n: int, k: int, span: int, facts: DeviceFacts) -> HopperPlan | None:
    """The plan in which every CTA holds its x, a part of one tile; None where there is no room for that. Where all
    clusters of a tile's CTAs run at once, they add up among themselves."""
    depth, found = -(-k // DEPTH), []
    for groups, cost in h200.RESIDENT_UNIT.items():
        tiles = -(-n // (64 * groups)) * -(-m // width)
        scattered = groups > 2 and k % h200.RESIDENT_SCALES_K != 0
        cost *= h200.RESIDENT_WIDTH[width] * (h200.RESIDENT_SCATTERED if scattered else 1)
        for shares in range(1, min(depth, facts.sms // tiles) + 1):
            held, cluster = -(-depth // shares), shares if tiles <= facts.clusters(shares) else 1
            meet = h200.FIX_UP + h200.FIX_UP_PART * groups * shares if shares > 1 else 0.0
            time = held * cost + groups * h200.RESIDENT_GROUP + (meet if cluster == 1 else h200.CLUSTER_PART * shares)
            for stages in range(min(h200.RESIDENT_STAGES, max(held, 2)), h200.RESIDENT_MOST_STAGES + 1):
                plan = HopperPlan(width, groups, stages, tiles * shares, held, cluster)
                if is_valid(plan, m, n, k, span, facts):
                    found.append((time, -stages, plan))
    return min(found, key=lambda one: one[:2])[2] if found else None


def _best_shares(tiles: int, depth: int, cost: float, cut: float, part: float, sms: int) -> tuple[float, int]:
    """The time of the busiest SM where every tile is cut into so many parts, and that number."""

    def time(shares: int) -> float:
        return -(-tiles * shares // sms) * (-(-depth // shares) * cost + (cut + part * shares if shares > 1 else 0))

    return min((time(shares), shares) for shares in range(1, max(1, min(depth, sms // tiles)) + 1))
