"""The RMS norm of a few rows on a CPU, by numba: one call where torch has six, each of which costs more than its work.

Bytes: x twice from the cache, and the result. It rounds as transformers' LlamaRMSNorm does, twice: the normed number,
and that times the weight. Squares are added in another order, which hardly a number of 16 bits shows; in fp32 most
would, so norms in fp32 stay torch's.
"""

# numba finds out the types of kernels by itself.
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

from math import sqrt

import numpy as np
import torch
from numba import njit
from torch import Tensor

from halfbyte.kernels.common.addresses import array_at
from halfbyte.kernels.common.floats import LIKE, from_bits, to_bits

DTYPES = (torch.bfloat16, torch.float16)
MOST = 1 << 16  # numbers; of more, torch's threads share the work


def supports(x: Tensor, weight: Tensor) -> bool:
    """Whether `rms_norm` is for plain tensors x [..., K] and weight [K]."""
    return (
        x.dtype in DTYPES
        and x.dtype is weight.dtype
        and x.is_cpu
        and weight.is_cpu
        and x.is_contiguous()
        and weight.is_contiguous()
        and not (x.is_neg() or weight.is_neg())
        and weight.dim() == 1
        and x.dim() > 0
        and x.shape[-1] == len(weight)
        and 0 < x.numel() <= MOST
    )


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """weight * (x / sqrt(mean(x²) + epsilon)), in the shape and dtype of x, of what `supports` says."""
    out, k = x.new_empty(x.shape), weight.numel()
    places = x.data_ptr(), weight.data_ptr(), out.data_ptr()
    _rms_norm(*places, x.numel() // k, k, epsilon, LIKE[x.dtype])
    return out


# Squares may be added in any order, so in vectors.
@njit(nogil=True, cache=True, fastmath={"reassoc", "contract", "nsz"}, error_model="numpy")
def _rms_norm(x, weight, out, rows, k, epsilon, like):
    x, out = array_at(x, (rows, k), like), array_at(out, (rows, k), like)
    weight = array_at(weight, (k,), like)
    for row in range(rows):
        squares = np.float32(0)
        for place in range(k):
            value = from_bits(x[row, place])
            squares += value * value
        factor = np.float32(1 / sqrt(squares / np.float32(k) + np.float32(epsilon)))
        for place in range(k):
            normed = to_bits(from_bits(x[row, place]) * factor, out)
            out[row, place] = to_bits(from_bits(normed) * from_bits(weight[place]), out)
