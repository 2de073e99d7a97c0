"""What an RMS norm is told."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Norm(NamedTuple):
    """x -> x * (offset + weight) / sqrt(mean(x²) + epsilon) over the last dimension. weight: of its size, in the dtype
    of x. offset: 1.0 for models that store the weight less one, else 0.0."""

    weight: Tensor
    epsilon: float
    offset: float = 0.0
