"""The plans for many rows of x on Hopper, and that its source compiles for them, GPU or not."""

import re
import subprocess
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch
from gpus import H200
from hypothesis import example, given
from hypothesis import strategies as st
from sass import arrivals_with_reads_on_their_way

from halfbyte.bench.predictions import problem as problem_named
from halfbyte.kernels.common import nvrtc
from halfbyte.kernels.common.device import DeviceProperties, properties_for
from halfbyte.kernels.linear import laid_out
from halfbyte.kernels.linear.dispatch import choose, choose_group
from halfbyte.kernels.linear.laid_out import copies_x, span_of, supports
from halfbyte.kernels.linear.problem import Problem
from halfbyte.kernels.linear.sm90_gemm import launch as gemm
from halfbyte.kernels.linear.sm90_gemm.launch import constants, source
from halfbyte.kernels.linear.sm90_gemm.plan import gemm_plan, one_after_another
from halfbyte.kernels.linear.sm90_gemm.shape import (
    BACK_TILES_M,
    DECODERS,
    STEP_K,
    TILES_M,
    WIDE_TILES_M,
    GemmPlan,
    decoding,
    is_valid,
    loads_words,
    tiles_of,
    x_stages,
)
from halfbyte.kernels.linear.sm90_gemm.times import estimate
from halfbyte.kernels.linear.tune import h200

BF16, F16 = torch.bfloat16, torch.float16


def nf4(n: int, k: int, block_size: int = 64) -> Problem:
    return Problem(BF16, n, k, "nf4", block_size, torch.uint8, 256)


@given(
    m=st.integers(1, 20000),
    n=st.integers(1, 60000),
    k=st.integers(1, 500).map(lambda k: 64 * k),
    block_size=st.sampled_from([32, 64, 128]),
    sms=st.integers(2, 200),
    back=st.booleans(),
)
@example(m=673, n=2689, k=16448, block_size=32, sms=26, back=False)  # twins, which may take more of x at once
def test_every_plan_is_valid(m: int, n: int, k: int, block_size: int, sms: int, back: bool) -> None:
    properties, problem = DeviceProperties("cuda", 90, sms, 232448), nf4(n, k, block_size)
    plan = gemm_plan(m, problem, properties, back)
    assert plan is not None
    assert plan.back is back
    k, n = plan.sides(problem)
    assert is_valid(plan, m, n, k, span_of(problem), properties)
    assert plan.microseconds > 0
    last = (m - 1) % plan.chunk + 1
    assert plan.x_tiles(last) * -(-n // plan.rows) * -(-k // 256) >= plan.workers  # nobody without work
    copies = back or plan.in_order
    alone = h200.BACK_X_BYTES if back else h200.IN_ORDER_X_BYTES if plan.in_order else h200.GEMM_X_BYTES
    most = alone if plan.twins == 1 else h200.GEMM_TWINS_X_BYTES
    together = plan.workers == -(-n // plan.rows) * plan.x_tiles(plan.chunk)  # CTAs go along K, each with a tile
    assert together or plan.chunk * k * 2 <= max(most, 2 * k * plan.tile_m) + 2 * k * plan.tile_m
    assert copies or plan.chunk * k * 2 <= max(h200.GEMM_ROOM, 2 * k * plan.tile_m)
    assert plan.microseconds == estimate(plan, m, problem, properties)


def test_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights for which x is laid out in one way, in as many chunks; chosen where that is said to save something."""
    pair = (nf4(28672, 8192),) * 2
    unlike = (pair[0], replace(pair[0], scale=torch.float32, nested=0))  # of two kernels
    for m, chunks in ((256, 1), (1500, 3)):
        monkeypatch.setattr(h200, "GEMM_LAYING_OUT", 0.0)
        choose_group.cache_clear()
        alone, together = gemm.plan(m, pair[0], H200, False), one_after_another(m, pair, H200)
        assert together is not None
        assert together.plans == (alone, alone)
        assert together.x_tiles(m) == -(-m // alone.tile_m)
        assert together.microseconds == 2 * alone.microseconds
        assert choose_group(m, unlike, H200) is None
        monkeypatch.setattr(h200, "GEMM_LAYING_OUT", 1.5)
        choose_group.cache_clear()
        choice = choose_group(m, unlike, H200)
        assert choice is not None
        assert choice.kernel is gemm
        assert choice.plan == one_after_another(m, unlike, H200) == gemm.plan_group(m, unlike, H200)
        assert choice.plan.microseconds == sum(p.microseconds for p in choice.plan.plans) - 1.5 * chunks
        assert gemm.group_variant(unlike, choice.plan, H200) is None
    choose_group.cache_clear()
    for other in (nf4(28672, 4096), nf4(28672, 8192, 32), nf4(200, 8192), Problem(F16, 28672, 8192, "nf4", 64, F16)):
        assert one_after_another(256, (pair[0], other), H200) is None
    assert gemm.plan_group(256, pair[:1], H200) is None


def test_plans_that_would_be_wrong_are_not_valid() -> None:
    def valid(m: int = 600, n: int = 1000, k: int = 4096, span: int = 64, **changes: int) -> bool:
        shape = {"tile_m": 256, "warpgroups": 2, "w_stages": 3, "x_stages": 3, "workers": 100, "cluster": 1}
        return is_valid(GemmPlan(**shape | {"chunk": 512} | changes), m, n, k, span, H200)

    assert valid()
    assert valid(span=32)
    assert not valid(chunk=500)  # launches begin within a tile
    assert not valid(chunk=0)
    assert not valid(workers=129)  # the last launch has 88 rows, one tile of x: 8 tiles of 16 units
    assert valid(workers=128)
    assert valid(m=512, cluster=2, workers=64)  # 16 tiles, each in four parts of four units
    assert not valid(m=600, cluster=2, workers=64)  # the last launch has other tiles
    assert not valid(m=512, cluster=2, workers=66)
    assert valid(m=512, cluster=3, workers=64)
    assert not valid(m=512, cluster=3, workers=96)  # parts of two units
    assert not valid(m=512, cluster=9, workers=16)
    assert valid(m=512, shares=8, workers=128)  # 16 tiles
    assert not valid(m=512, shares=8, workers=64)
    assert not valid(m=600, shares=8, workers=128)  # the last launch has other tiles
    assert not valid(m=512, shares=9, workers=144)  # not all of them run at once
    assert not valid(m=200, n=128, shares=17, workers=17)
    assert not valid(m=512, cluster=2, shares=2, workers=32)
    assert not valid(tile_m=100, chunk=500)
    assert not valid(x_stages=4)  # more than shared memory holds
    assert not valid(w_stages=1)
    assert not valid(k=1 << 24)
    assert gemm_plan(600, nf4(1000, 4096), properties_for("sm_100")) is None


def test_what_the_kernel_supports() -> None:
    assert supports(nf4(65, 128))
    assert supports(nf4(65, 96, 32))
    assert not supports(nf4(65, 96))
    assert not supports(Problem(torch.float32, 64, 64, "nf4", 64, torch.uint8, 256))
    assert not supports(Problem(BF16, 64, 64, "nf4", 64, torch.uint8, 512))
    assert not supports(Problem(BF16, 64, 64, "nf4", 64, torch.uint8, 256, align_packed=8))
    assert gemm.plan(600, nf4(65, 128), H200, True) is None  # sums of a row depend on how tiles are cut


def test_launches_follow_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes its rows of x to its rows of y; the last may be of fewer tiles, and is bound for those."""
    calls: list[tuple[int, ...]] = []

    def bind(kernel: object, device: object, rows: int, *_: object) -> Callable[..., None]:
        return lambda stream, x, bias, out, m: calls.append((rows, x, bias, out, m))

    monkeypatch.setattr(laid_out, "bind", bind)
    n, k = 300, 1024
    plan = GemmPlan(128, 2, 3, 6, 12, 1, 256)
    for m, launches in ((1, [1]), (256, [256]), (257, [256, 1]), (600, [256, 256, 88])):
        calls.clear()
        product = gemm.bind(torch.device("cuda", 0), m, nf4(n, k), (0,) * 5, plan)
        product(0, 1 << 20, 7, 1 << 30, m)
        firsts = [sum(launches[:i]) for i in range(len(launches))]
        assert [call[1:] for call in calls] == [
            ((1 << 20) + 2 * k * first, 7, (1 << 30) + 2 * n * first, rows)
            for first, rows in zip(firsts, launches, strict=True)
        ]
        assert all(bound >= rows > bound - 128 for bound, *_, rows in calls)


@pytest.mark.parametrize("format", ["nf4", "int4"])
def test_memory_of_many_rows_of_a_large_weight(format: str) -> None:
    """No dense weight with 2,048 rows, and 8 MiB for x laid out at most, as the tests on a GPU measure it."""
    problem = problem_named(format, *{"nf4": (64, True), "int4": (128, False)}[format], 28672, 8192)
    choice = choose(2048, problem, H200, False)
    assert choice is not None
    plan = choice.plan
    assert isinstance(plan, GemmPlan)
    assert copies_x(problem, plan) or plan.chunk * problem.k * 2 <= 8 << 20


def test_wide_tiles() -> None:
    """Rows that fill one are decoded for once; W whose scales come one by one has none."""
    for m, n, tile_m in ((300, 28672, 320), (500, 28672, 256), (640, 8192, 320)):
        plan = gemm_plan(m, nf4(n, 8192), H200)
        assert plan is not None
        assert plan.tile_m == tile_m, m
    one_by_one = gemm_plan(300, Problem(BF16, 28672, 8192, "nf4", 32, torch.uint8, 256, align_scale=1), H200)
    assert one_by_one is None or one_by_one.tile_m <= 256
    shape = GemmPlan(320, 2, 3, 2, 4, 1, 320)
    assert is_valid(shape, 320, 512, 1024, 64, H200)
    assert not is_valid(replace(shape, cluster=2), 320, 512, 1024, 64, H200)


def test_two_steps_a_turn_leave_two_on_their_way() -> None:
    """While a turn's steps are multiplied, and the next turn's wait, others must come."""
    for problem, back in product((nf4(4096, 4096), Problem(BF16, 4096, 4096, "int4", 128, BF16)), (False, True)):
        for tile_m in tiles_of(problem, back):
            stages = x_stages(tile_m, problem)
            plan = decoding(GemmPlan(tile_m, 2, 3, stages, 1, 1, tile_m, back=back), problem)
            steps = plan.turn_k // STEP_K
            assert steps <= 1 or 2 * steps + 2 <= stages, plan
            assert (steps == 2) == (tile_m <= (192 if plan.computes else 128)), plan


# What CTAs that go on to another tile leave on the stack where tiles are widest, in bytes: by the way, tile_m, cluster
# and shares. With products kept for a unit that is five words a unit, of a loop that takes 2.4 µs for it. Of wide tiles
# four words are loaded a unit by warps that multiply; the others are at a tile's end, and the producer's.
STACK = {(False, 256, 1, 1): 24, (True, 256, 1, 1): 8, (True, 128, 2, 1): 8, (True, 128, 3, 1): 8}
WIDE_STACK = {320: 128, 384: 200}
# Where two warpgroups decode, of a tile's end.
DECODERS_STACK = {192: 64}


@pytest.mark.slow
@pytest.mark.parametrize("back", [False, True])
@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.compile_all)])
def test_compiles_into_registers(every: bool, back: bool, tmp_path: Path) -> None:
    of_fp4 = Problem(F16, 64, 960, "fp4", 64, torch.float32)
    # With N = 65 x is laid out on the way back, too.
    problems = (nf4(64, 1024), Problem(F16, 64, 1024, "int4", 32, F16), nf4(65, 960), of_fp4)
    ways = (1, 1), (2, 1), (3, 1), (1, 2), (1, 3), (1, 4), (1, 16)
    tiles = BACK_TILES_M if back else TILES_M
    shapes = [(tile_m, *way) for tile_m in tiles for way in ways if tile_m not in WIDE_TILES_M or way[0] == 1]
    some = [(96, 1, 1, False), (256, 2, 1, not back), (160, 1, 4, False)]
    if not back:
        some.append((320, 1, 1, False))
    orders = (False,) if back else (False, True)
    each = [(*shape, in_order) for shape in shapes for in_order in orders]
    cases = each if every else some
    for i, (tile_m, cluster, shares, in_order) in enumerate(cases):
        for problem in problems if every else problems[i : i + 1]:
            if tile_m in WIDE_TILES_M and not loads_words(problem):
                continue
            plan = GemmPlan(tile_m, 2, 3, x_stages(tile_m, problem), 1, cluster, tile_m, back=back)
            plan = decoding(replace(plan, shares=shares, in_order=in_order), problem)
            check_registers(plan, problem, tmp_path / "gemm.cubin", back)
            if back and cluster == 1 and problem.numbers == "looked_up":
                check_registers(replace(plan, mates=2), problem, tmp_path / "gemm.cubin", back)
            if back and cluster == 1 and tile_m in DECODERS:
                decoders, w_stages, stages = DECODERS[tile_m]
                plan = replace(plan, w_stages=w_stages, x_stages=stages, decoders=decoders)
                check_registers(plan, problem, tmp_path / "gemm.cubin", back)


def check_registers(plan: GemmPlan, problem: Problem, path: Path, back: bool) -> None:
    """Nothing is kept in memory but what STACK says, and nobody is told of memory that is read still."""
    import triton

    path.write_bytes(nvrtc.compile_cubin(source(), "90a", constants(problem, plan)))
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    text = subprocess.run([tool, "-res-usage", path], capture_output=True, text=True, check=True).stdout
    kernels = re.findall(r"Function (\w+):\s+(REG.*)", text)
    found = {name: dict(re.findall(r"(\w+):(\d+)", used)) for name, used in kernels}
    assert found.keys() == {"multiply", "lay_out"}
    assert all(used["LOCAL"] == "0" for used in found.values()), (plan, problem)
    most = STACK.get((back, plan.tile_m, plan.cluster, plan.shares), WIDE_STACK.get(plan.tile_m, 0))
    if plan.decoders:
        most = DECODERS_STACK.get(plan.tile_m, 0)
    assert all(int(used["STACK"]) <= most for used in found.values()), (plan, problem)
    assert not arrivals_with_reads_on_their_way(path, "multiply", back), (plan, problem)


def test_places_on_the_way_back() -> None:
    """As back.cuh finds them: a step of 64 rows of W by 128 columns, from where the copy's swizzle has put its bytes to
    the registers of A, where mma.cuh draws two neighbouring rows of one column."""
    memory = {}
    for row, byte in product(range(64), range(64)):
        memory[row * 64 + (byte // 16 ^ row // 2 & 3) * 16 + byte % 16] = row, byte
    columns = []
    for warp in range(8):
        places = [lane * 64 + (warp // 2 ^ lane // 2 & 3) * 16 for lane in range(32)]
        for lane in range(32):
            group, member, column = lane // 4, lane % 4, warp // 2 * 32 + lane // 4 * 4 + warp % 2 * 2
            columns += [column, column + 1]
            operands = {}
            for half, i in product(range(2), range(4)):
                # Of matrix i, whose rows lanes 8 i to 8 i + 7 point at, transposed: two bytes each of two rows.
                rows = (half * 32 * 64 + places[8 * i + 2 * member + j] for j in range(2))
                word = [memory[row + 2 * group + byte] for row in rows for byte in range(2)]
                (upper, byte), (lower, same) = word[warp % 2], word[warp % 2 + 2]
                assert byte == same
                for second in range(2):
                    operands[2 * (4 * half + i) + second] = (upper, lower, 2 * byte + second)
            for register, found in operands.items():
                row = register // 4 * 16 + register // 2 % 2 * 8 + 2 * member
                assert found == (row, row + 1, column + register % 2)
    assert sorted(columns) == sorted(4 * list(range(128)))


def test_source_refuses_sizes_that_are_not_its_own() -> None:
    plan = GemmPlan(128, 2, 3, 6, 1, 1, 128)
    wrong = constants(nf4(64, 1024), plan) | {"shared_bytes": plan.shared_bytes(64) + 16}
    with pytest.raises(Exception, match="reckons with other sizes"):
        nvrtc.compile_cubin(source(), "90a", wrong)
