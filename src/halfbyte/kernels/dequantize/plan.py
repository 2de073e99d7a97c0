"""Which tile a dequantize launch takes: a pure function of the sizes and the device, from measurements on an H200.

A program turns `blocks` scale blocks into numbers, four packed bytes a thread at a time. Measured (docs/notebook.md):
tiles of 1 to 4 KB are alike within 3 percent as long as a thread has 8 to 16 bytes in flight. For large weights it pays
to fetch packed bytes into L2 ahead of their use, in bursts, because DRAM loses time whenever it turns between reading
and writing.
"""

from __future__ import annotations

from dataclasses import dataclass

from halfbyte.kernels.common.device import DeviceProperties

TILE_BYTES = 1024  # packed bytes a program: with four warps, 8 bytes in flight a thread
AHEAD_BYTES = 33 << 16  # on an H200: half a microsecond of the whole GPU's work
CHUNK_BYTES = 1 << 14
LARGE = 1 << 24  # weights from which on it pays to fetch ahead, on an H200: what they become fills most of its L2


@dataclass(frozen=True)
class DequantizePlan:
    """blocks: scale blocks a program. warps: its warps. ahead: how many programs ahead packed bytes are fetched into L2
    (0: not at all). chunk: how many programs' bytes one fetch covers."""

    blocks: int
    warps: int
    ahead: int = 0
    chunk: int = 1


def is_valid(
    plan: DequantizePlan, block_size: int, nested_block_size: int | None, properties: DeviceProperties
) -> bool:
    """True if the kernel computes the right thing under `plan`: what planner, tuner and tests all go by."""
    tile = plan.blocks * block_size // 2
    powers = all(value > 0 and value & (value - 1) == 0 for value in (plan.blocks, plan.warps, plan.chunk))
    return (
        powers
        and plan.warps <= 16
        and tile <= 1 << 16
        # One entry of the nested scales serves a whole program, read once.
        and (nested_block_size is None or nested_block_size % plan.blocks == 0)
        and (plan.ahead == 0 or (plan.ahead > 0 and _can_fetch_ahead(properties) and plan.chunk * tile < 1 << 31))
    )


def _can_fetch_ahead(properties: DeviceProperties) -> bool:
    """The bulk prefetch exists from sm_90 on."""
    return properties.kind == "cuda" and properties.capability >= 90


def plan(numel: int, block_size: int, nested_block_size: int | None, properties: DeviceProperties) -> DequantizePlan:
    """The plan for `numel` weights in blocks of `block_size`."""
    blocks = max(1, TILE_BYTES // (block_size // 2))
    if nested_block_size is not None:
        blocks = min(blocks, nested_block_size)
    # Half a microsecond is the faster the memory the more bytes, which come in bursts of 16 KB. A weight that fits into
    # L2 beside what it becomes gains nothing.
    rates = properties.as_fitted.rates
    fetches = numel >= LARGE * rates.l2 and _can_fetch_ahead(properties)
    tile = blocks * block_size // 2
    ahead, chunk = (
        (max(1, int(AHEAD_BYTES * rates.bandwidth) // tile), max(1, CHUNK_BYTES // tile)) if fetches else (0, 1)
    )
    return DequantizePlan(blocks, 4, ahead, chunk)
