"""How far a result is from the right one."""

from __future__ import annotations

from torch import Tensor


def relative_error(result: Tensor, right: Tensor) -> float:
    """‖result - right‖ / ‖right‖, in fp64."""
    return float((result.double() - right).norm() / right.norm())
