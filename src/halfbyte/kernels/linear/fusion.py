"""What a product does beside multiplying, in the same launch: to x before, and to the sums after."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

ACTIVATIONS = ("silu", "gelu_tanh")


@dataclass(frozen=True)
class Fusion:
    """norm: x is multiplied by (offset + weight) / sqrt(mean(x²) + epsilon) first; the pair (epsilon, offset), or None.
    activation: of ACTIVATIONS, or "": there are two weights, and y = activation(x @ gate.T) * (x @ up.T).
    residual: y = residual + residual * product, this number being the factor of the product; or None.
    static: no kernel just ahead in the stream writes W, so that it may be read before that one ends.
    """

    norm: tuple[float, float] | None = None
    activation: str = ""
    residual: float | None = None
    static: bool = False


ALONE = Fusion()  # nothing beside


class Residual(NamedTuple):
    """What a product is added to: y = value + factor * product. value [..., N], in the dtype of x."""

    value: Tensor
    factor: float = 1.0
