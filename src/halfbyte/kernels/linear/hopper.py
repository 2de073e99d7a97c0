"""The product on Hopper's tensor cores: which shape of hopper.cu, and how it is launched."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from halfbyte.formats.weight import QuantizedWeight
from halfbyte.kernels.common.device import MOST_CLUSTER, DeviceFacts, facts_of
from halfbyte.kernels.common.driver import Arguments, Launch, kernels, prepared
from halfbyte.kernels.common.nvrtc import Variant, read_sources
from halfbyte.kernels.common.tensor_map import tensor_map
from halfbyte.kernels.linear import rooms
from halfbyte.kernels.linear.codebook import unit_and_codebook
from halfbyte.kernels.linear.operands import INVARIANT_ROWS, Addresses, Operands, operands_of
from halfbyte.kernels.linear.ready import GroupProduct, Product, run

DEPTH = 256  # of K, a unit of work
WIDTHS = (8, 16, 32, 64)
REGISTERS = {2: (120, 192), 3: (80, 144), 4: (96, 96)}  # fetching, multiplying; by groups


@dataclass(frozen=True)
class HopperPlan:
    """The constants of hopper.cu. width: rows of x a tile. groups: warpgroups that multiply, 64 rows of W each.
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
        return INVARIANT_DIRECT if self.invariant else 6 + max(1, 32 // self.width)

    @property
    def rows(self) -> int:
        """Rows of W in a tile."""
        return 64 * self.groups

    def shared_bytes(self, span: int) -> int:
        """Dynamic shared memory. hopper.cu lays it out, and does not compile where this sum is another than its own."""
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
    """What a weight and x are, as far as hopper.cu is compiled for it. scales: "nested" or a dtype. vector: the scales
    of a row can be loaded 16 bytes at a time."""

    dtype: torch.dtype
    scales: str
    log_block: int
    span: int
    vector: bool
    high_first: bool


def find_kind(operands: Operands) -> Kind | None:
    """None where hopper.cu is not for such operands."""
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
    scales = "nested" if o.nested else str(o.scale).removeprefix("torch.")
    return Kind(o.dtype, scales, o.block_size.bit_length() - 1, span, vector, not o.low_first)


def kind_of(x: Tensor, q: QuantizedWeight) -> Kind | None:
    """What these very tensors are."""
    return find_kind(operands_of(x, q, None))


def is_valid(plan: HopperPlan, m: int, n: int, k: int, span: int, facts: DeviceFacts) -> bool:
    """True if hopper.cu computes the right thing under `plan`, and fits: planner, tuner and tests go by this."""
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


# Width and groups to stages and the microseconds that a unit takes. By width: what is lost where every tile is cut, or
# where all units are dealt out in equal runs, and for each part of a tile and group. With these the plan is among the
# fastest of all that were timed on an H200 (docs/notebook.md); they say which is faster, not how long it takes.
TILES = {
    (8, 4): (3, 1.15), (8, 3): (3, 1.29), (16, 4): (3, 1.45), (16, 3): (3, 1.42), (32, 4): (3, 1.78),
    (32, 3): (3, 1.135), (64, 3): (2, 1.72), (64, 2): (3, 1.22),
}  # fmt: skip
CUT_COST = {8: 4.5, 16: 2.6, 32: 1.3, 64: 3.0}
RUN_COST = {8: 2.5, 16: 1.35, 32: 1.0, 64: 2.5}
PART_COST = {8: 0.093, 16: 0.096, 32: 0.095, 64: 0.3}
INVARIANT_GROUPS, INVARIANT_DIRECT = 3, 8
FEW_WEIGHTS = 1 << 23  # up to so many there are SMs left for tiles of half the width
# Where each CTA holds its x: groups to the microseconds of a unit, and how many times that it is where x is wider, or
# where three groups fetch scales one by one, whose rows begin anywhere; what a group costs besides; and what adding up
# does, in memory for each part and group, in a cluster for each part.
HELD_COST = {2: 0.91, 3: 1.09}
HELD_WIDTH_COST = {8: 1.0, 16: 1.0, 32: 1.2, 64: 2.25}
SCATTERED_COST, SCALES_AT_ONCE = 1.13, 1024
HELD_GROUP_COST, MEET_COST, MEET_PART_COST, CLUSTER_PART_COST = 0.47, 0.7, 0.075, 0.19
# With fewer stages than ENOUGH, or than the CTA has units, it is slower than where x is laid out ahead.
ENOUGH, MOST_STAGES = 3, 4


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
    for (other, groups), (stages, cost) in TILES.items():
        if other != width:
            continue
        tiles = -(-n // (64 * groups)) * columns
        part = PART_COST[width] * groups
        time, shares = _best_shares(tiles, depth, cost, CUT_COST[width], part, facts.sms)
        found.append((time, HopperPlan(width, groups, stages, tiles * shares)))
        ctas = min(facts.sms, tiles * depth)
        time = -(-tiles * depth // ctas) * cost + RUN_COST[width] + (ctas / tiles + 1) * part
        found.append((time, HopperPlan(width, groups, stages, ctas)))
    valid = [pair for pair in found if is_valid(pair[1], m, n, k, span, facts)]
    return min(valid, key=lambda pair: pair[0])[1] if valid else None


def _invariant_plan(m: int, n: int, k: int, span: int, facts: DeviceFacts) -> HopperPlan | None:
    """The plan of which only width and the number of tiles depend on m: how a tile is cut along K and in which order
    its parts are added up does not, nor does whether there is a plan."""
    row_tiles = -(-n // (64 * INVARIANT_GROUPS))
    shares = _best_shares(row_tiles, -(-k // DEPTH), 1.0, 2.0, 0.3, facts.sms)[1]

    def plan(m: int) -> HopperPlan:
        width = _tile_width(m, n, k)
        stages, _ = TILES[width, INVARIANT_GROUPS]
        return HopperPlan(width, INVARIANT_GROUPS, stages, row_tiles * -(-m // width) * shares, invariant=True)

    every = (*WIDTHS, max(m, INVARIANT_ROWS))
    return plan(m) if all(is_valid(plan(rows), rows, n, k, span, facts) for rows in every) else None


def _tile_width(m: int, n: int, k: int) -> int:
    """The narrowest that holds all rows of x, or the widest."""
    if 32 < m <= 64 and n * k <= FEW_WEIGHTS:
        return 32
    return next((width for width in WIDTHS if width >= m), WIDTHS[-1])


def _held_plan(width: int, m: int, n: int, k: int, span: int, facts: DeviceFacts) -> HopperPlan | None:
    """The plan in which every CTA holds its x, a part of one tile; None where there is no room for that. Where all
    clusters of a tile's CTAs run at once, they add up among themselves."""
    depth, found = -(-k // DEPTH), []
    for groups, cost in HELD_COST.items():
        tiles = -(-n // (64 * groups)) * -(-m // width)
        cost *= HELD_WIDTH_COST[width] * (SCATTERED_COST if groups > 2 and k % SCALES_AT_ONCE else 1)
        for shares in range(1, min(depth, facts.sms // tiles) + 1):
            held, cluster = -(-depth // shares), shares if tiles <= facts.clusters(shares) else 1
            meet = MEET_COST + MEET_PART_COST * groups * shares if shares > 1 else 0.0
            time = held * cost + groups * HELD_GROUP_COST + (meet if cluster == 1 else CLUSTER_PART_COST * shares)
            for stages in range(min(ENOUGH, max(held, 2)), MOST_STAGES + 1):
                plan = HopperPlan(width, groups, stages, tiles * shares, held, cluster)
                if is_valid(plan, m, n, k, span, facts):
                    found.append((time, -stages, plan))
    return min(found, key=lambda one: one[:2])[2] if found else None


def _best_shares(tiles: int, depth: int, cost: float, cut: float, part: float, sms: int) -> tuple[float, int]:
    """The time of the busiest SM where every tile is cut into so many parts, and that number."""

    def time(shares: int) -> float:
        return -(-tiles * shares // sms) * (-(-depth // shares) * cost + (cut + part * shares if shares > 1 else 0))

    return min((time(shares), shares) for shares in range(1, max(1, min(depth, sms // tiles)) + 1))


def find_plan(m: int, operands: Operands, facts: DeviceFacts, batch_invariant: bool) -> HopperPlan | None:
    """The plan for x [m, K], or None where this kernel is not for such operands: it is for every format, x of 16 bits,
    K % 64 == 0 (K % 32 where 32 weights share a scale), on Hopper."""
    kind = find_kind(operands)
    return None if kind is None else hopper_plan(m, operands.n, operands.k, kind.span, facts, batch_invariant)


def plan_for(x: Tensor, q: QuantizedWeight, batch_invariant: bool) -> tuple[HopperPlan, Kind] | None:
    """The plan for these very tensors, and what they are."""
    operands = operands_of(x, q, None)
    plan, kind = find_plan(len(x), operands, facts_of(x.get_device()), batch_invariant), find_kind(operands)
    return None if plan is None or kind is None else (plan, kind)


def linear(x: Tensor, q: QuantizedWeight, bias: Tensor | None, out: Tensor, plan: HopperPlan) -> None:
    """out = x @ W.T + bias; x [M, K] and out [M, N], contiguous, on the current device."""
    run(product, x, q, bias, out, plan)


def lays_out_alike(group: Sequence[Operands], plans: Sequence[HopperPlan]) -> bool:
    """Whether x is laid out in one way for all weights, each of which this kernel is for; not so where CTAs hold it."""
    kinds = [find_kind(o) for o in group]
    each = zip(group, kinds, plans, strict=True)
    ways = {(o.k, kind.dtype, kind.span, plan.width) for o, kind, plan in each if kind is not None}
    return len(ways) == 1 and not any(plan.held for plan in plans)


def product(device: torch.device, m: int, operands: Operands, weight: Addresses, plan: HopperPlan) -> Product:
    """The product with a weight on the current device, of as many rows as there are tiles of x for m."""
    part = _prepare(device.index, m, operands, weight, plan)

    def multiply(stream: int, x: int, bias: int, out: int, m: int) -> None:
        arranged = torch.empty(part.arranged, dtype=torch.uint8, device=device) if part.arranged else None
        part(device, stream, x, bias, out, 0 if arranged is None else arranged.data_ptr(), m)

    return multiply


def group_product(
    device: torch.device, m: int, group: Sequence[Operands], weights: Sequence[Addresses], plans: Sequence[HopperPlan]
) -> GroupProduct:
    """The products of m rows of x with several weights, one after the other; x is laid out once."""
    parts = [_prepare(device.index, m, *each) for each in zip(group, weights, plans, strict=True)]
    first = parts[0]

    def multiply(stream: int, x: int, results: Iterable[int]) -> None:
        arranged = torch.empty(first.arranged, dtype=torch.uint8, device=device)
        addresses = iter(results)
        for part in parts:
            bias, out = next(addresses), next(addresses)
            part(device, stream, x, bias, out, arranged.data_ptr(), m, is_arranged=part is not first)

    return multiply


class _Part(NamedTuple):
    """The launches of a product and their arguments. arranged: bytes of x laid out, if it is. partial: sums that CTAs
    leave for others."""

    arrange: Launch
    multiply: Launch
    arguments: Arguments
    arranged: int
    partial: int

    def __call__(
        self, device: torch.device, stream: int, x: int, bias: int, out: int, arranged: int, m: int,
        is_arranged: bool = False,
    ) -> None:  # fmt: skip
        partial, left, count = 0, 0, 0
        captured = self.partial > 0 and torch.cuda.is_current_stream_capturing()
        if captured and rooms.of_this_thread.of_graph is None:
            # A graph may be replayed beside anything, and nobody would keep its memory. It is held until the launch.
            room = rooms.missing((self.partial,), device)
            partial = room.data_ptr()
        elif self.partial:
            partial, left, count = rooms.find(device, stream, self.partial, captured).take(self.partial)
        self.arguments.set(x, bias, out, arranged, partial, left, count // 4, m)
        if self.arranged and not is_arranged:
            self.arrange(stream, self.arguments.parameters)
        self.multiply(stream, self.arguments.parameters)


def _prepare(index: int, m: int, operands: Operands, weight: Addresses, plan: HopperPlan) -> _Part:
    o = operands
    row_tiles, column_tiles, units = -(-o.n // plan.rows), plan.tiles(m), -(-o.k // DEPTH)
    compiled = variant(o, plan, facts_of(index))
    key = ("hopper", index, column_tiles * units, plan, compiled)
    launches = prepared(key, lambda: _launches(index, column_tiles * units, plan, compiled))
    meets = plan.cluster == 1 and plan.ctas != row_tiles * column_tiles
    partial = plan.ctas * plan.rows * plan.width if meets else 0
    packed, *scales = weight
    constants = unit_and_codebook(o.format, o.dtype)
    sizes = (o.n, o.k, row_tiles, column_tiles, units, plan.ctas)
    weights = tensor_map(packed, (o.k // 2, o.n), (o.k // 2,), (DEPTH // 2, plan.rows))
    arguments = Arguments(LAYOUT, (weights, *scales), (*sizes, *constants))
    arranged = 0 if plan.held else column_tiles * units * plan.width * DEPTH * 2
    return _Part(*launches, arguments, arranged, partial)


# A structure aligned to 64 bytes: x, bias, out, arranged, partial, left, left_count and m change.
LAYOUT = ("128s4Q", "6Q2I", "6If64s12x")


def _launches(index: int, column_units: int, plan: HopperPlan, compiled: Variant) -> tuple[Launch, Launch]:
    """What lays x out, and the product."""
    shared = dict(compiled.macros)["SHARED_BYTES"]
    arrange, multiply = kernels(index, compiled, (("arrange", 0), ("multiply", shared)), carveout=100)
    pieces = column_units * plan.width * DEPTH // 8
    return (
        Launch(arrange, (plan.ctas + -(-pieces // 128), 1), 128, overlaps=True),
        Launch(
            multiply,
            (plan.ctas // plan.cluster, plan.cluster),
            plan.threads,
            shared,
            cluster=plan.cluster if plan.cluster > 1 else 0,
            overlaps=True,
        ),
    )


def variant(operands: Operands, plan: HopperPlan, facts: DeviceFacts) -> Variant:
    """What is compiled for such operands. Raises ValueError where the kernel is not for them."""
    kind = find_kind(operands)
    if kind is None:
        raise ValueError(f"hopper.cu is not for {operands}")
    return Variant.of(source(), "90a", macros(kind, plan))


def macros(kind: Kind, plan: HopperPlan) -> dict[str, int]:
    """What hopper.cu is compiled with."""
    fetching, multiplying = REGISTERS[plan.groups]
    return {
        "WIDTH": plan.width, "GROUPS": plan.groups, "STAGES": plan.stages, "SPAN": kind.span,
        "SCALES": ("nested", "float32", "float16", "bfloat16").index(kind.scales), "LOG_BLOCK": kind.log_block,
        "VECTOR": int(kind.vector), "HIGH_FIRST": int(kind.high_first), "FP16": int(kind.dtype == torch.float16),
        "HELD": plan.held, "CLUSTER": plan.cluster, "DIRECT": plan.direct, "SHARED_BYTES": plan.shared_bytes(kind.span),
        "FETCH_REGISTERS": fetching, "MULTIPLY_REGISTERS": multiplying,
    }  # fmt: skip


@cache
def source() -> str:
    folder = Path(__file__).parent
    names = ("barriers.cuh", "hopper_work.cuh", "hopper_fetch.cuh", "hopper.cu")
    return read_sources(*(folder / name for name in names))
