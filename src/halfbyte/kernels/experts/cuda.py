"""Products with a stack of experts on an NVIDIA GPU: few pairs of a token and an expert, in one launch each. Many are
grouped.py's.

The kernel is `linear`'s for few rows (kernels/linear/sm90_decode). It finds on the device which experts are wanted,
reads those alone, and needs neither a sort nor the host, so CUDA graphs can capture it. What a token's experts give is
added up by the launch that makes it, or where there are many tokens by one of its own.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from halfbyte.formats.weight import QuantizedWeight
from halfbyte.kernels.common import slow
from halfbyte.kernels.common.device import DeviceProperties, properties_of
from halfbyte.kernels.common.nvrtc import Variant
from halfbyte.kernels.common.thread_cache import ThreadCache
from halfbyte.kernels.experts import grouped
from halfbyte.kernels.experts.block import Block
from halfbyte.kernels.linear import reach
from halfbyte.kernels.linear.fusion import Residual
from halfbyte.kernels.linear.kernel import CombinedProduct, RoutedProduct
from halfbyte.kernels.linear.problem import Problem, addresses, key_of, problem_of
from halfbyte.kernels.linear.sm90_decode import launch as decode
from halfbyte.kernels.linear.sm90_decode.launch import rows_of
from halfbyte.kernels.linear.sm90_decode.routed import Kind, combined, room_for, routed_microseconds


class Bound(NamedTuple):
    """combines: the product adds up what the experts of a token give, and takes a `Sums`, which says how, as well."""

    multiply: RoutedProduct | CombinedProduct
    combines: bool


products: ThreadCache[Hashable, tuple[Bound | None]] = ThreadCache()
better_sorted: ThreadCache[Hashable, tuple[bool]] = ThreadCache()


def grouped_linear(x: Tensor, q: QuantizedWeight, expert: Tensor, bias: Tensor | None) -> Tensor | None:
    """x [S, K] times the expert of each row, plus its bias -> [S, N], zeros for ids that are out of range; None where
    no kernel is for it. All contiguous, x and bias aligned to 16 bytes, on the current device."""
    product = _product(x, q, bias, len(x), expert, 1, Kind(), clears=True)
    if product is None or _is_better_sorted(x, (q,), len(x)):
        found = grouped.grouped_linear(x, q, expert, bias)
        if product is None or found is not None:
            return found
    out = x.new_empty((len(x), q.shape[1]))
    _launch(product, x, expert, bias, out, len(x))
    return out


def grouped_linear_backward(grad: Tensor, q: QuantizedWeight, expert: Tensor) -> Tensor | None:
    """grad [S, N] times the transpose of the expert of each row -> [S, K], zeros for ids that are out of range; None
    where no kernel is for it. All contiguous, grad aligned to 16 bytes, on the current device. Few rows are sorted,
    too: the kernel for few has no way back."""
    return grouped.grouped_linear_backward(grad, q, expert)


def moe(
    x: Tensor, top_k_index: Tensor, top_k_weights: Tensor, block: Block, residual: Residual | None = None
) -> Tensor | None:
    """The experts of each token of x [T, H], weighted and added up, of few in two or three launches; None where no
    kernel is for it. A residual [T, H] is what the sums are added to.

    All contiguous, x and biases aligned to 16 bytes, on the current device. top_k_weights: fp32, or of x's dtype.
    """
    tokens, k = top_k_index.shape
    pairs = tokens * k
    if slow.no_kernels("cuda") is not None:
        return None
    down = block.down
    first, second = kinds_of(tokens, k, block.activation)
    inner = _product(x, block.gate_up, block.gate_up_bias, pairs, top_k_index, k, first)
    outer = _product(x, down, block.down_bias, pairs, top_k_index, 1, second)
    fits = inner is not None and outer is not None
    if not fits or _is_better_sorted(x, block.stacks, pairs):
        found = grouped.moe(x, top_k_index, top_k_weights, block, residual)
        if not fits or found is not None:
            return found
    assert inner is not None
    assert outer is not None
    hidden, out = x.new_empty((pairs, down.shape[2])), x.new_empty((tokens, down.shape[1]))
    _launch(inner, x, top_k_index, block.gate_up_bias, hidden, pairs)
    if outer.combines:
        added, factor = (0, 1.0) if residual is None else (residual.value.data_ptr(), residual.factor)
        sums = decode.Sums(top_k_weights.data_ptr(), top_k_weights.itemsize == 2, added, factor)
        _launch(outer, hidden, top_k_index, block.down_bias, out, pairs, sums)
        return out
    from halfbyte.kernels.experts.combine import combine

    y = x.new_empty((pairs, down.shape[1]), dtype=torch.float32)
    _launch(outer, hidden, top_k_index, block.down_bias, y, pairs)
    combine(y, top_k_index, top_k_weights, out, down.shape[0], residual)
    return out


def kinds_of(tokens: int, k: int, activation: str) -> tuple[Kind, Kind]:
    """Of gate and up, and of down, with k experts of each token. When down begins ids are known: the kernel ahead has
    waited for those who made them."""
    return Kind(activation), Kind(wide=True, early=True, combines=combined(tokens, k))


def _launch(product: Bound, x: Tensor, ids: Tensor, bias: Tensor | None, out: Tensor, pairs: int, *sums: Any) -> None:
    stream = torch._C._cuda_getCurrentRawStream(x.get_device())
    at = 0 if bias is None else bias.data_ptr()
    product.multiply(stream, x.data_ptr(), ids.data_ptr(), at, out.data_ptr(), pairs, *sums)


def _product(
    x: Tensor,
    q: QuantizedWeight,
    bias: Tensor | None,
    pairs: int,
    ids: Tensor,
    per_row: int,
    kind: Kind,
    clears: bool = False,
) -> Bound | None:
    """The product with a stack, of so many pairs, kept from call to call."""
    room = room_for(pairs)
    if pairs == 0 or room == 0 or min(q.shape) == 0:
        return None
    routing = decode.Routing(q.shape[0], per_row, ids.dtype is torch.int64, clears)
    key = (key_of(x, q, bias, False), room, routing, kind)
    return products.get(key, lambda: (_bind(x, q, bias, room, routing, kind),))[0]


def _is_better_sorted(x: Tensor, stacks: Sequence[QuantizedWeight], pairs: int) -> bool:
    if pairs == 0:
        return False

    def compare() -> tuple[bool]:
        problems = [problem_of(x, rows_of(q), None) for q in stacks]
        return (is_better_sorted(pairs, stacks[0].shape[0], problems, properties_of(x.get_device())),)

    key = (grouped.room_of(pairs), *(key_of(x, q, None, False) for q in stacks))
    return better_sorted.get(key, compare)[0]


def is_better_sorted(pairs: int, experts: int, problems: Sequence[Problem], properties: DeviceProperties) -> bool:
    """Whether so few pairs are estimated to take less time once they are sorted: where experts have more than eight
    each, whose weights are then read once."""
    routed = sum(routed_microseconds(pairs, experts, o) for o in problems)
    return grouped.microseconds(pairs, experts, problems, properties) < routed


def variants(
    tokens: int, k: int, experts: int, gate_up: Problem, down: Problem, activation: str, properties: DeviceProperties
) -> list[Variant]:
    """What is compiled for a block of so many tokens with k experts each. The rows of the problems are those of all
    experts."""
    pairs, both = tokens * k, (gate_up, down)
    if room := room_for(pairs):
        kinds = kinds_of(tokens, k, activation)
        plans = [decode.plan_routed(room, o, experts, kind, properties) for o, kind in zip(both, kinds, strict=True)]
        found = [decode.variant(o, plan, properties) for o, plan in zip(both, plans, strict=True) if plan is not None]
        if len(found) == len(both) and not is_better_sorted(pairs, experts, both, properties):
            return found
    return grouped.variants(pairs, experts, both, activation, properties)


def _bind(x: Tensor, q: QuantizedWeight, bias: Tensor | None, room: int, routing: Any, kind: Kind) -> Bound | None:
    properties = properties_of(x.get_device())
    if reach.without_kernels(properties) is not None:
        return None
    rows = decode.rows_of(q)
    problem = problem_of(x, rows, bias)
    plan = decode.plan_routed(room, problem, q.shape[0], kind, properties)
    if plan is None:
        return None
    bind = decode.bind_combined if plan.combines else decode.bind_routed
    return Bound(bind(x.device, problem, addresses(rows), routing, plan), plan.combines > 0)
