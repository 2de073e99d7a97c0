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


def linear(x: Tensor, q: QuantizedWeight, bias: Tensor | None, batch_invariant: bool) -> Tensor | None:
    """x @ W.T + bias, or None where the dense weight is the faster way, or nothing can be compiled.

    x [M, K] and bias [N] or None, contiguous, on the current device. Returns [M, N]. With batch_invariant the choice
    depends on the weight alone.
    """
    m, (n, k) = len(x), q.shape
    if not has_compiler() or min(m, n, k) == 0:
        return None
    facts = facts_of(x.get_device())
    if facts.ptx == 0:
        return None
    if x.data_ptr() % 16:
        x = x.clone()

    def allows(kernel: ModuleType) -> bool:
        return batch_invariant or m <= MOST_ROWS[kernel]

    out = x.new_empty((m, n))
    few = decode.plan_for(x, q, bias, batch_invariant)
    if few is not None and (facts.ptx > 90 or (not batch_invariant and _is_lighter(few, m, n * k))):
        decode.linear(x, q, bias, out, few)
    elif allows(hopper) and (found := hopper.plan_for(x, q, batch_invariant)) is not None:
        hopper.linear(x, q, bias, out, *found)
    elif allows(tensor) and (plan := tensor.plan_for(x, q, bias, batch_invariant)) is not None:
        tensor.linear(x, q, bias, out, plan)
    elif allows(exact):
        exact.linear(x, q, bias, out, exact.plan_for(x, q, bias))
    else:
        return None
    return out


def _is_lighter(plan: decode.DecodePlan, m: int, weights: int) -> bool:
    """True where `decode` is ahead of `hopper`, which starts later and then reads faster."""
    return weights < 1 << 27 and m <= (8 if plan.cluster == 1 else 4)
