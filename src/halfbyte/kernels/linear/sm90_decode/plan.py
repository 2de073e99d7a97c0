"""Which shape of kernel.cu is for a product: its constants, what it needs, and the planner that picks among them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import NamedTuple

import torch

from halfbyte.kernels.common.device import MOST_CLUSTER, DeviceProperties
from halfbyte.kernels.linear.codebook import has_integers
from halfbyte.kernels.linear.fusion import ALONE, Fusion
from halfbyte.kernels.linear.problem import Problem
from halfbyte.kernels.linear.tune import h200

SWIGLU_OAI = "swiglu_oai"  # of interleaved rows of gate and up
BLOCK = 64  # weights that are summed up before they are scaled
EXPONENT_BLOCK = 32  # weights that share an exponent
ROWS = 16  # rows of W in a tile
MOST_ROWS = 64  # of x
MOST_STAGES, MOST_WARPS = 8, 16
NARROW_CHUNK = 32  # bytes of a row that a tensor copy brings at a time where K has no larger power of two in it
RESERVED = 1024  # bytes of shared memory that the system takes for each CTA


class Scales(NamedTuple):
    """Of a weight. dtype: uint8 where they are nested, or exponents. block_size: weights that share one. exponents:
    they are powers of two, a byte for 32 weights."""

    dtype: torch.dtype
    block_size: int = BLOCK
    exponents: bool = False

    @property
    def nested(self) -> bool:
        return self.dtype is torch.uint8 and not self.exponents

    @property
    def blocks(self) -> int:
        """Blocks of 64 weights that share one, or share two exponents."""
        return max(1, self.block_size // BLOCK)

    @property
    def halves(self) -> int:
        """Parts of a block that have an exponent each, or one: a block has one scale at most."""
        return BLOCK // EXPONENT_BLOCK if self.exponents else 1

    @property
    def are_known(self) -> bool:
        return self.block_size == EXPONENT_BLOCK if self.exponents else self.block_size % BLOCK == 0

    def bytes_of(self, blocks: int) -> int:
        """Of so many blocks of 64 weights, the first of which is the first of those that share a scale."""
        return -(-blocks // self.blocks) * (self.halves if self.exponents else self.dtype.itemsize)


@dataclass(frozen=True)
class DecodePlan:
    """The constants of kernel.cu, by the names of its Config, and the estimate."""

    m_tiles: int  # groups of eight rows of x
    warps: int  # that multiply
    slice: int  # blocks of K a warp
    stages: int  # tiles, or steps of tiles, on their way
    cluster: int  # CTAs that share K
    bulk_scales: bool = False  # scales of a tile are copied in one piece
    window_scales: bool = False  # those of a row are copied with what lies around them
    bulk_weights: bool = False  # rows of a tile are copied in one piece
    computes: bool = False  # weights are integers, and not looked up
    parts: int = 1  # weights of one launch
    steps: int = 1  # that a tile is fetched in
    registers: int = 0  # of a multiplying thread, at the expense of others; 0: as many as those have
    sum_buffers: int = 1  # for what warps have
    first_stages: int = 1  # that are asked for before the first is there
    joined: int = 1  # blocks of K that share a scale, and are summed up before they are scaled
    resident_ctas: int = 1  # that share a multiprocessor
    reducers: int = 1  # warps that add up
    batches: int = 1  # CTAs side by side, for rows of x
    norm: bool = False  # x is normed first
    activation: str = ""  # what the first of two weights gates the second by
    residual: bool = False  # the result is added to something
    static_weights: bool = False  # W is read before the kernel ahead ends
    experts: int = 0  # of a stack, rounded up to a multiple of 32; 0: there is one weight, or several
    pairs: int = 0  # of a token and an expert, at most
    wide: bool = False  # results are fp32
    neighbours: int = 1  # CTAs that take the tiles of a run in turn
    combines: int = 0  # experts of a token, which are added up; 0: they are not
    microseconds: float = field(default=0.0, compare=False)

    @property
    def tiles_at_once(self) -> int:
        """Tiles that one CTA takes one after the other: both of a gated pair."""
        return 2 if self.activation not in ("", SWIGLU_OAI) else 1

    @property
    def threads(self) -> int:
        """Of a CTA: a warp that feeds, one or two that add up. Registers are handed over by four warps at a time."""
        return 32 * (self.warps + (4 if self.registers else 1 + self.reducers))

    @property
    def blocks(self) -> int:
        """Blocks of K that a CTA covers."""
        return self.warps * self.slice

    def x_tiles(self, m: int) -> int:
        """Tiles of x [m, K] that launches are made for: they are the same for any m."""
        return 0

    def shared_bytes(self, scales: Scales) -> int:
        """Dynamic shared memory. kernel.cu lays it out, and does not compile where this sum is another than its own."""
        stage, tiles = ROWS * self.blocks // self.steps * 32, -(-self.stages // self.steps)
        slots = 2 if self.cluster > 4 else 4
        sums = self.sum_buffers * self.warps * 8 * self.m_tiles * 64 + slots * (self.cluster - 1) * self.m_tiles * 512
        sums += (
            self.norm * self.cluster * self.warps * self.m_tiles * 32 + (self.tiles_at_once - 1) * self.m_tiles * 512
        )
        barriers = -(-(16 * (self.stages + self.sum_buffers) + 72) // 256) * 256  # 72: of slots and of squares
        # Of the stages, which begin at a multiple of 1024.
        ahead = -(-(1024 * self.parts + barriers + sums) // 1024) * 1024
        scaling = tiles * (ROWS * self.scale_row(scales) + 128 * scales.nested)
        scaling += self.blocks * scales.halves // self.joined * 80
        whole = 256 * 256 + ahead + self.stages * stage + scaling
        if self.experts == 0:
            return whole
        width = 8 * self.m_tiles
        units = (self.pairs + (width - 1) * min(self.pairs, self.experts)) // width
        return -(-whole // 16) * 16 + 16 + -(-(4 * self.experts + 2 * units) // 16) * 16 + 2 * width * units

    def scale_row(self, scales: Scales) -> int:
        """Bytes of shared memory for the scales of a row."""
        count = scales.bytes_of(self.blocks)
        if self.bulk_scales or self.window_scales:
            return count if self.bulk_scales else -(-count // 16) * 16 + 32
        chunk = scale_chunk(self, scales)
        return -(-count // chunk) * chunk


def scale_chunk(plan: DecodePlan, scales: Scales) -> int:
    """Bytes of a row's scales that one copy brings: a power of two."""
    count = scales.bytes_of(plan.blocks)
    return next((chunk for chunk in (16, 32, 64) if count <= chunk), 128)


def weight_chunk(k: int) -> int:
    """Bytes of a row of W that are beside each other in shared memory: a power of two that K is a multiple of."""
    return math.gcd(k // 2, 128)


def is_valid(plan: DecodePlan, n: int, k: int, scales: Scales, properties: DeviceProperties) -> bool:
    """True if kernel.cu computes the right thing under `plan`, and fits: planner, tuner and tests go by this."""
    blocks = k // BLOCK
    return (
        properties.ptx >= 90
        and scales.are_known
        and k % max(BLOCK, scales.block_size) == 0
        and _can_copy_scales(plan, blocks, scales)
        and (not plan.bulk_weights or _can_copy_rows(plan, k))
        and n % 4 == 0
        and 0 < n * k < 1 << 38  # blocks are counted in 32 bits
        and plan.slice in (4, 8)
        and plan.slice % (4 * plan.steps) == plan.slice % (2 * plan.joined) == 0
        and scales.blocks % plan.joined == 0
        and 1 <= plan.warps <= MOST_WARPS
        and 1 <= plan.cluster <= MOST_CLUSTER
        and plan.blocks * (plan.cluster - 1) < blocks <= plan.blocks * plan.cluster
        and 2 <= plan.stages <= MOST_STAGES
        and plan.sum_buffers >= 1
        and plan.first_stages >= 1
        and 1 <= plan.reducers <= 2
        and plan.m_tiles % plan.reducers == 0
        and (plan.registers == 0 or (properties.ptx == 90 and _can_hand_over_registers(plan)))
        and plan.resident_ctas * (plan.shared_bytes(scales) + RESERVED) <= properties.shared_memory + RESERVED
    )


def _can_hand_over_registers(plan: DecodePlan) -> bool:
    """Four warps at a time, to multiples of 8; a warp waits for ever for what the CTA does not have."""
    has = (1 << 16) // plan.threads // 8 * 8 * plan.threads
    asked = 32 * (plan.warps * plan.registers + 4 * 32)
    return plan.warps % 4 == plan.registers % 8 == 0 and asked <= has


def _can_copy_rows(plan: DecodePlan, k: int) -> bool:
    """A tile of 16 rows, all of K; and banks of shared memory, which such a copy does not permute, suit its rows."""
    return plan.experts > 0 and plan.cluster == plan.steps == 1 and weight_chunk(k) == NARROW_CHUNK


def _can_copy_scales(plan: DecodePlan, blocks: int, scales: Scales) -> bool:
    """Copies take multiples of 16 bytes at multiples of 16, of tensors too: of each row, or of four rows at least. CTAs
    that share K share no scale."""
    of_row, of_cta = scales.bytes_of(blocks), scales.bytes_of(plan.blocks)
    if plan.cluster > 1 and plan.blocks % scales.blocks:
        return False
    if plan.bulk_scales and plan.experts:
        return plan.cluster == 1  # every tile has 16 rows
    if plan.bulk_scales or plan.window_scales:
        return of_row % 4 == 0 and not (plan.bulk_scales and (plan.window_scales or plan.cluster > 1))
    return of_row % 16 == of_cta % 16 == 0


@lru_cache(maxsize=4096)  # some milliseconds of Python, and asked for whenever a product is new to its weight
def decode_plan(
    m: int, n: int, k: int, scales: Scales, properties: DeviceProperties, parts: int = 1, fusion: Fusion = ALONE
) -> DecodePlan | None:
    """The plan for x [m, k] and W [n, k], or None where this kernel is not for them. parts: the weights
    that W is, none of which shares a tile with another.

    A warp holds as much of K as its registers take beside x; then the least work of the busiest CTA wins, in blocks,
    with what a tile, a neighbour and a missing warp were seen to cost on an H200 (docs/notebook.md).
    """
    if not 1 <= m <= MOST_ROWS:
        return None
    m_tiles = _m_tiles(m, n, k, parts, properties)
    width, most_warps = h200.DECODE_SLICES[m_tiles]
    batches = -(-m // (8 * m_tiles))
    tiles = -(-n // ROWS) * batches

    blocks = k // BLOCK
    unaligned = scales.bytes_of(blocks) % 16 != 0
    alike = DecodePlan(
        m_tiles, 1, width, stages=2, cluster=1, parts=parts, batches=batches, norm=fusion.norm is not None,
        activation=fusion.activation, residual=fusion.residual is not None, static_weights=fusion.static,
    )  # fmt: skip

    def cost(shape: tuple[int, int]) -> float:
        cluster, warps = shape
        turns = _turns(alike.tiles_at_once, cluster, tiles, properties)
        busy = turns * (warps * width * (1 + h200.DECODE_LACKING_WARP * (most_warps - warps)) + h200.DECODE_TILE)
        return busy + h200.DECODE_NEIGHBOUR * cluster + (h200.DECODE_CLUSTER if cluster > 1 else 0)

    shapes = [
        (cluster, warps)
        for cluster in range(1, MOST_CLUSTER + 1)
        for warps in range(1, most_warps + 1)
        if warps * width * (cluster - 1) < blocks <= warps * width * cluster  # each has a part of K, as is_valid wants
    ]
    plans = (
        _refined(
            replace(
                alike,
                warps=warps,
                cluster=cluster,
                bulk_scales=unaligned and cluster == 1,
                window_scales=unaligned and cluster > 1,
            ),
            tiles / max(1, properties.sms // cluster),
            scales,
            properties,
        )
        for cluster, warps in sorted(shapes, key=cost)  # of equals the first, which has the most room
    )
    fitting = (one for plan in plans for one in _smaller(plan) if is_valid(one, n, k, scales, properties))
    best = next(fitting, None)
    return replace(best, microseconds=_microseconds(best, n, k, scales, properties)) if best else None


def computing(plan: DecodePlan | None, problem: Problem) -> DecodePlan | None:
    """The plan under which weights that are integers are not looked up."""
    return replace(plan, computes=True) if plan and has_integers(problem.format, problem.dtype) else plan


def _turns(at_once: int, cluster: int, tiles: int, properties: DeviceProperties) -> int:
    """Tiles of the CTA that has most."""
    return at_once * -(-tiles // (at_once * max(1, properties.sms // cluster)))


def _microseconds(plan: DecodePlan, n: int, k: int, scales: Scales, properties: DeviceProperties) -> float:
    """The estimated time of one launch: of reading W, of the busiest CTA's tiles, and of all that overlaps neither."""
    times, rates = h200.DECODE_TIMES[plan.m_tiles], properties.rates
    scale_bytes = n * scales.bytes_of(k // BLOCK)
    turns = _turns(plan.tiles_at_once, plan.cluster, -(-n // ROWS) * plan.batches, properties)
    megabytes = (n * k / 2 + scale_bytes) / 1e6
    reading = megabytes / (times.bandwidth * rates.bandwidth)
    multiplying = turns * (plan.blocks * times.block + times.tile) / rates.clock
    shared = times.cluster + times.neighbour * (plan.cluster - 1) if plan.cluster > 1 else 0.0
    alone = times.start + times.x * plan.blocks + times.scales * scale_bytes * plan.batches / 1e6 + shared
    return alone + max(math.hypot(reading, multiplying), megabytes / (h200.MOST_BANDWIDTH * rates.bandwidth))


def _m_tiles(m: int, n: int, k: int, parts: int, properties: DeviceProperties) -> int:
    """Groups of eight rows of x that a CTA takes, others taking the rest; several weights in one launch leave none.

    One that takes 32 rows has registers for 2048 of K at most, and is ahead there, unless each tile has a
    multiprocessor. Beyond, two that take 16 each are faster than two that share K, though both decode W; and so is one
    for every 8 rows where there are multiprocessors for all. Measured on an H200 (docs/notebook.md).
    """
    if m <= 8:
        return 1
    tiles = -(-n // ROWS)
    fewest_k, most_k = h200.DECODE_FEWER_ROWS_K
    if parts == 1 and m <= 32 and fewest_k <= k <= most_k and tiles * -(-m // 8) <= properties.sms:
        return 1
    even = 24 < m <= 32 and k % h200.DECODE_EVEN_K == 0 and tiles <= properties.sms
    short = k <= h200.DECODE_SHORT_K and not even
    return 4 if m > 16 and (short or parts > 1) else 2


def _refined(plan: DecodePlan, turns: float, scales: Scales, properties: DeviceProperties) -> DecodePlan:
    """The plan with what is best for its warps. turns: tiles of a CTA, on average.

    Three halves of a tile on their way are better than more, which come in any order. Sixteen warps would like more
    registers than eighteen can have each, and so would those that hold 32 rows of x; with fewer they spill. With many
    warps, and nested scales or but one tile, the second stage is better asked for when the first is there: x and the
    codes would wait behind it. So it is where two CTAs share the one tile that they have, but not where W may be asked
    for before there is an x. Few warps leave room for two CTAs. Measured on an H200 (docs/notebook.md).
    """
    full, m_tiles = plan.warps == 16, plan.m_tiles
    if m_tiles == 1:
        halves = turns > 1 or plan.warps >= h200.DECODE_HALVES_WARPS
        shared = plan.cluster == 2 and plan.warps >= h200.DECODE_PATIENT_PAIR_WARPS and turns <= 1
        crowded = plan.warps >= h200.DECODE_PATIENT_WARPS and (scales.nested or turns <= 1)
        patient = not plan.static_weights and (shared or crowded)
        plan = replace(plan, steps=2 if halves else 1, stages=3 if halves else 2, first_stages=1 if patient else 2)
    elif m_tiles == 2 and plan.window_scales:
        plan = replace(plan, stages=3, first_stages=2, sum_buffers=2)
    if turns > 1 and plan.warps <= h200.DECODE_PAIR_WARPS[m_tiles]:
        plan = replace(plan, resident_ctas=2)
    if properties.ptx == 90 and full and (plan.cluster == 1 or m_tiles == 1):
        plan = replace(plan, registers=h200.DECODE_REGISTERS_16_WARPS)
    elif properties.ptx == 90 and plan.warps == 8 and m_tiles == 4 and plan.cluster <= 2:
        plan = replace(plan, registers=h200.DECODE_REGISTERS_8_WARPS)
    elif full:
        plan = replace(plan, sum_buffers=2)
    # Fewer wait for sums that take longer; six were slower all the same.
    if plan.warps >= h200.DECODE_JOINED_WARPS and plan.warps != h200.DECODE_ALONE_WARPS:
        plan = replace(plan, joined=min(scales.blocks, plan.slice // 2))
    if m_tiles > 1 and plan.resident_ctas == 1 and _has_room_for_a_warp(plan):
        plan = replace(plan, reducers=2)
    return plan


def _has_room_for_a_warp(plan: DecodePlan) -> bool:
    """True if one more takes no registers that the others need: a quarter of all is for every fourth warp."""
    warps = plan.warps + 2
    return plan.registers > 0 or warps % 4 != 0 or (plan.m_tiles == 2 and warps < 16)


def _smaller(plan: DecodePlan) -> Iterable[DecodePlan]:
    """The plan, and what needs less shared memory: for GPUs that have less."""
    for resident_ctas in range(plan.resident_ctas, 0, -1):
        for stages in range(plan.stages, 1, -1):
            for sums in range(plan.sum_buffers, 0, -1):
                yield replace(plan, resident_ctas=resident_ctas, stages=stages, sum_buffers=sums)
