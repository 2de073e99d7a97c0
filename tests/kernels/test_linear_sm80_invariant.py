"""sm80's plans with batch_invariant: a row of x has its bits whatever other rows are beside it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import cuda_on_cpu
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rings import BF16, F16, compiled, int4, nf4, on_cpu, operations, usage

import halfbyte as hb
from halfbyte.kernels.common.device import properties_for, properties_like
from halfbyte.kernels.common.gpus import GPUS, Gpu
from halfbyte.kernels.linear import dispatch
from halfbyte.kernels.linear.problem import INVARIANT_ROWS, Problem, problem_of
from halfbyte.kernels.linear.sm80.invariant import Order, invariant_plan, order_of, shapes_of
from halfbyte.kernels.linear.sm80.plan import REGISTERS, is_valid, with_stages
from halfbyte.kernels.linear.tune import h200

PROBLEMS = (nf4(4096), int4(4096), nf4(14336, 4096, 32), int4(28672, 8192, 128, BF16))


@settings(max_examples=40)
@given(
    n=st.integers(1, 60000),
    k=st.integers(1, 500).map(lambda k: 32 * k),
    block_size=st.sampled_from([32, 64, 128, 4096]),
    integers=st.booleans(),
    dtype=st.sampled_from([F16, BF16]),
    capability=st.sampled_from([80, 86, 89, 90, 100, 120]),
    sms=st.integers(1, 200),
)
def test_one_order_for_all_numbers_of_rows(
    n: int, k: int, block_size: int, integers: bool, dtype: torch.dtype, capability: int, sms: int
) -> None:
    properties = replace(properties_for(f"sm_{capability}"), sms=sms)
    problem = (int4 if integers else nf4)(n, k, block_size, dtype)
    plans = {m: invariant_plan(m, problem, properties) for m in (1, 7, 8, 9, 16, 33, 48, 64, 65, 200, INVARIANT_ROWS)}
    orders, decoding = set(), set()
    for m, plan in plans.items():
        assert plan is not None
        assert plan.invariant
        assert is_valid(plan, m, problem, properties)
        assert plan.ctas % plan.tiles(m, problem) == 0
        assert plan.partial_sums(m, problem) <= h200.SM80_INVARIANT_SUMS
        orders.add(order_of(plan, m, problem))
        decoding.add((plan.decoding_columns, plan.direct))
    assert len(orders) == len(decoding) == 1
    assert orders.pop().shares <= min(plans[1].direct, h200.SM80_SHARES)  # added up by the first CTA, in their order


def test_what_it_is_not_for() -> None:
    assert invariant_plan(0, nf4(), properties_for("sm_80")) is None
    assert invariant_plan(1, nf4(k=4100), properties_for("sm_80")) is None
    assert invariant_plan(1, nf4(), properties_for("sm_75")) is None
    huge = nf4((1 << 31) - 1, 4096)  # more spans than 32 bits count, for any number of rows
    assert [invariant_plan(m, huge, properties_for("sm_80")) for m in (1, 256)] == [None, None]


@pytest.mark.parametrize("gpu", [gpu for gpu in GPUS if 80 <= gpu.capability < 90], ids=lambda gpu: gpu.name)
def test_it_is_chosen_where_it_is_faster(gpu: Gpu) -> None:
    """By the estimates for a typical number of rows; and then for every number. On an RTX 3090 `sm75` is nearly
    as fast with NF4, and once faster."""
    properties, most = properties_like(gpu), 1.1 if gpu.name == "NVIDIA GeForce RTX 3090" else 1.0
    for n, k in ((4096, 4096), (14336, 4096), (28672, 8192), (1024, 8192)):
        for problem in (nf4(n, k), int4(n, k), nf4(n, k, 32, F16)):
            ring, other = (
                kernel.plan(dispatch.TYPICAL_INVARIANT_ROWS, problem, properties, True)
                for kernel in (dispatch.sm80, dispatch.sm75)
            )
            assert ring is not None
            assert other is not None
            assert ring.microseconds < most * other.microseconds
            faster = "sm80" if ring.microseconds < other.microseconds else "sm75"
            kernels = {dispatch.choose(m, problem, properties, True).kernel.NAME for m in (1, 20, INVARIANT_ROWS)}
            assert kernels == {faster}


def test_on_hopper_its_own_kernel_stays() -> None:
    for problem in (nf4(4096), int4(4096)):
        choice = dispatch.choose(5, problem, properties_for("sm_90"), True)
        assert choice is not None
        assert choice.kernel.NAME == "sm90_streamk"


@pytest.mark.slow
@pytest.mark.parametrize(
    "capability", [80, *(pytest.param(one, marks=pytest.mark.compile_all) for one in (86, 89, 90, 120))]
)
@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_compiles_into_registers(problem: Problem, capability: int, tmp_path: Path) -> None:
    """What is chosen for few rows and many. Where scales multiply sums, the compiler makes one instruction of both at
    every width: a product that is rounded before it is added would be other bits."""
    properties, seen = properties_for(f"sm_{capability}"), set()
    for m in (1, 16, 32, 64, INVARIANT_ROWS):
        plan = invariant_plan(m, problem, properties)
        assert plan is not None
        if replace(plan, ctas=1) in seen:
            continue
        seen.add(replace(plan, ctas=1))
        cubin = compiled(tmp_path, problem, plan, capability)
        used = usage(cubin)
        assert used["STACK"] == used["LOCAL"] == 0, (plan, used)
        assert used["REG"] * 32 * plan.warps * plan.resident_ctas <= REGISTERS, plan
        assert operations(cubin).count("FMUL") <= 4 * plan.row_groups  # of scales alone: by absmax, and by the unit


# Of the weight: format, options, rows, columns. And the order. Ends of K within a unit, rows of W within a tile.
LONG = pytest.mark.compile_all  # what takes ten seconds and more is left to `make compile-all`
CASES = [
    pytest.param(("nf4", {}, 71, 1088), BF16, Order(64, 1, 0, 3), marks=LONG),
    (("nf4", {}, 71, 576), F16, Order(64, 2, 64, 2)),
    pytest.param(("nf4", {"block_size": 32}, 70, 1056), BF16, Order(32, 1, 0, 8), marks=LONG),
    (("int4", {"group_size": 128}, 71, 1152), F16, Order(128, 2, 128, 1)),
    pytest.param(("int4", {"group_size": 128}, 70, 640), BF16, Order(64, 1, 0, 2), marks=LONG),
    pytest.param(("mxfp4", {}, 70, 544), BF16, Order(32, 1, 0, 1), marks=LONG),
]


@pytest.mark.slow
@cuda_on_cpu.needs_compiler
@pytest.mark.parametrize(("weight", "dtype", "order"), CASES, ids=str)
def test_bits_of_a_row(
    weight: tuple[str, dict[str, Any], int, int], dtype: torch.dtype, order: Order, tmp_path: Path
) -> None:
    """Alone, among others and elsewhere among them, under plans of every width: the source itself gives one result."""
    format, options, n, k = weight
    torch.manual_seed(0)
    q, x = hb.quantize(torch.randn(n, k).to(dtype), format, **options), torch.randn(50, k).to(dtype)
    bias = torch.randn(n).to(dtype)
    whole, widths = None, set()
    for m, columns in ((50, 8), (50, 1), (30, 4), (9, 2), (5, 1), (1, 6)):
        rows = x[-m:].clone()
        problem = problem_of(rows, q, bias)
        shapes = [shape for shape in shapes_of(order, m, problem) if shape.columns == columns]
        plans = [plan for shape in shapes if (plan := with_stages(shape, m, problem, properties_for("sm_80")))]
        if not plans:
            continue
        plan = plans[m % len(plans)]
        assert order_of(plan, m, problem) == order
        widths.add(columns)
        y = on_cpu(tmp_path, rows, q, bias, plan)
        if whole is None:
            whole = y
            exact = hb.dequantize(q, torch.float32).double()
            right, sizes = x.double() @ exact.t() + bias, x.double().abs() @ exact.abs().t() + bias.abs()
            assert ((y.double() - right).abs() <= 1.01 * torch.finfo(dtype).eps * sizes).all()
        assert torch.equal(y, whole[-m:]), (m, plan)
    assert len(widths) >= 2
