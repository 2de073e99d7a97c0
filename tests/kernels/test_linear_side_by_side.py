"""Several weights in one launch: how CTAs are dealt out, and what the launch is told."""

import re
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate
from pathlib import Path

import pytest
import torch
from drivers import Driver, make, pretend, right
from gpus import H200
from hypothesis import given
from hypothesis import strategies as st

from halfbyte.kernels.common import nvrtc
from halfbyte.kernels.common.device import DeviceProperties
from halfbyte.kernels.linear import cuda, side_by_side
from halfbyte.kernels.linear.dispatch import GroupChoice, choose_group
from halfbyte.kernels.linear.laid_out import scale_loads, span_of
from halfbyte.kernels.linear.problem import Problem
from halfbyte.kernels.linear.sm90_gemm import launch as gemm
from halfbyte.kernels.linear.sm90_gemm import plan as gemm_plans
from halfbyte.kernels.linear.sm90_streamk import launch as streamk
from halfbyte.kernels.linear.sm90_streamk import plan as streamk_plans
from halfbyte.kernels.linear.tune import h200

BF16 = torch.bfloat16
KERNELS = {gemm: gemm_plans, streamk: streamk_plans}


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    yield from pretend(monkeypatch, H200)


def nf4(n: int, k: int) -> Problem:
    return Problem(BF16, n, k, "nf4", 64, torch.uint8, 256)


@given(st.lists(st.integers(1, 5000), min_size=2, max_size=4), st.integers(4, 200))
def test_ctas_are_dealt_out(units: list[int], ctas: int) -> None:
    """Each weight has some, nobody is idle, and none could be taken from one weight to relieve the busiest."""
    dealt = side_by_side.deal(units, ctas)
    assert all(1 <= some <= each for some, each in zip(dealt, units, strict=True))
    assert sum(dealt) == min(ctas, sum(units)) or any(some == each for some, each in zip(dealt, units, strict=True))
    busiest = max(each / some for each, some in zip(units, dealt, strict=True))
    others = [each / (some - 1) for each, some in zip(units, dealt, strict=True) if some > 1]
    assert all(other >= busiest for other in others)


@given(
    m=st.integers(1, 9000), sides=st.lists(st.integers(1, 30000), min_size=2, max_size=4), units=st.integers(1, 60),
    sms=st.integers(4, 200),
)  # fmt: skip
def test_every_plan_is_valid(m: int, sides: list[int], units: int, sms: int) -> None:
    properties = DeviceProperties("cuda", 90, sms, 232448)
    group = tuple(nf4(n, 64 * units) for n in sides)
    for plans in KERNELS.values():
        together = plans.in_one_launch(m, group, properties)
        assert together is not None
        assert together.is_one_launch
        assert len({replace(plan, **_share(plan, 1)) for plan in together.plans}) == 1  # one kernel
        for plan, o in zip(together.plans, group, strict=True):
            assert plans.is_valid(plan, m, o.n, o.k, span_of(o), properties)
        assert together.plans[0].resident or sum(plan.ctas for plan in together.plans) <= max(
            sms, sum(-(-n // plan.rows) * plan.x_tiles(m) for n, plan in zip(sides, together.plans, strict=True))
        )


def _share(plan: object, count: int) -> dict[str, int]:
    """The field that says how many CTAs a weight has."""
    return {"workers" if isinstance(plan, gemm_plans.GemmPlan) else "ctas": count}


def test_which_go_together() -> None:
    q, k = nf4(4096, 4096), nf4(1024, 4096)
    assert side_by_side.are_alike((q, k, replace(k, bias=True)))
    for other in (
        nf4(1024, 2048), replace(k, format="fp4"), replace(k, block_size=128), replace(k, nested=0, scale=BF16),
        replace(k, dtype=torch.float16), replace(k, align_scale=4),
    ):  # fmt: skip
        assert not side_by_side.are_alike((q, other))
    assert not side_by_side.are_alike((q,))
    assert not side_by_side.are_alike((k,) * 5)
    for m, kernel in ((32, streamk), (64, streamk), (96, streamk), (512, gemm), (1024, gemm), (2048, gemm)):
        choice = choose_group(m, (q, k, k), H200)
        assert choice is not None
        assert (choice.kernel, choice.plan.is_one_launch) == (kernel, True)
        variant = kernel.group_variant((q, k, k), choice.plan, H200)
        assert variant is not None
        assert dict(variant.constants)["parts"] == 3


@pytest.mark.parametrize("sides", [(1029, 256), (256, 1029), (256, 260, 16)])
def test_scales_come_one_by_one_where_those_of_one_weight_must(sides: tuple[int, ...]) -> None:
    """Where K is no multiple of 256, and so for other weights of the launch."""
    group = tuple(nf4(n, 4160) for n in sides)
    assert {scale_loads(o) for o in group} == {"one", "across"}
    for kernel, plans in KERNELS.items():
        for of_launch, loads in ((group, "one"), ((nf4(256, 4160), nf4(16, 4160)), "across")):
            plan = plans.in_one_launch(100, of_launch, H200)
            assert plan is not None
            assert dict(kernel.group_variant(of_launch, plan, H200).constants)["loads"] == f"Loads::{loads}"


@pytest.mark.slow
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("x_bytes", [1 << 24, 1024 * 2 * 300])
def test_what_a_launch_is_told(gpu: Driver, kernel: object, x_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each weight's product is right, and CTAs of different weights share no room for sums."""
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: -1)
    monkeypatch.setattr(h200, "GEMM_X_BYTES", x_bytes)
    chosen = lambda *given: GroupChoice(kernel, KERNELS[kernel].in_one_launch(*given))  # noqa: E731
    monkeypatch.setattr(cuda, "choose_group", chosen)
    gpu.group = [make(n, 1024) for n in (600, 130, 64)]
    biases = [torch.randn(600).bfloat16(), None, torch.randn(64).bfloat16()]
    for m in (690, 700, 20):
        gpu.seen.clear(), gpu.others.clear(), gpu.workspaces.clear()
        x = torch.randn(m, 1024).bfloat16()
        found = cuda.linear_group(x, gpu.group, biases)
        assert found is not None
        for y, q, bias in zip(found, gpu.group, biases, strict=True):
            assert torch.equal(y, right(x, q, bias))
        plans = chosen(m, tuple(nf4(n, 1024) for n in (600, 130, 64)), H200).plan.plans
        chunk = getattr(plans[0], "chunk", 0) or m
        assert [rows for _, rows in gpu.seen] == [min(chunk, m - first) for first in range(0, m, chunk) for _ in plans]
        assert len(gpu.others) == (0 if plans[0].resident or plans[0].in_order else len(range(0, m, chunk)))
        for i in range(0, len(gpu.workspaces), 3):
            partials, left, _ = zip(*gpu.workspaces[i : i + 3], strict=True)
            assert len(set(left)) == 1
            room = [4 * plan.ctas * plan.sums for plan in plans]
            assert partials in {(0, 0, 0), tuple(partials[0] + before for before in (0, *accumulate(room))[:3])}


@pytest.mark.slow
def test_compiles_into_registers(tmp_path: Path) -> None:
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    q, k = nf4(4096, 4096), nf4(1024, 4096)
    for kernel, m, group in (
        (gemm, 1024, (q, k, k)),
        (gemm, 96, (q, q)),
        (streamk, 64, (q, k, k)),
        (streamk, 20, (k, k)),
    ):
        plan = KERNELS[kernel].in_one_launch(m, group, H200)
        variant = kernel.group_variant(group, plan, H200)
        path = tmp_path / "kernel.cubin"
        path.write_bytes(nvrtc.compile_cubin(variant.source, "90a", dict(variant.constants)))
        text = subprocess.run([tool, "-res-usage", path], capture_output=True, text=True, check=True).stdout
        found = re.findall(r"Function \w+:\s+REG:\d+ STACK:(\d+).*LOCAL:(\d+)", text)
        assert found == [("0", "0")] * 2, (kernel.NAME, m)
