"""x @ W.T + bias on a CPU by torch's product, of a W that is dense a panel of rows at a time: a panel is still in the
cache when it is multiplied, and there is never a whole dense weight.

x [..., K], W [N, K], bias [N] or None -> [..., N].
Bytes: the packed weight and, as many times as there are panels, x. Flops: 2 M N K.
"""

from __future__ import annotations

from collections.abc import Callable
from math import gcd

from torch import Tensor

from halfbyte.kernels.linear import reference

WEIGHTS = 2**22  # of a panel; with less, products of few rows of W use less of the machine (docs/kernels/linear.md)


def panel_rows(n: int, k: int, block_size: int, least: int) -> int:
    """Rows of a panel of W [n, k], each of which begins with a block; n where panels would gain nothing. least: weights
    of a panel that all threads together decode well."""
    step = block_size // gcd(k, block_size)
    rows = -(-max(WEIGHTS, least) // (max(k, 1) * step)) * step
    return rows if 2 * rows <= n else n


def linear(x: Tensor, dequantize: Callable[[Tensor, int], None], bias: Tensor | None, out: Tensor, rows: int) -> None:
    """Write x [..., K] @ W.T + bias into `out` [..., N], `rows` rows of W at a time, as `panel_rows` counts them. x is
    taken as it is given: in which order torch adds up, and how well, depends on its strides.

    dequantize: fills a panel [rows, K] of x's dtype with weights of W from that number on.
    """
    n, k = out.shape[-1], x.shape[-1]
    weight = x.new_empty((rows, k))
    for first in range(0, n, rows):
        panel = weight[: n - first]
        dequantize(panel, first * k)
        last = first + len(panel)
        out[..., first:last] = reference.linear(x, panel, None if bias is None else bias[first:last])
