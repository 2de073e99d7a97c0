"""Kernels of a served model, compiled while an engine does what else it does before the first request.

An engine asks for products one by one, as it warms up and captures graphs, and would wait a second for each kernel that
is not in the cache. Here all CPUs compile what products with so many rows of x will want, as soon as there are weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache, cached_property
from threading import Thread
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from halfbyte.formats.weight import QuantizedWeight
from halfbyte.kernels.common import nvrtc
from halfbyte.kernels.common.device import properties_of
from halfbyte.kernels.common.nvrtc import Variant
from halfbyte.kernels.experts import cuda as experts
from halfbyte.kernels.head import launch as heads
from halfbyte.kernels.linear import reach
from halfbyte.kernels.linear.dispatch import variant_of
from halfbyte.kernels.linear.fusion import Fusion
from halfbyte.kernels.linear.problem import problem_of
from halfbyte.kernels.linear.sm90_decode.launch import rows_of
from halfbyte.models.ahead import rows_up_to
from halfbyte.models.products import Fused, variant_of_product
from halfbyte.serving.arrivals import Weight
from halfbyte.serving.products import as_one

if TYPE_CHECKING:
    from halfbyte.kernels.attention.sm90.paged import Kind


class Ahead:
    """rows: the most that x will have. batch_invariant: whether products are. What was asked for before is not looked
    at again."""

    def __init__(self, rows: int, batch_invariant: bool = False) -> None:
        self.most, self.batch_invariant = rows, batch_invariant
        self.seen: set[object] = set()

    @cached_property
    def rows(self) -> list[int]:
        return rows_up_to(self.most)

    def linear(self, dtype: torch.dtype, weights: Sequence[Weight], has_bias: bool) -> None:
        """The products of x of this dtype with the weights of a layer (products.py)."""
        quantized = [weight for weight in weights if isinstance(weight, QuantizedWeight)]
        if not quantized or not reach.can_compile(device := quantized[0].device):
            return
        x = torch.empty(0, dtype=dtype, device=device)
        problems = tuple(problem_of(x, q, x if has_bias else None) for q in quantized)
        if problems in self.seen:
            return
        self.seen.add(problems)
        together = not self.batch_invariant and as_one(weights)
        groups = {(one,) for one in problems} | ({problems} if together else set())
        properties = properties_of(device.index)
        _compile(variant_of(m, group, properties, self.batch_invariant) for m in self.rows for group in groups)

    def layer(self, dtype: torch.dtype, weights: Sequence[Sequence[QuantizedWeight]], biased: Sequence[bool]) -> None:
        """The products of a decoder layer with what stands beside them: of q, k and v, o, gate and up, and down."""
        device = weights[0][0].device
        if not reach.can_compile(device):
            return
        x = torch.empty(0, dtype=dtype, device=device)
        qkv, out, gates, downs = (
            tuple(problem_of(x, q, x if has_bias else None) for q in group)
            for group, has_bias in zip(weights, biased, strict=True)
        )
        if (qkv, out, gates, downs) in self.seen:
            return
        self.seen.add((qkv, out, gates, downs))
        norm, added = (0.0, 0.0), Fusion(residual=1.0, static=True)
        products = [
            Fused(qkv, Fusion(norm, static=True)),
            Fused(out, added),
            Fused(gates, Fusion(norm, "silu", static=True), (downs[0], added)),
            Fused(gates, Fusion(norm, "silu", static=True)),
            Fused(downs, added),
        ]
        properties = properties_of(device.index)
        _compile(variant_of_product(m, product, properties, False) for m in self.rows for product in products)

    def experts(
        self, dtype: torch.dtype, gate_up: QuantizedWeight, down: QuantizedWeight, activation: str, k: int, biases: bool
    ) -> None:
        """A block of experts, k of them for each token. With batch_invariant they are products by themselves."""
        if self.batch_invariant or not reach.can_compile(gate_up.device):
            return
        x = torch.empty(0, dtype=dtype, device=gate_up.device)
        bias = x if biases else None
        both = problem_of(x, rows_of(gate_up), bias), problem_of(x, rows_of(down), bias)
        if (both, k) in self.seen:
            return
        self.seen.add((both, k))
        properties, count = properties_of(gate_up.device.index), gate_up.shape[0]
        _compile(variant for m in self.rows for variant in experts.variants(m, k, count, *both, activation, properties))

    def head(self, weight: Tensor, has_bias: bool) -> None:
        """The product with a dense head [N, K]."""
        if reach.can_compile(weight.device):
            n, k = weight.shape
            _compile(heads.variants(self.rows, (n, k), weight.dtype, has_bias, properties_of(weight.device.index)))


@cache
def attention(kind: Kind, requests: int, tokens: int) -> None:
    """Of batches of up to so many requests, each with one new token and up to so many tokens, on the current device."""
    from halfbyte.kernels.attention.sm90.paged import can_compile  # needs Triton, which not every CPU has

    properties = properties_of(torch.cuda.current_device())
    if can_compile(kind, properties):
        plans = {kind.plan(properties, number, tokens): None for number in range(1, requests + 1)}
        _compile(kind.variant(properties, plan) for plan in plans if plan is not None)


def _compile(variants: Iterable[Variant | None]) -> None:
    """Planning takes a second or two in all, so it is done aside, too."""
    Thread(target=lambda: nvrtc.compile_ahead(filter(None, variants)), daemon=True).start()
