"""Ranks of tokens on the CPU: torch's fp32 products of a few rows of the head at a time, and fp64 for close ones.

hidden [T, D], lm_head [V, D] -> int64 [T]. Logits that are nearer to the token's own than a sum in fp32 may be off are
summed anew in fp64, by numba. Memory: TILE logits at a time. Flops: 2 T V D.
"""

# numba finds out the types of kernels by itself.
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

import numpy as np
import torch
from numba import njit
from torch import Tensor

from halfbyte.kernels.common.floats import BITS, from_bits
from halfbyte.kernels.common.threads import parallel

TILE = 2**21  # logits, and elements of the head, that are fp32 at a time

# What a sum in fp32 may be off by: of |h| |w|, which bounds the sum of magnitudes, and of the largest logit beside it.
# fp64 sums are equal if they differ by less than TIE of |h| |w|.
MARGIN, LARGEST, TIE = 2.0**-20, 2.0**-16, 2.0**-45


def own_logits(hidden: Tensor, rows: Tensor, index: Tensor) -> Tensor:
    """fp64 [2, T]: the logit of each token, by row index[t] of `rows`, and |h| |w| of it.

    index: int64 [T]. What is outside of `rows` is taken as its nearest end.
    """
    index = index.clamp(0, len(rows) - 1)
    lengths = [torch.linalg.vector_norm(lines, dim=1, dtype=torch.float64) for lines in (hidden, rows[index])]
    lines = torch.arange(len(hidden), dtype=torch.int64, device="cpu")
    return torch.stack((_exact(hidden, rows, lines, index), lengths[0] * lengths[1]))


def count_above(hidden: Tensor, lm_head: Tensor, own: Tensor, tokens: Tensor, first: int, above: Tensor) -> None:
    """Add to `above`, int64 [T], how many rows of `lm_head` beat each token.

    own: of `own_logits`. first: the index that row 0 of `lm_head` has among those that `tokens` counts.
    """
    # A product in 16 bits rounds its result, which leaves more for fp64, and is still several times as fast.
    narrow = hidden.dtype == lm_head.dtype != torch.float32
    rounding = torch.finfo(hidden.dtype).eps if narrow else 0.0
    step = max(1, TILE // max(1, len(hidden), 1 if narrow else hidden.shape[1]))
    for start in range(0, len(lm_head), step):
        rows = lm_head[start : start + step]
        products = (hidden @ rows.T).float() if narrow else hidden.float() @ rows.float().T
        margin = (
            torch.maximum(MARGIN * own[1], LARGEST * products.abs().amax(dim=1))[:, None] + rounding * products.abs()
        )
        ahead = products.double() - own[0][:, None]
        above += (ahead > margin).sum(dim=1)
        line, row = (~(ahead.abs() > margin)).nonzero(as_tuple=True)
        exact = _exact(hidden, lm_head, line, row + start)
        lead, index = exact - own[0][line], row + (start + first)
        tie = lead.abs() <= TIE * own[1][line]
        above.index_add_(0, line, torch.where(tie, index < tokens[line], lead > 0).long())


def _exact(hidden: Tensor, rows: Tensor, line: Tensor, row: Tensor) -> Tensor:
    """fp64 [n]: the product of hidden[line[i]] and rows[row[i]]."""
    out = torch.empty(len(line), dtype=torch.float64, device="cpu")
    bits = [tensor.view(BITS[tensor.dtype]).numpy() for tensor in (hidden, rows)]
    parallel(_products, len(line), 256, *bits, line.numpy(), row.numpy(), out.numpy())
    return out


@njit(nogil=True, cache=True, fastmath={"reassoc", "contract", "nsz"}, error_model="numpy")
def _products(begin, end, hidden, rows, line, row, out):
    for i in range(begin, end):
        a, b = hidden[line[i]], rows[row[i]]
        total = 0.0
        for d in range(a.size):
            total += np.float64(from_bits(a[d])) * np.float64(from_bits(b[d]))
        out[i] = total
