"""INT4 groups as compressed-tensors stores them ("pack-quantized", symmetric): integers and a scale for every group.

A weight is [N, K]. Eight integers share an int32 word along K, element i in bits 4i to 4i + 3, stored as value + 8.
Each row is cut into groups of G along K, and each group has one scale, in the weight's own dtype.

    value = (nibble - 8) * scale[n, k // G]        in fp32, then one rounding to the output dtype

Written by us: scale = max|group| / 7, q = clamp(round(w / scale), -7, 7), both in fp32, the scale rounded to its dtype
first; a group of zeros has scale 0 and integers 0. Read from others: -8 to 7.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

NAME = "int4"
GROUP_SIZES = (32, 64, 128)
PER_WORD = 8
LARGEST = 7
BIAS = 8


@cache
def codebook_tensor(device: torch.device) -> torch.Tensor:
    """The integers -8 to 7 in the order of their nibbles, fp32 [16]; one tensor per device, never to be written to."""
    import torch  # not above: the numbers are read without it (halfbyte explain)

    return torch.arange(-BIAS, BIAS, dtype=torch.float32, device=device)


def check_group_size(group_size: int) -> None:
    """Raise ValueError unless there are groups of `group_size`."""
    if type(group_size) is not int or group_size not in GROUP_SIZES:
        raise ValueError(f"group_size is {group_size!r}; int4 takes one of {GROUP_SIZES}")


def check_shape(shape: Sequence[int], group_size: int) -> None:
    """Raise ValueError unless a weight of `shape` can be cut into groups of `group_size`."""
    check_group_size(group_size)
    if len(shape) != 2:
        raise ValueError(f"shape is {list(shape)}; int4 takes a weight of two dimensions [N, K]")
    if shape[1] % group_size:
        raise ValueError(
            f"K is {shape[1]}, not a multiple of group_size {group_size}; choose a group_size that divides K, or nf4"
        )
