"""The product on CUDA cores: its plans, and that its source compiles for every target, GPU or not."""

import subprocess
from itertools import product
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import halfbyte as hb
from halfbyte.formats.spec import FORMATS
from halfbyte.formats.weight import FLOAT_DTYPES
from halfbyte.kernels.common import nvrtc
from halfbyte.kernels.common.device import DeviceFacts
from halfbyte.kernels.common.targets import CUDA_TARGETS
from halfbyte.kernels.linear.simt import launch as exact
from halfbyte.kernels.linear.simt.launch import constants, source
from halfbyte.kernels.linear.simt.plan import ExactPlan, exact_plan, is_valid

SCALES = ((torch.uint8, "nf4"), (torch.float32, "fp4"), *((dtype, "int4") for dtype in FLOAT_DTYPES))
PLANS = [
    ExactPlan(rows, columns, whole)
    for rows in (1, 2, 4, 8)
    for columns, whole in ((1, True), (2, True), (4, True), (1, False), (2, False))
]


@given(
    m=st.integers(0, 10**7),
    n=st.integers(1, 1 << 33),
    k=st.integers(1, 1 << 33) | st.integers(1, 1 << 20).map(lambda k: 16 * k),
    aligned=st.booleans(),
    sms=st.integers(1, 200),
)
def test_everything_has_a_valid_plan(m: int, n: int, k: int, aligned: bool, sms: int) -> None:
    plan = exact_plan(m, n, k, aligned, DeviceFacts("cuda", 80, sms))
    assert is_valid(plan, k, aligned)
    assert plan in PLANS
    assert plan.rows == 8 or plan.rows // 2 < max(m, 1) <= plan.rows
    assert -(-n // (exact.WARPS * plan.columns)) < 1 << 31


def test_loads_of_sixteen_weights_need_alignment() -> None:
    assert is_valid(ExactPlan(1, 4, True), 4096, True)
    assert not is_valid(ExactPlan(1, 4, True), 4096, False)
    assert not is_valid(ExactPlan(1, 4, True), 4104, True)
    assert is_valid(ExactPlan(1, 4, False), 4105, False)
    assert not is_valid(ExactPlan(3, 4, False), 4096, True)


def test_plan_for_looks_at_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exact, "facts_of", lambda index: DeviceFacts("cuda", 90, 132))
    x, q = torch.randn(65).bfloat16(), hb.quantize(torch.randn(32, 64).bfloat16())
    assert x.data_ptr() % 16 == 0
    assert exact.plan_for(x[:64].view(1, 64), q, None).whole
    assert not exact.plan_for(x[1:].view(1, 64), q, None).whole


@pytest.mark.parametrize("bias", [None, torch.arange(3.0)])
def test_without_k_there_is_only_the_bias(bias: torch.Tensor | None) -> None:
    q = hb.quantize(torch.empty(3, 0))
    out = torch.full((2, 3), 777.0)
    exact.linear(torch.empty(2, 0), q, bias, out, ExactPlan(2, 1, False))
    assert torch.equal(out, torch.zeros(2, 3) if bias is None else bias.expand(2, 3))
    exact.linear(torch.empty(0, 0), q, bias, out[:0], ExactPlan(1, 1, False))


@pytest.mark.slow
@pytest.mark.parametrize("capability", CUDA_TARGETS)
def test_compiles(capability: int, tmp_path: Path) -> None:
    """The plans with the most registers, and a thirty-fifth of all cases, another one for each target."""
    every = list(product(FLOAT_DTYPES, SCALES, PLANS))
    largest = [(torch.bfloat16, SCALES[0], ExactPlan(8, 4, True)), (torch.float32, SCALES[0], ExactPlan(8, 2, False))]
    for dtype, (scale, format), plan in largest + every[CUDA_TARGETS.index(capability) :: 7][::5]:
        path = tmp_path / "exact.cubin"
        path.write_bytes(nvrtc.compile_cubin(source(), capability, constants(dtype, scale, FORMATS[format], plan)))
        assert _stack_bytes(path) <= 16  # a few spilled words, none of them an array


def _stack_bytes(path: Path) -> int:
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    usage = subprocess.run([tool, "-res-usage", path], capture_output=True, text=True, check=True).stdout
    return max(int(word.removeprefix("STACK:")) for word in usage.split() if word.startswith("STACK:"))


def test_source_refuses_more_sums_than_lanes() -> None:
    with pytest.raises(Exception, match="in the end a sum lies in"):
        nvrtc.compile_cubin(source(), 90, constants(torch.float16, torch.uint8, FORMATS["nf4"], ExactPlan(16, 4, True)))
