"""Why a product on a GPU cannot take the fast path, in a sentence that says how to mend it."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import NamedTuple

import torch

from halfbyte.kernels.common import compiler
from halfbyte.kernels.common.device import DeviceProperties, properties_of
from halfbyte.kernels.common.driver import driver
from halfbyte.kernels.linear.problem import FIRST_WITH_BF16, Problem
from halfbyte.kernels.linear.sm75 import launch as sm75
from halfbyte.kernels.linear.sm80 import launch as sm80
from halfbyte.kernels.linear.sm90_decode import launch as sm90_decode
from halfbyte.kernels.linear.sm90_streamk import launch as sm90_streamk
from halfbyte.kernels.linear.triton_plan import MOST_ROWS as MOST_ROWS_HIP


class Lack(NamedTuple):
    """what: is missing, in a few words. mend: how to get it."""

    what: str
    mend: str

    def __str__(self) -> str:
        return (
            f"{self.what}, so linear writes a dense copy of the weight and multiplies that, several times slower; "
            f"{self.mend}"
        )


@cache
def without_kernels(properties: DeviceProperties) -> Lack | None:
    """Why no CUDA kernel of this folder can run on a GPU; None where they can."""
    if properties.kind != "cuda":
        return Lack(
            f"linear's kernel for AMD GPUs takes no stacks of experts, and {MOST_ROWS_HIP} rows of x at most",
            "NVIDIA GPUs have kernels for both",
        )
    if driver() is None:
        return Lack("the CUDA driver's library cannot be loaded", "make sure that the system's loader finds it")
    if compiler.find() is None:
        return Lack("NVRTC, which compiles linear's kernels, is missing", compiler.install())
    return None


def can_compile(device: torch.device) -> bool:
    """Whether CUDA kernels of this folder run on a device, so that it is of use to compile some."""
    return device.type == "cuda" and without_kernels(properties_of(device.index)) is None


def without_scales(m: int, problem: Problem, properties: DeviceProperties) -> Lack | None:
    """Why no CUDA kernel of this folder takes the scales of a weight for x [m, K]; None where one does."""
    kernels = (sm90_decode, sm80)
    if problem.has_known_scales or any(kernel.plan(m, problem, properties, False) is not None for kernel in kernels):
        return None
    return Lack(
        f"linear has a CUDA kernel for the scales of {problem.format} from sm_80 (Ampere) on, for x of 16 bits and K a "
        "multiple of 32",
        "quantize the weight to another format",
    )


@cache
def without_tensor_cores(problem: Problem, properties: DeviceProperties, batch_invariant: bool) -> str | None:
    """Why no kernel on tensor cores takes x of 16 bits with a weight; None where one does, and for x in fp32."""
    o = problem
    if o.dtype is torch.bfloat16 and properties.ptx < FIRST_WITH_BF16 and not batch_invariant:
        o = replace(o, dtype=torch.float16)  # as which more than a few rows are multiplied
    if o.dtype is torch.float32 or any(
        kernel.plan(1, o, properties, False) is not None for kernel in (sm90_decode, sm90_streamk, sm80, sm75)
    ):
        return None
    slow = f"so linear multiplies x [M, {o.k}] with a weight [{o.n}, {o.k}] without tensor cores, slowly"
    if o.dtype is torch.bfloat16 and properties.ptx < FIRST_WITH_BF16:
        return f"this GPU (sm_{properties.capability}) has no bfloat16 tensor cores, {slow}; load the model in float16"
    if properties.ptx < 75:
        return f"halfbyte's tensor-core kernels need sm_75 (Turing), this GPU is sm_{properties.capability}, {slow}"
    if o.k % 32:
        return f"K = {o.k} is no multiple of 32, {slow}; pad the layer's input to a multiple of 32"
    if not o.has_usual_nesting:
        return f"{o.nested} nested scales share an absmax where the kernels take 256, {slow}; quantize the weight again"
    if o.align_packed < 8:
        return f"the packed weight's address is no multiple of 8, {slow}; pass a copy: packed.clone()"
    return f"the weight is larger than the tensor-core kernels can count, {slow}; split its rows"
