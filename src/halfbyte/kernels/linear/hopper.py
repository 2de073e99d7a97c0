"""The product on Hopper's tensor cores: which shape of hopper.cu, and how it is launched."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from pathlib import Path

import torch
from torch import Tensor

from halfbyte.formats import blockwise, grouped
from halfbyte.formats.weight import QuantizedWeight
from halfbyte.kernels.common.device import DeviceFacts, facts_of
from halfbyte.kernels.common.driver import Launch, check, driver, load, prepared
from halfbyte.kernels.common.nvrtc import cubin, read_sources
from halfbyte.kernels.linear.codebook import UNIT_AND_CODEBOOK

DEPTH = 256  # of K, a unit of work
WIDTHS = (8, 16, 32, 64)
REGISTERS = {2: (120, 192), 3: (80, 144), 4: (96, 96)}  # fetching, multiplying; by groups


@dataclass(frozen=True)
class HopperPlan:
    """The constants of hopper.cu. width: rows of x a tile. groups: warpgroups that multiply, 64 rows of W each.
    stages: units on their way. ctas: how many share the work."""

    width: int
    groups: int
    stages: int
    ctas: int

    @property
    def rows(self) -> int:
        """Rows of W in a tile."""
        return 64 * self.groups

    def shared_bytes(self, span: int) -> int:
        """Dynamic shared memory. hopper.cu lays it out, and does not compile where this sum is another than its own."""
        stage = self.rows * DEPTH // 2 + self.width * DEPTH * 2 + DEPTH // span * self.rows * 4
        return 256 * 256 + 1024 + self.stages * stage

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


def kind_of(x: Tensor, q: QuantizedWeight) -> Kind | None:
    """None where hopper.cu is not for such a weight or x."""
    span = min(q.block_size, 64)
    k = q.shape[1]
    if x.dtype not in (torch.float16, torch.bfloat16) or k % span or k == 0:
        return None
    if q.nested is not None and q.nested.block_size != blockwise.NESTED_BLOCK_SIZE:
        return None
    if any(tensor.data_ptr() % 16 for tensor in (q.packed, x)):
        return None
    scales = "nested" if q.nested else str(q.scale.dtype).removeprefix("torch.")
    size = q.scale.element_size()
    vector = (
        DEPTH // q.block_size * size in (4, 8, 16)
        and k % DEPTH == 0
        and k // q.block_size * size % 16 == 0
        and q.scale.data_ptr() % 16 == 0
    )
    high_first = q.format != grouped.NAME
    return Kind(x.dtype, scales, q.block_size.bit_length() - 1, span, vector, high_first)


def is_valid(plan: HopperPlan, m: int, n: int, k: int, span: int, facts: DeviceFacts) -> bool:
    """True if hopper.cu computes the right thing under `plan`, and fits: planner, tuner and tests go by this."""
    units = -(-n // plan.rows) * -(-m // plan.width) * -(-k // DEPTH)
    return (
        facts.ptx == 90
        and plan.width in WIDTHS
        and plan.groups in REGISTERS
        and 2 <= plan.stages <= 8
        and 1 <= plan.ctas <= units
        and units * plan.ctas < 1 << 32
        and m * k < 1 << 31
        and n < 1 << 31
        and plan.shared_bytes(span) <= facts.shared_memory
    )


# Width and groups to stages and the microseconds that a unit takes; what a CTA loses where it shares a tile,
# and for each part of such a tile. Measured on an H200 (docs/notebook.md).
TILES = {
    (8, 4): (3, 1.15), (8, 3): (3, 1.0), (16, 4): (3, 1.45), (16, 3): (3, 1.06), (32, 4): (3, 1.78),
    (32, 3): (3, 1.30), (64, 3): (2, 1.72), (64, 2): (3, 1.21),
}  # fmt: skip
SHARE_COST = 2.0
PART_COST = {8: 0.22, 16: 0.26, 32: 0.33, 64: 0.48}
INVARIANT_GROUPS = 3


def hopper_plan(m: int, n: int, k: int, span: int, facts: DeviceFacts, batch_invariant: bool) -> HopperPlan | None:
    """The plan for x [m, k] and W [n, k], or None where this kernel is not for them.

    Either every SM takes an equal part of all units, or every tile is cut into the same number of parts, whichever lets
    the busiest CTA be done first. With batch_invariant how a tile is cut does not depend on m.
    """
    if min(m, n, k) < 1 or facts.ptx != 90:
        return None
    width = next((width for width in WIDTHS if width >= m), WIDTHS[-1])
    depth, columns = -(-k // DEPTH), -(-m // width)
    found = []
    for (other, groups), (stages, cost) in TILES.items():
        if other != width or (batch_invariant and groups != INVARIANT_GROUPS):
            continue
        row_tiles = -(-n // (64 * groups))
        tiles = row_tiles * columns
        if batch_invariant:
            shares = _best_shares(row_tiles, depth, 1.0, 0.3, facts.sms)[1]
            found.append((0.0, HopperPlan(width, groups, stages, tiles * shares)))
            continue
        part = PART_COST[width]
        time, shares = _best_shares(tiles, depth, cost, part, facts.sms)
        found.append((time, HopperPlan(width, groups, stages, tiles * shares)))
        ctas = min(facts.sms, tiles * depth)
        time = -(-tiles * depth // ctas) * cost + 2 * SHARE_COST + (ctas / tiles + 1) * part
        found.append((time, HopperPlan(width, groups, stages, ctas)))
    valid = [pair for pair in found if is_valid(pair[1], m, n, k, span, facts)]
    return min(valid, key=lambda pair: pair[0])[1] if valid else None


def _best_shares(tiles: int, depth: int, cost: float, part: float, sms: int) -> tuple[float, int]:
    """The time of the busiest SM where every tile is cut into so many parts, and that number."""

    def time(shares: int) -> float:
        return -(-tiles * shares // sms) * (
            -(-depth // shares) * cost + (SHARE_COST + part * shares if shares > 1 else 0)
        )

    return min((time(shares), shares) for shares in range(1, max(1, min(depth, sms // tiles)) + 1))


def plan_for(x: Tensor, q: QuantizedWeight, batch_invariant: bool) -> tuple[HopperPlan, Kind] | None:
    """The plan with which `linear` computes x @ W.T, or None where this kernel is not for them: it is for every format,
    x of 16 bits, K % 64 == 0 (K % 32 where 32 weights share a scale), on Hopper."""
    kind = kind_of(x, q)
    if kind is None:
        return None
    plan = _plan(len(x), *q.shape, kind.span, x.get_device(), batch_invariant)
    return None if plan is None else (plan, kind)


@lru_cache(4096)
def _plan(m: int, n: int, k: int, span: int, index: int, batch_invariant: bool) -> HopperPlan | None:
    return hopper_plan(m, n, k, span, facts_of(index), batch_invariant)


def linear(x: Tensor, q: QuantizedWeight, bias: Tensor | None, out: Tensor, plan: HopperPlan, kind: Kind) -> None:
    """out = x @ W.T + bias; x [M, K] and out [M, N], contiguous, on the current device."""
    (m, k), n, index = x.shape, out.shape[1], x.get_device()
    row_tiles, column_tiles, units = -(-n // plan.rows), -(-m // plan.width), -(-k // DEPTH)
    arrange, multiply = prepared(
        (index, row_tiles, column_tiles, units, kind, plan),
        lambda: _launches(index, row_tiles, column_tiles, units, kind, plan),
    )
    stream = torch._C._cuda_getCurrentRawStream(index)
    partial = 2 * plan.ctas * plan.rows * plan.width * 4 if plan.ctas != row_tiles * column_tiles else 0
    arranged = column_tiles * units * plan.width * DEPTH * 2
    workspace = torch.empty(partial + arranged, dtype=torch.uint8, device=x.device)
    at, packed = workspace.data_ptr(), q.packed.data_ptr()
    code, absmax, offset = q.nested[:3] if q.nested else (q.scale, q.scale, q.scale)
    counters = _counters(row_tiles * column_tiles * plan.groups * 4, index, stream)
    fields = (
        _map(packed, n, k, plan.rows), q.scale.data_ptr(), code.data_ptr(), absmax.data_ptr(), offset.data_ptr(),
        x.data_ptr(), 0 if bias is None else bias.data_ptr(),
        out.data_ptr(), at + partial, at, counters.data_ptr(),
        m, n, k, row_tiles, column_tiles, units, *UNIT_AND_CODEBOOK[q.format, x.dtype],
    )  # fmt: skip
    arrange(stream, *fields)
    multiply(stream, *fields)


def _counters(count: int, index: int, stream: int) -> Tensor:
    """Zeros that the kernel leaves as zeros. Launches of one stream follow each other and may share them; those of a
    CUDA graph may be replayed beside anything, and get their own."""
    if torch.cuda.is_current_stream_capturing():
        return torch.zeros(count, dtype=torch.int32, device=torch.device("cuda", index))
    known = _counters_of.get((index, stream))
    if known is None or len(known) < count:
        known = torch.zeros(max(count, 1 << 14), dtype=torch.int32, device=torch.device("cuda", index))
        _counters_of[index, stream] = known
    return known


_counters_of: dict[tuple[int, int], Tensor] = {}


_LAYOUT = "128s10Q6If64s20x"  # a structure aligned to 64 bytes


def _launches(
    index: int, row_tiles: int, column_tiles: int, units: int, kind: Kind, plan: HopperPlan
) -> tuple[Launch, Launch]:
    arrange, multiply = _functions(index, kind, replace(plan, ctas=0))
    pieces = column_tiles * units * plan.width * DEPTH // 8
    return (
        Launch(arrange, _LAYOUT, (-(-pieces // 128), 1), 128, overlaps=True),
        Launch(multiply, _LAYOUT, (plan.ctas, 1), plan.threads, plan.shared_bytes(kind.span), overlaps=True),
    )


@lru_cache(4096)
def _map(packed: int, n: int, k: int, rows: int) -> bytes:
    """The tensor map of W's bytes [n, k / 2] in boxes of `rows` by 128 bytes, 128-byte swizzle."""
    space = ctypes.create_string_buffer(192)
    aligned = ctypes.addressof(space) + -ctypes.addressof(space) % 64
    check(
        driver().cuTensorMapEncodeTiled(
            ctypes.c_void_p(aligned), 0, 2, ctypes.c_void_p(packed),  # 0: bytes
            (ctypes.c_uint64 * 2)(k // 2, n), (ctypes.c_uint64 * 1)(k // 2),
            (ctypes.c_uint32 * 2)(DEPTH // 2, rows), (ctypes.c_uint32 * 2)(1, 1),
            0, 3, 3, 0,  # no interleaving, 128-byte swizzle, 256 bytes at a time into L2, zeros out of bounds
        )
    )  # fmt: skip
    return ctypes.string_at(aligned, 128)


def macros(kind: Kind, plan: HopperPlan) -> dict[str, int]:
    """What hopper.cu is compiled with."""
    fetching, multiplying = REGISTERS[plan.groups]
    return {
        "WIDTH": plan.width, "GROUPS": plan.groups, "STAGES": plan.stages, "SPAN": kind.span,
        "SCALES": ("nested", "float32", "float16", "bfloat16").index(kind.scales), "LOG_BLOCK": kind.log_block,
        "VECTOR": int(kind.vector), "HIGH_FIRST": int(kind.high_first), "FP16": int(kind.dtype == torch.float16),
        "SHARED_BYTES": plan.shared_bytes(kind.span), "FETCH_REGISTERS": fetching, "MULTIPLY_REGISTERS": multiplying,
    }  # fmt: skip


def source() -> str:
    folder = Path(__file__).parent
    return read_sources(folder / "barriers.cuh", folder / "hopper.cu")


@cache
def _functions(index: int, kind: Kind, plan: HopperPlan) -> tuple[ctypes.c_void_p, ctypes.c_void_p]:
    shared = plan.shared_bytes(kind.span)
    code = cubin(source(), "90a", macros(kind, plan))
    arrange, multiply = load(code, {"arrange": 0, "multiply": shared}, carveout=100)
    return arrange, multiply
