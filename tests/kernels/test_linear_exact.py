"""The product on CUDA cores: its plans, and that its source compiles for every target, GPU or not."""

import subprocess
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from halfbyte.formats.weight import FLOAT_DTYPES
from halfbyte.kernels.common import nvrtc
from halfbyte.kernels.common.device import DeviceProperties
from halfbyte.kernels.common.targets import CUDA_TARGETS
from halfbyte.kernels.linear.problem import Problem
from halfbyte.kernels.linear.simt import launch as exact
from halfbyte.kernels.linear.simt.launch import constants, source
from halfbyte.kernels.linear.simt.plan import SimtPlan, is_valid, simt_plan

SCALES = ((torch.uint8, "nf4"), (torch.float32, "fp4"), *((dtype, "int4") for dtype in FLOAT_DTYPES))
PLANS = [
    SimtPlan(rows, columns, whole)
    for rows in (1, 2, 4, 8)
    for columns, whole in ((1, True), (2, True), (4, True), (1, False), (2, False))
]


def problem(dtype: torch.dtype, scale: torch.dtype, format: str) -> Problem:
    return Problem(dtype, 64, 1024, format, 64, scale)


@given(
    m=st.integers(0, 10**7),
    n=st.integers(1, 1 << 33),
    k=st.integers(1, 1 << 33) | st.integers(1, 1 << 20).map(lambda k: 16 * k),
    aligned=st.booleans(),
    sms=st.integers(1, 200),
)
def test_everything_has_a_valid_plan(m: int, n: int, k: int, aligned: bool, sms: int) -> None:
    plan = simt_plan(m, n, k, aligned, DeviceProperties("cuda", 80, sms))
    assert is_valid(plan, k, aligned)
    assert plan in PLANS
    assert plan.tile_m == 8 or plan.tile_m // 2 < max(m, 1) <= plan.tile_m
    assert -(-n // (exact.WARPS * plan.tile_n)) < 1 << 31


def test_loads_of_sixteen_weights_need_alignment() -> None:
    assert is_valid(SimtPlan(1, 4, True), 4096, True)
    assert not is_valid(SimtPlan(1, 4, True), 4096, False)
    assert not is_valid(SimtPlan(1, 4, True), 4104, True)
    assert is_valid(SimtPlan(1, 4, False), 4105, False)
    assert not is_valid(SimtPlan(3, 4, False), 4096, True)


def test_a_plan_looks_at_the_address() -> None:
    problem, gpu = Problem(torch.bfloat16, 32, 64, "nf4", 64, torch.uint8, 256), DeviceProperties("cuda", 90, 132)
    assert exact.plan(1, problem, gpu, False).aligned
    assert not exact.plan(1, replace(problem, align_packed=4), gpu, False).aligned


@pytest.mark.slow
@pytest.mark.parametrize(
    "capability",
    [pytest.param(one, marks=[] if one in (75, 80, 90, 120) else [pytest.mark.compile_all]) for one in CUDA_TARGETS],
)
def test_compiles(capability: int, tmp_path: Path) -> None:
    """The plans with the most registers, and a thirty-fifth of all cases, another one for each target."""
    every = list(product(FLOAT_DTYPES, SCALES, PLANS))
    largest = [(torch.bfloat16, SCALES[0], SimtPlan(8, 4, True)), (torch.float32, SCALES[0], SimtPlan(8, 2, False))]
    for dtype, (scale, format), plan in largest + every[CUDA_TARGETS.index(capability) :: 7][::5]:
        path = tmp_path / "exact.cubin"
        path.write_bytes(nvrtc.compile_cubin(source(), capability, constants(problem(dtype, scale, format), plan)))
        assert _stack_bytes(path) <= 16  # a few spilled words, none of them an array


def _stack_bytes(path: Path) -> int:
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    usage = subprocess.run([tool, "-res-usage", path], capture_output=True, text=True, check=True).stdout
    return max(int(word.removeprefix("STACK:")) for word in usage.split() if word.startswith("STACK:"))


def test_source_refuses_more_sums_than_lanes() -> None:
    with pytest.raises(Exception, match="in the end a sum lies in"):
        nvrtc.compile_cubin(source(), 90, constants(problem(torch.float16, torch.uint8, "nf4"), SimtPlan(16, 4, True)))
