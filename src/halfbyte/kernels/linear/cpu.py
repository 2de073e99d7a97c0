"""x @ W.T on the CPU, straight from the 4-bit bytes, through numba.

x [M, K], W packed two weights a byte, one scale for every `block_size` weights -> [M, N], summed in fp32, rounded once.
A few rows of whole steps are multiplied by common/products.py, and many by common/float_strips.py, where the CPU has
AVX2. Where it multiplies bf16 numbers in pairs, a few of these are by common/paired_products.py and many by
common/strip_products.py. Other rows are decoded a weight at a time, here.

Bytes moved: the packed weights and their scales, once, while the rows of x fit into the cache. Flops: 2 M N K.
"""

# numba finds out the types of kernels by itself.
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numba import njit
from torch import Tensor

from halfbyte.formats.spec import Format
from halfbyte.formats.weight import NestedScale, QuantizedWeight
from halfbyte.kernels.common import float_strips, paired_products, products, strip_products
from halfbyte.kernels.common.products import AS_IT_IS, GRAIN, LANES, ROWS, WEIGHTS
from halfbyte.kernels.common.scales import scale_of
from halfbyte.kernels.common.threads import parallel
from halfbyte.kernels.linear.codebook import factor_of

# Rows of x of a group up to which pairs are faster than strips, on AMD's Zen 4.
MOST_PAIRED = 16


def most_few(dtype: torch.dtype, k: int) -> float:
    """Rows of x of a group that are added up in the order of a few, as long as the order may depend on how many there
    are: so many at most, or any number where no kernel has another."""
    if paired_products.supports(dtype, k):
        return MOST_PAIRED
    return float_strips.MOST_FEW if float_strips.supports(k) else math.inf


def linear(
    x: Tensor,
    packed: Tensor,
    scale: Tensor,
    nested: NestedScale | None,
    format: Format,
    block_size: int,
    bias: Tensor | None,
    out: Tensor,
    batch_invariant: bool = True,
) -> None:
    """Write x [M, K] @ W.T + bias into `out` [M, N]; blocks run over the flattened W, so rows may start anywhere.

    The bits of a row depend on that row and on W alone, but that many rows are added up in another order than a few.
    With batch_invariant all have the order of a few.
    """
    if out.numel() > 0:
        weight = products.weight_arguments(packed, scale, nested, format, block_size)
        _linear(x, weight, format, block_size, bias, out, batch_invariant)


def bind(
    q: QuantizedWeight, dtype: torch.dtype, batch_invariant: bool
) -> Callable[[Tensor, int, Tensor | None, Tensor], None]:
    """`linear` with this weight [N, K], for as long as its tensors lie where they do: of contiguous x of this dtype,
    its rows, bias and out. It keeps none of them alive, and sees what they hold when it is called."""
    weight, format, block_size, (n, k) = products.weight_in_place(q), q.spec, q.block_size, q.shape
    call, most = None, math.inf if batch_invariant else most_few(dtype, k)
    if paired_products.supports(dtype, k):
        call = paired_products.bind(weight, format, factor_of(format.name, dtype), block_size, n, k)
    elif k % WEIGHTS == 0:
        call = products.bind(weight, format, block_size, n, k, dtype)

    def product(x: Tensor, m: int, bias: Tensor | None, out: Tensor) -> None:
        if n == 0 or (call is not None and m <= most and call(x, m, bias, out)):
            return
        bias = None if bias is None else bias.detach()
        _linear(x.detach().view(m, k), weight(), format, block_size, bias, out.view(m, n), batch_invariant)

    return product


def _linear(
    x: Tensor,
    weight: tuple[Any, ...],
    format: Format,
    block_size: int,
    bias: Tensor | None,
    out: Tensor,
    batch_invariant: bool,
) -> None:
    """All of them contiguous, and not empty."""
    (m, k), n = x.shape, out.shape[1]
    rows, matrix = np.arange(m), np.zeros(m, np.int64)
    bias = None if bias is None else bias.view(1, n)
    if k % WEIGHTS == 0:
        alone = matrix[:1], np.array([0, m])
        multiply(x, rows, weight, format, block_size, *alone, bias, rows, out, batch_invariant)
    else:
        wide, y = products.widen(x, AS_IT_IS), np.empty((m, n), np.float32)
        parallel(_linear_rows, n, max(ROWS, GRAIN // (m * max(k, 1))), *weight, wide, k, y)
        products.finish(y, rows, bias, matrix, out)


def multiply(
    x: Tensor, source: Any, weight: tuple[Any, ...], format: Format, block_size: int, matrices: Any, first: Any,
    bias: Tensor | None, target: Any, out: Tensor, batch_invariant: bool = False,
) -> None:  # fmt: skip
    """out[target[i]] = x[source[i]] @ W.T + bias, of the W and the bias [N] that i's group has; x [T, K] contiguous, K
    a multiple of a step. weight, matrices, first: as products.py has them. bias: [matrices of the stack, N] or None.
    """
    k, n, counts = x.shape[1], out.shape[1], np.diff(first)
    many = (counts > most_few(x.dtype, k)) & (not batch_invariant)
    for chosen, are_many in ((~many, False), (many, True)):
        if not chosen.any():
            continue
        own, rows = matrices[chosen], np.repeat(chosen, counts)
        begins, sources, targets = np.append(0, counts[chosen].cumsum()), source[rows], target[rows]
        if are_many and paired_products.supports(x.dtype, k):
            factor = factor_of(format.name, x.dtype)
            strip_products.multiply(x, sources, weight, format, factor, block_size, own, begins, bias, targets, out)
        elif are_many:
            float_strips.multiply(x, sources, weight, format, own, begins, bias, targets, out)
        else:
            y = sums(x, sources, weight, format, block_size, n, own, begins)
            products.finish(y, targets, bias, np.repeat(own, counts[chosen]), out)


def sums(
    x: Tensor, source: Any, weight: tuple[Any, ...], format: Format, block_size: int, n: int, matrices: Any, first: Any
) -> Any:
    """y [first[-1], N] fp32: y[i] = x[source[i]] @ W.T, as `multiply` has it, in the order of a few rows."""
    k = x.shape[1]
    if not paired_products.supports(x.dtype, k):
        wide = products.widen(x, products.order_of(format))
        return products.multiply(wide, k, source, weight, block_size, n, matrices, first)
    factor = factor_of(format.name, x.dtype)
    return paired_products.multiply(x, source, weight, format, factor, block_size, n, matrices, first)


@njit(nogil=True, cache=True, fastmath=False, error_model="numpy")
def _linear_rows(begin, end, packed, flat, codes, code, absmax, offset, nested_log2, log2, codebook, x, k, out):
    """Rows `begin` to `end` of W, for any K, where they may start in the middle of a byte. x is padded with zeros."""
    weights = np.zeros(x.shape[1], np.float32)
    for row in range(begin, end):
        for place in range(k):
            index = row * k + place
            octet = np.int64(packed[index >> 1])
            nibble = octet & 15 if index & 1 else octet >> 4
            weights[place] = codebook[nibble] * scale_of(index >> log2, flat, codes, code, absmax, offset, nested_log2)
        for column in range(len(x)):
            sums = np.zeros(LANES, np.float64)
            for first in range(0, x.shape[1], LANES):
                for lane in range(LANES):
                    sums[lane] += np.float64(weights[first + lane]) * x[column, first + lane]
            for half in (8, 4, 2, 1):
                for lane in range(half):
                    sums[lane] += sums[half + lane]
            out[column, row] = sums[0]
