"""Which CUDA kernel multiplies, of those in this folder; all are compiled for the GPU at hand on first use.

sm90_streamk  wgmma, any number of rows of x: sm_90
sm90_decode   a few rows, blocks of 64 weights and more, from the lightest start: sm_90 and later
sm80          mma.sync, every format: sm_75 and later
simt          CUDA cores: whatever is left, fp32 x above all
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import lru_cache
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from halfbyte.formats.weight import QuantizedWeight
from halfbyte.kernels.common import slow
from halfbyte.kernels.common.device import DeviceFacts, facts_of
from halfbyte.kernels.common.driver import per_thread, prepared
from halfbyte.kernels.common.nvrtc import Variant
from halfbyte.kernels.linear import reach
from halfbyte.kernels.linear.operands import ALIGNED, INVARIANT_ROWS, Operands, addresses, operands_of
from halfbyte.kernels.linear.ready import GroupProduct, Product, ready
from halfbyte.kernels.linear.simt import launch as simt
from halfbyte.kernels.linear.sm80 import launch as sm80
from halfbyte.kernels.linear.sm90_decode import launch as sm90_decode
from halfbyte.kernels.linear.sm90_decode import plan as decode_plans
from halfbyte.kernels.linear.sm90_streamk import launch as sm90_streamk
from halfbyte.kernels.linear.tune import h200

# The most rows of x that each is for.
MOST_ROWS = {sm90_streamk: h200.STREAMK_ROWS, sm80: h200.SM80_ROWS, simt: h200.SIMT_ROWS}
MOST = max(MOST_ROWS.values())


class Choice(NamedTuple):
    """A kernel, which is the module `launch` of its folder, and its plan; of a group with `sm90_streamk` the plans."""

    kernel: ModuleType
    plan: Any

    def variant(self, operands: Operands, facts: DeviceFacts) -> Variant:
        """What is compiled for it."""
        variant: Variant = self.kernel.variant(operands, self.plan, facts)
        return variant


@lru_cache(1 << 14)
def choose(m: int, operands: Operands, facts: DeviceFacts, batch_invariant: bool) -> Choice | None:
    """How x [m, K] is multiplied, m and no side of W being 0, or None where the dense weight is the faster way.

    With batch_invariant m is up to INVARIANT_ROWS, and there always is a way, which depends on the weight alone.
    """
    if m <= decode_plans.MOST_ROWS or (batch_invariant and facts.ptx > 90):
        few = sm90_decode.find_plan(m, operands, facts, batch_invariant)
        if few is not None and _goes_first(m, operands, few, facts, batch_invariant):
            return Choice(sm90_decode, few)
    for kernel, most in MOST_ROWS.items():
        if batch_invariant or m <= most:
            plan = kernel.find_plan(m, operands, facts, batch_invariant)
            if plan is not None:
                return Choice(kernel, plan)
    return None


def _goes_first(
    m: int, operands: Operands, plan: decode_plans.DecodePlan, facts: DeviceFacts, batch_invariant: bool
) -> bool:
    """True where `sm90_decode` takes what it can. With batch_invariant one kernel takes any number of rows, on Hopper
    another one. On later GPUs many rows are `sm80`'s."""
    if facts.ptx > 90:
        return batch_invariant or m <= h200.DECODE_ROWS_AFTER_HOPPER
    return not batch_invariant and _is_lighter(m, operands, plan)


def _is_lighter(m: int, operands: Operands, plan: decode_plans.DecodePlan) -> bool:
    """True where `sm90_decode` is ahead of `sm90_streamk`, which starts later and then reads faster; measured on an
    H200. Where there are many bytes of scales, `sm90_streamk` loses more by them; where many CTAs share K,
    `sm90_decode` does."""
    k, numel = operands.k, operands.n * operands.k
    many = 16 * operands.scale.itemsize >= operands.block_size
    if m <= 8:
        return k <= h200.DECODE_K_8 or numel < h200.DECODE_SIZE_8 or many
    if m <= 16 and not many:
        if plan.cluster == 1:
            return numel < h200.DECODE_SIZE_16
        pair = plan.cluster == 2 and plan.warps == 16
        return numel <= (h200.DECODE_SIZE_16_PAIR if pair else h200.DECODE_SIZE_16_CLUSTER)
    if m <= 16:
        if k <= h200.DECODE_SHORT_K_16:
            return numel < h200.DECODE_SIZE_16
        return k <= h200.DECODE_K_16 and numel <= h200.DECODE_LONG_SIZE_16
    if plan.columns == 4:
        most = h200.DECODE_SIZE_WIDE_8_WARPS if m <= 32 and plan.warps == 8 else h200.DECODE_SIZE_WIDE
    elif plan.cluster > 1:
        most = h200.DECODE_SIZE_CLUSTER_48 if m <= 48 else h200.DECODE_SIZE_CLUSTER
    elif m > 48:
        most = h200.DECODE_SIZE_64
    else:
        most = h200.DECODE_SIZE_48_NESTED if operands.nested else h200.DECODE_SIZE_48
    return numel <= most


@lru_cache(1 << 14)
def choose_group(m: int, group: tuple[Operands, ...], facts: DeviceFacts) -> Choice | None:
    """How x [m, K] is multiplied with several weights at once, or None where one after the other is as fast.

    `sm90_decode` has one launch for all. `sm90_streamk` has x laid out once; then each weight has a plan of its own.
    """
    plan = sm90_decode.find_group_plan(m, group, facts)
    numel = sum(o.n * o.k for o in group)
    # `sm90_streamk` would have to be far ahead to make up for several launches; measured on an H200.
    if plan is not None and (facts.ptx > 90 or m <= 8 or numel < (h200.GROUP_SIZE_16 if m <= 16 else h200.GROUP_SIZE)):
        return Choice(sm90_decode, plan)
    alone = [choose(m, operands, facts, False) for operands in group]
    plans = tuple(one.plan for one in alone if one is not None and one.kernel is sm90_streamk)
    return (
        Choice(sm90_streamk, plans)
        if len(plans) == len(group) > 1 and sm90_streamk.lays_out_alike(group, plans)
        else None
    )


def linear(x: Tensor, q: QuantizedWeight, bias: Tensor | None, batch_invariant: bool) -> Tensor | None:
    """x @ W.T + bias, or None where the dense weight is the faster way, or nothing can be compiled.

    x [..., K] and bias [N] or None, contiguous, on the current device. Returns [..., N]. With batch_invariant the
    choice depends on the weight alone.
    """
    n, k = q.shape
    m = x.numel() // max(k, 1)
    if m > MOST and not batch_invariant:  # before anything is gathered: no kernel is for so many
        return None
    device, facts = x.device, facts_of(x.get_device())
    if min(m, n, k) == 0:
        return None
    if (lack := reach.without_kernels(facts)) is not None:
        slow.warn("CUDA kernels", str(lack))
        return None
    if x.data_ptr() % ALIGNED:
        x = x.clone()
    if batch_invariant and bias is not None and bias.data_ptr() % ALIGNED:
        bias = bias.clone()  # else another kernel, which adds up in another order, may be for it
    if (found := again(x, q, bias, batch_invariant)) is not None:
        return found
    operands, weight = operands_of(x, q, bias), addresses(q)
    if (reason := reach.without_tensor_cores(operands, facts)) is not None:
        slow.warn("tensor cores", reason)
    most = INVARIANT_ROWS if batch_invariant else m
    if choose(min(m, most), operands, facts, batch_invariant) is None:
        return None
    out = x.new_empty((*x.shape[:-1], n))
    stream = torch._C._cuda_getCurrentRawStream(x.get_device())
    at, bias_at, out_at = x.data_ptr(), 0 if bias is None else bias.data_ptr(), out.data_ptr()
    for first in range(0, m, most):
        rows = min(most, m - first)
        choice = choose(rows, operands, facts, batch_invariant)
        assert choice is not None
        product = ready(choice.kernel.product, device, rows, operands, weight, choice.plan)
        if rows == m and bias_at % ALIGNED == 0:
            products: dict[int, Product] = prepared(_key(x, q, bias, batch_invariant), dict)
            products[m] = product
        product(stream, at + first * k * x.itemsize, bias_at, out_at + first * n * x.itemsize, rows)
    return out


def again(x: Tensor, q: QuantizedWeight, bias: Tensor | None, batch_invariant: bool) -> Tensor | None:
    """x @ W.T + bias at the cost of little more than the launch, where this thread has had a product of so many rows
    with this weight before. Otherwise None, whatever the reason; then the caller looks closer.

    x, bias: any plain tensors that need no gradients.
    """
    products = per_thread.ready.get(_key(x, q, bias, batch_invariant))
    if products is None:
        return None
    n, k = q.shape
    index, sides = x.get_device(), x.shape
    # All that the key does not hold. x is often the transpose or a part of something; then it has to be copied first.
    if (
        not sides
        or sides[-1] != k
        or x.layout is not torch.strided
        or not x.is_contiguous()
        or x.is_neg()
        or q.packed.get_device() != index
        or torch._C._cuda_getDevice() != index
        or (product := products.get(x.numel() // k)) is None
    ):
        return None
    at, bias_at = x.data_ptr(), 0
    if bias is not None:
        if (
            bias.dtype is not x.dtype
            or bias.shape != (n,)
            or bias.get_device() != index
            or not bias.is_contiguous()
            or bias.is_neg()
        ):
            return None
        bias_at = bias.data_ptr()
    if (at | bias_at) % ALIGNED:
        return None
    out = x.new_empty((*sides[:-1], n))
    product(torch._C._cuda_getCurrentRawStream(index), at, bias_at, out.data_ptr(), x.numel() // k)
    return out


def linear_group(x: Tensor, weights: Sequence[QuantizedWeight], biases: Sequence[Tensor | None]) -> list[Tensor] | None:
    """[x @ W.T + bias] for several weights of the same K at once, or None where that gains nothing.

    x, biases: any plain tensors that need no gradients, and fit. x [..., K]; returns [..., N] for each.
    """
    index, sides = x.get_device(), x.shape
    m = x.numel() // max(sides[-1], 1)
    if torch._C._cuda_getDevice() != index or not x.is_contiguous() or x.is_neg() or x.data_ptr() % ALIGNED:
        return None
    for bias in biases:
        if bias is not None and (not bias.is_contiguous() or bias.is_neg() or bias.data_ptr() % ALIGNED):
            return None
    key = ("group", m, *(_key(x, q, bias, False) for q, bias in zip(weights, biases, strict=True)))
    (product,) = prepared(key, lambda: (_group_product(m, x, weights, biases),))
    if product is None:
        return None
    out = [x.new_empty((*sides[:-1], q.shape[0])) for q in weights]
    results = []
    for bias, y in zip(biases, out, strict=True):
        results += [0 if bias is None else bias.data_ptr(), y.data_ptr()]
    product(torch._C._cuda_getCurrentRawStream(index), x.data_ptr(), results)
    return out


def _group_product(
    m: int, x: Tensor, weights: Sequence[QuantizedWeight], biases: Sequence[Tensor | None]
) -> GroupProduct | None:
    facts = facts_of(x.get_device())
    if m == 0 or reach.without_kernels(facts) is not None:
        return None
    group = tuple(operands_of(x, q, bias) for q, bias in zip(weights, biases, strict=True))
    choice = choose_group(m, group, facts)
    if choice is None:
        return None
    product: GroupProduct = choice.kernel.group_product(x.device, m, group, list(map(addresses, weights)), choice.plan)
    return product


def _key(x: Tensor, q: QuantizedWeight, bias: Tensor | None, batch_invariant: bool) -> Hashable:
    """By which the products with a weight are known: where its numbers are, what they mean, and what x and bias are."""
    packed, scale = q.packed, q.scale
    code, absmax, offset, size = q.nested or (scale, scale, scale, 0)
    return (
        packed.data_ptr(), scale.data_ptr(), code.data_ptr(), absmax.data_ptr(), offset.data_ptr(), size, *q.shape,
        q.format, q.block_size, scale.dtype, x.dtype, x.get_device(), bias is None, not batch_invariant,
    )  # fmt: skip
