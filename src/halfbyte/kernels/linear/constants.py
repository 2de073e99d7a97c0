"""What planners know of instructions."""

from __future__ import annotations

MMA_FLOPS = 2 * 16 * 8 * 16  # of one mma.sync, m16n8k16
