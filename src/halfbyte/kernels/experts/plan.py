"""Which experts a fused kernel multiplies with, and which are dequantized: a pure function of sizes and device."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from halfbyte.kernels.common.fused_rows import most_fused_rows


class Group(NamedTuple):
    """The rows from `first` to before `last`, sorted by expert, that one expert has."""

    expert: int
    first: int
    last: int


@dataclass(frozen=True)
class ExpertsPlan:
    """fused: experts whose 4-bit bytes are read by a kernel, all in one launch. dense: those that are dequantized, one
    after the other, and left to torch's product."""

    fused: tuple[Group, ...]
    dense: tuple[Group, ...]


def groups_of(counts: Iterable[int]) -> tuple[Group, ...]:
    """The groups of sorted rows, of how many each expert has; experts without rows have none."""
    groups, first = [], 0
    for expert, count in enumerate(counts):
        if count:
            groups.append(Group(expert, first, first + count))
        first += count
    return tuple(groups)


def plan(
    groups: tuple[Group, ...], n: int, k: int, dtype: torch.dtype, device_type: str, cpu_capability: str = ""
) -> ExpertsPlan:
    """The plan for rows of `dtype` and experts [n, k] on a kind of device.

    cpu_capability: as `cpu_capability` of common/device.py names it.
    """
    if device_type != "cpu":
        return ExpertsPlan((), groups)
    most = most_fused_rows(n, k, dtype, cpu_capability)
    fused = tuple(group for group in groups if group.last - group.first <= most)
    return ExpertsPlan(fused, tuple(group for group in groups if group.last - group.first > most))
