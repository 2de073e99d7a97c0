"""The CUDA product of a few rows of x with one weight, or several: how a shape of kernel.cu is launched."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from halfbyte.formats.weight import QuantizedWeight
from halfbyte.kernels.common.device import DeviceFacts, facts_of
from halfbyte.kernels.common.driver import Arguments, Launch, kernels, prepared
from halfbyte.kernels.common.nvrtc import Constant, Variant, read_source
from halfbyte.kernels.common.tensor_map import tensor_map
from halfbyte.kernels.linear.codebook import unit_and_codebook
from halfbyte.kernels.linear.constants import TYPES
from halfbyte.kernels.linear.operands import Addresses, Operands, operands_of
from halfbyte.kernels.linear.ready import GroupProduct, Product, run
from halfbyte.kernels.linear.sm90_decode.plan import (
    BLOCK,
    ROWS,
    DecodePlan,
    Scales,
    decode_plan,
    scale_chunk,
    weight_chunk,
)

MOST_PARTS = 3  # weights of one launch: q, k and v


def find_plan(m: int, operands: Operands, facts: DeviceFacts, batch_invariant: bool) -> DecodePlan | None:
    """The plan for x [m, K], or None where this kernel is not for such operands.

    It is for every format in blocks of 64 or multiples, x of 16 bits and up to 64 rows, shapes that `is_valid`
    describes. With batch_invariant it takes any number of rows, eight at a time: a row's sums are then always made in
    the same order.
    """
    o = operands
    if not _takes(o):
        return None
    return decode_plan(8 if batch_invariant else m, o.n, o.k, scales_of(o), facts)


def find_group_plan(m: int, group: Sequence[Operands], facts: DeviceFacts) -> DecodePlan | None:
    """The plan for x [m, K] and several weights in one launch, or None where this kernel is not for them."""
    first = group[0]
    if not 1 < len(group) <= MOST_PARTS or not all(map(_takes, group)):
        return None
    alike = {(o.k, o.format, o.nested, scales_of(o)) for o in group}
    if len(alike) > 1 or any(o.n % 4 or o.n == 0 for o in group):
        return None
    plan = decode_plan(m, ROWS * sum(map(_tiles, group)), first.k, scales_of(first), facts, len(group))
    return plan if plan is not None and plan.batches == 1 else None


def _takes(o: Operands) -> bool:
    if o.dtype not in (torch.float16, torch.bfloat16) or o.block_size % BLOCK or not o.has_usual_nesting:
        return False
    return min(o.align_packed, o.align_scale, o.align_x, o.align_bias) >= 16


def scales_of(operands: Operands) -> Scales:
    return Scales(torch.uint8 if operands.nested else operands.scale, operands.block_size)


def _tiles(operands: Operands) -> int:
    return -(-operands.n // ROWS)


def plan_for(x: Tensor, q: QuantizedWeight, bias: Tensor | None, batch_invariant: bool) -> DecodePlan | None:
    """The plan for these very tensors."""
    return find_plan(len(x), operands_of(x, q, bias), facts_of(x.get_device()), batch_invariant)


def linear(x: Tensor, q: QuantizedWeight, bias: Tensor | None, out: Tensor, plan: DecodePlan) -> None:
    """out = x @ W.T + bias, as many rows at a time as `plan` takes.

    x [M, K] and out [M, N], contiguous, aligned to 16 bytes, on the current device; the plan is from `plan_for`.
    """
    run(product, x, q, bias, out, plan)


def product(device: torch.device, m: int, operands: Operands, weight: Addresses, plan: DecodePlan) -> Product:
    """The product with a weight on the current device, of any number of rows; with batches, of as many as there is one
    for each at least."""
    launch, arguments = _prepare(device.index, (operands,), (weight,), plan)
    step = 8 * plan.columns * plan.batches
    too_few = step - 8 * plan.columns  # a batch without rows expects nothing of its cluster, and may lose count
    row, out_row = operands.k * operands.dtype.itemsize, operands.n * operands.dtype.itemsize

    def multiply(stream: int, x: int, bias: int, out: int, m: int) -> None:
        if m and (m - 1) % step < too_few:
            raise ValueError(f"got {m} rows of x: this plan is for {too_few + 1} to {step} at a time ({plan})")
        for first in range(0, m, step):
            arguments.set(x + first * row, bias, out + first * out_row, min(step, m - first))
            launch(stream, arguments.parameters)

    return multiply


def group_product(
    device: torch.device, m: int, group: Sequence[Operands], weights: Sequence[Addresses], plan: DecodePlan
) -> GroupProduct:
    """The products of m rows of x, no more than the plan's, with several weights on the current device."""
    launch, arguments = _prepare(device.index, group, weights, plan)

    def multiply(stream: int, x: int, results: Iterable[int]) -> None:
        arguments.set(x, *results, m)
        launch(stream, arguments.parameters)

    return multiply


def _prepare(
    index: int, group: Sequence[Operands], weights: Sequence[Addresses], plan: DecodePlan
) -> tuple[Launch, Arguments]:
    """One compiled shape of kernel.cu with its grid, and its arguments."""
    o, parts, tiles = operands_of_group(group), len(group), [_tiles(o) for o in group]
    compiled = variant(o, plan, facts_of(index))
    launch = prepared(("decode", index, sum(tiles), compiled), lambda: _launch(index, o, sum(tiles), plan, compiled))
    firsts = [sum(tiles[:part]) for part in range(parts)]
    sizes = (*(o.n for o in group), *firsts, sum(tiles), o.k)
    described = chain.from_iterable(map(partial(_described, plan), group, weights))
    return launch, Arguments(layout(parts), tuple(described), (*sizes, *unit_and_codebook(o.format, o.dtype)))


def _described(plan: DecodePlan, o: Operands, weight: Addresses) -> tuple[Any, ...]:
    """kernel.cu's Weight."""
    packed, scale, *nested = weight
    chunk, scales, blocks = weight_chunk(o.k), scales_of(o), o.k // BLOCK
    box = (chunk, ROWS, plan.blocks // plan.steps * 32 // chunk)
    weights = tensor_map(packed, (chunk, o.n, o.k // 2 // chunk), (o.k // 2, chunk), box)
    scale_map = b""
    if not plan.whole and not plan.offset:
        row = scales.bytes_of(blocks)
        scale_map = tensor_map(scale, (row, o.n), (row,), (scale_chunk(plan, scales), ROWS))
    return weights, scale_map, scale, *nested


def layout(parts: int) -> tuple[str, str, str]:
    """kernel.cu's Arguments: x, then bias and out for each weight, and m change."""
    before, changing, after = parts * "128s128s4Q32x", f"{1 + 2 * parts}QI", f"{2 * parts + 2}If64s"
    return before, changing, after + f"{-struct.calcsize(before + changing + after) % 64}x"


def operands_of_group(group: Sequence[Operands]) -> Operands:
    """What is compiled for one is compiled for all, but for the bias: there is none, or room for each."""
    return replace(group[0], bias=any(o.bias for o in group))


def _launch(index: int, o: Operands, tiles: int, plan: DecodePlan, compiled: Variant) -> Launch:
    shared = plan.shared_bytes(scales_of(o))
    (function,) = kernels(index, compiled, (("decode", shared),))
    launch = Launch(function, (1, plan.cluster), plan.threads, shared, cluster=plan.cluster, overlaps=True)
    most = min(launch.most_clusters(), facts_of(index).sms * plan.resident // plan.cluster)
    launch.set_grid(min(most // plan.batches, tiles), plan.cluster, plan.batches)
    return launch


def variant(operands: Operands, plan: DecodePlan, facts: DeviceFacts) -> Variant:
    """What is compiled for such operands."""
    o = operands
    settings = constants(o.dtype, scales_of(o), o.low_first, o.bias, plan, o.k)
    return Variant.of(source(), target(plan, facts), settings)


def target(plan: DecodePlan, facts: DeviceFacts) -> int | str:
    """What is compiled for: no later GPU than Hopper where registers are handed over."""
    return "90a" if plan.registers else facts.capability


def constants(
    dtype: torch.dtype, scales: Scales, low_first: bool, bias: bool, plan: DecodePlan, k: int
) -> dict[str, Constant]:
    """kernel.cu's Config."""
    return {
        "x": TYPES[dtype], "scale": TYPES[scales.dtype], "low_first": low_first, "bias": bias, "mma_k": 16,
        "m_tiles": plan.columns, "warps": plan.warps, "slice": plan.slice, "stages": plan.stages, "steps": plan.steps,
        "first_stages": plan.first, "sum_buffers": plan.sums, "cluster": plan.cluster, "batches": plan.batches,
        "parts": plan.parts, "reducers": plan.reducers, "resident_ctas": plan.resident, "registers": plan.registers,
        "bulk_scales": plan.whole, "window_scales": plan.offset, "scale_blocks": scales.blocks,
        "joined": plan.together, "chunk": weight_chunk(k), "scale_chunk": scale_chunk(plan, scales),
        "padded": plan.blocks * plan.cluster * BLOCK != k, "shared_bytes": plan.shared_bytes(scales),
    }  # fmt: skip


@cache
def source() -> str:
    path = Path(__file__).with_name("kernel.cu")
    return read_source(path, root=path.parents[1])
