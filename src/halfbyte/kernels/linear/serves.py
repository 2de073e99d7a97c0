"""Which kernel multiplies one row of x with a weight, in a few words for people."""

from __future__ import annotations

import torch

from halfbyte.formats.weight import QuantizedWeight
from halfbyte.kernels.common.device import DeviceProperties, cpu_capability, properties_of
from halfbyte.kernels.common.slow import has_numba, has_triton
from halfbyte.kernels.linear import reach
from halfbyte.kernels.linear.dispatch import choose
from halfbyte.kernels.linear.plan import plan
from halfbyte.kernels.linear.problem import Problem, problem_of


def serves(q: QuantizedWeight, dtype: torch.dtype) -> str:
    """What `halfbyte.linear` computes x [1, K] @ W.T with, x being of `dtype` and on the device of `q` [N, K].

    "numba", "Triton" (on AMD GPUs), or "CUDA C++ sm90_decode (sm_90)" by the kernel's folder; where the fast path is
    out of reach, what computes instead and what is missing. No GPU is asked for more than its properties.
    """
    device, (n, k) = q.device, q.shape
    if device.type == "cpu":
        return _on_cpu(n, k, dtype)
    if device.type != "cuda":
        return "torch reference"
    properties = properties_of(device.index)
    if properties.kind == "hip":
        return _on_amd(n, k, dtype)
    problem = problem_of(torch.empty(0, dtype=dtype, device=device), q, None)
    lack = reach.without_kernels(properties) or reach.without_scales(1, problem, properties)
    return _on_cuda(problem, properties, lack)


def _on_cpu(n: int, k: int, dtype: torch.dtype) -> str:
    if not has_numba():
        return "torch: numba is missing"
    if plan(1, n, k, dtype, "cpu", False, cpu_capability()).kernel == "fused":
        return "numba"
    return f"numba dequantize, then torch.matmul: K = {k} is no multiple of 32"


def _on_amd(n: int, k: int, dtype: torch.dtype) -> str:
    if not has_triton():
        return "torch: Triton is missing"
    if plan(1, n, k, dtype, "hip", False).kernel == "fused":
        return "Triton"
    return "Triton dequantize, then torch.matmul: the weight has more rows or columns than the kernel can count"


def _on_cuda(problem: Problem, properties: DeviceProperties, lack: reach.Lack | None) -> str:
    if lack is None:
        choice = choose(1, problem, properties, False) if problem.numel else None
        if choice is not None:
            return f"CUDA C++ {choice.kernel.NAME} (sm_{properties.capability})"
    reason = "no kernel is for such a weight" if lack is None else lack.what
    return f"{'Triton' if has_triton() else 'torch'} dequantize, then torch.matmul: {reason}"
