"""Products with a stack of experts on the CPU, straight from the 4-bit bytes, through numba.

x [T, K] and a stack [E, N, K], two weights a byte -> [S, N]: row i is x[source[i]] times the expert that its group has,
summed in fp32, rounded once. Rows are sorted by expert, so each expert's bytes come from memory once, however many rows
it has; threads share tiles of (expert, a few of its rows), by what each costs. The products are linear/cpu.py's.

Bytes moved: the packed weights and scales of the experts that have rows, once, while an expert's rows of x fit into the
cache. Flops: 2 S N K.
"""

# numba finds out the types of kernels by itself.
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba import njit
from torch import Tensor

from halfbyte.formats.spec import Format
from halfbyte.formats.weight import NestedScale
from halfbyte.kernels.common import products
from halfbyte.kernels.common.floats import to_bits
from halfbyte.kernels.common.products import GRAIN
from halfbyte.kernels.common.threads import parallel
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


def combine(y: Any, row_of: Any, weights: Tensor, dtype: torch.dtype) -> Tensor:
    """out [T, H]: the sum of weights[t, j] * y[row_of[t, j]] over j, in its order, in fp32, rounded once to `dtype`.

    y: [S, H] fp32. row_of: int64 [T, k], -1 where there is no row. weights: fp32 [T, k]."""
    (tokens, k), hidden = row_of.shape, y.shape[1]
    out, grain = torch.empty((tokens, hidden), dtype=dtype, device="cpu"), max(1, GRAIN // max(1, k * hidden))
    parallel(_combine, tokens, grain, y, row_of, weights.contiguous().numpy(), products.array_of(out))
    return out


@njit(nogil=True, cache=True, fastmath=False, error_model="numpy")
def _combine(begin, end, y, row_of, weights, out):
    total = np.empty(out.shape[1], np.float32)
    for token in range(begin, end):
        total[:] = 0
        for place in range(row_of.shape[1]):
            row, weight = row_of[token, place], weights[token, place]
            if row >= 0:
                for column in range(len(total)):
                    total[column] += weight * y[row, column]
        for column in range(len(total)):
            out[token, column] = to_bits(total[column], out)
