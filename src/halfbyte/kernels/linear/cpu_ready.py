"""Products on a CPU that are ready: of a few rows of x, with a weight that as many were multiplied with before.

What a product costs beside its kernel is Python, as much as a small weight takes. So how kernels are told of a weight
is kept, by thread and address as cache.py does it for GPUs: nothing is kept alive, and kernels read what is in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import NamedTuple

import torch
from torch import Tensor

from halfbyte.formats.weight import QuantizedWeight
from halfbyte.kernels.common.thread_cache import ThreadCache
from halfbyte.kernels.linear.problem import key_of

# Of x [..., K], its rows m, the bias [N] or None, and the result [..., N], which it writes.
Product = Callable[[Tensor, int, Tensor | None, Tensor], None]

MOST_ROWS = 16  # of more, a product takes much longer than all around it


class Known(NamedTuple):
    """The product with a weight, and numbers of rows that are to be multiplied so."""

    product: Product
    rows: set[int]


weights: ThreadCache[Hashable, Known] = ThreadCache()  # by `key_of`


def keep(
    m: int,
    x: Tensor,
    q: QuantizedWeight,
    bias: Tensor | None,
    batch_invariant: bool,
    bind: Callable[[QuantizedWeight, torch.dtype, bool], Product],
) -> None:
    """From now on m rows are multiplied with this weight, as long as it lies where it does, by what `bind` gives."""
    if 0 < m <= MOST_ROWS:
        key = key_of(x, q, bias, batch_invariant)
        weights.get(key, lambda: Known(bind(q, x.dtype, batch_invariant), set())).rows.add(m)


def ready(x: Tensor, q: QuantizedWeight, bias: Tensor | None, batch_invariant: bool) -> Tensor | None:
    """x @ W.T + bias where this thread has had a product of as many rows with this weight before, and all is as kernels
    take it. Otherwise None, whatever the reason; then the caller looks closer.

    x, bias: any plain tensors that need no gradients.
    """
    if len(q.shape) != 2 or q.shape[1] == 0:
        return None
    (n, k), sides = q.shape, x.shape
    m = x.numel() // k
    known = weights.entries.get(key_of(x, q, bias, batch_invariant)) if m <= MOST_ROWS else None
    if (
        known is None
        or m not in known.rows
        or not sides
        or sides[-1] != k
        or not _is_usual(x)
        or not q.packed.is_cpu
        or not (bias is None or (bias.dtype is x.dtype and bias.shape == (n,) and _is_usual(bias)))
    ):
        return None
    out = x.new_empty((*sides[:-1], n))
    known.product(x, m, bias, out)
    return out


def _is_usual(tensor: Tensor) -> bool:
    return tensor.is_cpu and tensor.layout is torch.strided and tensor.is_contiguous() and not tensor.is_neg()
