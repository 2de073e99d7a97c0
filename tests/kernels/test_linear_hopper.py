"""The plans of the product on Hopper, and that its source compiles for them, GPU or not."""

import ctypes
import re
import subprocess
from dataclasses import replace
from itertools import cycle, islice, pairwise, product
from pathlib import Path

import pytest
import torch
from gpus import H200
from hypothesis import given
from hypothesis import strategies as st

import halfbyte as hb
from halfbyte.kernels.common import nvrtc, workspace
from halfbyte.kernels.common.cuda_types import TYPES
from halfbyte.kernels.common.device import DeviceProperties, properties_for
from halfbyte.kernels.linear import kernel
from halfbyte.kernels.linear.dispatch import choose, choose_group
from halfbyte.kernels.linear.fusion import Fusion
from halfbyte.kernels.linear.kernel import plan_for
from halfbyte.kernels.linear.laid_out import UNIT_K, scale_loads, span_of
from halfbyte.kernels.linear.problem import INVARIANT_ROWS, Problem, problem_of
from halfbyte.kernels.linear.sm90_decode import launch as decode
from halfbyte.kernels.linear.sm90_gemm import launch as gemm
from halfbyte.kernels.linear.sm90_streamk import launch as hopper
from halfbyte.kernels.linear.sm90_streamk.launch import constants, source
from halfbyte.kernels.linear.sm90_streamk.plan import one_after_another, streamk_plan
from halfbyte.kernels.linear.sm90_streamk.shape import StreamKPlan, is_valid
from halfbyte.kernels.linear.tune.h200 import INVARIANT_WARPGROUPS, STREAMK_TILES

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
MODELS = ((28672, 8192), (8192, 28672), (14336, 4096), (4096, 14336), (1024, 4096), (25600, 5120), (5120, 25600))
GROUPS = (2, 3, 4)
TILES = tuple(STREAMK_TILES.items())
WIDTHS = sorted({width for width, _ in STREAMK_TILES})
shapes = {
    "n": st.integers(1, 40000),
    "span": st.sampled_from([32, 64]),
    "units": st.integers(1, 2000),  # K in units of 32
    "sms": st.integers(1, 200),
}


def planned(
    m: int, n: int, k: int, span: int, properties: DeviceProperties, batch_invariant: bool
) -> StreamKPlan | None:
    return streamk_plan(m, Problem(BF16, n, k, "nf4", span, torch.uint8, 256), properties, batch_invariant)


def tiles(plan: StreamKPlan, m: int, n: int) -> int:
    return -(-n // plan.rows) * -(-m // plan.tile_m)


def cuts(plan: StreamKPlan, m: int, n: int, k: int) -> set[tuple[int, ...]]:
    """Where CTAs begin within tiles, as sm90_streamk/kernel.cu shares units: one tuple if all tiles are cut alike."""
    depth, found = -(-k // UNIT_K), {}
    for cta in range(plan.ctas):
        tile, at = divmod(cta * tiles(plan, m, n) * depth // plan.ctas, depth)
        found.setdefault(tile, []).append(at)
    missing = {()} if len(found) < tiles(plan, m, n) else set()
    return {tuple(parts) for parts in found.values()} | missing


@given(
    m=st.one_of(st.integers(0, 300), st.integers(1, 1 << 17)),
    **shapes,
    capability=st.sampled_from([75, 80, 89, 90, 100, 120]),
    batch_invariant=st.booleans(),
)
def test_every_plan_is_valid(
    m: int, n: int, span: int, units: int, sms: int, capability: int, batch_invariant: bool
) -> None:
    properties = DeviceProperties("cuda", capability, sms, 232448)
    k = span * units
    plan = planned(m, n, k, span, properties, batch_invariant)
    if capability != 90 or m == 0:
        assert plan is None
        return
    if plan is None:
        assert m > 300  # too many units for 32 bits
        return
    assert is_valid(plan, m, n, k, span, properties)
    # No tile is empty, and none could be narrower; with batch_invariant tiles have one number of warpgroups, and there
    # may be more of them where those of so many rows take less time.
    allowed = [width for width in WIDTHS if not batch_invariant or (width, INVARIANT_WARPGROUPS) in STREAMK_TILES]
    count = -(-m // plan.tile_m)
    assert plan.tile_m == next(width for width in allowed if width * count >= m)
    assert batch_invariant or count <= -(-m // allowed[-1]) + (m > 32) or count * -(-n // 128) <= sms
    work = tiles(plan, m, n) * -(-k // UNIT_K)
    assert 1 <= plan.ctas <= work
    assert (work + 1) * plan.ctas <= 1 << 32  # sm90_streamk/kernel.cu multiplies them in 32 bits
    assert plan.shared_bytes(span) <= 232448
    if plan.resident:
        assert not batch_invariant
        assert plan.ctas <= sms
        starts = [cta * work // plan.ctas for cta in range(plan.ctas + 1)]
        assert all(0 < end - start <= plan.resident for start, end in pairwise(starts))
        depth = -(-k // UNIT_K)
        assert all(start // depth == (end - 1) // depth for start, end in pairwise(starts))  # all of one tile
    if plan.cluster > 1:
        assert plan.resident
        assert plan.ctas == tiles(plan, m, n) * plan.cluster
        assert tiles(plan, m, n) <= properties.clusters(plan.cluster)


@given(m=st.integers(1, 1000), other=st.integers(1, 1000), **shapes)
def test_the_order_of_a_sum_does_not_depend_on_the_rows_of_x(
    m: int, other: int, n: int, span: int, units: int, sms: int
) -> None:
    """Neither where a tile is cut along K, nor in which order its parts are added up, nor whether there is a plan."""
    properties, k = replace(H200, sms=sms), span * units
    plans = {rows: planned(rows, n, k, span, properties, True) for rows in (1, m, other)}
    if None in plans.values():
        assert m > INVARIANT_ROWS or other > INVARIANT_ROWS or set(plans.values()) == {None}
        return
    found = set().union(*(cuts(plan, rows, n, k) for rows, plan in plans.items()))
    assert len(found) == 1
    assert len({plan.direct for plan in plans.values()}) == 1


@pytest.mark.parametrize("n", [600_000, 4_000_000])
def test_a_weight_too_large_for_many_rows_is_refused_with_few(n: int) -> None:
    """Another kernel, which adds up in another order, would take the many."""
    plans = {planned(m, n, 16384, 64, H200, True) for m in (1, 9, 64, INVARIANT_ROWS)}
    assert plans == {None}
    assert planned(1, n, 16384, 64, H200, False) is not None


@given(m=st.integers(1, INVARIANT_ROWS), shape=st.sampled_from((*MODELS, (152064, 8192), (256000, 28672))))
def test_all_that_go_at_a_time_have_a_plan(m: int, shape: tuple[int, int]) -> None:
    """Another kernel would add up in another order."""
    assert planned(m, *shape, 64, H200, True) is not None


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("shape", MODELS)
def test_models_have_plans(shape: tuple[int, int], batch_invariant: bool) -> None:
    for span in (32, 64):
        for m in range(1, 257):
            plan = planned(m, *shape, span, H200, batch_invariant)
            assert plan is not None
            if m <= plan.tile_m and not batch_invariant:
                assert 40 <= plan.ctas <= 132


@pytest.mark.parametrize("target", ["sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120"])
def test_one_kernel_takes_all_that_must_not_depend_on_the_batch(target: str) -> None:
    for n, k in (*MODELS, (2048, 2048), (4096, 5376), (1000, 96)):
        problem = Problem(BF16 if target != "sm_75" else F16, n, k, "nf4", 64, torch.uint8, 256)
        rows = (*range(1, 10), *range(13, INVARIANT_ROWS, 17), INVARIANT_ROWS)
        kernels = {choose(m, problem, properties_for(target), True).kernel for m in rows}
        assert len(kernels) == 1


def test_a_group_has_x_laid_out_in_one_way() -> None:
    """Once for all, even where a weight by itself would have other tiles, or keep its x."""
    assert hopper.plan(24, Problem(BF16, 1024, 8192, "nf4", 64, torch.uint8, 256), H200, False).resident
    group = tuple(Problem(BF16, n, 2304, "nf4", 64, torch.uint8, 256) for n in (9000, 8000, 64))
    for m in (33, 64, 65, 200):
        for some in (group[:2], group):
            together = one_after_another(m, some, H200)
            assert len({(plan.tile_m, plan.resident, plan.cluster) for plan in together.plans}) == 1
            assert all(is_valid(plan, m, o.n, o.k, 64, H200) for o, plan in zip(some, together.plans, strict=True))
        assert together.microseconds < sum(plan.microseconds for plan in together.plans)
        assert choose(m, group[2], H200, False).kernel in ((decode,) if m <= 64 else (hopper, gemm))  # a small one
    others = (replace(group[0], k=1024), replace(group[0], block_size=32), replace(group[0], dtype=F32))
    assert all(choose_group(200, (group[0], other), H200) is None for other in others)
    assert all(one_after_another(200, (group[0], other), H200) is None for other in others)
    narrower = tuple(replace(one, n=n) for one, n in zip(group, (9000, 1000), strict=False))
    assert [hopper.plan(64, one, H200, False).tile_m for one in narrower] == [64, 24]
    assert len({plan.tile_m for plan in one_after_another(64, narrower, H200).plans}) == 1


@pytest.mark.parametrize("m", [1, 20, 32, 70, 112])
def test_pairs_and_norms(m: int) -> None:
    """One launch for gate and up, be they normed or not, and for q, k and v; CTAs that keep x have no norm."""
    gate, *others = (Problem(BF16, n, 4096, "nf4", 64, torch.uint8, 256) for n in (14336, 4096, 1024, 1024))
    norm = (1e-5, 0.0)
    for fusion in (Fusion(activation="silu"), Fusion(norm, "silu")):
        plan = hopper.plan_fused(m, [gate, gate], fusion, H200)
        assert plan is not None
        assert plan.is_one_launch
        assert {(one.paired, one.norm, one.activation) for one in plan.plans} == {(True, bool(fusion.norm), "silu")}
        assert is_valid(plan.plans[0], m, gate.n, gate.k, 64, H200)
    for group in (others, others[:1]):
        plan = hopper.plan_fused(m, group, Fusion(norm), H200)
        assert plan is not None
        assert plan.is_one_launch is (len(group) > 1)
        assert all(one.norm and is_valid(one, m, o.n, o.k, 64, H200) for one, o in zip(plan.plans, group, strict=True))
    assert hopper.plan_fused(m, others[:1], Fusion(norm, residual=1.0), H200) is None
    assert hopper.plan_fused(m, [gate, replace(gate, format="fp4")], Fusion(norm, "silu"), H200) is None
    held = StreamKPlan(16, 2, 4, 128, 4)
    assert is_valid(held, 16, 4096, 4096, 64, H200)
    assert not is_valid(replace(held, norm=True), 16, 4096, 4096, 64, H200)


def test_pairs_of_many_rows() -> None:
    gate = Problem(BF16, 14336, 4096, "nf4", 64, torch.uint8, 256)
    pair, silu = [gate, gate], Fusion(activation="silu")
    for m in (100, 512, 20000):
        plan = gemm.plan_fused(m, pair, silu, H200)
        assert plan is not None
        assert {(one.paired, one.activation) for one in plan.plans} == {(True, "silu")}
        assert gemm.group_variant(pair, plan, H200) is not None
    for wrong in (Fusion((1e-5, 0.0), "silu"), Fusion(residual=1.0), Fusion()):
        assert gemm.plan_fused(512, pair, wrong, H200) is None
    assert gemm.plan_fused(512, [gate, replace(gate, format="fp4")], silu, H200) is None


def test_how_many_clusters_run_at_once() -> None:
    """No more than there are multiprocessors for, and as an H200 says itself or fewer."""
    says = {2: 66, 3: 39, 4: 30, 5: 22, 6: 17, 7: 15, 8: 15}
    assert all(0.85 * most < H200.clusters(size) <= most for size, most in says.items())
    assert H200.clusters(1) == 132
    assert H200.clusters(9) == 0
    assert H200.clusters(4, resident=2) >= 2 * H200.clusters(4)
    assert H200.clusters(16, 2, 16) > H200.clusters(16, 1, 16) == 7
    for sms in range(1, 200):
        properties = replace(H200, sms=sms)
        assert all(0 <= size * properties.clusters(size) <= sms for size in says)


def test_plans_that_would_be_wrong_are_not_valid() -> None:
    def valid(
        properties: DeviceProperties = H200, m: int = 1, n: int = 300, k: int = 4096, span: int = 64, **changes
    ) -> bool:
        return is_valid(replace(StreamKPlan(8, 3, 3, 32), **changes), m, n, k, span, properties)

    assert valid()
    assert valid(span=32)
    assert valid(m=9, ctas=64)
    assert all(
        valid(warpgroups=groups, tile_m=width, stages=2)
        is (StreamKPlan(width, groups, 2, 1).shared_bytes(64) <= 232448)
        for groups, width in product(GROUPS, WIDTHS)
    )
    assert all(valid(warpgroups=groups, tile_m=width, stages=stages) for (width, groups), (stages, _) in TILES)
    assert not valid(ctas=33)  # two tiles of sixteen units
    assert not valid(n=192, ctas=17)
    assert valid(resident=1)
    assert valid(ctas=6, resident=6)  # a third of sixteen units, and that is all of it
    assert not valid(ctas=6, resident=5)
    assert not valid(ctas=5, resident=16)  # a CTA has parts of two tiles
    assert valid(ctas=6, resident=6, cluster=3)
    assert not valid(ctas=6, cluster=3)  # x comes with W, behind which there is no room for sums
    assert not valid(ctas=8, resident=6, cluster=3)
    assert not valid(ctas=6, resident=6, cluster=2)
    assert not valid(ctas=18, resident=2, cluster=9)  # more than a cluster has
    wide = {"tile_m": 64, "m": 64, "n": 256, "warpgroups": 4, "resident": 4, "stages": 2}
    assert valid(ctas=4, cluster=4, **wide, properties=replace(H200, shared_memory=1 << 20))
    assert not valid(
        ctas=5, cluster=5, **wide, properties=replace(H200, shared_memory=1 << 20)
    )  # no room for ten groups
    assert not valid(ctas=0)
    assert not valid(warpgroups=1)
    assert not valid(warpgroups=5)
    for width in (1, 4, 40, 256):
        assert not valid(tile_m=width)
    assert not valid(stages=0)
    assert not valid(stages=1)
    assert not valid(
        stages=9, warpgroups=2, properties=replace(H200, shared_memory=1 << 20)
    )  # no room for the barriers
    most = max(stages for stages in range(2, 9) if valid(stages=stages))
    assert valid(stages=most)
    assert not valid(stages=most + 1)
    assert not valid(
        stages=most, properties=replace(H200, shared_memory=StreamKPlan(8, 3, most, 1).shared_bytes(64) - 1)
    )
    for capability in (80, 89, 100, 103, 120):
        assert not valid(replace(H200, capability=capability))
    assert not valid(DeviceProperties("hip", 90, 304, 232448))
    assert not valid(DeviceProperties("host"))
    assert not valid(m=1 << 16, n=1 << 16, k=1 << 13, ctas=1 << 14)  # more than 32 bits count
    assert valid(m=1 << 16, n=1 << 16, k=1 << 13, ctas=1)


# Weights of every kind that kernel.cu is compiled for: format, block size, scales, K, and how scales of a row are
# loaded.
KINDS = (
    ("nf4", 64, torch.uint8, 1024, "vector"),
    ("nf4", 64, torch.uint8, 960, "across"),
    ("nf4", 64, torch.uint8, 768, "unit"),
    ("nf4", 32, torch.uint8, 512, "vector"),
    ("nf4", 32, torch.uint8, 96, "across"),
    ("nf4", 128, torch.uint8, 4096, "one"),
    ("nf4", 4096, torch.uint8, 4096, "one"),
    ("nf4", 32, torch.float32, 1024, "one"),
    ("nf4", 64, torch.float32, 256, "vector"),
    ("int4", 256, torch.float32, 1024, "vector"),
    ("nf4", 4096, torch.float32, 4096, "one"),
    ("int4", 32, torch.float16, 256, "vector"),
    ("int4", 128, torch.float16, 512, "unit"),
    ("int4", 64, torch.bfloat16, 512, "vector"),
    ("int4", 32, torch.bfloat16, 96, "across"),
    ("int4", 128, torch.bfloat16, 1024, "vector"),
)


def problem(dtype: torch.dtype, format: str, block_size: int, scale: torch.dtype, k: int, loads: str) -> Problem:
    found = Problem(dtype, 4096, k, format, block_size, scale, 256 if scale == torch.uint8 else 0)
    assert scale_loads(found) == loads
    return found


@pytest.mark.slow
@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.compile_all)])
def test_what_the_planner_picks_compiles_into_registers(every: bool, tmp_path: Path) -> None:
    """With three kinds of weights; without `every` one plan of each class with one."""
    picked = {
        replace(plan, ctas=1)
        for m in WIDTHS
        for shape in (*MODELS, (600, 4096))
        for batch_invariant in (False, True)
        if (plan := planned(m, *shape, 64, H200, batch_invariant)) is not None
    }
    assert {plan.tile_m for plan in picked} == set(WIDTHS)
    assert any(plan.cluster > 1 for plan in picked)
    kinds = cycle(problem(dtype, *kind) for kind, dtype in zip(cycle(KINDS), (BF16, F16) * len(KINDS), strict=False))
    if not every:
        picked = set({(plan.tile_m, plan.cluster > 1, plan.resident > 0): plan for plan in picked}.values())
    picked.add(StreamKPlan(128, 2, 2, 1))  # of which the planner does not know yet what it takes
    for plan in sorted(picked, key=lambda plan: (plan.tile_m, plan.warpgroups, plan.stages)):
        for kind in islice(kinds, 3 if every else 1):
            multiply, lay_out = _compiled(kind, plan, tmp_path)
            assert multiply["LOCAL"] == lay_out["STACK"] == lay_out["LOCAL"] == 0, (kind, plan)
            # One word of the widest tiles is stored and loaded once a unit.
            assert multiply["STACK"] <= (8 if plan.tile_m >= 80 and plan.warpgroups == 3 else 0), (kind, plan)


@pytest.mark.slow
@pytest.mark.parametrize("groups", GROUPS)
def test_what_a_tuner_may_pick_compiles(groups: int, tmp_path: Path) -> None:
    kinds = cycle(problem(BF16 if groups == 3 else F16, *kind) for kind in KINDS[groups::4])
    for width, kind in zip((8, 16, 32, 64), kinds, strict=False):
        plans = (StreamKPlan(width, groups, stages, 1) for stages in range(2, 9))
        valid = [plan for plan in plans if is_valid(plan, width, 4096, 4096, span_of(kind), H200)]
        multiply, _ = _compiled(kind, valid[-1], tmp_path)
        assert multiply["STACK"] <= 256  # a few spilled words, none of them an array


@pytest.mark.slow
def test_pairs_and_norms_compile_into_registers(tmp_path: Path) -> None:
    kinds = cycle(problem(dtype, *kind) for dtype, kind in zip((BF16, F16, BF16, F16), KINDS, strict=False))
    plans = (
        StreamKPlan(32, 2, 3, 132, paired=True, activation="silu", norm=True),
        StreamKPlan(16, 3, 2, 132, 2, paired=True, activation="gelu_tanh"),
        StreamKPlan(64, 2, 3, 132, norm=True),
        StreamKPlan(64, 2, 3, 132, norm=True, beside=True),
        StreamKPlan(32, 3, 3, 132, paired=True, activation="silu", beside=True),
        StreamKPlan(32, 4, 2, 132, beside=True),
        StreamKPlan(24, 3, 3, 132, shares=6, residual=True),
    )
    for plan, kind in zip(plans, kinds, strict=False):
        multiply, lay_out = _compiled(kind, plan, tmp_path)
        assert multiply["STACK"] == lay_out["STACK"] == 0


def _compiled(kind: Problem, plan: StreamKPlan, directory: Path) -> tuple[dict[str, int], dict[str, int]]:
    """What cuobjdump says of `multiply` and `lay_out`: registers ("REG"), "STACK", "SHARED", "LOCAL"."""
    import triton

    settings = constants(kind, plan) | {"parts": 2 if plan.paired else 1}
    path = directory / "hopper.cubin"
    path.write_bytes(nvrtc.compile_cubin(source(), "90a", settings))
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    text = subprocess.run([tool, "-res-usage", path], capture_output=True, text=True, check=True).stdout
    kernels = re.findall(r"Function (\w+):\s+(REG.*)", text)
    found = {kernel: {name: int(value) for name, value in re.findall(r"(\w+):(\d+)", used)} for kernel, used in kernels}
    assert found.keys() == {"multiply", "lay_out"}
    warpgroups = plan.warpgroups + 1
    assert found["multiply"]["REG"] * 128 * warpgroups <= 65536
    # A warpgroup waits for ever for registers that the CTA does not have.
    asked = int(settings["producer_registers"]) + plan.warpgroups * int(settings["consumer_registers"])
    assert asked <= found["multiply"]["REG"] * warpgroups
    # Dynamic shared memory begins where the system's ends.
    assert found["multiply"]["SHARED"] <= 1024
    return found["multiply"], found["lay_out"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tile", "held", "cluster"),
    [((8, 4, 3), 0, 1), ((16, 4, 3), 2, 1), ((32, 3, 3), 2, 3), ((64, 2, 3), 0, 1), ((64, 2, 3), 2, 3)],
)
def test_addresses_of_the_main_loop_are_uniform(
    tile: tuple[int, int, int], held: int, cluster: int, tmp_path: Path
) -> None:
    """Where the compiler takes them for different in every lane, it moves each back by an R2UR, and all of it is slower
    (docs/notebook.md): for that, a loop that lanes leave one by one anywhere before is enough."""
    import triton

    path = tmp_path / "hopper.cubin"
    plan = StreamKPlan(*tile, 132, held, cluster)
    path.write_bytes(nvrtc.compile_cubin(source(), "90a", constants(problem(BF16, *KINDS[0]), plan)))
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"
    text = subprocess.run([tool, path], capture_output=True, text=True, check=True).stdout
    operations = re.findall(r"^\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\d+ )?(\w+)", text[text.index(".text.multiply") :], re.M)
    products = [i for i, operation in enumerate(operations) if operation == "HGMMA"]
    assert len(products) == 16
    loop = operations[products[0] : products[-1]]
    assert "R2UR" not in loop
    assert len(loop) < 300  # with 64 look-ups, two instructions each


def test_source_refuses_sizes_that_are_not_its_own() -> None:
    plan = StreamKPlan(8, 3, 3, 1)
    wrong = constants(problem(BF16, *KINDS[0]), plan) | {"shared_bytes": plan.shared_bytes(64) + 16}
    with pytest.raises(Exception, match="reckons with other sizes"):
        nvrtc.compile_cubin(source(), "90a", wrong)


@pytest.mark.parametrize(
    ("format", "k", "options", "loads"),
    [
        ("nf4", 1024, {"block_size": 64}, "vector"),
        ("nf4", 14336, {"block_size": 64}, "vector"),
        ("nf4", 512, {"block_size": 64}, "unit"),  # eight bytes of scales a row
        ("nf4", 5376, {"block_size": 64}, "unit"),
        ("nf4", 960, {"block_size": 64}, "across"),
        ("nf4", 512, {"block_size": 32}, "vector"),
        ("nf4", 96, {"block_size": 32}, "across"),
        ("fp4", 4096, {"block_size": 128}, "one"),  # two bytes a unit
        ("fp4", 4096, {"block_size": 4096}, "one"),
        ("nf4", 256, {"block_size": 64, "nested": False}, "vector"),
        ("nf4", 320, {"block_size": 64, "nested": False}, "across"),
        ("nf4", 1024, {"block_size": 32, "nested": False}, "one"),  # 32 bytes a unit
        ("fp4", 512, {"block_size": 128, "nested": False}, "vector"),
        ("fp4", 1024, {"block_size": 256, "nested": False}, "vector"),
        ("fp4", 512, {"block_size": 256, "nested": False}, "unit"),
        ("fp4", 4096, {"block_size": 512, "nested": False}, "one"),
        ("int4", 256, {"group_size": 32}, "vector"),
        ("int4", 512, {"group_size": 64}, "vector"),
        ("int4", 1024, {"group_size": 128}, "vector"),
        ("int4", 512, {"group_size": 128}, "unit"),
        ("int4", 320, {"group_size": 64}, "across"),
    ],
)
def test_kinds(format: str, k: int, options: dict[str, object], loads: str) -> None:
    q, x = hb.quantize(torch.randn((16, k)).half(), format, **options), torch.zeros((2, k), dtype=BF16)
    for dtype in (BF16, F16):
        found = problem_of(x.to(dtype), q, None)
        assert scale_loads(found) == loads
        one_is_a_unit = UNIT_K // q.block_size == 1 and q.scale.itemsize == 4 and k % UNIT_K == 0
        unaligned = problem_of(x, replace(q, scale=moved(q.scale)), None)
        assert scale_loads(unaligned) == ("unit" if one_is_a_unit else "one")
        if loads == "across":
            assert scale_loads(replace(found, n=found.n + 1)) == "one"  # nothing is read beyond the last scale
        config = constants(found, StreamKPlan(8, 3, 3, 1))
        assert config["x"] == TYPES[dtype]
        assert config["scale"] == TYPES[q.scale.dtype]
        assert 1 << config["log_block"] == q.block_size
        assert (config["span"], config["loads"], config["low_first"]) == (
            min(q.block_size, 64),
            f"Loads::{loads}",
            format == "int4",
        )


def moved(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous copy that begins one element behind an aligned address."""
    return torch.empty(tensor.numel() + 1, dtype=tensor.dtype)[1:].view(tensor.shape).copy_(tensor)


@pytest.fixture
def _as_on_an_h200(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "properties_of", lambda index: H200)


@pytest.mark.usefixtures("_as_on_an_h200")
def test_what_the_kernel_is_for() -> None:
    x, weight = torch.randn(100, 1024).bfloat16(), torch.randn(65, 1024).bfloat16()
    q = hb.quantize(weight)
    for rows, width in ((1, 8), (8, 8), (9, 16), (17, 24), (32, 32), (33, 48), (64, 64), (65, 80), (97, 112)):
        assert planned(rows, 28672, 8192, 64, H200, False).tile_m == width
        assert plan_for(hopper, x[:rows], q) == planned(rows, 65, 1024, 64, H200, False)
        assert plan_for(hopper, x[:rows], q, None, True) == planned(rows, 65, 1024, 64, H200, True)
    small = hb.quantize(weight[:, :96], block_size=32)
    assert plan_for(hopper, x[:, :96].contiguous(), small) is not None
    for no in (
        (x[:0], q),
        (x.float(), q),
        (x, replace(q, packed=moved(q.packed))),
        (x, replace(q, nested=q.nested._replace(absmax=q.nested.absmax[:3], block_size=512))),
        (x[:, :1000].contiguous(), hb.quantize(weight[:, :1000])),
        (x[:, :96].contiguous(), hb.quantize(weight[:, :96])),
        (x[:, :1008].contiguous(), hb.quantize(weight[:, :1008], block_size=32)),
        (x[:, :0].contiguous(), hb.quantize(weight[:, :0], nested=False)),
    ):
        assert plan_for(hopper, *no) is None
        assert plan_for(hopper, *no, None, True) is None


@given(st.lists(st.integers(1, 50), min_size=1, max_size=20))
def test_a_launch_finds_its_workspace_full_of_sentinels(counts: list[int]) -> None:
    space = workspace.Workspace(4 * max(counts), torch.device("cpu"))

    def numbers(address: int, count: int) -> torch.Tensor:
        there = (ctypes.c_int32 * max(count, 1)).from_address(address)
        return torch.frombuffer(there, dtype=torch.int32)[:count]

    for count in counts:
        partial, left, fours = space.take(4 * count)
        assert (numbers(partial, 4 * count) == -1).all()
        numbers(partial, 4 * count).fill_(7)  # what the launch does
        numbers(left, 4 * fours).fill_(-1)
    assert not torch.equal(numbers(partial, 4 * count), numbers(left, 4 * count))
