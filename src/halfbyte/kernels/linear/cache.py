"""Products that are ready, kept from call to call: what `linear` costs on the host beside its launch is decided here.

A thread has products of its own, since a launch writes its arguments first. They are known by addresses, sizes and
dtypes, never by tensors: nothing is kept alive, and a weight whose memory has moved is another weight.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from halfbyte.formats.weight import QuantizedWeight
from halfbyte.kernels.common.thread_cache import ThreadCache
from halfbyte.kernels.linear.dispatch import Choice, FusedChoice, GroupChoice
from halfbyte.kernels.linear.fusion import Fusion
from halfbyte.kernels.linear.kernel import FusedProduct, GroupProduct, MlpProduct, Product
from halfbyte.kernels.linear.problem import Addresses, Problem, key_of

MOST_ROWS_KEPT = 256  # numbers of rows of a weight: servers come to ask for every one


class Known(NamedTuple):
    """A weight that was multiplied with before: what it is, where it lies, and its products by the rows of x."""

    device: torch.device
    problem: Problem
    weight: Addresses
    products: dict[int, Product]

    def keep(self, m: int, product: Product) -> Product:
        if len(self.products) >= MOST_ROWS_KEPT:
            self.products.clear()
        self.products[m] = product
        return product


# By `key_of`: what was computed before with these very addresses.
products: ThreadCache[Hashable, Known] = ThreadCache()
# By what a bound product depends on; it may serve several numbers of rows.
bound: ThreadCache[Hashable, Product] = ThreadCache()
bound_groups: ThreadCache[Hashable, GroupProduct] = ThreadCache()
bound_fused: ThreadCache[Hashable, FusedProduct] = ThreadCache()
# By rows and the keys of a group's weights; None where the group gains nothing.
groups: ThreadCache[Hashable, tuple[GroupProduct | None]] = ThreadCache()
# By rows of a gradient and the key of a weight, the product with W itself; None where the dense weight is as fast.
back: ThreadCache[Hashable, tuple[Product | None]] = ThreadCache()
# As groups, with what is fused; None where launches of their own are as fast.
fused: ThreadCache[Hashable, tuple[FusedProduct | None]] = ThreadCache()
# By rows and the keys of gate's, up's and down's weights, what multiplies with all three; None where they follow each
# other like any products.
mlps: ThreadCache[Hashable, tuple[MlpProduct | None]] = ThreadCache()


def group_key(m: int, x: Tensor, weights: Sequence[QuantizedWeight], biases: Sequence[Tensor | None]) -> Hashable:
    return (m, *(key_of(x, q, bias, False) for q, bias in zip(weights, biases, strict=True)))


def bind(choice: Choice, device: torch.device, m: int, problem: Problem, weight: Addresses) -> Product:
    """The chosen product with a weight on the current device, of m rows and all that are as many tiles of x."""
    kernel, plan = choice
    return bound.get(
        (kernel.NAME, device, plan.x_tiles(m), problem, weight, plan),
        lambda: kernel.bind(device, m, problem, weight, plan),
    )


def bind_group(
    choice: GroupChoice, device: torch.device, m: int, group: tuple[Problem, ...], weights: tuple[Addresses, ...]
) -> GroupProduct:
    """The same with several weights."""
    kernel, plan = choice
    return bound_groups.get(
        (kernel.NAME, device, plan.x_tiles(m), group, weights, plan),
        lambda: kernel.bind_group(device, m, group, weights, plan),
    )


def bind_fused(
    choice: FusedChoice,
    device: torch.device,
    m: int,
    group: tuple[Problem, ...],
    weights: tuple[Addresses, ...],
    fusion: Fusion,
) -> FusedProduct:
    """The same with what is fused."""
    kernel, plan = choice
    return bound_fused.get(
        (kernel.NAME, device, plan.x_tiles(m), group, weights, fusion, plan),
        lambda: kernel.bind_fused(device, m, group, weights, fusion, plan),
    )
