"""The sum that an L2 distance is the root of, for all Triton kernels that need it exactly: (c - q)^2 in fp32."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def sum_of_squares(
    query, candidates, rows, n_dims, stride, ROWS: tl.constexpr, DIMS: tl.constexpr, EVEN: tl.constexpr
):  # fmt: skip
    """fp32 [ROWS]: the sum of (c - q)^2 for each of `rows`, which are inside. EVEN: DIMS divides n_dims."""
    total = tl.zeros((ROWS, DIMS), tl.float32)
    line = candidates + rows.to(tl.int64)[:, None] * stride
    for start in range(0, n_dims, DIMS):
        d = start + tl.arange(0, DIMS)
        if EVEN:
            q = tl.load(query + d).to(tl.float32)
            c = tl.load(line + d[None, :], eviction_policy="evict_first").to(tl.float32)
        else:
            inside = d < n_dims
            q = tl.load(query + d, mask=inside, other=0).to(tl.float32)
            c = tl.load(line + d[None, :], mask=inside[None, :], other=0, eviction_policy="evict_first").to(tl.float32)
        difference = c - q[None, :]
        total += difference * difference
    return tl.sum(total, axis=1)
