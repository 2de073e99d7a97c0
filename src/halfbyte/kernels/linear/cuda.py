"""Which CUDA kernel multiplies, of those in this folder; all are compiled for the GPU at hand on first use.

hopper   wgmma, any number of rows of x: sm_90
decode   a few rows, weights in blocks of 64, from the lightest start: sm_90 and later
tensor   mma.sync, every format: sm_75 and later
exact    CUDA cores: whatever is left, fp32 x above all
"""

from __future__ import annotations

from types import ModuleType

from torch import Tensor

from halfbyte.formats.weight import QuantizedWeight
from halfbyte.kernels.common.device import facts_of
from halfbyte.kernels.common.nvrtc import has_compiler
from halfbyte.kernels.linear import decode, exact, hopper, tensor

# The most rows of x for which decoding W anew for each tile of them is ahead of making the dense weight once. Measured
# on an H200; `tensor`'s is a guess from it.
MOST_ROWS = {hopper: 384, tensor: 64, exact: 8}
# With batch_invariant so many rows go at a time: no kernel refuses as few, so that all of them take the same one.
INVARIANT_ROWS = 256


def linear(x: Tensor, q: QuantizedWeight, bias: Tensor | None, batch_invariant: bool) -> Tensor | None:
    """x @ W.T + bias, or None where the dense weight is the faster way, or nothing can be compiled.

    x [M, K] and bias [N] or None, contiguous, on the current device. Returns [M, N]. With batch_invariant the choice
    depends on the weight alone.
    """
    m, (n, k) = x.shape[0], q.shape
    if min(m, n, k) == 0 or not has_compiler() or facts_of(x.get_device()).ptx == 0:
        return None
    if x.data_ptr() % 16:
        x = x.clone()
    out = x.new_empty((m, n))
    if not batch_invariant or m <= INVARIANT_ROWS:
        return out if _multiply(x, q, bias, batch_invariant, out) else None
    for first in range(0, m, INVARIANT_ROWS):
        rows = slice(first, first + INVARIANT_ROWS)
        _multiply(x[rows], q, bias, True, out[rows])
    return out


def _multiply(x: Tensor, q: QuantizedWeight, bias: Tensor | None, batch_invariant: bool, out: Tensor) -> bool:
    """Fill `out`, and say so, if a kernel is for such a product and ahead of the dense weight."""
    m, (n, k) = x.shape[0], q.shape
    blackwell = facts_of(x.get_device()).ptx > 90

    def allows(kernel: ModuleType) -> bool:
        return batch_invariant or m <= MOST_ROWS[kernel]

    if m <= decode.MOST_ROWS or (batch_invariant and blackwell):
        few = decode.plan_for(x, q, bias, batch_invariant)
        if few is not None and (blackwell or (not batch_invariant and _is_lighter(few, m, n, k))):
            decode.linear(x, q, bias, out, few)
            return True
    if allows(hopper) and (found := hopper.plan_for(x, q, batch_invariant)) is not None:
        hopper.linear(x, q, bias, out, *found)
    elif allows(tensor) and (plan := tensor.plan_for(x, q, bias, batch_invariant)) is not None:
        tensor.linear(x, q, bias, out, plan)
    elif allows(exact):
        exact.linear(x, q, bias, out, exact.plan_for(x, q, bias))
    else:
        return False
    return True


def _is_lighter(plan: decode.DecodePlan, m: int, n: int, k: int) -> bool:
    """True where `decode` is ahead of `hopper`, which starts later and then reads faster; measured on an H200."""
    if n * k <= 1 << 23:
        return True
    if k <= 5376:
        return m <= 8 and n * k < 1 << 27
    return m <= 4 and n * k < 1 << 26 and plan.cluster > 1
