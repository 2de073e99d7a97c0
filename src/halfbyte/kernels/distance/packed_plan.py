"""Which tile the packed distance kernels take, and what they can take at all: pure functions of sizes and format."""

from __future__ import annotations

from dataclasses import dataclass

from halfbyte.formats.weight import QuantizedWeight
from halfbyte.kernels.distance.plan import power_of_two

WORDS = 4  # of 32 bits, that a thread reads at once
LOAD = 32  # weights in them; no scale block is smaller


@dataclass(frozen=True)
class PackedPlan:
    """rows: candidates a program. parts: that a tile is wide, one a thread and row. loads: of 32 weights, to a part.
    warps: of a program."""

    rows: int
    parts: int
    loads: int
    warps: int


def is_valid(plan: PackedPlan, dims: int, block_size: int) -> bool:
    """True if the kernels compute the right thing under `plan`."""
    sides = (plan.rows, plan.parts, plan.loads, plan.warps)
    powers = all(side > 0 and side & (side - 1) == 0 for side in sides)
    return powers and plan.loads in (1, 2) and block_size % (LOAD * plan.loads) == 0 and dims % block_size == 0


def has_whole_blocks(q: QuantizedWeight) -> bool:
    """Whether no scale block reaches from one row into the next."""
    return len(q.shape) == 2 and q.shape[1] > 0 and q.shape[1] % q.block_size == 0


def supports(q: QuantizedWeight) -> bool:
    """Whether rows are whole scale blocks, places fit into 32 bits, and bytes can be read 16 at a time."""
    return has_whole_blocks(q) and q.numel // LOAD < 2**31 - 2**16 and q.packed.data_ptr() % 16 == 0


def plan(dims: int, block_size: int) -> PackedPlan:
    """The plan for candidates of `dims`."""
    loads = 2 if block_size >= 2 * LOAD else 1
    return PackedPlan(16, min(32, power_of_two(dims // (LOAD * loads))), loads, 4)
