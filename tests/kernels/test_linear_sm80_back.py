"""Gradients through sm80_back: its plans, that its source compiles for every target, and that it computes the right
thing: on a CPU, to the bits of the dequantized weights."""

import math
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import cuda_on_cpu
import pytest
import torch
from cuda_on_cpu import Shape
from gpus import A100, H200
from rings import BF16, F16, REGISTERS, SENTINEL, any_problem, int4, nf4, usage

import halfbyte as hb
from halfbyte.kernels.common import nvrtc
from halfbyte.kernels.common.device import properties_for
from halfbyte.kernels.linear import dispatch
from halfbyte.kernels.linear.aligned import pitch_of
from halfbyte.kernels.linear.problem import Problem, addresses, problem_of
from halfbyte.kernels.linear.sm80_back import launch as back
from halfbyte.kernels.linear.sm80_back.plan import BackPlan, back_plan, is_valid
from halfbyte.kernels.linear.tune import h200


@any_problem
def test_every_plan_is_valid(
    m: int, n: int, k: int, block_size: int, dtype: torch.dtype, capability: int, sms: int
) -> None:
    properties, problem = replace(properties_for(f"sm_{capability}"), sms=sms), nf4(n, k, block_size, dtype)
    plan = back_plan(m, problem, properties)
    assert plan is not None
    assert is_valid(plan, m, problem, properties)
    assert plan.ctas <= math.prod(plan.sizes(m, problem))


def test_what_it_is_for() -> None:
    assert back.plan_back(5, Problem(BF16, 64, 64, "mxfp4", 32, torch.uint8), A100) is not None
    assert back.plan_back(5, replace(nf4(), scale=torch.float32, nested=0), A100) is not None
    for changes in ({"dtype": torch.float32}, {"nested": 512}, {"align_packed": 8}, {"k": 4100}):
        assert back.plan_back(5, replace(nf4(), **changes), A100) is None
    assert back.plan_back(5, nf4(), properties_for("sm_75")) is None
    assert back.plan_back(0, nf4(), A100) is None
    few, many = back.plan_back(8, nf4(4096), A100), back.plan_back(4096, nf4(4096), A100)
    assert few is not None
    assert many is not None
    assert few.columns < many.columns


def test_where_it_is_chosen() -> None:
    choice = dispatch.choose_back(32, nf4(14336), A100)
    assert choice is not None
    assert choice.kernel is back
    assert choice.variant(nf4(14336), A100).capability == 80
    assert dispatch.choose_back(1 << 15, nf4(14336), A100) is None


@pytest.mark.slow
@pytest.mark.parametrize(
    "capability", [80, 89, 120, *(pytest.param(one, marks=pytest.mark.compile_all) for one in (86, 90, 100))]
)
def test_compiles_into_registers(capability: int, tmp_path: Path) -> None:
    properties = properties_for(f"sm_{capability}")
    kinds = nf4(), int4(), replace(nf4(block_size=32), scale=torch.float32, nested=0, dtype=F16)
    for (columns, most), problem in zip(h200.SM80_BACK_SHAPES.items(), (*kinds, nf4()), strict=True):
        plans = (BackPlan(columns, h200.SM80_BACK_STAGES, resident, 1) for resident in range(most, 0, -1))
        plan = next(plan for plan in plans if is_valid(plan, 64, problem, properties))
        path = tmp_path / "back.cubin"
        path.write_bytes(nvrtc.compile_cubin(back.source(), capability, back.constants(problem, plan)))
        used = usage(path)
        assert used["STACK"] == used["LOCAL"] == 0, (plan, used)
        assert used["REG"] * plan.threads * plan.resident_ctas <= REGISTERS, plan
        assert used["SHARED"] <= 1024  # of the system's, and none of its own


# Of the weight: format, options, rows, columns. Of the plan: columns, stages, CTAs. Rows of dy.
LONG = pytest.mark.compile_all  # what takes ten seconds and more is left to `make compile-all`
CASES = [
    (("nf4", {}, 130, 192), BF16, (2, 3, 1), 5),
    pytest.param(("nf4", {}, 203, 160), F16, (4, 4, 5), 33, marks=LONG),
    pytest.param(("nf4", {"nested": False, "block_size": 32}, 71, 288), F16, (2, 3, 4), 40, marks=LONG),
    pytest.param(("nf4", {"block_size": 256}, 64, 512), BF16, (8, 3, 3), 70, marks=LONG),
    pytest.param(("fp4", {"block_size": 64}, 333, 64), BF16, (12, 4, 4), 97, marks=LONG),
    (("int4", {"group_size": 128}, 200, 128), F16, (4, 3, 2), 20),
    (("int4", {"group_size": 32}, 71, 96), BF16, (2, 3, 2), 3),
    (("mxfp4", {}, 150, 96), BF16, (2, 5, 3), 17),
]


def on_cpu(folder: Path, dy: torch.Tensor, q: hb.QuantizedWeight, shape: tuple[int, int, int]) -> torch.Tensor:
    """The source itself, thread by thread, and its workspace as it was found."""
    problem, (m, n), k = problem_of(dy, q, None), dy.shape, q.shape[1]
    columns, stages, ctas = shape
    plan = BackPlan(columns, stages, 1, ctas)
    assert is_valid(plan, m, problem, H200)
    variant, out = back.variant(problem, plan, H200), torch.full((m + 2, k), 777.0, dtype=dy.dtype)
    sums = torch.full((plan.partial_sums(m, problem),), SENTINEL, dtype=torch.int32)
    stale = torch.zeros(68, dtype=torch.int32)
    pitch = pitch_of(problem.n)
    aligned = dy if pitch == n else torch.full((m, pitch), 777.0, dtype=dy.dtype)
    before, after = back.arguments(m, problem, addresses(q), plan)
    places = (tensor.data_ptr() for tensor in (dy, aligned, out, sums, stale))
    bits = struct.pack("".join(back.LAYOUT), *before, *places, 16, m, *after)
    parts = [aligned, q.packed, q.scale, *(q.nested[:2] if q.nested else ())]
    for kernel, shared in (("align", 0), ("multiply", plan.shared_bytes(problem))):
        if kernel == "align" and aligned is dy:
            continue
        assert cuda_on_cpu.run(folder, variant, kernel, bits, Shape(ctas, plan.threads, shared), parts) == 0
    assert torch.equal(aligned[:, :n], dy)
    assert (aligned[:, n:] == 0).all()
    assert (out[m:] == 777).all()
    assert (stale[:64] == SENTINEL).all()
    assert (stale[64:] == 0).all()
    return out[:m]


@pytest.mark.slow
@cuda_on_cpu.needs_compiler
@pytest.mark.parametrize(("weight", "dtype", "shape", "m"), CASES, ids=str)
def test_product(
    weight: tuple[str, dict[str, Any], int, int],
    dtype: torch.dtype,
    shape: tuple[int, int, int],
    m: int,
    tmp_path: Path,
) -> None:
    format, options, n, k = weight
    torch.manual_seed(0)
    q, dy = hb.quantize(torch.randn(n, k).to(dtype), format, **options), torch.randn(m, n).to(dtype)
    out = on_cpu(tmp_path, dy, q, shape)
    dense = hb.dequantize(q, dtype).double()
    right, sizes = dy.double() @ dense, dy.double().abs() @ dense.abs()
    rounding = 0.51 * torch.finfo(dtype).eps * right.abs() + 1e-6 * sizes  # of the result, and of sums in fp32
    assert ((out.double() - right).abs() <= rounding).all()


@pytest.mark.slow
@cuda_on_cpu.needs_compiler
@pytest.mark.parametrize("format", ["nf4", "int4", "mxfp4"])
def test_operands_are_what_dequantize_gives(format: str, tmp_path: Path) -> None:
    """An identity matrix gives the dense weight, bit for bit: no nibble in a wrong place, no scale in another's."""
    torch.manual_seed(0)
    options: dict[str, Any] = {"group_size": 64} if format == "int4" else {}
    q = hb.quantize(torch.randn(40, 192).bfloat16(), format, **options)
    assert torch.equal(on_cpu(tmp_path, torch.eye(40).bfloat16(), q, (4, 3, 2)), hb.dequantize(q, BF16))


@pytest.mark.slow
@cuda_on_cpu.needs_compiler
def test_no_bank_is_asked_twice(tmp_path: Path) -> None:
    """Of the eight rows of a matrix."""
    functions = """extern "C" unsigned w(unsigned row, unsigned piece) { return w_place(row, piece); }
extern "C" unsigned dy(unsigned row, unsigned piece) { return dy_place(row, piece); }"""
    place = cuda_on_cpu.library(tmp_path, back.variant(nf4(), BackPlan(4, 3, 1, 1), H200), functions)
    for first in range(0, 64, 8):
        rows = range(first, first + 8)
        assert all(len({place.w(row, piece) // 16 % 8 for row in rows}) == 8 for piece in range(4))
        assert all(len({place.dy(row, piece) // 16 % 8 for row in rows}) == 8 for piece in range(8))
    assert len({place.w(row, piece) for row in range(64) for piece in range(4)}) == 256
    assert len({place.dy(row, piece) for row in range(32) for piece in range(8)}) == 256
