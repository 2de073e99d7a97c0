"""The CUDA product of a few rows of x with one weight, or several: how a shape of kernel.cu is launched."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import replace
from functools import cache, lru_cache, partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch

from halfbyte.formats.weight import QuantizedWeight
from halfbyte.kernels.common import workspace
from halfbyte.kernels.common.cuda_types import TYPES
from halfbyte.kernels.common.device import DeviceProperties, properties_of
from halfbyte.kernels.common.driver import Arguments, Launch, kernels
from halfbyte.kernels.common.nvrtc import Constant, Variant, read_source
from halfbyte.kernels.common.tensor_map import tensor_map
from halfbyte.kernels.common.thread_cache import ThreadCache
from halfbyte.kernels.linear.codebook import unit_and_codebook
from halfbyte.kernels.linear.fusion import ALONE, Fusion
from halfbyte.kernels.linear.kernel import CombinedProduct, FusedProduct, GroupProduct, Product, RoutedProduct
from halfbyte.kernels.linear.problem import ALIGNMENT, Addresses, Problem
from halfbyte.kernels.linear.sm90_decode.plan import (
    BLOCK,
    ROWS,
    DecodePlan,
    Scales,
    computing,
    decode_plan,
    scale_chunk,
    weight_chunk,
)
from halfbyte.kernels.linear.sm90_decode.routed import Kind, routed_plan

NAME = "sm90_decode"
MOST_PARTS = 3  # weights of one launch: q, k and v
SUMS = "5QIIf12x"  # Combining in work.cuh
launches: ThreadCache[Hashable, Launch] = ThreadCache()


def plan(m: int, problem: Problem, properties: DeviceProperties, batch_invariant: bool) -> DecodePlan | None:
    """The plan for x [m, K], or None where this kernel does not support the problem.

    It supports every format in blocks of 64 or multiples, exponents of 32 weights with x in bf16, up to 64 rows of x in
    16 bits, and shapes that `is_valid` describes. With batch_invariant it takes any number of rows, eight in a launch:
    a row's sums are then always made in the same order.
    """
    o = problem
    if not _supports(o):
        return None
    if not batch_invariant:
        return computing(decode_plan(m, o.n, o.k, scales_of(o), properties), o)
    found = computing(decode_plan(8, o.n, o.k, scales_of(o), properties), o)
    return None if found is None else replace(found, microseconds=-(-m // 8) * found.microseconds)


def plan_group(m: int, group: Sequence[Problem], properties: DeviceProperties) -> DecodePlan | None:
    """The plan for x [m, K] and several weights in one launch, or None where this kernel does not support them."""
    return plan_fused(m, group, ALONE, properties) if len(group) > 1 else None


def plan_fused(m: int, group: Sequence[Problem], fusion: Fusion, properties: DeviceProperties) -> DecodePlan | None:
    """The plan for x [m, K] and one or several weights in one launch with what is fused, or None where this kernel does
    not support it. With an activation the group is gate and up; a residual is added to a single weight's product."""
    first = group[0]
    if not 1 <= len(group) <= MOST_PARTS or not all(map(_supports, group)):
        return None
    if fusion.norm is not None and fusion.norm[1] not in (0.0, 1.0):  # what its weights count from
        return None
    alike = {(o.k, o.format, o.nested, scales_of(o)) for o in group}
    if len(alike) > 1 or any(o.n % 4 or o.n == 0 for o in group):
        return None
    assert not fusion.activation or (len(group) == 2 and group[0].n == group[1].n), "gate and up are of one size"
    assert fusion.residual is None or len(group) == 1, "one product is added to what there is"
    n = first.n if len(group) == 1 else ROWS * sum(map(_tiles, group))
    found = computing(decode_plan(m, n, first.k, scales_of(first), properties, len(group), fusion), first)
    return found if found is not None and (found.batches == 1 or len(group) == 1) else None


def _supports(o: Problem) -> bool:
    if o.dtype not in (torch.float16, torch.bfloat16) or not scales_of(o).are_known:
        return False
    if o.has_exponents:  # whose range is that of bf16
        if o.dtype is torch.float16:
            return False
    elif not (o.has_known_scales and o.has_usual_nesting):
        return False
    return min(o.align_packed, o.align_scale) >= ALIGNMENT


def scales_of(problem: Problem) -> Scales:
    return Scales(problem.scale, problem.block_size, problem.has_exponents)


def _tiles(problem: Problem) -> int:
    return -(-problem.n // ROWS)


def bind(device: torch.device, m: int, problem: Problem, weight: Addresses, plan: DecodePlan) -> Product:
    """The product with a weight on the current device, of any number of rows; with batches, of as many as there is one
    for each at least."""
    launch, arguments = _prepare(device.index, (problem,), (weight,), plan)
    step = 8 * plan.m_tiles * plan.batches
    too_few = step - 8 * plan.m_tiles  # a batch without rows expects nothing of its cluster, and may lose count
    row, out_row = problem.k * problem.dtype.itemsize, problem.n * problem.dtype.itemsize

    def multiply(stream: int, x: int, bias: int, out: int, m: int) -> None:
        if m and (m - 1) % step < too_few:
            raise ValueError(f"got {m} rows of x: this plan is for {too_few + 1} to {step} at a time ({plan})")
        for first in range(0, m, step):
            arguments.set(x + first * row, 0, 0, 0, bias, out + first * out_row, min(step, m - first), 0)
            launch(stream, arguments.parameters)

    return multiply


def bind_group(
    device: torch.device, m: int, group: Sequence[Problem], weights: Sequence[Addresses], plan: DecodePlan
) -> GroupProduct:
    """The products with several weights on the current device, of no more rows than the plan's."""
    multiply = bind_fused(device, m, group, weights, ALONE, plan)
    return lambda stream, x, m, results: multiply(stream, x, 0, 0, m, results)


def bind_fused(
    device: torch.device,
    m: int,
    group: Sequence[Problem],
    weights: Sequence[Addresses],
    fusion: Fusion,
    plan: DecodePlan,
) -> FusedProduct:
    """The products with what is fused on the current device, of no more rows than the plan's."""
    launch, arguments = _prepare(device.index, group, weights, plan, fusion)

    def multiply(stream: int, x: int, norm: int, residual: int, m: int, results: Iterable[int]) -> None:
        arguments.set(x, norm, residual, 0, *results, m, 0)
        launch(stream, arguments.parameters)

    return multiply


def _prepare(
    index: int, group: Sequence[Problem], weights: Sequence[Addresses], plan: DecodePlan, fusion: Fusion = ALONE
) -> tuple[Launch, Arguments]:
    """One compiled shape of kernel.cu with its grid, and its arguments."""
    o, parts, tiles = _common(group), len(group), [_tiles(o) for o in group]
    compiled = variant(o, plan, properties_of(index))
    launch = launches.get((index, sum(tiles), compiled), lambda: _launch(index, o, sum(tiles), plan, compiled))
    firsts = [sum(tiles[:part]) for part in range(parts)]
    sizes = (*(o.n for o in group), *firsts, sum(tiles), o.k, *(0,) * 5)
    described = chain.from_iterable(map(partial(_described, plan), group, weights))
    unit, codebook = unit_and_codebook(o.format, o.dtype)
    factors = (unit, *(fusion.norm or (0.0, 0.0)), 1.0 if fusion.residual is None else fusion.residual)
    return launch, Arguments(layout(parts), tuple(described), (*sizes, *factors, codebook))


class Routing(NamedTuple):
    """experts: of the stack. per_row: pairs that share a row of x. wide_ids: ids have 64 bits. clears: results of pairs
    whose id is no expert are zeros, and not left as they are."""

    experts: int
    per_row: int
    wide_ids: bool
    clears: bool = False


def rows_of(q: QuantizedWeight) -> QuantizedWeight:
    """A stack [E, N, K] as one weight [E * N, K], sharing its memory."""
    experts, n, k = q.shape
    if not q.spec.along_k:
        return replace(q, shape=(experts * n, k))
    packed, scale = (tensor.view(experts * n, -1) for tensor in (q.packed, q.scale))
    return replace(q, packed=packed, scale=scale, shape=(experts * n, k))


def plan_routed(pairs: int, o: Problem, experts: int, kind: Kind, properties: DeviceProperties) -> DecodePlan | None:
    """The plan for pairs of a token and an expert of a stack, whose rows are all those of `o`, or None where this
    kernel does not support it."""
    return routed_plan(pairs, experts, o.n // experts, o.k, scales_of(o), kind, properties) if _supports(o) else None


def bind_routed(
    device: torch.device, o: Problem, weight: Addresses, routing: Routing, plan: DecodePlan
) -> RoutedProduct:
    """The products of pairs with the experts of a stack, on the current device.

    Raises ValueError for a plan that begins early and results that are to be cleared: others may still read them.
    """
    if plan.static_weights and routing.clears:
        raise ValueError(f"{plan} begins before the kernel ahead ends, and may not clear results")
    launch, arguments, _ = _bound(device, o, weight, routing, plan, 0)

    def multiply(stream: int, x: int, ids: int, bias: int, out: int, pairs: int) -> None:
        arguments.set(x, 0, 0, ids, bias, out, 8 * plan.m_tiles, pairs)
        launch(stream, arguments.parameters)

    return multiply


class Sums(NamedTuple):
    """How a token's experts are added up. shares, narrow: the address of the weights of pairs, of 16 bits or of 32.
    added, factor: the address of what the factor times the sum is added to, or 0."""

    shares: int
    narrow: bool
    added: int = 0
    factor: float = 1.0


def bind_combined(
    device: torch.device, o: Problem, weight: Addresses, routing: Routing, plan: DecodePlan
) -> CombinedProduct:
    """As `bind_routed`, of a plan that combines: results have a row for each token, of the type of x."""
    launch, arguments, memory = _bound(device, o, weight, routing, plan, struct.calcsize(SUMS))
    tail = struct.Struct(SUMS)
    parameters = (ctypes.c_void_p * 1)(ctypes.addressof(memory))

    def multiply(stream: int, x: int, ids: int, bias: int, out: int, pairs: int, sums: Sums) -> None:
        there, left, fours = workspace.take(device, stream, pairs * (o.n // routing.experts))
        tail.pack_into(memory, 0, there, left, out, sums.shares, sums.added, fours, sums.narrow, sums.factor)
        arguments.set(x, 0, 0, ids, bias, 0, 8 * plan.m_tiles, pairs)
        launch(stream, parameters)

    return multiply


def _bound(
    device: torch.device, o: Problem, weight: Addresses, routing: Routing, plan: DecodePlan, ahead: int
) -> tuple[Launch, Arguments, Any]:
    """The launch, its arguments but for those that change, and the memory where these lie behind so many bytes."""
    rows = o.n // routing.experts
    tiles = rows // (ROWS * plan.tiles_at_once)
    compiled = variant(o, plan, properties_of(device.index))
    launch = launches.get((device.index, rows, compiled), lambda: _routed_launch(device.index, o, plan, compiled))
    unit, codebook = unit_and_codebook(o.format, o.dtype)
    facts = (routing.experts, rows, routing.per_row, routing.wide_ids, routing.clears)
    sizes = (o.n, 0, tiles, o.k, *facts, unit, 0.0, 0.0, 1.0, codebook)
    memory = ctypes.create_string_buffer(ahead + struct.calcsize("".join(layout(1))))
    return launch, Arguments(layout(1), _described(plan, o, weight), sizes, memory, ahead), memory


def _routed_launch(index: int, o: Problem, plan: DecodePlan, compiled: Variant) -> Launch:
    shared = plan.shared_bytes(scales_of(o))
    (function,) = kernels(index, compiled, (("decode", shared),))
    launch = Launch(function, (1, plan.cluster), plan.threads, shared, cluster=plan.cluster, overlaps=True)
    most = min(launch.most_clusters(), properties_of(index).sms * plan.resident_ctas // plan.cluster)
    launch.set_grid(most, plan.cluster)
    return launch


def _described(plan: DecodePlan, o: Problem, weight: Addresses) -> tuple[Any, ...]:
    """kernel.cu's Weight."""
    packed, scale, *nested = weight
    chunk, scales, blocks = weight_chunk(o.k), scales_of(o), o.k // BLOCK
    box = (chunk, ROWS, plan.blocks // plan.steps * 32 // chunk)
    weights = tensor_map(packed, (chunk, o.n, o.k // 2 // chunk), (o.k // 2, chunk), box)
    scale_map = b""
    if not plan.bulk_scales and not plan.window_scales:
        row = scales.bytes_of(blocks)
        scale_map = tensor_map(scale, (row, o.n), (row,), (scale_chunk(plan, scales), ROWS))
    return weights, scale_map, packed, scale, *nested


def layout(parts: int) -> tuple[str, str, str]:
    """kernel.cu's Arguments, of which x, norm, residual and ids, then bias and out for each weight, and m and
    pairs change."""
    before, changing, after = parts * "128s128s5Q24x", f"{4 + 2 * parts}Q2I", f"{2 * parts + 7}I4f64s"
    return before, changing, after + f"{-struct.calcsize(before + changing + after) % 64}x"


def _common(group: Sequence[Problem]) -> Problem:
    """What is compiled for one is compiled for all, but for the bias: there is none, or an address for each."""
    first, bias = group[0], any(o.bias for o in group)
    return first if first.bias is bias else replace(first, bias=bias)


def _launch(index: int, o: Problem, tiles: int, plan: DecodePlan, compiled: Variant) -> Launch:
    shared = plan.shared_bytes(scales_of(o))
    (function,) = kernels(index, compiled, (("decode", shared),))
    launch = Launch(function, (1, plan.cluster), plan.threads, shared, cluster=plan.cluster, overlaps=True)
    most = min(launch.most_clusters(), properties_of(index).sms * plan.resident_ctas // plan.cluster)
    launch.set_grid(min(most // plan.batches, tiles // plan.tiles_at_once), plan.cluster, plan.batches)
    return launch


def group_variant(group: Sequence[Problem], plan: DecodePlan, properties: DeviceProperties) -> Variant:
    """What is compiled for several weights in one launch."""
    return variant(_common(group), plan, properties)


@lru_cache(1 << 12)  # asked for by each weight
def variant(problem: Problem, plan: DecodePlan, properties: DeviceProperties) -> Variant:
    """What is compiled."""
    return Variant.of(source(), target(plan, properties), constants(problem, plan))


def target(plan: DecodePlan, properties: DeviceProperties) -> int | str:
    """What is compiled for: no later GPU than Hopper where registers are handed over."""
    return "90a" if plan.registers else properties.capability


def constants(problem: Problem, plan: DecodePlan) -> dict[str, Constant]:
    """kernel.cu's Config."""
    scales, shape = scales_of(problem), dict(vars(plan))
    del shape["microseconds"]
    return {
        **shape, "activation": f"Activation::{plan.activation or 'none'}", "x": TYPES[problem.dtype],
        "scale": "Type::e8m0" if problem.has_exponents else TYPES[problem.scale], "low_first": problem.low_first,
        "bias": problem.bias, "mma_k": 16, "scale_blocks": scales.blocks, "chunk": weight_chunk(problem.k),
        "scale_chunk": scale_chunk(plan, scales), "padded": plan.blocks * plan.cluster * BLOCK != problem.k,
        "shared_bytes": plan.shared_bytes(scales),
    }  # fmt: skip


@cache
def source() -> str:
    path = Path(__file__).with_name("kernel.cu")
    return read_source(path, root=path.parents[1])
