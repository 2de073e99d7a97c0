"""How `attend` is cut into programs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from halfbyte.kernels.common.device import DeviceProperties

MOST_PARTS = 64


@dataclass(frozen=True)
class AttentionPlan:
    """block: tokens at once. blocks: of one program. parts: programs of a head, the last of which may find nothing.
    warps, stages: Triton's options."""

    block: int
    blocks: int
    parts: int
    warps: int
    stages: int


@lru_cache(1 << 14)
def plan_for(properties: DeviceProperties, heads: int, tokens: int, size: int) -> AttentionPlan:
    """heads: of keys, of all texts. tokens: of the cache. size: the larger of a head's.

    Four programs a multiprocessor, if each has tokens enough to be worth a part; measured on an H200. Where heads alone
    fill the GPU, a part is worth it from four blocks on. Caches of all lengths make four plans an octave, since each is
    compiled for itself.
    """
    block = 64 if size <= 128 else 32
    blocks = _rounded(-(-tokens // block))
    parts = max(1, min(4 * properties.sms // heads, MOST_PARTS, blocks if heads < properties.sms else blocks // 4))
    each = -(-blocks // parts)
    return AttentionPlan(block, each, -(-blocks // each), 4, 2)


def _rounded(number: int) -> int:
    """The next of 1 to 8, 10, 12, 14, 16, 20, 24, ..."""
    step = 1 << max(0, (number - 1).bit_length() - 3)
    return -(-number // step) * step
