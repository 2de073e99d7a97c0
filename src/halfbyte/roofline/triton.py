"""Kernels that do nothing but move bytes: read, write and copy one buffer, as often as told.

Layout: `blocks` programs share the words of a buffer, int32 [words], in tiles of TILE words, one after another. A
buffer is passed over `passes` times within one launch, past the first-level cache, so that a small buffer shows what
the cache behind it gives and no launch is timed with it. Bytes: 4 * words * passes read, written, or both. Flops: none.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

TILE = 4096
WARPS = 8
PROGRAMS = 8  # a multiprocessor


@triton.jit
def read_kernel(source, sink, words, passes, TILE: tl.constexpr):
    lanes = tl.arange(0, TILE)
    seen = tl.zeros((TILE,), tl.int32)
    for _ in range(passes):
        for start in range(tl.program_id(0).to(tl.int64) * TILE, words, tl.num_programs(0) * TILE):
            seen |= tl.load(source + start + lanes, cache_modifier=".cg")
    # Never true of the buffers that are read, which the compiler cannot know.
    tl.store(sink + lanes, seen, mask=seen == -1)


@triton.jit
def write_kernel(target, words, passes, TILE: tl.constexpr):
    lanes = tl.arange(0, TILE)
    for turn in range(passes):
        for start in range(tl.program_id(0).to(tl.int64) * TILE, words, tl.num_programs(0) * TILE):
            tl.store(target + start + lanes, lanes + turn)


@triton.jit
def copy_kernel(source, target, words, passes, TILE: tl.constexpr):
    lanes = tl.arange(0, TILE)
    for _ in range(passes):
        for start in range(tl.program_id(0).to(tl.int64) * TILE, words, tl.num_programs(0) * TILE):
            tl.store(target + start + lanes, tl.load(source + start + lanes, cache_modifier=".cg"))


def read(source: torch.Tensor, sink: torch.Tensor, passes: int = 1, blocks: int = 0) -> None:
    """Read `source`, int32 with no bit 31, whose number of elements is a multiple of TILE. sink: int32 [TILE]."""
    read_kernel[_grid(source, blocks)](source, sink, _words(source), passes, TILE, num_warps=WARPS)


def write(target: torch.Tensor, passes: int = 1, blocks: int = 0) -> None:
    """Write all of `target`, int32, whose number of elements is a multiple of TILE."""
    write_kernel[_grid(target, blocks)](target, _words(target), passes, TILE, num_warps=WARPS)


def copy(source: torch.Tensor, target: torch.Tensor, passes: int = 1, blocks: int = 0) -> None:
    """Copy `source` into `target`, both int32 of one size, a multiple of TILE."""
    if target.numel() != source.numel():
        raise ValueError(f"the target has {target.numel()} elements and the source {source.numel()}; make them equal")
    copy_kernel[_grid(source, blocks)](source, target, _words(source), passes, TILE, num_warps=WARPS)


def _words(buffer: torch.Tensor) -> int:
    if buffer.dtype != torch.int32 or buffer.numel() % TILE:
        raise ValueError(f"{buffer.numel()} elements of {buffer.dtype}; a multiple of {TILE} of int32 is accepted")
    return buffer.numel()


def _grid(buffer: torch.Tensor, blocks: int) -> tuple[int]:
    if not blocks:
        blocks = PROGRAMS * torch.cuda.get_device_properties(buffer.device).multi_processor_count
    return (max(1, min(blocks, buffer.numel() // TILE)),)
