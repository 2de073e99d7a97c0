"""Products with a stack of experts on the CPU, straight from the 4-bit bytes, through numba.

x [T, K] and a stack [E, N, K], two weights a byte -> [S, N]: row i is x[source[i]] times the expert that its group has,
summed in fp32, rounded once. Rows are sorted by expert, so each expert's bytes come from memory once, however many rows
it has; threads share tiles of (expert, a few of its rows), by what each costs. The products are linear/cpu.py's.

Bytes moved: the packed weights and scales of the experts that have rows, once, while an expert's rows of x fit into the
cache. Flops: 2 S N K.
"""

# numba's kernels have no types.
# mypy: allow-untyped-calls

from __future__ import annotations

import numpy as np
from torch import Tensor

from halfbyte.formats.spec import Format
from halfbyte.formats.weight import NestedScale
from halfbyte.kernels.common import products
from halfbyte.kernels.experts.plan import Group
from halfbyte.kernels.linear.cpu import multiply


def grouped_linear(
    x: Tensor,
    source: Tensor,
    groups: tuple[Group, ...],
    packed: Tensor,
    scale: Tensor,
    nested: NestedScale | None,
    format: Format,
    block_size: int,
    bias: Tensor | None,
    out: Tensor,
    target: Tensor,
) -> None:
    """out[target[i]] = x[source[i]] @ W[expert].T + bias[expert] for the rows i of each group.

    x: [T, K], contiguous, K a multiple of 32. source, target: int64. bias: [E, N] or None. out: [.., N], contiguous, of
    x's dtype or fp32.
    """
    n = out.shape[1]
    if n == 0 or not groups:
        return
    experts, firsts, lasts = np.array(groups, np.int64).T
    counts = lasts - firsts
    rows = np.concatenate([np.arange(first, last) for _, first, last in groups])
    first = np.concatenate([[0], np.cumsum(counts)])
    weight = products.weight_arguments(packed, scale, nested, format, block_size)
    sources, targets, stack = source.numpy()[rows], target.numpy()[rows], np.ascontiguousarray(experts)
    multiply(x, sources, weight, format, block_size, stack, first, bias, targets, out)
