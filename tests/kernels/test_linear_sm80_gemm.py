"""Many rows through sm80_gemm, forward and back: its plans, that its source compiles for every target, and that it
computes the right thing: on a CPU, to the bits of the dequantized weights."""

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
from routes import Expected, routes_of

import halfbyte as hb
from halfbyte.kernels.common import nvrtc
from halfbyte.kernels.common.device import properties_for
from halfbyte.kernels.experts import reference as stacks
from halfbyte.kernels.linear import dispatch, grouped
from halfbyte.kernels.linear.grouped import Grouping
from halfbyte.kernels.linear.problem import Problem, addresses, problem_of
from halfbyte.kernels.linear.sm80_gemm import launch as many
from halfbyte.kernels.linear.sm80_gemm.plan import ManyPlan, is_valid, many_plan
from halfbyte.kernels.linear.sm90_decode.launch import rows_of
from halfbyte.kernels.linear.spread import most_tiles
from halfbyte.kernels.linear.tune import h200

both_ways = pytest.mark.parametrize("back", [False, True], ids=["forward", "back"])


@both_ways
@any_problem
def test_every_plan_is_valid(
    back: bool, m: int, n: int, k: int, block_size: int, dtype: torch.dtype, capability: int, sms: int
) -> None:
    properties, problem = replace(properties_for(f"sm_{capability}"), sms=sms), nf4(n, k, block_size, dtype)
    plan = many_plan(m, problem, properties, back)
    assert plan is not None
    assert is_valid(plan, m, problem, properties)
    assert plan.ctas <= math.prod(plan.sizes(m, problem))


@both_ways
def test_what_it_is_for(back: bool) -> None:
    def plan(m: int, problem: Problem, properties: Any = A100) -> ManyPlan | None:
        return many.plan_back(m, problem, properties) if back else many.plan(m, problem, properties, False)

    assert plan(500, Problem(BF16, 64, 64, "mxfp4", 32, torch.uint8)) is not None
    assert plan(500, replace(nf4(), scale=torch.float32, nested=0)) is not None
    for changes in ({"dtype": torch.float32}, {"nested": 512}, {"align_packed": 8}, {"k": 4100}):
        assert plan(500, replace(nf4(), **changes)) is None
    assert plan(500, nf4(), properties_for("sm_75")) is None
    assert plan(0, nf4()) is None
    assert many.plan(500, nf4(), A100, True) is None  # sums would depend on the rows of x


def test_where_it_is_chosen() -> None:
    choice, other = dispatch.choose(256, nf4(14336), A100, False), dispatch.choose_back(256, nf4(14336), A100)
    assert choice is not None
    assert other is not None
    assert choice.kernel is many
    assert other.kernel is many
    assert choice.variant(nf4(14336), A100).capability == 80
    few = dispatch.choose(16, nf4(14336), A100, False)
    assert few is not None
    assert few.kernel is not many


@pytest.mark.slow
@pytest.mark.parametrize(
    "capability", [80, 89, 120, *(pytest.param(one, marks=pytest.mark.compile_all) for one in (86, 90, 100))]
)
def test_compiles_into_registers(capability: int, tmp_path: Path) -> None:
    properties = properties_for(f"sm_{capability}")
    kinds = (nf4(), int4(), replace(nf4(block_size=32), scale=torch.float32, nested=0, dtype=F16))
    for i, (shape, most) in enumerate(h200.MANY_SHAPES.items()):
        problem, back = kinds[i % 3], i % 2 == 0
        plans = (ManyPlan(back, *shape, 2, resident, 1) for resident in range(most, 0, -1))
        plan = next((plan for plan in plans if is_valid(plan, 64, problem, properties)), None)
        if plan is None:
            continue
        path = tmp_path / "many.cubin"
        path.write_bytes(nvrtc.compile_cubin(many.source(), capability, many.constants(problem, plan)))
        used = usage(path)
        assert used["STACK"] == used["LOCAL"] == 0, (plan, used)
        assert used["REG"] * plan.threads * plan.resident_ctas <= REGISTERS, plan
        assert used["SHARED"] <= 1024  # of the system's, and none of its own


# Of the weight: format, options, rows, columns. Of the plan: warps, columns, stages, CTAs. Rows of x. Way back.
LONG = pytest.mark.compile_all  # what takes ten seconds and more is left to `make compile-all`
CASES = [
    (("nf4", {}, 130, 192), BF16, (2, 2, 4, 3, 2), 5, False),
    (("nf4", {}, 130, 192), BF16, (2, 2, 4, 3, 3), 67, True),
    pytest.param(("nf4", {"nested": False, "block_size": 32}, 71, 288), F16, (2, 4, 4, 3, 2), 140, False, marks=LONG),
    pytest.param(("nf4", {"block_size": 256}, 203, 512), F16, (2, 4, 8, 3, 5), 70, True, marks=LONG),
    pytest.param(("fp4", {"block_size": 64}, 333, 64), BF16, (2, 2, 4, 3, 4), 97, False, marks=LONG),
    pytest.param(("fp4", {"block_size": 64}, 333, 320), BF16, (2, 2, 4, 3, 4), 9, True, marks=LONG),
    (("int4", {"group_size": 128}, 200, 128), F16, (2, 2, 4, 3, 3), 20, False),
    (("int4", {"group_size": 32}, 71, 96), BF16, (2, 2, 4, 4, 2), 3, True),
    (("mxfp4", {}, 150, 96), BF16, (2, 2, 8, 3, 3), 17, False),
]


def on_cpu(
    folder: Path,
    x: torch.Tensor,
    q: hb.QuantizedWeight,
    bias: torch.Tensor | None,
    shape: tuple[int, int, int, int, int],
    back: bool,
) -> torch.Tensor:
    """The source itself, thread by thread, and its workspace as it was found."""
    problem, m = problem_of(x, q, bias), len(x)
    plan = ManyPlan(back, *shape[:4], 1, shape[4])
    assert is_valid(plan, m, problem, H200)
    length, pitch = many.row_and_pitch(problem, plan)
    produced = problem.k if back else problem.n
    variant, out = many.variant(problem, plan, H200), torch.full((m + 2, produced), 777.0, dtype=x.dtype)
    sums = torch.full((plan.partial_sums(m, problem),), SENTINEL, dtype=torch.int32)
    stale = torch.zeros(68, dtype=torch.int32)
    aligned = x if pitch == length else torch.full((m, pitch), 777.0, dtype=x.dtype)
    before, after = many.arguments(m, problem, addresses(q), plan)
    places = [0 if one is None else one.data_ptr() for one in (x, aligned, bias, out, None, sums, stale)]
    bits = struct.pack("".join(many.LAYOUT), *before, *places, 16, m, *after)
    parts = [aligned, q.packed, q.scale, *(q.nested[:2] if q.nested else ())]
    for kernel, shared in (("align", 0), ("multiply", plan.shared_bytes(problem))):
        if kernel == "align" and aligned is x:
            continue
        assert cuda_on_cpu.run(folder, variant, kernel, bits, Shape(plan.ctas, plan.threads, shared), parts) == 0
    assert torch.equal(aligned[:, :length], x)
    assert (aligned[:, length:] == 0).all()
    assert (out[m:] == 777).all()
    assert (stale[:64] == SENTINEL).all()
    assert (stale[64:] == 0).all()
    return out[:m]


@pytest.mark.slow
@cuda_on_cpu.needs_compiler
@pytest.mark.parametrize(("weight", "dtype", "shape", "m", "back"), CASES, ids=str)
def test_product(
    weight: tuple[str, dict[str, Any], int, int],
    dtype: torch.dtype,
    shape: tuple[int, int, int, int, int],
    m: int,
    back: bool,
    tmp_path: Path,
) -> None:
    format, options, n, k = weight
    torch.manual_seed(0)
    q = hb.quantize(torch.randn(n, k).to(dtype), format, **options)
    x, bias = torch.randn(m, n if back else k).to(dtype), None if back else torch.randn(n).to(dtype)
    out = on_cpu(tmp_path, x, q, bias, shape, back)
    dense = hb.dequantize(q, dtype).double() if back else hb.dequantize(q, dtype).double().t()
    right, sizes = x.double() @ dense, x.double().abs() @ dense.abs()
    if bias is not None:
        right, sizes = right + bias.double(), sizes + bias.double().abs()
    rounding = 0.51 * torch.finfo(dtype).eps * right.abs() + 1e-6 * sizes  # of the result, and of sums in fp32
    assert ((out.double() - right).abs() <= rounding).all()


@pytest.mark.slow
@cuda_on_cpu.needs_compiler
@both_ways
@pytest.mark.parametrize("format", ["nf4", "int4", "mxfp4"])
def test_operands_are_what_dequantize_gives(format: str, back: bool, tmp_path: Path) -> None:
    """An identity matrix gives the dense weight, bit for bit: no nibble in a wrong place, no scale in another's."""
    torch.manual_seed(0)
    options: dict[str, Any] = {"group_size": 64} if format == "int4" else {}
    q = hb.quantize(torch.randn(*((40, 192) if back else (192, 64))).bfloat16(), format, **options)
    dense, eye = hb.dequantize(q, BF16), torch.eye(40 if back else 64).bfloat16()
    assert torch.equal(on_cpu(tmp_path, eye, q, None, (2, 2, 4, 3, 2), back), dense if back else dense.t())


@pytest.mark.slow
@cuda_on_cpu.needs_compiler
@both_ways
@pytest.mark.parametrize("w_warps", [2, 4])
def test_no_bank_is_asked_twice(w_warps: int, back: bool, tmp_path: Path) -> None:
    """By ldmatrix, of the eight rows of a matrix; and by what eight lanes, or sixteen with half a piece each, store."""
    functions = """extern "C" unsigned w(unsigned p, unsigned s, unsigned piece) { return w_place(p, s, piece); }
extern "C" unsigned x(unsigned row, unsigned piece) { return x_place(row, piece); }"""
    plan = ManyPlan(back, w_warps, 2, 4, 3, 1, 1)
    place = cuda_on_cpu.library(tmp_path, many.variant(nf4(), plan, H200), functions)
    for first in range(0, 64, 8):
        rows = range(first, first + 8)
        assert all(len({place.x(row, piece) // 16 % 8 for row in rows}) == 8 for piece in range(8))
    warps = range(0, 64 * w_warps, 64)
    for piece in range(8):
        for i in range(8):
            for warp in warps:
                if back:
                    found = {place.w(warp, 8 * i + row, piece) // 16 % 8 for row in range(8)}
                else:
                    found = {place.w(warp + 8 * row + i, 0, piece) // 16 % 8 for row in range(8)}
                assert len(found) == 8
    if back:
        in_row = 2 * w_warps  # threads
        for first in range(0, 64 * in_row, 16):
            threads = [(t // in_row, t % in_row) for t in range(first, first + 16)]
            for p in range(8):
                halves = {(place.w(32 * q, row, p) + q % 2 * 8) // 8 % 16 for row, q in threads}
                assert len(halves) == 16
    else:
        for first in range(0, 128, 8):
            threads = [(t // 2, t % 2) for t in range(first, first + 8)]
            for part in range(4):
                assert len({(place.w(row, 0, 4 * q) ^ part * 16) // 16 % 8 for row, q in threads}) == 8


# -- Stacks of experts -------------------------------------------------------------------------------------------------

# Of the stack: format, options, experts, rows of each, columns. Of the plan: warps, columns. Pairs; how many share a
# row of x, or 0 where they are sorted.
STACKS = [
    (("nf4", {}, 5, 72, 128), BF16, (2, 2, 4), 40, 2, Grouping(5, "silu")),
    (("int4", {"group_size": 32}, 3, 150, 64), F16, (2, 2, 4), 33, 0, Grouping(3, wide=True)),
    (("mxfp4", {}, 4, 48, 96), BF16, (2, 2, 4), 21, 1, Grouping(4, "swiglu_oai")),
    pytest.param(("fp4", {}, 2, 264, 192), BF16, (2, 2, 8), 300, 3, Grouping(2, "gelu_tanh"), marks=LONG),
    pytest.param(("nf4", {}, 3, 136, 96), F16, (2, 4, 4), 260, 1, Grouping(3, scatters=True), marks=LONG),
]


@pytest.mark.parametrize("pairs", [1, 8, 600, 16384])
@pytest.mark.parametrize("sides", [(128, 1536, 2048), (8, 28672, 4096), (32, 5760, 2880)])
def test_plans_of_stacks(sides: tuple[int, int, int], pairs: int) -> None:
    """Wider tiles for more pairs of an expert, and tiles that both products of a block have in common."""
    experts, n, k = sides
    problems = nf4(experts * n, k), nf4(experts * k, n // 2)
    for properties in (A100, properties_for("sm_86"), properties_for("sm_120")):
        plans = grouped.plan(pairs, experts, problems, properties)
        assert plans is not None
        assert grouped.names(plans) == "sm80_gemm"
        assert plans[0].tile_m == plans[1].tile_m
        for plan, o in zip(plans, problems, strict=True):
            assert isinstance(plan, ManyPlan)
            assert is_valid(plan, plan.tile_m, o, properties)
            assert plan.grouped_tiles == most_tiles(pairs, experts, plan.tile_m)
        back = grouped.plan(pairs, experts, problems[:1], properties, back=True)
        assert back is not None
        assert back[0].back
    few, many_pairs = (grouped.plan(count, 4, problems[:1], A100) for count in (4, 8192))
    assert few is not None
    assert many_pairs is not None
    assert few[0].tile_m < many_pairs[0].tile_m
    assert grouped.plan(pairs, experts, [replace(o, dtype=torch.float32) for o in problems], A100) is None


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, *(pytest.param(c, marks=pytest.mark.compile_all) for c in (89, 90, 120))])
def test_stacks_compile_into_registers(capability: int, tmp_path: Path) -> None:
    properties = properties_for(f"sm_{capability}")
    kinds = Grouping(4, "silu"), Grouping(4, "swiglu_oai"), Grouping(4, wide=True), Grouping(4, scatters=True)
    for (shape, most), grouping, o in zip(h200.MANY_SHAPES.items(), kinds, (nf4(), int4()) * 2, strict=True):
        plans = (ManyPlan(grouping.scatters, *shape, 3, resident, 1, 7) for resident in range(most, 0, -1))
        plan = next((plan for plan in plans if is_valid(plan, 64, o, properties)), None)
        if plan is None:
            continue
        path = tmp_path / "many.cubin"
        path.write_bytes(nvrtc.cubin(many.grouped_variant(o, grouping, plan, properties)))
        used = usage(path)
        assert used["STACK"] == used["LOCAL"] == 0, (plan, used)
        assert used["REG"] * plan.threads * plan.resident_ctas <= REGISTERS, plan


@pytest.mark.slow
@cuda_on_cpu.needs_compiler
@pytest.mark.parametrize(("stack", "dtype", "shape", "pairs", "per_row", "grouping"), STACKS, ids=str)
def test_stacks(
    stack: tuple[str, dict[str, Any], int, int, int],
    dtype: torch.dtype,
    shape: tuple[int, int, int],
    pairs: int,
    per_row: int,
    grouping: Grouping,
    tmp_path: Path,
) -> None:
    """Of ids that are no expert, too, whose rows are left as they are."""
    format, options, experts, n, k = stack
    torch.manual_seed(0)
    q = hb.quantize(torch.randn(experts, n, k).to(dtype), format, **options)
    x, bias = 0.3 * torch.randn(-(-pairs // (per_row or 1)), k).to(dtype), torch.randn(experts, n).to(dtype)
    ids = torch.randint(-1, experts + 1, (pairs,))
    found, routes = grouped_on_cpu(tmp_path, x, q, ids, bias, shape, per_row, grouping, False)
    dense, sorted_rows = hb.dequantize(q, dtype).double(), routes.places.tolist()
    seen = 0
    for pair, expert in enumerate(ids.tolist()):
        if not 0 <= expert < experts:
            continue
        given = x[pair // per_row] if per_row else x[sorted_rows[pair]]
        y = given.double() @ dense[expert].t() + bias[expert].double()
        if grouping.activation:
            y = stacks.activate(y.float()[None], grouping.activation)[0].double()
        row = found[pair if grouping.scatters else sorted_rows[pair]].double()
        assert (row - y).norm() <= 2e-2 * y.norm() + 1e-3, pair
        seen += 1
    assert 0 < seen < pairs
    untouched = set(range(len(found))) - {
        pair if grouping.scatters else sorted_rows[pair] for pair in range(pairs) if sorted_rows[pair] >= 0
    }
    assert untouched
    assert all((found[row] == 777).all() for row in untouched)


@pytest.mark.slow
@cuda_on_cpu.needs_compiler
@pytest.mark.parametrize("format", ["nf4", "int4"])
def test_gradients_of_stacks(format: str, tmp_path: Path) -> None:
    """The product with the transpose of each pair's expert, in the order of the pairs; rows of dy are not aligned."""
    torch.manual_seed(0)
    q = hb.quantize(torch.randn(3, 70, 96).bfloat16(), format, **({"group_size": 32} if format == "int4" else {}))
    ids, dy = torch.randint(-1, 4, (50,)), torch.randn(50, 70).bfloat16()
    found, _ = grouped_on_cpu(tmp_path, dy, q, ids, None, (2, 2, 4), 1, Grouping(3, scatters=True), True)
    for pair, expert in enumerate(ids.tolist()):
        if 0 <= expert < 3:
            right = dy[pair].double() @ hb.dequantize(q, BF16)[expert].double()
            assert (found[pair].double() - right).norm() <= 1e-2 * right.norm()
        else:
            assert (found[pair] == 777).all()


def grouped_on_cpu(
    folder: Path,
    x: torch.Tensor,
    q: hb.QuantizedWeight,
    ids: torch.Tensor,
    bias: torch.Tensor | None,
    shape: tuple[int, int, int],
    per_row: int,
    grouping: Grouping,
    back: bool,
) -> tuple[torch.Tensor, Expected]:
    """Results of sorted pairs, or of pairs, with one row more, and where each pair is among the sorted ones."""
    experts, n, k = q.shape
    flat, pairs = rows_of(q), len(ids)
    problem, tile_m = problem_of(x, flat, bias), 8 * shape[1] * shape[2]
    room = most_tiles(pairs, experts, tile_m)
    plan = ManyPlan(back, *shape, 3, 1, 3, room)
    routes = routes_of(ids, experts, tile_m, room)
    head = torch.tensor([routes.count, 0, 0, 0], dtype=torch.int32)
    table = torch.cat([head, routes.tiles.flatten(), routes.order])
    width = k if back else n // 2 if grouping.activation else n
    out = torch.full((pairs + 1, width), 777.0, dtype=torch.float32 if grouping.wide else x.dtype)
    length, pitch = many.row_and_pitch(replace(problem, n=n), plan)
    aligned = x if pitch == length else torch.full((len(x), pitch), 777.0, dtype=x.dtype)
    before, after = many.grouped_arguments(problem, addresses(flat), n, plan)
    variant = many.grouped_variant(problem, grouping, plan, H200)
    places = [0 if one is None else one.data_ptr() for one in (x, aligned, bias, out, table)]
    parts = [aligned, table, flat.packed, flat.scale, *(flat.nested[:2] if flat.nested else ())]
    for kernel, shared, m in (("align", 0, len(x)), ("multiply", plan.shared_bytes(problem), per_row)):
        if kernel == "align" and aligned is x:
            continue
        bits = struct.pack("".join(many.LAYOUT), *before, *places, 0, 0, 0, m, *after)
        assert cuda_on_cpu.run(folder, variant, kernel, bits, Shape(plan.ctas, plan.threads, shared), parts) == 0
    return out, routes
