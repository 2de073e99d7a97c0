"""What a product does beside multiplying, in the same launch: to x before, and to the sums after."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from halfbyte.kernels.common.norm import Norm

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


class Beside(NamedTuple):
    """What stands beside a product, with its tensors. norm: of x, before. activation, residual: after, as Fusion says;
    of an MLP the first is behind gate and up, the second behind down."""

    norm: Norm | None = None
    activation: str = ""
    residual: Residual | None = None

    @property
    def fusion(self) -> Fusion:
        """The same without tensors, of a W that no kernel just ahead in the stream writes."""
        norm = None if self.norm is None else (self.norm.epsilon, self.norm.offset)
        return Fusion(norm, self.activation, None if self.residual is None else self.residual.factor, static=True)

    @property
    def addresses(self) -> tuple[int, int]:
        """Of the norm's weight and of what is added to; 0 for none."""
        norm = 0 if self.norm is None else self.norm.weight.data_ptr()
        return norm, 0 if self.residual is None else self.residual.value.data_ptr()


NOTHING = Beside()
