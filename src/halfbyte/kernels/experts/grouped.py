"""Products with a stack of experts on a GPU: many pairs of a token and an expert, sorted by expert.

The kernels are those of `linear` for which x is laid out (kernels/linear/grouped.py). The sort and all that follows
from it stay on the device (sort.cu), and launches are made for the most tiles that there can be, so CUDA graphs can
capture them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from halfbyte.formats.weight import QuantizedWeight
from halfbyte.kernels.common.device import DeviceProperties, properties_of
from halfbyte.kernels.common.nvrtc import Variant
from halfbyte.kernels.common.thread_cache import ThreadCache
from halfbyte.kernels.experts.block import Block
from halfbyte.kernels.experts.sort import MOST_EXPERTS, Routes, sort
from halfbyte.kernels.experts.sort import variant as sort_variant
from halfbyte.kernels.linear import grouped, reach
from halfbyte.kernels.linear.fusion import Residual
from halfbyte.kernels.linear.grouped import Grouping
from halfbyte.kernels.linear.kernel import GroupedProduct
from halfbyte.kernels.linear.laid_out import span_of
from halfbyte.kernels.linear.problem import Problem, addresses, key_of, problem_of
from halfbyte.kernels.linear.sm90_decode.launch import rows_of
from halfbyte.kernels.linear.spread import most_tiles

WIDE_BYTES = 1 << 25  # of down's products in fp32, which L2 holds; more of them are rounded to x's dtype
MOST_BYTES = 1 << 31  # of what a block keeps of its tokens; more of these go one part after the other


class Products(NamedTuple):
    """Products with stacks, one after the other, whose pairs are sorted once. tile_m, tiles: of the routes. clears:
    those that scatter write zeros for pairs without an expert."""

    tile_m: int
    tiles: int
    each: tuple[GroupedProduct, ...]
    clears: bool

    def sort(self, ids: Tensor, experts: int) -> Routes:
        return sort(ids, experts, self.tile_m, self.tiles)


products: ThreadCache[Hashable, tuple[Products | None]] = ThreadCache()


def grouped_linear(x: Tensor, q: QuantizedWeight, expert: Tensor, bias: Tensor | None) -> Tensor | None:
    """As in cuda.py."""
    multiply = _of_sorted(x, q, expert, bias)
    return None if multiply is None else multiply()


def grouped_linear_backward(grad: Tensor, q: QuantizedWeight, expert: Tensor) -> Tensor | None:
    """As in cuda.py."""
    multiply = _of_sorted(grad, q, expert, back=True)
    return None if multiply is None else multiply()


def sorted_ahead(x: Tensor, q: QuantizedWeight, ids: Tensor) -> Callable[[], Tensor] | None:
    """What multiplies rows [R, K] with k experts each, ids [R, k], into [R k, N], and finds these pairs sorted: that is
    done here, once. None where no kernel is for it. All contiguous, x aligned to 16 bytes, on the current device."""
    return _of_sorted(x, q, ids, per_row=ids.shape[1])


def _of_sorted(
    x: Tensor, q: QuantizedWeight, ids: Tensor, bias: Tensor | None = None, back: bool = False, per_row: int = 1
) -> Callable[[], Tensor] | None:
    """What multiplies each row with its experts, as many as `per_row`, or on the way back with their transposes, into
    the order of ids. Pairs are sorted here."""
    experts, n, k = q.shape
    found = _products(x, (q,), (bias,), (Grouping(experts, scatters=True),), ids.numel(), back)
    if found is None:
        return None
    routes = found.sort(ids, experts)

    def multiply() -> Tensor:
        out = (x.new_empty if found.clears else x.new_zeros)((ids.numel(), k if back else n))
        _launch(found.each[0], x, routes, bias, out, per_row)
        return out

    return multiply


def moe(
    x: Tensor, top_k_index: Tensor, top_k_weights: Tensor, block: Block, residual: Residual | None = None
) -> Tensor | None:
    """As in cuda.py: sort, gate and up, down, and the weighted sums."""
    if top_k_index.numel() == 0:
        return None
    from halfbyte.kernels.experts.combine import combine_sorted

    (tokens, k), (experts, hidden, inner) = top_k_index.shape, block.down.shape
    part = _part(tokens, k * (6 * hidden + 4 * inner))  # x laid out and down's rows, and what is between
    keeps = min(block.gate_up.block_size, 64) == min(block.down.block_size, 64)  # as span_of has it
    groupings = groupings_of(experts, block.activation, min(tokens, part) * k, hidden, keeps)
    wide = groupings[1].wide
    out = x.new_empty((tokens, hidden))
    for first in range(0, tokens, part):
        rows, ids, weights = (tensor[first : first + part] for tensor in (x, top_k_index, top_k_weights))
        found = _products(x, block.stacks, block.biases, groupings, ids.numel())
        if found is None:
            return None
        routes = found.sort(ids, experts)
        between = x.new_empty((ids.numel(), inner))
        _launch(found.each[0], rows, routes, block.gate_up_bias, between, k)
        y = x.new_empty((ids.numel(), hidden), dtype=torch.float32 if wide else x.dtype)
        _launch(found.each[1], between, routes, block.down_bias, y, 0)
        added = None if residual is None else residual._replace(value=residual.value[first : first + part])
        combine_sorted(y, routes.places, weights, out[first : first + part], added)
    return out


def groupings_of(experts: int, activation: str, pairs: int, hidden: int, keeps: bool) -> tuple[Grouping, Grouping]:
    """Of gate and up, and of down. keeps: as many weights share a scale in both, so K has the same order."""
    wide = 4 * pairs * hidden <= WIDE_BYTES
    return Grouping(experts, activation, orders=keeps), Grouping(experts, ordered=keeps, wide=wide)


def microseconds(pairs: int, experts: int, problems: Sequence[Problem], properties: DeviceProperties) -> float:
    """The estimated time of the sort and of the products with stacks, or infinity where no kernel is for them."""
    plans = grouped.plan(pairs, experts, problems, properties)
    return math.inf if plans is None else grouped.sorted_microseconds(pairs, plans)


def variants(
    pairs: int, experts: int, problems: Sequence[Problem], activation: str, properties: DeviceProperties
) -> list[Variant]:
    """What is compiled for a block of so many pairs, none where no kernel is for it. The rows of the problems are those
    of all experts."""
    plans = grouped.plan(room_of(pairs), experts, problems, properties)
    if plans is None:
        return []
    gate_up, down = problems
    keeps = span_of(gate_up) == span_of(down)
    groupings = groupings_of(experts, activation, pairs, down.n // experts, keeps)
    each = (
        grouped.variant(o, grouped.as_planned(grouping, plans), plan, properties)
        for o, grouping, plan in zip(problems, groupings, plans, strict=True)
    )
    return [sort_variant(pairs, plans[0].tile_m, properties), *each]


def _part(tokens: int, bytes_of_token: int) -> int:
    """Tokens that go together: all of them in equal parts, which are aligned."""
    parts = -(-tokens * bytes_of_token // MOST_BYTES)
    return -(-tokens // max(1, parts) // 16) * 16


def _launch(product: GroupedProduct, x: Tensor, routes: Routes, bias: Tensor | None, out: Tensor, per_row: int) -> None:
    stream = torch._C._cuda_getCurrentRawStream(x.get_device())
    at = 0 if bias is None else bias.data_ptr()
    product(stream, x.data_ptr(), routes.table.data_ptr(), at, out.data_ptr(), len(x), per_row)


def room_of(pairs: int) -> int:
    """How many pairs products are made for that will have these: up to an eighth more."""
    step = 1 << max(0, pairs.bit_length() - 4)
    return -(-pairs // step) * step


def _products(
    x: Tensor,
    stacks: Sequence[QuantizedWeight],
    biases: Sequence[Tensor | None],
    groupings: Sequence[Grouping],
    pairs: int,
    back: bool = False,
) -> Products | None:
    """The products with stacks, or with their transposes, of so many pairs, kept from call to call; None where no
    kernel is for them."""
    if pairs == 0 or any(min(q.shape) == 0 or q.shape[0] > MOST_EXPERTS for q in stacks):
        return None
    keys = tuple(key_of(x, q, bias, False) for q, bias in zip(stacks, biases, strict=True))
    room = room_of(pairs)
    return products.get((keys, room, back, *groupings), lambda: (_bind(x, stacks, biases, groupings, room, back),))[0]


def _bind(
    x: Tensor,
    stacks: Sequence[QuantizedWeight],
    biases: Sequence[Tensor | None],
    groupings: Sequence[Grouping],
    pairs: int,
    back: bool,
) -> Products | None:
    properties, experts = properties_of(x.get_device()), stacks[0].shape[0]
    if reach.without_kernels(properties) is not None:
        return None
    weights = [rows_of(q) for q in stacks]
    problems = [problem_of(x, q, bias) for q, bias in zip(weights, biases, strict=True)]
    plans = grouped.plan(pairs, experts, problems, properties, back)
    if plans is None:
        return None
    each = (
        grouped.bind(x.device, problem, addresses(q), grouped.as_planned(grouping, plans), plan)
        for problem, q, grouping, plan in zip(problems, weights, groupings, plans, strict=True)
    )
    tile_m = plans[0].tile_m
    return Products(tile_m, most_tiles(pairs, experts, tile_m), tuple(each), grouped.clears(plans))
