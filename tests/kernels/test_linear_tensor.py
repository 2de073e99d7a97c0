"""The plans of the product on tensor cores, and that its source compiles for every target, GPU or not."""

import re
import subprocess
from dataclasses import replace
from itertools import cycle
from pathlib import Path

import pytest
import torch
from gpus import MI300X
from hypothesis import given
from hypothesis import strategies as st

import halfbyte as hb
from halfbyte.kernels.common import nvrtc
from halfbyte.kernels.common.cuda_types import TYPES
from halfbyte.kernels.common.device import DeviceProperties
from halfbyte.kernels.linear import kernel
from halfbyte.kernels.linear.kernel import plan_for
from halfbyte.kernels.linear.problem import Problem
from halfbyte.kernels.linear.sm75 import launch as tensor
from halfbyte.kernels.linear.sm75.launch import constants, source
from halfbyte.kernels.linear.sm75.plan import Sm75Plan, is_valid, sm75_plan
from halfbyte.kernels.linear.tune.h200 import SM75_WARPS

SHARED = {75: 65536, 80: 166912, 86: 101376, 89: 101376, 90: 232448, 100: 232448, 120: 101376}
GPUS = {capability: DeviceProperties("cuda", capability, 100, shared) for capability, shared in SHARED.items()}
F16, BF16 = torch.float16, torch.bfloat16
# Tiles of x and warps: the extremes of what the planner chooses from, and a tuner may.
TILES = [
    (columns, most // resident // k_warps, k_warps, resident)
    for columns, most in SM75_WARPS.items()
    for resident in (1, 2)
    for k_warps in (most // resident, 1)
]


@given(
    m=st.integers(1, 200),
    n=st.integers(1, 40000),
    k=st.integers(1, 1000).map(lambda k: 32 * k),
    block_size=st.sampled_from([32, 64, 128, 4096]),
    dtype=st.sampled_from([F16, BF16]),
    capability=st.sampled_from(list(GPUS)),
    sms=st.integers(1, 200),
)
def test_every_plan_is_valid(
    m: int, n: int, k: int, block_size: int, dtype: torch.dtype, capability: int, sms: int
) -> None:
    properties = replace(GPUS[capability], sms=sms)
    plan = sm75_plan(m, n, k, block_size, dtype, properties)
    if capability == 75 and dtype == BF16:
        assert plan is None
        return
    assert plan is not None
    assert is_valid(plan, n, k, block_size, dtype, properties)
    assert plan.span == (64 if k % 64 == 0 and block_size % 64 == 0 else 32)
    assert plan.mma_k == (8 if capability == 75 else 16)
    columns = -(-m // (8 * plan.m_tiles))
    assert m > 4 * plan.m_tiles or plan.m_tiles == 1  # no tile of x is for more than twice as many rows as there are
    across, down = plan.grid(n, columns, sms)
    assert across == columns * plan.splits
    assert 1 <= down <= -(-n // plan.rows)
    assert down == 1 or across * down <= sms * plan.resident_ctas


def test_plans_that_would_be_wrong_are_not_valid() -> None:
    def valid(capability: int = 80, n: int = 1000, k: int = 4096, block_size: int = 64, dtype=BF16, **changes) -> bool:
        plan = replace(Sm75Plan(2, 2, 4, 2, 2, 64), **changes)
        return is_valid(plan, n, k, block_size, dtype, GPUS[capability])

    assert valid()
    assert valid(k=512)
    assert valid(block_size=32, span=32)
    assert valid(75, dtype=F16, mma_k=8, resident_ctas=1)
    assert not valid(k=448)  # eight warps for seven spans
    assert not valid(k=4128)
    assert not valid(k=4128, block_size=32)
    assert not valid(block_size=32)
    assert not valid(n=0)
    assert not valid(n=1 << 30, k=1 << 20)
    assert not valid(dtype=torch.float32)
    assert not valid(m_tiles=3)
    assert not valid(m_tiles=8)  # two CTAs would have 128 registers a thread
    assert not valid(splits=0)
    assert valid(80, m_tiles=8, n_warps=1)
    assert not valid(86, m_tiles=8, n_warps=1)  # shared memory is for one CTA
    assert not valid(75, dtype=F16, resident_ctas=1)  # a step of 16
    assert not valid(75, dtype=BF16, mma_k=8, resident_ctas=1)
    assert not valid(75, dtype=F16, mma_k=8)  # two CTAs, again
    assert not is_valid(Sm75Plan(2, 2, 4, 2, 2, 64), 1000, 4096, 64, F16, MI300X)
    assert sm75_plan(0, 1000, 4096, 64, F16, GPUS[80]) is None
    assert sm75_plan(1, 1000, 4100, 64, F16, GPUS[80]) is None


@pytest.mark.slow
@pytest.mark.parametrize(("capability", "offset"), list(zip((75, 80, 90, 120), cycle((0, 1, 2)))))
def test_compiles_into_registers(capability: int, offset: int, tmp_path: Path) -> None:
    """A third of the tiles, with one format or another: nothing is spilled, and shared memory is what the plan says."""
    kinds = cycle(
        (format, scale, dtype, span)
        for span in (64, 32)
        for dtype in (BF16, F16)
        for format, scale in (("nf4", torch.uint8), ("nf4", torch.float32), ("int4", F16), ("int4", BF16))
        if (capability, dtype) != (75, BF16)
    )
    for (columns, n_warps, k_warps, resident), (format, scale, dtype, span) in zip(
        TILES[offset::3], kinds, strict=False
    ):
        plan = Sm75Plan(columns, n_warps, k_warps, 1, resident, span, 8 if capability == 75 else 16)
        if not is_valid(plan, 4096, 4096, 64, dtype, GPUS[capability]):
            continue
        path = tmp_path / "tensor.cubin"
        path.write_bytes(
            nvrtc.compile_cubin(source(), capability, constants(Problem(dtype, 4096, 4096, format, 64, scale), plan))
        )
        usage = _usage(path)
        assert all(one["STACK"] == one["LOCAL"] == 0 for one in usage.values()), plan
        product = usage["product"]
        assert product["REG"] * 32 * plan.warps * plan.resident_ctas <= 65536
        system = 1024 if capability >= 90 else 0  # counted in there
        assert product["SHARED"] + plan.sum_bytes <= plan.shared_bytes + system
        assert plan.resident_ctas * (product["SHARED"] - system + plan.sum_bytes) <= SHARED[capability]


def _usage(path: Path) -> dict[str, dict[str, int]]:
    """What cuobjdump says of each kernel: registers ("REG"), "STACK", "SHARED", "LOCAL"."""
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    text = subprocess.run([tool, "-res-usage", path], capture_output=True, text=True, check=True).stdout
    kernels = re.findall(r"Function (\w+):\s+(REG.*)", text)
    return {kernel: {name: int(value) for name, value in re.findall(r"(\w+):(\d+)", used)} for kernel, used in kernels}


@pytest.fixture
def _on(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    monkeypatch.setattr(kernel, "properties_of", lambda index: GPUS[request.param])


@pytest.mark.parametrize("_on", [80], indirect=True)
@pytest.mark.usefixtures("_on")
def test_what_the_kernel_is_for() -> None:
    x, weight = torch.randn(100, 1024).bfloat16(), torch.randn(65, 1024).bfloat16()
    q = hb.quantize(weight)
    for rows, columns in ((1, 1), (8, 1), (9, 2), (16, 2), (17, 4), (32, 4), (33, 8), (65, 8), (100, 8)):
        assert plan_for(tensor, x[:rows], q, None, False).m_tiles == columns
        assert plan_for(tensor, x[:rows], q, None, True) == plan_for(tensor, x[:1], q, None, True)
    for yes in (
        hb.quantize(weight, "fp4", nested=False, block_size=32),
        hb.quantize(weight, "nf4", block_size=4096),
        *(hb.quantize(weight.to(dtype), "int4", group_size=32) for dtype in (F16, BF16, torch.float32)),
    ):
        assert plan_for(tensor, x, yes, None, False) is not None
        assert yes.scale.dtype in TYPES
    shifted = torch.empty(q.packed.numel() + 1, dtype=torch.uint8)[1:]
    for no in (
        (x[:0], q, None, False),
        (x[:0], q, None, True),
        (x.float(), q, None, False),
        (x, replace(q, packed=shifted), None, False),
        (x, replace(q, nested=q.nested._replace(absmax=q.nested.absmax[:3], block_size=512)), None, False),
        (x[:, :1000].contiguous(), hb.quantize(weight[:, :1000]), None, False),
    ):
        assert plan_for(tensor, *no) is None


@pytest.mark.parametrize("_on", [75], indirect=True)
@pytest.mark.usefixtures("_on")
def test_turing_has_no_bf16() -> None:
    q = hb.quantize(torch.randn(64, 1024))
    assert plan_for(tensor, torch.randn(64, 1024).bfloat16(), q, None, False) is None
    assert plan_for(tensor, torch.randn(64, 1024).half(), q, None, False).mma_k == 8
