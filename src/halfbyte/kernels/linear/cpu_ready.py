"""Products on a CPU that are ready: of rows of x with a weight that as many were multiplied with before.

What a product costs beside its kernel is Python, as much as a small weight takes. So how kernels are told of a weight
is kept, by thread and address as cache.py does it for GPUs: nothing is kept alive, and kernels read what is in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch
from torch import Tensor

from halfbyte.formats.weight import QuantizedWeight
from halfbyte.kernels.common.thread_cache import ThreadCache
from halfbyte.kernels.linear.problem import key_of

# Of rows x [m, K], the bias [N] or None, and the result [m, N], which it writes.
Product = Callable[[Tensor, Tensor | None, Tensor], None]

MOST_ROWS = 16  # of more, a product takes much longer than all around it

products: ThreadCache[Hashable, Product] = ThreadCache()  # by rows and `key_of`


def keep(m: int, x: Tensor, q: QuantizedWeight, bias: Tensor | None, batch_invariant: bool, product: Product) -> None:
    """The product of m rows with this weight is the way to compute it from now on, as long as it lies where it does."""
    products.keep((m, key_of(x, q, bias, batch_invariant)), product)


def ready(x: Tensor, q: QuantizedWeight, bias: Tensor | None, batch_invariant: bool) -> Tensor | None:
    """x @ W.T + bias where this thread has had a product of as many rows with this weight before, and all is as kernels
    take it. Otherwise None, whatever the reason; then the caller looks closer.

    x, bias: any plain tensors that need no gradients.
    """
    if len(q.shape) != 2 or q.shape[1] == 0:
        return None
    (n, k), sides = q.shape, x.shape
    m = x.numel() // k
    product = products.entries.get((m, key_of(x, q, bias, batch_invariant))) if m <= MOST_ROWS else None
    if (
        product is None
        or not sides
        or sides[-1] != k
        or not _is_usual(x)
        or not q.packed.is_cpu
        or not (bias is None or (bias.dtype is x.dtype and bias.shape == (n,) and _is_usual(bias)))
    ):
        return None
    x = x.detach()
    out = x.new_empty((*sides[:-1], n))
    product(x.view(m, k), None if bias is None else bias.detach(), out.view(m, n))
    return out


def _is_usual(tensor: Tensor) -> bool:
    return tensor.is_cpu and tensor.layout is torch.strided and tensor.is_contiguous() and not tensor.is_neg()
