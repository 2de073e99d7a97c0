"""Which CUDA kernel multiplies: that with the least estimated time, of those in this folder.

sm90_gemm     wgmma, many rows of x, 16-bit operands that are the dequantized weights: sm_90
sm90_streamk  wgmma, any number of rows of x: sm_90
sm90_decode   a few rows, blocks of 64 weights and more, from the lightest start: sm_90 and later
sm80          mma.sync behind rings of asynchronous copies, every format, any number of rows: sm_80 and later
sm80_gemm     the same for many rows, for which a CTA decodes W once to shared memory: sm_80 and later
sm75          mma.sync, every format: sm_75 and later
simt          CUDA cores: whatever is left, fp32 x above all

The other way is to make the dense weight and to leave the product to torch. It is in the competition, too, but for two
kernels, which are for few rows of x. Times are those of the GPU at hand, but of all Hopper GPUs an H200's. The product
with W itself, which gradients are, has the ways of sm90_gemm, of sm80_gemm, of sm80_back (sm_80 and later, for fewer
rows), and of the dense weight.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from types import ModuleType
from typing import Any, NamedTuple, TypeVar, cast

import torch

from halfbyte.kernels.common.device import DeviceProperties
from halfbyte.kernels.common.nvrtc import Variant
from halfbyte.kernels.linear.fusion import Fusion
from halfbyte.kernels.linear.kernel import BackKernel, FusedKernel, GroupKernel, Kernel, Plan
from halfbyte.kernels.linear.problem import FIRST_WITH_BF16, Problem
from halfbyte.kernels.linear.simt import launch as simt
from halfbyte.kernels.linear.sm75 import launch as sm75
from halfbyte.kernels.linear.sm80 import launch as sm80
from halfbyte.kernels.linear.sm80_back import launch as sm80_back
from halfbyte.kernels.linear.sm80_gemm import launch as sm80_gemm
from halfbyte.kernels.linear.sm90_decode import launch as sm90_decode
from halfbyte.kernels.linear.sm90_gemm import launch as sm90_gemm
from halfbyte.kernels.linear.sm90_streamk import launch as sm90_streamk
from halfbyte.kernels.linear.sm90_streamk.plan import StreamKGroup, handed_over
from halfbyte.kernels.linear.sm90_streamk.shape import StreamKPlan
from halfbyte.kernels.linear.tune import h200

KERNELS: tuple[Kernel[Any], ...] = (sm90_decode, sm90_streamk, sm90_gemm, sm80, sm80_gemm, sm75, simt)
GROUP_KERNELS: tuple[GroupKernel[Any], ...] = (sm90_decode, sm90_streamk, sm90_gemm)
FUSED_KERNELS: tuple[FusedKernel[Any], ...] = (sm90_decode, sm90_streamk, sm90_gemm)
BACK_KERNELS: tuple[BackKernel[Any], ...] = (sm90_gemm, sm80_gemm, sm80_back)
# Kernel to one that was faster in all that was measured: where that supports a problem, too, this one is not asked.
SUPERSEDED: dict[str, Kernel[Any]] = {sm75.NAME: sm80, sm80.NAME: sm90_streamk, sm80_gemm.NAME: sm90_streamk}
# Of gradients. That it is so on Hopper follows from the rates of their tensor cores' instructions.
BACK_SUPERSEDED: dict[str, Kernel[Any]] = {sm80_gemm.NAME: sm90_gemm}
# The same with batch_invariant, for which sm75 and sm80 have not been measured side by side.
INVARIANT_SUPERSEDED: dict[str, Kernel[Any]] = {sm80.NAME: sm90_streamk}
# The most rows of x of kernels whose estimates are not good enough to be held against the dense weight's.
MOST_ROWS = {sm75.NAME: h200.SM75_ROWS, simt.NAME: h200.SIMT_ROWS}
# With batch_invariant no choice may depend on the rows of x: it is the best one for so many.
TYPICAL_INVARIANT_ROWS = 32


K = TypeVar("K", bound=Kernel[Any])


class Choice(NamedTuple):
    """A kernel and its plan."""

    kernel: Kernel[Any]
    plan: Any

    def variant(self, problem: Problem, properties: DeviceProperties) -> Variant:
        """What is compiled for it."""
        return self.kernel.variant(problem, self.plan, properties)


class GroupChoice(NamedTuple):
    """A kernel and its plan for several weights at once."""

    kernel: GroupKernel[Any]
    plan: Plan


class FusedChoice(NamedTuple):
    """A kernel and its plan for one or several weights with what is fused."""

    kernel: FusedKernel[Any]
    plan: Plan


@lru_cache(1 << 14)
def choose(m: int, problem: Problem, properties: DeviceProperties, batch_invariant: bool) -> Choice | None:
    """How x [m, K] is multiplied, m and no side of W being 0, or None where the dense weight is the faster way.

    With batch_invariant m is up to INVARIANT_ROWS, and the choice depends on the weight alone: `simt` supports every
    weight with known scales, and `sm90_decode` then takes any number of rows.
    """
    properties = properties.as_fitted
    if batch_invariant:
        typical = _fastest(
            KERNELS, INVARIANT_SUPERSEDED, lambda kernel: kernel.plan(TYPICAL_INVARIANT_ROWS, problem, properties, True)
        )
        if typical is None:
            return None
        kernel = typical.kernel
        return Choice(kernel, kernel.plan(m, problem, properties, True))
    kernels = tuple(kernel for kernel in KERNELS if m <= MOST_ROWS.get(kernel.NAME, m))
    choice = _fastest(kernels, SUPERSEDED, lambda kernel: kernel.plan(m, problem, properties, False))
    if choice is None or choice.kernel.NAME in MOST_ROWS:
        return choice
    return choice if choice.plan.microseconds <= _most_beside_dense(m, problem, properties) else None


def _fastest(
    kernels: Sequence[K], superseded: Mapping[str, Kernel[Any]], plan: Callable[[K], Plan | None]
) -> Choice | None:
    """Of those that support the problem. One that another supersedes is asked after that one, and only if it must be:
    planning takes longer than many a product."""
    found: list[Choice] = []
    served: set[str] = set()  # kernels that support it, and those that need not be asked
    for kernel in kernels:
        better = superseded.get(kernel.NAME)
        if better is not None and better.NAME in served:
            served.add(kernel.NAME)
        elif (planned := plan(kernel)) is not None:
            served.add(kernel.NAME)
            found.append(Choice(kernel, planned))
    return min(found, key=lambda choice: choice.plan.microseconds, default=None)


def dense_microseconds(m: int, problem: Problem, properties: DeviceProperties, back: bool = False) -> float:
    """The estimated time of making the dense weight, and of torch's product with its transpose, or back with itself."""
    millions, rates = problem.numel / 1e6, properties.rates
    teraflops = h200.DENSE_TERAFLOPS * rates.teraflops
    tiles = -(-m // h200.DENSE_TILE) * -(-(problem.k if back else problem.n) // h200.DENSE_TILE)
    if tiles <= h200.DENSE_IDLE * properties.sms:
        teraflops /= h200.DENSE_FEW_TILES
    product = math.hypot(millions * h200.DENSE_READ / rates.bandwidth, 2 * m * millions / teraflops)
    if problem.n % 8 and problem.dtype is not torch.float32:  # cuBLAS has slower kernels for such rows of y
        product *= h200.DENSE_ODD if problem.n % 2 else h200.DENSE_EVEN
    return h200.DENSE_START + millions * h200.DENSE_WRITE / rates.bandwidth + product


def _most_beside_dense(m: int, problem: Problem, properties: DeviceProperties, back: bool = False) -> float:
    """The most µs that a kernel may take where there is the dense way, which takes memory for the dense weight."""
    return h200.DENSE_GAIN * dense_microseconds(m, problem, properties, back)


@lru_cache(1 << 14)
def takes_halves(m: int, problem: Problem, properties: DeviceProperties, batch_invariant: bool) -> bool:
    """Whether x [m, K] in bf16 is better multiplied as fp16 (halves.py), whose tensor cores alone a GPU has: always
    where torch multiplies otherwise, which has none for bf16 either. Not where rows of x may decide nothing."""
    if properties.ptx >= FIRST_WITH_BF16 or problem.dtype is not torch.bfloat16 or batch_invariant:
        return False
    as_it_is = choose(m, problem, properties, False)
    if as_it_is is None:
        return True
    halves = replace(problem, dtype=torch.float16, bias=False)
    choice = choose(m, halves, properties, False)
    time = dense_microseconds(m, halves, properties.as_fitted) if choice is None else choice.plan.microseconds
    return time + h200.HALVES < float(as_it_is.plan.microseconds)


@lru_cache(1 << 14)
def choose_back(m: int, problem: Problem, properties: DeviceProperties) -> Choice | None:
    """How a gradient [m, N] is multiplied with W itself, m and no side of W being 0, or None where the dense weight is
    the faster way."""
    properties = properties.as_fitted
    best = _fastest(BACK_KERNELS, BACK_SUPERSEDED, lambda kernel: kernel.plan_back(m, problem, properties))
    return best if best and best.plan.microseconds <= _most_beside_dense(m, problem, properties, True) else None


@lru_cache(1 << 14)
def choose_group(m: int, group: tuple[Problem, ...], properties: DeviceProperties) -> GroupChoice | None:
    """How x [m, K] is multiplied with several weights at once, or None where one after the other is as fast."""
    best, found, fitted = _microseconds_one_by_one(m, group, properties), None, properties.as_fitted
    for kernel in GROUP_KERNELS:
        plan = kernel.plan_group(m, group, fitted)
        if plan is not None and plan.microseconds < best:
            best, found = plan.microseconds, GroupChoice(kernel, plan)
    return found


@lru_cache(1 << 14)
def choose_fused(
    m: int, group: tuple[Problem, ...], fusion: Fusion, properties: DeviceProperties
) -> FusedChoice | None:
    """How x [m, K] is multiplied with one or several weights, and what stands beside the product is done in the same
    launch; None where launches of their own are as fast, be it for the norm alone."""
    together = choose_group(m, group, properties) if len(group) > 1 else None
    best = _microseconds_one_by_one(m, group, properties) if together is None else together.plan.microseconds
    best += h200.POINTWISE * (bool(fusion.norm) + bool(fusion.activation) + (fusion.residual is not None))
    if fusion.norm is not None:
        rest = replace(fusion, norm=None)
        after = choose_fused(m, group, rest, properties) if rest != Fusion(static=fusion.static) else None
        best = min(best, math.inf if after is None else after.plan.microseconds + h200.POINTWISE)
    found, fitted = None, properties.as_fitted
    for kernel in FUSED_KERNELS:
        plan = kernel.plan_fused(m, group, fusion, fitted)
        if plan is not None and plan.microseconds < best:
            best, found = plan.microseconds, FusedChoice(kernel, plan)
    return found


class MlpChoice(NamedTuple):
    """A kernel and its plans for gate and up, which lay their result out, and for down, which takes it so."""

    kernel: ModuleType
    gates: StreamKGroup
    down: StreamKPlan


@lru_cache(1 << 14)
def choose_mlp(
    m: int, group: tuple[Problem, ...], fusion: Fusion, after: Fusion, properties: DeviceProperties
) -> MlpChoice | None:
    """How x [m, K] is multiplied with gate and up, and what they give with down, without a launch between; None where
    the launches of either are others. group: of all three. fusion, after: of gate and up, and of down."""
    gates = choose_fused(m, group[:2], fusion, properties)
    down = choose_fused(m, group[2:], after, properties)
    if gates is None or down is None or not gates.kernel is down.kernel is sm90_streamk:
        return None
    first, (then,) = cast(StreamKGroup, gates.plan), cast(StreamKGroup, down.plan).plans
    plan = handed_over(first, then, group[2])
    return None if plan is None else MlpChoice(sm90_streamk, plan, then)


def variant_of(
    m: int, group: tuple[Problem, ...], properties: DeviceProperties, batch_invariant: bool
) -> Variant | None:
    """What is compiled for x [m, K] and one weight, or for what several do in common; None where nothing is."""
    if len(group) == 1:
        choice = choose(m, group[0], properties, batch_invariant)
        return choice.variant(group[0], properties) if choice else None
    together = None if batch_invariant else choose_group(m, group, properties)
    return together.kernel.group_variant(group, together.plan, properties) if together else None


def _microseconds_one_by_one(m: int, group: Sequence[Problem], properties: DeviceProperties) -> float:
    alone = ((problem, choose(m, problem, properties, False)) for problem in group)
    fitted = properties.as_fitted
    return sum(dense_microseconds(m, o, fitted) if one is None else one.plan.microseconds for o, one in alone)
