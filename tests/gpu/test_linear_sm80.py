"""The product with rings of asynchronous copies, every shape and format of it: it runs on any GPU from sm_80 on."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

import halfbyte as hb
from halfbyte.kernels.common.device import properties_of
from halfbyte.kernels.linear.kernel import plan_for, run
from halfbyte.kernels.linear.problem import INVARIANT_ROWS, problem_of
from halfbyte.kernels.linear.sm80 import launch as ring
from halfbyte.kernels.linear.sm80.invariant import Order, invariant_plan, shapes_of
from halfbyte.kernels.linear.sm80.plan import Sm80Plan, every_shape, folds, is_valid, sm80_plan, span_of
from halfbyte.kernels.linear.tune import h200

from .conftest import (
    BF16,
    DEVICE,
    F16,
    F32,
    NOISE,
    POISON,
    captured,
    check_product,
    compile_ahead,
    poisoned,
    sixteen_bits,
    weight,
)

FORMATS = (
    *(("nf4", {"block_size": size, "nested": True}) for size in (32, 64, 128, 4096)),
    *(("nf4", {"block_size": size, "nested": False}) for size in (32, 64, 1024)),
    *(("fp4", {"block_size": size, "nested": size != 64}) for size in (32, 64, 256)),
    *(("int4", {"group_size": size}) for size in (32, 64, 128)),
    ("mxfp4", {}),
)
formats = pytest.mark.parametrize(("format", "options"), FORMATS, ids=lambda value: str(value))


def fused(
    x: torch.Tensor,
    q: hb.QuantizedWeight,
    bias: torch.Tensor | None = None,
    plan: Sm80Plan | None = None,
    invariant: bool = False,
) -> torch.Tensor:
    """The kernel's result, with poison around it; fails where the kernel says it is not for this."""
    plan = plan or plan_for(ring, x, q, bias, invariant)
    assert plan is not None
    assert is_valid(plan, len(x), problem_of(x, q, bias), properties_of(0))
    with poisoned((len(x), q.shape[0]), x.dtype) as out:
        run(ring, x, q, bias, out, plan)
    return out


def check(x: torch.Tensor, q: hb.QuantizedWeight, plan: Sm80Plan | None = None) -> None:
    problem = problem_of(x, q, None)
    # Operands may be those of the dense weight; then only the order of sums differs, and with it the last rounding.
    noise = NOISE if problem.has_exponents or folds(problem, max(h200.SM80_COLUMNS)) else 1.0
    check_product(x, q, lambda plan, bias: fused(x, q, bias, plan), [plan], noise)


def random(m: int, k: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn((m, k), device=DEVICE).to(dtype)


@pytest.mark.parametrize("shape", [(1, 64), (77, 64), (1029, 320), (4096, 5376), (1023, 14336)])
@sixteen_bits
@formats
def test_error(format: str, options: dict[str, object], dtype: torch.dtype, shape: tuple[int, int]) -> None:
    n, k = shape
    q = weight(n, k, format, dtype, **options)
    for m in (1, 8, 9, 32, 33, 64, 65, 300):
        check(random(m, k, dtype), q)


@sixteen_bits
def test_every_number_of_rows(dtype: torch.dtype) -> None:
    q = weight(515, 1024, dtype=dtype)
    for m in range(1, 67):
        check(random(m, 1024, dtype), q)


def plans(m: int, q: hb.QuantizedWeight, dtype: torch.dtype) -> Iterator[Sm80Plan]:
    """Every shape that the planner chooses from, with every span, few and many stages, one CTA, as many as there are
    tiles, as many as there can be, and numbers between."""
    x, properties = torch.empty((m, q.shape[1]), dtype=dtype, device=DEVICE), properties_of(0)
    problem = problem_of(x, q, None)
    for columns in h200.SM80_COLUMNS:
        for row_groups, n_warps, k_warps, tile_k, resident in every_shape(columns):
            own = tile_k // k_warps
            for span in {*(span_of(problem, row_groups, columns, most) for most in (own, 64)), 32}:
                shape = Sm80Plan(row_groups, columns, n_warps, k_warps, tile_k, span, 3, resident, 1)
                row_tiles, column_tiles, depth = shape.sizes(m, problem.n, problem.k)
                tiles = row_tiles * column_tiles
                for ctas in {1, tiles, tiles + 1, 3 * tiles // 2, tiles * depth, properties.sms * resident}:
                    for stages in (3, 6):
                        plan = replace(shape, ctas=ctas, stages=stages)
                        if is_valid(plan, m, problem, properties):
                            yield plan


@pytest.mark.parametrize(
    "case", [("nf4", {}, 1344), ("int4", {"group_size": 128}, 1408), ("nf4", {"block_size": 32}, 1312)], ids=str
)
@pytest.mark.parametrize("m", [7, 71])
@sixteen_bits
def test_every_way_to_share_the_work(case: tuple[str, dict[str, Any], int], m: int, dtype: torch.dtype) -> None:
    format, options, k = case
    q = weight(777, k, format, dtype, **options)
    x, found = random(m, k, dtype), list(plans(m, q, dtype))
    assert len(found) >= 60
    problem = problem_of(x, q, None)
    compile_ahead(ring, problem, found)
    noise = NOISE if folds(problem, max(h200.SM80_COLUMNS)) else 1.0
    check_product(x, q, lambda plan, bias: fused(x, q, bias, plan), found, noise)


@pytest.mark.parametrize("sms", [1, 36, 40, 58, 108])
def test_on_fewer_multiprocessors(sms: int) -> None:
    q = weight(4096, 4096)
    for m in (1, 16, 64, 200):
        x = random(m, 4096, BF16)
        plan = sm80_plan(m, problem_of(x, q, None), replace(properties_of(0), sms=sms))
        assert plan is not None
        assert plan.ctas <= sms * plan.resident_ctas
        check(x, q, plan)


@pytest.mark.parametrize("shape", [(1, 64), (77, 64), (1029, 320), (4096, 5376), (1023, 14336), (5000, 1024)])
@sixteen_bits
@formats
def test_a_row_among_others(
    format: str, options: dict[str, object], dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    """With batch_invariant: alone, first of some, elsewhere among them; tiles of every width, one and several."""
    n, k = shape
    q, x = weight(n, k, format, dtype, **options), random(INVARIANT_ROWS, k, dtype)
    for m in (1, 40, INVARIANT_ROWS):
        check(x[:m].clone(), q, plan_for(ring, x[:m], q, None, True))
    whole = fused(x, q, invariant=True)
    for m in (1, 7, 8, 9, 17, 33, 40, 49, 64, 65, 129, 255):
        assert torch.equal(fused(x[:m].clone(), q, invariant=True), whole[:m]), m
    for row in (3, 100, 255):
        assert torch.equal(fused(x[row : row + 1].clone(), q, invariant=True)[0], whole[row])
    order = torch.randperm(INVARIANT_ROWS, device=DEVICE)
    assert torch.equal(fused(x[order], q, invariant=True), whole[order])


ORDERS = (
    ("nf4", {}, 1344, (Order(64, 1, 0, 1), Order(64, 1, 0, 5), Order(64, 2, 64, 3), Order(64, 2, 128, 2))),
    ("int4", {"group_size": 128}, 1408, (Order(128, 1, 0, 2), Order(128, 2, 128, 1), Order(64, 2, 64, 1))),
    ("nf4", {"block_size": 32}, 1312, (Order(32, 1, 0, 8), Order(32, 2, 64, 1))),
    ("mxfp4", {}, 1312, (Order(32, 1, 0, 3),)),
)


@pytest.mark.parametrize("case", ORDERS, ids=str)
@sixteen_bits
def test_every_plan_of_an_order(case: tuple[str, dict[str, Any], int, tuple[Order, ...]], dtype: torch.dtype) -> None:
    """Of all widths, numbers of rows of W and depths of the ring: the same bits."""
    format, options, k, orders = case
    q, x = weight(777, k, format, dtype, **options), random(71, k, dtype)
    for order in orders:
        whole, widths = None, set()
        for m in (71, 9):
            problem = problem_of(x[:m], q, None)
            shapes = (replace(shape, stages=stages) for shape in shapes_of(order, m, problem) for stages in (3, 4))
            found = [plan for plan in shapes if is_valid(plan, m, problem, properties_of(0))]
            compile_ahead(ring, problem, found)
            for plan in found:
                y = fused(x[:m].clone(), q, plan=plan)
                whole = y if whole is None else whole
                widths.add(plan.columns)
                assert torch.equal(y, whole[:m]), plan
        assert len(widths) >= 2


@pytest.mark.parametrize("sms", [1, 36, 58, 108])
def test_more_parts_of_tiles_than_run_at_once(sms: int) -> None:
    """What is chosen with batch_invariant for GPUs with fewer multiprocessors."""
    for q in (weight(4096, 4096), weight(4096, 4096, "int4", F16, group_size=128)):
        x = random(200, 4096, q.scale.dtype if q.format == "int4" else BF16)
        properties = replace(properties_of(0), sms=sms)
        plans = {m: invariant_plan(m, problem_of(x[:m], q, None), properties) for m in (1, 16, 64, 200)}
        whole = fused(x, q, plan=plans[200])
        for m, plan in plans.items():
            assert plan is not None
            assert torch.equal(fused(x[:m].clone(), q, plan=plan), whole[:m])


@sixteen_bits
def test_a_row_among_others_through_the_front_door(dtype: torch.dtype) -> None:
    """MXFP4, which on Hopper no other kernel takes for any number of rows; more rows than go at a time."""
    q, x = weight(520, 1056, "mxfp4", dtype), random(INVARIANT_ROWS + 70, 1056, dtype)
    whole = hb.linear(x, q, batch_invariant=True)
    for m in (1, 9, 40, INVARIANT_ROWS, INVARIANT_ROWS + 1):
        assert torch.equal(hb.linear(x[:m], q, batch_invariant=True), whole[:m])
        assert torch.equal(hb.linear(x[-m:], q, batch_invariant=True), whole[-m:])


@pytest.mark.parametrize("group_size", [32, 64, 128])
@sixteen_bits
def test_identity_gives_the_integers(dtype: torch.dtype, group_size: int) -> None:
    """Bit for bit what dequantize gives: no nibble in a wrong place, no scale in another's."""
    n, k = 129, 512
    q = weight(n, k, "int4", dtype, group_size=group_size)
    q = replace(q, packed=torch.randint(-(2**31), 2**31 - 1, q.packed.shape, dtype=torch.int32, device=DEVICE))
    eye, dense = torch.eye(k, dtype=dtype, device=DEVICE), hb.dequantize(q)
    for rows in (1, 16, 32, 64):
        for first in range(0, k, 64):
            part = slice(first, first + rows)
            assert torch.equal(fused(eye[part], q), dense.t()[part])


@pytest.mark.parametrize("scale_dtype", [F16, BF16, F32])
@sixteen_bits
def test_scales_of_integers(dtype: torch.dtype, scale_dtype: torch.dtype) -> None:
    check(random(20, 1024, dtype), weight(1000, 1024, "int4", scale_dtype, group_size=64))


def test_what_is_not_a_number_stays_in_its_row() -> None:
    q, x = weight(100, 1024), random(20, 1024, BF16)
    right = fused(x, q)
    x[3, 5], x[19, 1000] = float("nan"), float("inf")
    y = fused(x, q)
    others = [row for row in range(20) if row not in (3, 19)]
    assert torch.equal(y[others], right[others])
    assert y[3].isnan().all()
    assert not y[19].isfinite().any()


def test_cuda_graph_and_streams() -> None:
    q, x = weight(256, 14336), random(4, 14336, BF16)
    plan = plan_for(ring, x, q, None, False)
    assert plan is not None
    assert plan.partial_sums(4, problem_of(x, q, None)) > 0
    right, y = fused(x, q, plan=plan), torch.empty((4, 256), dtype=BF16, device=DEVICE)
    graph, _ = captured(lambda: run(ring, x, q, None, y, plan))
    for _ in range(3):
        y.fill_(POISON)
        graph.replay()
        assert torch.equal(y, right)
    with torch.cuda.stream(torch.cuda.Stream()):
        assert torch.equal(fused(x, q, plan=plan), right)
