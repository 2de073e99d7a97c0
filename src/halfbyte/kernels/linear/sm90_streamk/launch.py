"""The product on Hopper's tensor cores: which shape of kernel.cu, and how it is launched."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from halfbyte.formats.weight import QuantizedWeight
from halfbyte.kernels.common.device import DeviceFacts, facts_of
from halfbyte.kernels.common.driver import Arguments, Launch, kernels, prepared
from halfbyte.kernels.common.nvrtc import Constant, Variant, read_source
from halfbyte.kernels.common.tensor_map import tensor_map
from halfbyte.kernels.linear import rooms
from halfbyte.kernels.linear.codebook import unit_and_codebook
from halfbyte.kernels.linear.constants import TYPES
from halfbyte.kernels.linear.operands import Addresses, Operands, operands_of
from halfbyte.kernels.linear.ready import GroupProduct, Product, run
from halfbyte.kernels.linear.sm90_streamk.plan import DEPTH, REGISTERS, HopperPlan, Kind, find_kind, hopper_plan


def kind_of(x: Tensor, q: QuantizedWeight) -> Kind | None:
    """What these very tensors are."""
    return find_kind(operands_of(x, q, None))


def find_plan(m: int, operands: Operands, facts: DeviceFacts, batch_invariant: bool) -> HopperPlan | None:
    """The plan for x [m, K], or None where this kernel is not for such operands: it is for every format, x of 16 bits,
    K % 64 == 0 (K % 32 where 32 weights share a scale), on Hopper."""
    kind = find_kind(operands)
    return None if kind is None else hopper_plan(m, operands.n, operands.k, kind.span, facts, batch_invariant)


def plan_for(x: Tensor, q: QuantizedWeight, batch_invariant: bool) -> tuple[HopperPlan, Kind] | None:
    """The plan for these very tensors, and what they are."""
    operands = operands_of(x, q, None)
    plan, kind = find_plan(len(x), operands, facts_of(x.get_device()), batch_invariant), find_kind(operands)
    return None if plan is None or kind is None else (plan, kind)


def linear(x: Tensor, q: QuantizedWeight, bias: Tensor | None, out: Tensor, plan: HopperPlan) -> None:
    """out = x @ W.T + bias; x [M, K] and out [M, N], contiguous, on the current device."""
    run(product, x, q, bias, out, plan)


def lays_out_alike(group: Sequence[Operands], plans: Sequence[HopperPlan]) -> bool:
    """Whether x is laid out in one way for all weights, each of which this kernel is for; not so where CTAs hold it."""
    kinds = [find_kind(o) for o in group]
    each = zip(group, kinds, plans, strict=True)
    ways = {(o.k, kind.dtype, kind.span, plan.width) for o, kind, plan in each if kind is not None}
    return len(ways) == 1 and not any(plan.held for plan in plans)


def product(device: torch.device, m: int, operands: Operands, weight: Addresses, plan: HopperPlan) -> Product:
    """The product with a weight on the current device, of as many rows as there are tiles of x for m."""
    part = _prepare(device.index, m, operands, weight, plan)

    def multiply(stream: int, x: int, bias: int, out: int, m: int) -> None:
        arranged = torch.empty(part.arranged, dtype=torch.uint8, device=device) if part.arranged else None
        part(device, stream, x, bias, out, 0 if arranged is None else arranged.data_ptr(), m)

    return multiply


def group_product(
    device: torch.device, m: int, group: Sequence[Operands], weights: Sequence[Addresses], plans: Sequence[HopperPlan]
) -> GroupProduct:
    """The products of m rows of x with several weights, one after the other; x is laid out once."""
    parts = [_prepare(device.index, m, *each) for each in zip(group, weights, plans, strict=True)]
    first = parts[0]

    def multiply(stream: int, x: int, results: Iterable[int]) -> None:
        arranged = torch.empty(first.arranged, dtype=torch.uint8, device=device)
        addresses = iter(results)
        for part in parts:
            bias, out = next(addresses), next(addresses)
            part(device, stream, x, bias, out, arranged.data_ptr(), m, is_arranged=part is not first)

    return multiply


class _Part(NamedTuple):
    """The launches of a product and their arguments. arranged: bytes of x laid out, if it is. partial: sums that CTAs
    leave for others."""

    arrange: Launch
    multiply: Launch
    arguments: Arguments
    arranged: int
    partial: int

    def __call__(
        self, device: torch.device, stream: int, x: int, bias: int, out: int, arranged: int, m: int,
        is_arranged: bool = False,
    ) -> None:  # fmt: skip
        partial, left, count = 0, 0, 0
        captured = self.partial > 0 and torch.cuda.is_current_stream_capturing()
        if captured and rooms.of_this_thread.of_graph is None:
            # A graph may be replayed beside anything, and nobody would keep its memory. It is held until the launch.
            room = rooms.missing((self.partial,), device)
            partial = room.data_ptr()
        elif self.partial:
            partial, left, count = rooms.find(device, stream, self.partial, captured).take(self.partial)
        self.arguments.set(x, bias, out, arranged, partial, left, count // 4, m)
        if self.arranged and not is_arranged:
            self.arrange(stream, self.arguments.parameters)
        self.multiply(stream, self.arguments.parameters)


def _prepare(index: int, m: int, operands: Operands, weight: Addresses, plan: HopperPlan) -> _Part:
    o = operands
    row_tiles, column_tiles, units = -(-o.n // plan.rows), plan.tiles(m), -(-o.k // DEPTH)
    compiled = variant(o, plan, facts_of(index))
    key = ("hopper", index, column_tiles * units, plan, compiled)
    launches = prepared(key, lambda: _launches(index, column_tiles * units, plan, compiled))
    meets = plan.cluster == 1 and plan.ctas != row_tiles * column_tiles
    partial = plan.ctas * plan.rows * plan.width if meets else 0
    packed, *scales = weight
    sizes = (o.n, o.k, row_tiles, column_tiles, units, plan.ctas)
    weights = tensor_map(packed, (o.k // 2, o.n), (o.k // 2,), (DEPTH // 2, plan.rows))
    arguments = Arguments(LAYOUT, (weights, *scales), (*sizes, *unit_and_codebook(o.format, o.dtype)))
    arranged = 0 if plan.held else column_tiles * units * plan.width * DEPTH * 2
    return _Part(*launches, arguments, arranged, partial)


# A structure aligned to 64 bytes: x, bias, out, arranged, partial, left, left_count and m change.
LAYOUT = ("128s4Q", "6Q2I", "6If64s12x")


def _launches(index: int, column_units: int, plan: HopperPlan, compiled: Variant) -> tuple[Launch, Launch]:
    """What lays x out, and the product."""
    shared = int(dict(compiled.constants)["shared_bytes"])
    arrange, multiply = kernels(index, compiled, (("arrange", 0), ("multiply", shared)), carveout=100)
    pieces = column_units * plan.width * DEPTH // 8
    return (
        Launch(arrange, (plan.ctas + -(-pieces // 128), 1), 128, overlaps=True),
        Launch(
            multiply,
            (plan.ctas // plan.cluster, plan.cluster),
            plan.threads,
            shared,
            cluster=plan.cluster if plan.cluster > 1 else 0,
            overlaps=True,
        ),
    )


def variant(operands: Operands, plan: HopperPlan, facts: DeviceFacts) -> Variant:
    """What is compiled for such operands. Raises ValueError where the kernel is not for them."""
    kind = find_kind(operands)
    if kind is None:
        raise ValueError(f"kernel.cu is not for {operands}")
    return Variant.of(source(), "90a", constants(kind, plan))


def constants(kind: Kind, plan: HopperPlan) -> dict[str, Constant]:
    """kernel.cu's Config."""
    fetching, multiplying = REGISTERS[plan.groups]
    return {
        "x": TYPES[kind.dtype], "scale": TYPES[kind.scales], "low_first": kind.low_first, "log_block": kind.log_block,
        "span": kind.span, "vector": kind.vector, "tile_m": plan.width, "warpgroups": plan.groups,
        "stages": plan.stages, "resident": plan.held, "cluster": plan.cluster, "direct": plan.direct,
        "producer_registers": fetching, "consumer_registers": multiplying,
        "shared_bytes": plan.shared_bytes(kind.span),
    }  # fmt: skip


@cache
def source() -> str:
    path = Path(__file__).with_name("kernel.cu")
    return read_source(path, root=path.parents[1])
