"""The CUDA product for a few rows of x: which shape of decode.cu, and how it is launched."""

from __future__ import annotations

import ctypes
import threading
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from halfbyte.formats import blockwise
from halfbyte.formats.weight import QuantizedWeight
from halfbyte.kernels.common.device import DeviceFacts, facts_of
from halfbyte.kernels.common.nvrtc import cubin, has_compiler

BLOCK = 64  # weights that share a scale
ROWS = 16  # rows of W in a tile
# What a codebook is multiplied by before it is rounded to 16 bits, so that all sixteen values fall close to numbers
# that exist there. FP4's become exact; NF4's error is 2.5 times (fp16) and 1.7 times (bf16) below that of rounding it
# as it is, and 3.4 and 2.7 times below that of rounding dense weights.
FACTORS = {
    ("nf4", torch.float16): 1.677689552307129,
    ("nf4", torch.bfloat16): 1.4370059967041016,
    ("fp4", torch.float16): 12.0,
    ("fp4", torch.bfloat16): 12.0,
}
MOST_ROWS = 32  # of x
MOST_CLUSTER = 8  # CTAs, everywhere clusters exist
SUMS, SLOTS = 2, 4


@dataclass(frozen=True)
class DecodePlan:
    """The constants of decode.cu. columns: groups of eight rows of x. warps: that multiply. slice: blocks of K a warp.
    stages: tiles on their way. cluster: CTAs that share K."""

    columns: int
    warps: int
    slice: int
    stages: int
    cluster: int

    @property
    def blocks(self) -> int:
        """Blocks of K that a CTA covers."""
        return self.warps * self.slice

    def shared_bytes(self, nested: bool) -> int:
        """Dynamic shared memory. decode.cu lays it out, and does not compile where this sum is another than its own."""
        scale_bytes = 1 if nested else 4
        fixed = 256 * 256 + 1024 + 256 + SUMS * self.warps * 8 * self.columns * 80
        stage = ROWS * (self.blocks * 32 + 32 + self.blocks * scale_bytes + 16)
        return fixed + SLOTS * (self.cluster - 1) * self.columns * 512 + self.stages * stage


def is_valid(plan: DecodePlan, n: int, k: int, nested: bool, facts: DeviceFacts) -> bool:
    """True if decode.cu computes the right thing under `plan`, and fits: planner, tuner and tests go by this."""
    blocks, scale_bytes = k // BLOCK, 1 if nested else 4
    return (
        facts.ptx >= 90
        and k % BLOCK == 0
        and blocks * scale_bytes % 16 == 0  # bulk copies take multiples of 16 bytes at multiples of 16
        and plan.blocks * scale_bytes % 16 == 0
        and n % 4 == 0
        and n > 0
        and plan.slice % 4 == 0
        and 1 <= plan.warps <= 16
        and 1 <= plan.cluster <= MOST_CLUSTER
        and plan.blocks * (plan.cluster - 1) < blocks <= plan.blocks * plan.cluster
        and 2 <= plan.stages <= 8
        and plan.shared_bytes(nested) <= facts.shared_memory
    )


def decode_plan(m: int, n: int, k: int, nested: bool, facts: DeviceFacts) -> DecodePlan | None:
    """The plan for x [m, k] and W [n, k] in blocks of 64, or None where this kernel is not for them.

    A warp holds as much of K as its registers take beside x; then the fewest steps of the busiest CTA win, with what a
    tile, a neighbour and a missing warp were seen to cost on an H200 (docs/notebook.md).
    """
    if not 1 <= m <= MOST_ROWS:
        return None
    columns, width, most_warps = (1, 8, 16) if m <= 8 else (2, 4, 16) if m <= 16 else (4, 4, 8)
    tiles = -(-n // ROWS)

    def cost(plan: DecodePlan) -> float:
        turns = -(-tiles // max(1, facts.sms // plan.cluster))
        return turns * (plan.blocks * (1 + 0.05 * (most_warps - plan.warps)) + 8) + 8 * plan.cluster - plan.stages

    plans = (
        DecodePlan(columns, warps, width, stages, cluster)
        for cluster in range(1, MOST_CLUSTER + 1)
        for warps in range(1, most_warps + 1)
        for stages in (2, 3, 4)
    )
    return min((plan for plan in plans if is_valid(plan, n, k, nested, facts)), key=cost, default=None)


def plan_for(x: Tensor, q: QuantizedWeight, bias: Tensor | None, batch_invariant: bool) -> DecodePlan | None:
    """The plan with which `linear` computes x @ W.T + bias, or None where this kernel is not for them.

    It is for NF4 and FP4 in blocks of 64, x of 16 bits and up to 32 rows, shapes that `is_valid` describes. With
    batch_invariant it takes any number of rows, eight at a time: a row's sums are then always made in the same order.
    """
    if (q.format, x.dtype) not in FACTORS or q.block_size != BLOCK:
        return None
    if q.nested is not None and q.nested.block_size != 256:
        return None
    if any(tensor.data_ptr() % 16 for tensor in (q.packed, q.scale, x, x if bias is None else bias)):
        return None
    rows = min(len(x), 8) if batch_invariant else len(x)
    plan = _plan(rows, *q.shape, q.nested is not None, x.get_device())
    return plan if has_compiler() else None


def linear(x: Tensor, q: QuantizedWeight, bias: Tensor | None, out: Tensor, plan: DecodePlan) -> None:
    """out = x @ W.T + bias, as many rows at a time as `plan` takes.

    x [M, K] and out [M, N], contiguous, aligned to 16 bytes, on the current device; the plan is from `plan_for`.
    """
    step = 8 * plan.columns
    for first in range(0, len(x), step):
        part = slice(first, first + step)
        _linear_blockwise(x[part], q, bias, out[part], plan)


@cache
def _codebook(format: str, dtype: torch.dtype, device: torch.device) -> Tensor:
    return blockwise.codebook_tensor(format, device) * FACTORS[format, dtype]


@cache
def _plan(m: int, n: int, k: int, nested: bool, index: int) -> DecodePlan | None:
    return decode_plan(m, n, k, nested, facts_of(index))


def _linear_blockwise(x: Tensor, q: QuantizedWeight, bias: Tensor | None, out: Tensor, plan: DecodePlan) -> None:
    (m, k), n, index = x.shape, out.shape[1], x.get_device()
    key = (index, n, k, x.dtype, q.nested is None, bias is None, plan)
    launch = _per_thread.launches.get(key)
    if launch is None:
        launch = _Launch(index, n, x.dtype, q.nested is not None, bias is not None, plan)
        _per_thread.launches[key] = launch
    code, absmax, offset = q.nested[:3] if q.nested else (q.scale, q.scale, q.scale)
    codebook = _codebook(q.format, x.dtype, x.device)
    tensors = (q.packed, q.scale, code, absmax, offset, codebook, x, x if bias is None else bias, out)
    unit = 1.0 / FACTORS[q.format, x.dtype]
    launch(torch._C._cuda_getCurrentRawStream(index), [tensor.data_ptr() for tensor in tensors], m, n, k, unit)


class _PerThread(threading.local):
    """Launches that are ready; a launch's arguments are not shared between threads."""

    def __init__(self) -> None:
        self.launches: dict[object, _Launch] = {}


_per_thread = _PerThread()


class _Arguments(ctypes.Structure):
    _fields_ = [
        ("pointers", ctypes.c_uint64 * 9),
        ("m", ctypes.c_uint),
        ("n", ctypes.c_uint),
        ("k", ctypes.c_uint),
        ("unit", ctypes.c_float),
    ]


class _Attribute(ctypes.Structure):  # CUlaunchAttribute
    _fields_ = [("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_uint * 16)]


class _Config(ctypes.Structure):  # CUlaunchConfig
    _fields_ = [
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("count", ctypes.c_uint),
    ]


_CLUSTER_DIMENSION = 4  # CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES


class _Launch:
    """One compiled shape of decode.cu with its grid. Raises RuntimeError when the driver refuses."""

    def __init__(self, index: int, n: int, dtype: torch.dtype, nested: bool, bias: bool, plan: DecodePlan) -> None:
        self.function = _function(index, dtype, nested, bias, plan)
        self.arguments = _Arguments()
        self.parameters = (ctypes.c_void_p * 1)(ctypes.addressof(self.arguments))
        self.attribute = _Attribute(_CLUSTER_DIMENSION, 0, (ctypes.c_uint * 16)(1, plan.cluster, 1))
        self.config = _Config(
            (ctypes.c_uint * 3)(1, plan.cluster, 1),
            (ctypes.c_uint * 3)(32 * (plan.warps + 2), 1, 1),
            plan.shared_bytes(nested),
            None,
            ctypes.addressof(self.attribute),
            1,
        )
        clusters = ctypes.c_int()
        _check(_driver().cuOccupancyMaxActiveClusters(ctypes.byref(clusters), self.function, ctypes.byref(self.config)))
        self.config.grid[0] = min(clusters.value, -(-n // ROWS))
        self.reference = ctypes.byref(self.config)
        self.launch = _driver().cuLaunchKernelEx

    def __call__(self, stream: int, pointers: list[int], m: int, n: int, k: int, unit: float) -> None:
        arguments = self.arguments
        arguments.pointers[:] = pointers
        arguments.m, arguments.n, arguments.k, arguments.unit = m, n, k, unit
        self.config.stream = stream
        _check(self.launch(self.reference, self.function, self.parameters, None))


def macros(dtype: torch.dtype, nested: bool, bias: bool, plan: DecodePlan) -> dict[str, int]:
    """What decode.cu is compiled with."""
    return {
        "COLUMNS": plan.columns, "WARPS": plan.warps, "SLICE": plan.slice, "STAGES": plan.stages,
        "CLUSTER": plan.cluster, "NESTED": int(nested), "FP16": int(dtype == torch.float16), "BIAS": int(bias),
        "SHARED_BYTES": plan.shared_bytes(nested),
    }  # fmt: skip


def source() -> str:
    return Path(__file__).with_suffix(".cu").read_text(encoding="utf-8")


@cache
def _function(index: int, dtype: torch.dtype, nested: bool, bias: bool, plan: DecodePlan) -> ctypes.c_void_p:
    code = cubin(source(), facts_of(index).capability, macros(dtype, nested, bias, plan))
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    _check(_driver().cuModuleLoadData(ctypes.byref(module), code))
    _check(_driver().cuModuleGetFunction(ctypes.byref(function), module, b"decode"))
    _check(_driver().cuFuncSetAttribute(function, _MAX_DYNAMIC_SHARED, ctypes.c_int(plan.shared_bytes(nested))))
    return function


@cache
def _driver() -> Any:
    """NVIDIA's driver; calls keep the interpreter lock, so a launch's arguments stay its own."""
    return ctypes.PyDLL("libcuda.so.1")


def _check(status: int) -> None:
    if status:
        raise RuntimeError(f"the CUDA driver answered with error {status} (see CUresult in cuda.h)")
