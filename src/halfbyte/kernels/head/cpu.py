"""x @ W.T + bias of one row of x and a dense weight on a CPU, a model's head (kernel.cu has it for GPUs), by numba.

Bytes: W once, at the speed of memory, which torch's products of one row do not reach in bf16 and fp32. Flops: 2 N K.
More rows, and fp16, torch multiplies as fast.
"""

# numba finds out the types of kernels by itself.
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

import numpy as np
import torch
from numba import njit
from torch import Tensor

from halfbyte.kernels.common.floats import BITS, from_bits, to_bits
from halfbyte.kernels.common.products import GRAIN
from halfbyte.kernels.common.threads import parallel

DTYPES = (torch.bfloat16, torch.float32)


def supports(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether `head` is for x [..., K], of one row, and a weight [N, K]."""
    tensors = [x, weight] if bias is None else [x, weight, bias]
    return (
        x.dtype in DTYPES
        and all(t.dtype is x.dtype and t.device.type == "cpu" and t.is_contiguous() for t in tensors)
        and weight.dim() == 2
        and 0 < x.shape[-1] == weight.shape[1] == x.numel()
    )


def head(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x @ weight.T (+ bias), [..., N] in the dtype of x, of what `supports` says: summed in fp32, rounded once."""
    (n, k), kind = weight.shape, BITS[x.dtype]
    out = x.new_empty((*x.shape[:-1], n))
    added = x.new_empty(0) if bias is None else bias
    bits = [tensor.detach().view(kind).numpy() for tensor in (weight, added, out.view(n))]
    parallel(_multiply, n, max(1, GRAIN // k), x.detach().float().view(k).numpy(), *bits)
    return out


# Sums may be made in any order, so in vectors; which one it is does not depend on the threads.
@njit(nogil=True, cache=True, fastmath={"reassoc", "contract", "nsz"}, error_model="numpy")
def _multiply(begin, end, x, weight, bias, out):
    for row in range(begin, end):
        line, total = weight[row], np.float32(0)
        for place in range(len(x)):
            total += from_bits(line[place]) * x[place]
        if len(bias) > 0:
            total += from_bits(bias[row])
        out[row] = to_bits(total, out)
