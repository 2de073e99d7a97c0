"""How `attend` is cut into programs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from halfbyte.kernels.common.device import DeviceProperties

MOST_NEW = 8  # new tokens of a text
FEW_PARTS, MOST_PARTS = 16, 128
LEAST_ROWS = 16  # of a product on tensor cores
MOST_ROWS = 64  # of one program: its sums are held in registers
OVERHEAD = 1.5  # what a program takes beside its blocks, in blocks: its start, its first loads, its sums
SPLITTING = 3  # what adding up the parts of a head takes, likewise
MOST_RESIDENT = 1  # programs of a multiprocessor at once; more make more parts, which took longer on an H200
TENSOR_CORES = 80  # the first target whose tensor cores Triton uses; before it, more than LEAST_ROWS are spilled
OTHER_SHARED = 2048  # bytes that a program takes beside queries and the blocks on their way, about
RESERVED = 1024  # bytes of shared memory that the driver takes of each program


@dataclass(frozen=True)
class AttentionPlan:
    """block: tokens at once. parts: the most programs that share the tokens of a head. least: blocks that a part is
    worth. rows: of a program's product. warps, stages: Triton's options. one_launch: the last part of a head to end
    adds the parts up; else a second kernel does."""

    block: int
    parts: int
    rows: int = 16
    warps: int = 4
    stages: int = 3
    least: int = 1
    one_launch: bool = True

    def tiles(self, rows: int) -> int:
        """Programs that share one part of a head of keys, which has `rows` rows of queries."""
        return -(-rows // self.rows)


@lru_cache(1 << 14)
def plan_for(properties: DeviceProperties, heads: int, tokens: int, size: int, rows: int) -> AttentionPlan:
    """heads: of keys, of all texts. tokens: of the cache, as long as it can be. size: the larger of a head's. rows:
    heads that share keys, times new tokens.

    As many programs as the GPU holds at once, or several times as many: a last round that is mostly empty costs as much
    as a full one.
    """
    tensor_cores = properties.kind != "cuda" or properties.capability >= TENSOR_CORES
    tile = min(max(LEAST_ROWS, _power(rows)), MOST_ROWS if tensor_cores else LEAST_ROWS)
    width = max(16, _power(size))
    block = 64 if width <= 128 and tensor_cores else 32
    stage = 4 * block * width  # bytes, of keys and of values
    other = 2 * tile * width + OTHER_SHARED + RESERVED
    shared = properties.shared_memory + RESERVED
    # From sm_90 on, products of 64 rows read shared memory while they run, and take a block more.
    ahead = 1 if tile < 64 or properties.ptx < 90 else 0
    stages = 3 if ahead and 2 * (2 * stage + other) <= shared else 2
    resident = max(1, min(MOST_RESIDENT, shared // ((stages - ahead) * stage + other)))
    programs = heads * -(-rows // tile)
    blocks = -(-tokens // block)

    def cost(parts: int) -> float:
        rounds = -(-programs * parts // (resident * properties.sms))
        return rounds * (-(-blocks // parts) + OVERHEAD) + (SPLITTING if parts > 1 else 0)

    parts = min(range(1, min(blocks, MOST_PARTS) + 1), key=cost)
    if programs * parts > resident * properties.sms:
        stages = 2  # so that several programs share a multiprocessor
    return AttentionPlan(block, parts, tile, 4 if tile * width <= 8192 else 8, stages)


def _power(number: int) -> int:
    """The power of two from `number` on."""
    return 1 << (number - 1).bit_length()
