"""What stands between one token of `generate` and the next: which one is chosen, what follows from it, which tokens the
next step may look at, the angles of its position, and its embedding.

Bytes: the logits once, and a mask. Launches are what this costs, and a step of a small model is short: torch takes some
thirty, these are five, each of which begins while the one ahead ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
import triton
import triton.language as tl
from torch import Tensor

from halfbyte.kernels.common.device import DeviceProperties
from halfbyte.kernels.common.launch import launch
from halfbyte.kernels.common.overlap import SINCE, let_the_next_begin, wait_for_the_one_ahead

BLOCK = 4096  # logits of a program, or places of a mask
ROW_BLOCK = 1024  # numbers of a row of an embedding
AT_ONCE = 1024  # of what the programs have found, in one step of the one that puts tokens
LARGEST = 0x7FFFFFFF


@triton.jit
def argmax_kernel(
    found, scores, noise, columns, stride, parts,
    DIVIDES: tl.constexpr, BLOCK: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Program i: part i % parts of row i // parts. Writes one number for the largest of it: how large that is, in its
    upper half, and how early, in its lower half. DIVIDES: scores are divided by noise first."""
    row = tl.program_id(0) // parts
    column = tl.program_id(0) % parts * BLOCK + tl.arange(0, BLOCK)
    if OVERLAPS:
        wait_for_the_one_ahead()
        let_the_next_begin()
    at = row.to(tl.int64) * stride + column
    value = tl.load(scores + at, column < columns, float("-inf")).to(tl.float32)
    if DIVIDES:
        value = tl.div_rn(value, tl.load(noise + at, column < columns, 1.0))
    bits = tl.where(value == 0, 0.0, value).to(tl.int32, bitcast=True)  # both zeros are one number
    order = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    order = tl.where(value != value, 0x7FFFFFFF, order)  # as in torch, what is no number is the largest
    both = (order.to(tl.int64) << 32) + (0x7FFFFFFF - column).to(tl.int64)
    tl.store(found + tl.program_id(0), tl.max(both, axis=0))


@triton.jit
def put_argmax_kernel(
    found, ids, length, positions, fed, unfinished, pad, report, ends, broken, real, rows, parts, width,
    ENDS: tl.constexpr, BREAKS: tl.constexpr, BROKEN: tl.constexpr, ROWS: tl.constexpr, PARTS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    """One program: it is done with all rows before it counts the length up. BREAKS: any real row that is broken makes
    BROKEN of the report's last number."""
    if OVERLAPS:
        wait_for_the_one_ahead()
        let_the_next_begin()
    place = tl.load(length)
    padding = tl.load(pad)
    part = tl.arange(0, PARTS)[None, :]
    goes_on = tl.zeros((1,), tl.int32)
    breaks = tl.zeros((1,), tl.int32)
    for first in range(0, rows, ROWS):
        row = first + tl.arange(0, ROWS)
        exists = row < rows
        both = tl.load(
            found + row[:, None] * parts + part, exists[:, None] & (part < parts), -0x7FFFFFFFFFFFFFFF
        )  # fmt: skip
        token = 0x7FFFFFFF - (tl.max(both, axis=1) & 0xFFFFFFFF)
        open_ = tl.load(unfinished + row, exists, 0) != 0
        if ENDS > 0:
            token = tl.where(open_, token, padding)
            for end in tl.static_range(ENDS):
                open_ = open_ & (token != tl.load(ends + end))
            tl.store(unfinished + row, open_, exists)
        tl.store(ids + row.to(tl.int64) * width + place, token, exists & (place < width))
        tl.store(fed + row, token, exists)
        tl.store(report + row, token, exists)
        tl.store(positions + row, tl.load(positions + row, exists, 0) + 1, exists)
        goes_on = tl.maximum(goes_on, tl.max((open_ & exists).to(tl.int32), axis=0))
        if BREAKS:
            is_broken = (tl.load(broken + row, exists, 0) != 0) & (tl.load(real + row, exists, 0) != 0)
            breaks = tl.maximum(breaks, tl.max(is_broken.to(tl.int32), axis=0))
    tl.store(report + rows + tl.arange(0, 1), tl.where(breaks != 0, BROKEN, goes_on).to(tl.int64))
    tl.debug_barrier()  # every warp has read the length
    tl.store(length, place + 1)


@triton.jit
def step_masks_kernel(
    slots, full, sliding, length, shift, slides, lengths, visible, layers, rows, tokens, window, blocks,
    FULL: tl.constexpr, SLIDING: tl.constexpr, LAYERS: tl.constexpr, BLOCK: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Program i: block i % blocks of the masks of row i // blocks. The first one also finds where layers put the token:
    at slots[2 * layer]."""
    row = tl.program_id(0) // blocks
    at = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    if OVERLAPS:
        wait_for_the_one_ahead()
        let_the_next_begin()
    place = tl.load(length) - 1
    moved = tl.load(shift)
    if tl.program_id(0) == 0:
        layer = tl.arange(0, LAYERS)
        here = layer < layers
        slot = place - tl.load(slides + layer, here, 0) * moved
        tl.store(slots + 2 * layer, slot % tl.load(lengths + layer, here, 1), here)
    seen = visible + row.to(tl.int64) * tokens
    if FULL:
        shown = tl.load(seen + at, at < tokens, 0) != 0
        tl.store(full + row.to(tl.int64) * tokens + at, shown & (at <= place), at < tokens)
    if SLIDING:
        # The newest token that such a slot has had: slot (p - shift) % W has the token of position p.
        since = (place - moved - at) % window
        held = place - tl.where(since < 0, since + window, since)
        shown = tl.load(seen + held, (at < window) & (held >= 0) & (held < tokens), 0) != 0
        tl.store(sliding + row.to(tl.int64) * window + at, shown, at < window)


@triton.jit
def angles_kernel(
    cosines, sines, positions, frequencies, half,
    FACTOR: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Program i: token i."""
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    if OVERLAPS:
        wait_for_the_one_ahead()
        let_the_next_begin()
    position = tl.load(positions + tl.program_id(0)).to(tl.float32)
    angle = position * tl.load(frequencies + column % half, inside, 0)
    at = tl.program_id(0) * WIDTH + column
    tl.store(cosines + at, tl.cos(angle) * FACTOR, inside)
    tl.store(sines + at, tl.sin(angle) * FACTOR, inside)


@triton.jit
def embedding_kernel(
    found, ids, weight, rows, width, blocks, BLOCK: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Program i: block i % blocks of the row of token i // blocks; NaN where there is no such row."""
    token = tl.program_id(0) // blocks
    column = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    if OVERLAPS:
        wait_for_the_one_ahead()
        let_the_next_begin()
    row = tl.load(ids + token).to(tl.int64)
    exists = (row >= 0) & (row < rows)
    value = tl.load(weight + row * width + column, exists & (column < width), float("nan"))
    tl.store(found + token.to(tl.int64) * width + column, value, column < width)


def supports(scores: Tensor) -> bool:
    """Whether `put_argmax` takes the scores of tokens, [rows, tokens], on the current device."""
    return (
        scores.dtype in (torch.float16, torch.bfloat16, torch.float32)
        and scores.dim() == 2
        and scores.stride(1) == 1
        and 0 < scores.shape[1] < LARGEST
        and scores.shape[0] > 0
        and scores.numel() < LARGEST * BLOCK
    )


class Rows(Protocol):
    """What a captured step reads and writes (models/loop.py): ids int64 [rows, room], of which `length` are
    there; positions and fed, what the next step is given, int64 [rows, 1]; unfinished and real bool [rows]; pad int64
    without dimensions; report int64 [rows + 1], the tokens and whether any row goes on. All contiguous."""

    ids: Tensor
    length: Tensor
    positions: Tensor
    fed: Tensor
    unfinished: Tensor
    real: Tensor
    pad: Tensor
    report: Tensor


def put_argmax(
    scores: Tensor, to: Rows, ends: Tensor | None, noise: Tensor | None = None, broken: tuple[Tensor, int] | None = None
) -> None:
    """The likeliest token of each row, as torch.argmax finds it, behind the others, and all that follows from it.

    scores [rows, tokens]; noise, fp32 and of their strides, divides them first. ends: int64, the tokens that end a row,
    which gets `pad` from then on; or None. broken: bool [rows], and what the report says at its end if any of them is
    real. On the current device.
    """
    (rows, columns), index = scores.shape, scores.get_device()
    parts = -(-columns // BLOCK)
    found = torch.empty((rows, parts), dtype=torch.int64, device=scores.device)

    def configure_argmax(properties: DeviceProperties) -> tuple[int, dict[str, Any]]:
        constants = {"DIVIDES": noise is not None, "BLOCK": BLOCK, "OVERLAPS": properties.ptx >= SINCE}
        return rows * parts, constants | {"num_warps": 8}

    stride = 0 if rows == 1 else scores.stride(0)
    given = (found, scores, scores if noise is None else noise, columns, stride, parts)
    launch(argmax_kernel, index, given, (scores.dtype, noise is None, rows, parts), configure_argmax)

    count = 0 if ends is None else len(ends)
    across = triton.next_power_of_2(parts)
    down = max(1, min(triton.next_power_of_2(rows), AT_ONCE // across))
    flags, instead = (to.real, 0) if broken is None else broken

    def configure_put(properties: DeviceProperties) -> tuple[int, dict[str, Any]]:
        constants = {"ENDS": count, "BREAKS": broken is not None, "BROKEN": instead, "ROWS": down, "PARTS": across}
        return 1, constants | {"OVERLAPS": properties.ptx >= SINCE, "num_warps": 4}

    arguments = (
        found, to.ids, to.length, to.positions, to.fed, to.unfinished, to.pad, to.report,
        to.pad if ends is None else ends, flags, to.real, rows, parts, to.ids.shape[1],
    )  # fmt: skip
    launch(put_argmax_kernel, index, arguments, (count, broken is None, instead, down, across), configure_put)


def step_masks(
    slots: Tensor, masks: Sequence[Tensor | None], length: Tensor, shift: Tensor, slides: Tensor, lengths: Tensor,
    visible: Tensor,
) -> None:  # fmt: skip
    """What a step needs to know of its token, the last of `length`: where layers put it, and what it may look at.

    slots: int64 [layers], every second number, which become (place - slides * shift) % lengths. slides and lengths:
    int64 [layers], contiguous. masks: bool [rows, tokens] of layers that keep all, and [rows, window] of layers with a
    window, in whose slots tokens take turns; either may be None. visible: bool [rows, tokens], false for padding.
    length and shift: int64 without dimensions. All on the current device.
    """
    full, sliding = masks
    rows, tokens = visible.shape
    window = 1 if sliding is None else sliding.shape[1]
    longest = max(tokens if full is not None else 1, window)
    blocks = -(-longest // BLOCK)
    block = min(BLOCK, triton.next_power_of_2(longest))
    layers = len(slides)

    def configure(properties: DeviceProperties) -> tuple[int, dict[str, Any]]:
        constants = {"FULL": full is not None, "SLIDING": sliding is not None, "BLOCK": block}
        constants |= {"LAYERS": triton.next_power_of_2(layers), "OVERLAPS": properties.ptx >= SINCE}
        return rows * blocks, constants | {"num_warps": 4}

    arguments = (
        slots, visible if full is None else full, visible if sliding is None else sliding, length, shift, slides,
        lengths, visible, layers, rows, tokens, window, blocks,
    )  # fmt: skip
    key = (full is None, sliding is None, block, layers, rows)
    launch(step_masks_kernel, visible.get_device(), arguments, key, configure)


def angles(
    positions: Tensor, frequencies: Tensor, factor: float, width: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """The cosines and sines [texts, new, width] of positions, int64 [texts, new], times frequencies, fp32 [width] or
    [width / 2], which then come twice; all of that times the factor. Contiguous, on the current device."""
    shape = (*positions.shape, width)
    found = [torch.empty(shape, dtype=dtype, device=positions.device) for _ in range(2)]

    def configure(properties: DeviceProperties) -> tuple[int, dict[str, Any]]:
        constants = {"FACTOR": factor, "WIDTH": width, "BLOCK": triton.next_power_of_2(width)}
        return positions.numel(), constants | {"OVERLAPS": properties.ptx >= SINCE, "num_warps": 1}

    key = (dtype, positions.numel(), factor, width)
    arguments = (*found, positions, frequencies, len(frequencies))
    launch(angles_kernel, positions.get_device(), arguments, key, configure)
    return found[0], found[1]


def embedding(ids: Tensor, weight: Tensor) -> Tensor:
    """The rows of weight [rows, width], of floating-point numbers, that ids of integers [...] name: [..., width]. Both
    contiguous, on the current device."""
    rows, width = weight.shape
    found = weight.new_empty((*ids.shape, width))
    block = min(ROW_BLOCK, triton.next_power_of_2(width))
    blocks = -(-width // block)

    def configure(properties: DeviceProperties) -> tuple[int, dict[str, Any]]:
        return ids.numel() * blocks, {"BLOCK": block, "OVERLAPS": properties.ptx >= SINCE, "num_warps": 4}

    key = (ids.dtype, weight.dtype, ids.numel(), rows, width)
    launch(embedding_kernel, weight.get_device(), (found, ids, weight, rows, width, blocks), key, configure)
    return found
