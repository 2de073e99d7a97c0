"""Which kernel multiplies with stacks of experts, in a few words for people."""

from __future__ import annotations

import torch

from halfbyte.formats.weight import QuantizedWeight
from halfbyte.kernels.common.device import DeviceProperties, properties_of
from halfbyte.kernels.common.slow import has_numba
from halfbyte.kernels.experts.sort import MOST_EXPERTS
from halfbyte.kernels.linear import grouped, reach
from halfbyte.kernels.linear.problem import problem_of
from halfbyte.kernels.linear.sm90_decode import launch as decode
from halfbyte.kernels.linear.sm90_decode.routed import Kind

ONE_BY_ONE = "experts one by one: dequantize, then torch.matmul"


def serves(q: QuantizedWeight) -> str:
    """What `halfbyte.moe` multiplies q [E, N, K] with, on q's device."""
    if q.device.type == "cuda":
        return _on_cuda(q, properties_of(q.device.index))
    if q.device.type != "cpu":
        return f"{ONE_BY_ONE}, as there is no kernel for stacks there"
    if not has_numba():
        return "experts one by one in torch: numba is missing"
    if q.shape[2] % 32:
        return f"experts one by one: numba dequantize, then torch.matmul: K = {q.shape[2]} is no multiple of 32"
    return "experts: numba"


def _on_cuda(q: QuantizedWeight, properties: DeviceProperties) -> str:
    lack = reach.without_kernels(properties)
    if lack is not None:
        return f"{ONE_BY_ONE}: {lack.what}"
    x = torch.empty(0, dtype=q.dtype if q.dtype.itemsize == 2 else torch.bfloat16, device=q.device)
    problem, experts = problem_of(x, decode.rows_of(q), None), q.shape[0]
    found = []
    if decode.plan_routed(1, problem, experts, Kind(), properties) is not None:
        found.append(f"{decode.NAME} where tokens are few")
    plans = grouped.plan(1, experts, (problem,), properties) if experts <= MOST_EXPERTS else None
    if plans is not None:
        found.append(f"{grouped.names(plans)} where they are many" if found else grouped.names(plans))
    if not found:
        return f"{ONE_BY_ONE}, as no kernel is for such a stack on this GPU"
    return f"experts: CUDA C++ {', '.join(found)} (sm_{properties.capability})"
