"""Which kernel multiplies with stacks of experts, in a few words for people."""

from __future__ import annotations

from halfbyte.formats.weight import QuantizedWeight
from halfbyte.kernels.common.slow import has_numba


def serves(q: QuantizedWeight) -> str:
    """What `halfbyte.moe` multiplies few tokens and q [E, N, K] with, on q's device."""
    if q.device.type != "cpu":
        return "experts one by one: dequantize, then torch.matmul, as there is no kernel for stacks there"
    if not has_numba():
        return "experts one by one in torch: numba is missing"
    if q.shape[2] % 32:
        return f"experts one by one: numba dequantize, then torch.matmul: K = {q.shape[2]} is no multiple of 32"
    return "experts: numba"
