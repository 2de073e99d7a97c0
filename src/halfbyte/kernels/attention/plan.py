"""How `attend` is cut into programs."""

from __future__ import annotations

from dataclasses import dataclass

from halfbyte.kernels.common.device import DeviceFacts

MOST_PARTS = 64


@dataclass(frozen=True)
class AttentionPlan:
    """block: tokens at once. blocks: of one program. warps, stages: Triton's options."""

    block: int
    blocks: int
    warps: int
    stages: int

    def parts(self, tokens: int) -> int:
        return -(-tokens // (self.block * self.blocks))


def plan_for(facts: DeviceFacts, heads: int, tokens: int, size: int) -> AttentionPlan:
    """heads: of keys, of all texts. tokens: of the cache. size: the larger of a head's.

    Four programs a multiprocessor, if each has tokens enough to be worth a part; measured on an H200. Where heads alone
    fill the GPU, a part is worth it from four blocks on.
    """
    block = 64 if size <= 128 else 32
    blocks = -(-tokens // block)
    parts = max(1, min(4 * facts.sms // heads, MOST_PARTS, blocks if heads < facts.sms else blocks // 4))
    return AttentionPlan(block, -(-blocks // parts), 4, 2)
