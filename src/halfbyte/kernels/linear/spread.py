"""How pairs of a token and an expert are spread over experts, if each is as likely for every pair."""

from __future__ import annotations

import math


def wanted(pairs: int, experts: int) -> float:
    """How many experts have pairs."""
    return experts * -math.expm1(pairs * math.log1p(-1 / experts)) if experts > 1 else 1


def usual_tiles(pairs: int, experts: int, tile_m: int) -> float:
    """About how many tiles there are: of each expert that is wanted one, and half of another where it has more."""
    each = pairs / wanted(pairs, experts)
    return wanted(pairs, experts) * max(1, (2 * each / tile_m + 1) / 2)
