"""The plans of the product with rings of asynchronous copies, that its source compiles for every target, and that it
computes the right thing: on a CPU."""

import math
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any

import cuda_on_cpu
import pytest
import torch
from gpus import H200, MI300X
from hypothesis import given
from hypothesis import strategies as st
from rings import BF16, F16, compiled, int4, nf4, on_cpu, usage

import halfbyte as hb
from halfbyte.kernels.common.device import DeviceProperties, properties_for
from halfbyte.kernels.linear.problem import Problem, problem_of
from halfbyte.kernels.linear.sm80 import launch as ring
from halfbyte.kernels.linear.sm80.launch import variant
from halfbyte.kernels.linear.sm80.plan import (
    REGISTERS,
    Sm80Plan,
    every_shape,
    has_integers,
    is_valid,
    sm80_plan,
    span_of,
)
from halfbyte.kernels.linear.tune import h200

CAPABILITIES = (80, 86, 89, 90, 100, 120)
LARGE = nf4()


@given(
    m=st.integers(1, 5000),
    n=st.integers(1, 60000),
    k=st.integers(1, 500).map(lambda k: 32 * k),
    block_size=st.sampled_from([32, 64, 128, 4096]),
    integers=st.booleans(),
    dtype=st.sampled_from([F16, BF16]),
    capability=st.sampled_from(CAPABILITIES),
    sms=st.integers(1, 200),
)
def test_every_plan_is_valid(
    m: int, n: int, k: int, block_size: int, integers: bool, dtype: torch.dtype, capability: int, sms: int
) -> None:
    properties = replace(properties_for(f"sm_{capability}"), sms=sms)
    problem = (int4 if integers else nf4)(n, k, block_size, dtype)
    plan = sm80_plan(m, problem, properties)
    assert plan is not None
    assert is_valid(plan, m, problem, properties)
    assert math.isfinite(plan.microseconds)
    assert plan.tile_m >= m or plan.columns == max(h200.SM80_COLUMNS)
    assert plan.ctas <= math.prod(plan.sizes(m, n, k))


def test_plans_that_would_be_wrong_are_not_valid() -> None:
    def valid(problem: Problem = LARGE, m: int = 40, properties: DeviceProperties = H200, **changes: Any) -> bool:
        shape = {"row_groups": 2, "columns": 8, "n_warps": 8, "k_warps": 1, "tile_k": 64, "span": 64, "stages": 4}
        return is_valid(Sm80Plan(**shape | {"resident_ctas": 1, "ctas": 64} | changes), m, problem, properties)

    assert valid()
    assert valid(nf4(k=4160), ctas=10)
    assert not valid(nf4(k=4128))
    assert valid(nf4(k=4128, block_size=32), span=32, k_warps=2, n_warps=4)
    assert not valid(nf4(block_size=32))
    assert not valid(span=32, k_warps=4, n_warps=2)  # half a span of a stage for each warp
    assert valid(span=32, tile_k=128, k_warps=4, n_warps=2)
    assert not valid(tile_k=512)
    assert not valid(ctas=65)  # 4 tiles of 16 units
    assert not valid(nf4(n=60000), ctas=133)  # which cannot all run at once
    assert valid(int4(), span=128, tile_k=128, columns=4)
    assert valid(int4(), span=128, tile_k=128, stages=3, ctas=32)
    assert not valid(int4(block_size=64), span=128, tile_k=128, stages=3, ctas=32)
    # A span's weights and the sums of 64 rows.
    assert not valid(replace(int4(), scale=torch.float32), span=128, tile_k=128, stages=3, ctas=32)
    assert not valid(stages=2)
    assert not valid(stages=9)
    assert valid(stages=6, tile_k=128, ctas=32)
    assert not valid(stages=6, tile_k=128, ctas=32, properties=properties_for("sm_80"))  # more than shared memory holds
    assert not valid(row_groups=3)
    assert not valid(columns=5)
    assert not valid(n_warps=1)
    assert not valid(resident_ctas=2)
    assert not valid(Problem(torch.float32, 1000, 4096, "nf4", 64, torch.uint8, 256))
    assert not valid(properties=MI300X)
    assert not valid(properties=properties_for("sm_75"))
    assert not valid(m=0)
    assert sm80_plan(0, nf4(), H200) is None
    assert sm80_plan(1, nf4(k=4100), H200) is None


def test_what_the_kernel_supports() -> None:
    for problem in (nf4(), int4(), replace(nf4(), scale=torch.float32, nested=0), nf4(k=96, block_size=32)):
        assert ring.plan(5, problem, H200, False) is not None
    assert ring.plan(5, Problem(BF16, 64, 64, "mxfp4", 32, torch.uint8), H200, False) is not None
    for changes in ({"dtype": torch.float32}, {"nested": 512}, {"align_packed": 8}, {"k": 4100}):
        assert ring.plan(5, replace(nf4(), **changes), H200, False) is None
    assert has_integers(int4())
    assert not has_integers(nf4())
    assert [span_of(one, 1, 1, own) for one, own in ((int4(), 128), (int4(), 64), (nf4(), 128), (nf4(k=96), 64))] == [
        128,
        64,
        64,
        32,
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("capability", "offset"), [(80, 0), (86, 1), (90, 2)])
def test_compiles_into_registers(capability: int, offset: int, tmp_path: Path) -> None:
    """A third of the shapes that the planner chooses from, for one target or another: nothing is spilled, and what a
    CTA takes is as reckoned."""
    properties = properties_for(f"sm_{capability}")
    problems = (nf4(), int4(), replace(nf4(block_size=32), scale=torch.float32, nested=0, dtype=F16), int4(dtype=BF16))
    cases = [(columns, shape) for columns in h200.SM80_COLUMNS for shape in every_shape(columns)]
    for (columns, shape), problem in zip(cases[offset::3], cycle(problems)):
        row_groups, n_warps, k_warps, tile_k, resident = shape
        span = span_of(problem, row_groups, columns, tile_k // k_warps)
        plans = (
            Sm80Plan(row_groups, columns, n_warps, k_warps, tile_k, span, stages, resident, 1)
            for stages in range(h200.SM80_STAGES, 2, -1)
        )
        plan = next((plan for plan in plans if is_valid(plan, 8 * columns, problem, properties)), None)
        if plan is None:
            continue
        used = usage(compiled(tmp_path, problem, plan, capability))
        assert used["STACK"] == used["LOCAL"] == 0, (plan, used)
        assert used["REG"] * 32 * plan.warps * plan.resident_ctas <= REGISTERS, plan
        assert used["SHARED"] <= 1024  # of the system's, and none of its own


# -- On a CPU ----------------------------------------------------------------------------------------------------------

# Of the weight: format, options, rows, columns. Of the plan: row_groups, columns, n_warps, k_warps, tile_k, stages,
# CTAs. Tiles and units that overhang, several CTAs a tile, several tiles a CTA, all spans and ways to share them.
CASES = [
    (("nf4", {}, 100, 512), BF16, 5, (1, 1, 2, 1, 128, 3, 1)),
    (("nf4", {}, 100, 512), BF16, 8, (1, 1, 2, 1, 128, 3, 5)),
    (("nf4", {"nested": False}, 131, 416), F16, 13, (1, 2, 4, 2, 128, 4, 3)),
    (("int4", {"group_size": 128}, 70, 1152), F16, 9, (1, 2, 2, 1, 128, 3, 4)),
    (("int4", {"group_size": 128}, 71, 1152), BF16, 23, (1, 2, 4, 2, 128, 3, 4)),
    (("int4", {"group_size": 32}, 71, 1152), BF16, 33, (2, 4, 2, 1, 64, 5, 2)),
    (("int4", {"group_size": 128}, 150, 1152), F16, 64, (2, 8, 2, 1, 128, 3, 4)),
    (("nf4", {"block_size": 32}, 71, 544), BF16, 40, (1, 6, 2, 4, 128, 3, 2)),
    (("nf4", {}, 100, 1344), BF16, 8, (1, 1, 4, 1, 256, 3, 2)),
    (("int4", {"group_size": 128}, 71, 1408), F16, 9, (1, 2, 4, 2, 256, 3, 3)),
    (("int4", {"group_size": 128}, 140, 1408), F16, 64, (4, 8, 2, 2, 128, 3, 3)),
    (("nf4", {}, 300, 512), BF16, 70, (2, 8, 4, 1, 64, 4, 3)),
    (("nf4", {}, 150, 2048), F16, 16, (2, 2, 4, 4, 256, 4, 3)),
    (("int4", {"group_size": 128}, 70, 1152), F16, 32, (2, 4, 2, 8, 256, 3, 2)),
    (("fp4", {}, 150, 512), F16, 70, (4, 4, 2, 1, 64, 4, 5)),
    (("mxfp4", {}, 150, 544), BF16, 17, (2, 4, 4, 2, 64, 4, 5)),
]


@pytest.mark.slow
@cuda_on_cpu.needs_compiler
@pytest.mark.parametrize(("weight", "dtype", "m", "shape"), CASES, ids=str)
def test_product(
    weight: tuple[str, dict[str, Any], int, int], dtype: torch.dtype, m: int, shape: tuple[int, ...], tmp_path: Path
) -> None:
    """Right, and within bounds."""
    format, options, n, k = weight
    torch.manual_seed(0)
    q, x = hb.quantize(torch.randn(n, k).to(dtype), format, **options), torch.randn(m, k).to(dtype)
    bias = torch.randn(n).to(dtype) if m % 2 else None
    problem = problem_of(x, q, bias)
    row_groups, columns, n_warps, k_warps, tile_k, stages, ctas = shape
    span = span_of(problem, row_groups, columns, tile_k // k_warps)
    plan = Sm80Plan(row_groups, columns, n_warps, k_warps, tile_k, span, stages, 1, ctas)
    assert is_valid(plan, m, problem, H200)
    out = on_cpu(tmp_path, x, q, bias, plan)
    exact = hb.dequantize(q, torch.float32).double()
    right = x.double() @ exact.t() + (0 if bias is None else bias.double())
    sizes = x.double().abs() @ exact.abs().t() + (0 if bias is None else bias.double().abs())
    assert ((out.double() - right).abs() <= 1.01 * torch.finfo(dtype).eps * sizes).all()


@pytest.mark.slow
@cuda_on_cpu.needs_compiler
@pytest.mark.parametrize(
    ("tile_k", "span"), [(64, 32), (64, 64), *((k, span) for k in (128, 256) for span in (32, 64, 128))]
)
def test_no_bank_is_asked_twice(tile_k: int, span: int, tmp_path: Path) -> None:
    """Of the lanes that shared memory serves at once: 8 with 16 bytes each, 16 with 8, 32 with 4."""
    plan = Sm80Plan(1, 1, 4, max(1, tile_k // span // 4), tile_k, span, 3, 1, 1)
    functions = """extern "C" unsigned w(unsigned row, unsigned piece) { return w_place(row, piece); }
extern "C" unsigned x(unsigned row, unsigned piece) { return x_place(row, piece); }"""
    place = cuda_on_cpu.library(tmp_path, variant(int4(), plan, H200), functions)
    quarter = span // 8  # bytes of W that a lane takes of a row's span, and pieces of x times four
    for number in range(tile_k // span):
        for half in range(2):
            byte = [number * (span // 2) + lane % 4 * quarter for lane in range(32)]
            at = [place.w(lane // 4 * 2 + half, byte[lane] // 16) + byte[lane] % 16 for lane in range(32)]
            assert _turns(at, quarter) == quarter // 4
        for i in range(span // 32):
            first = [number * quarter + lane % 4 * (span // 32) + i for lane in range(32)]
            assert _turns([place.x(lane // 4, first[lane]) for lane in range(32)], 16) == 4


def _turns(at: list[int], size: int) -> int:
    """Of shared memory, for loads of `size` bytes by 32 lanes."""
    at_once = 128 // size
    turns = 0
    for first in range(0, 32, at_once):
        words = {(start + byte) // 4 for start in at[first : first + at_once] for byte in range(0, size, 4)}
        banks = [word % 32 for word in words]
        turns += max(banks.count(bank) for bank in banks)
    return turns
