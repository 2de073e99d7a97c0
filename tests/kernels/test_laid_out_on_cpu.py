"""sm90_streamk's and sm90_gemm's own source on a CPU: what their launches leave is right, and no wait or barrier is
missing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import hopper_on_cpu
import pytest
import torch
from cuda_on_cpu import Shape, needs_compiler
from gpus import H200
from hopper_on_cpu import BF16, DEVICE, F16, F32, F64, SMALL, Driver, address, check, hopper, parts_of, weight
from routes import routes_of, table_of
from torch import Tensor
from torch.nn import functional

import halfbyte as hb
from halfbyte.kernels.common.norm import Norm
from halfbyte.kernels.experts import reference as stacks
from halfbyte.kernels.linear import cuda, grouped
from halfbyte.kernels.linear.dispatch import MlpChoice, choose_mlp
from halfbyte.kernels.linear.fusion import Beside, Fusion
from halfbyte.kernels.linear.grouped import Grouping
from halfbyte.kernels.linear.laid_out import GroupPlan, span_of
from halfbyte.kernels.linear.problem import Problem, addresses, problem_of
from halfbyte.kernels.linear.sm90_decode.launch import rows_of
from halfbyte.kernels.linear.sm90_gemm import launch as gemm
from halfbyte.kernels.linear.sm90_gemm import plan as wide
from halfbyte.kernels.linear.sm90_gemm.shape import GemmPlan, decoding
from halfbyte.kernels.linear.sm90_streamk import launch as streamk
from halfbyte.kernels.linear.sm90_streamk import shape as narrow
from halfbyte.kernels.linear.sm90_streamk.plan import handed_over
from halfbyte.kernels.linear.sm90_streamk.shape import StreamKPlan

__all__ = ["hopper"]
pytestmark = [needs_compiler, pytest.mark.slow]


class Case(NamedTuple):
    m: int
    n: int
    k: int
    plan: StreamKPlan | GemmPlan
    dtype: torch.dtype = BF16
    format: str = "nf4"
    options: dict[str, Any] = {}  # noqa: RUF012 nobody writes to it


def decoded(plan: Any, problem: Problem) -> Any:
    """The plan for weights of this kind."""
    return decoding(plan, problem) if isinstance(plan, GemmPlan) else plan


GROUPS, SHORT_BLOCKS = {"group_size": 128}, {"nested": False, "block_size": 32}
CASES = {
    "parts of tiles": Case(13, 300, 1024, StreamKPlan(16, 2, 3, 5)),
    "scales one by one": Case(40, 130, 576, StreamKPlan(48, 3, 2, 2), F16),
    "scales of a unit": Case(9, 200, 1280, StreamKPlan(24, 2, 4, 5), F16, "fp4", {"nested": False, "block_size": 128}),
    "scales across": Case(100, 192, 832, StreamKPlan(112, 2, 2, 2), BF16, "nf4", {"nested": False}),
    "nested scales across": Case(100, 192, 832, StreamKPlan(112, 2, 2, 2), F16),
    "nested scales across, many rows": Case(100, 192, 1088, GemmPlan(128, 2, 2, 4, 3, 1, 128)),
    "widest": Case(120, 200, 1024, StreamKPlan(128, 2, 2, 3)),
    "widest, flat scales of 32": Case(
        125, 130, 608, StreamKPlan(128, 2, 2, 2), F16, "fp4", {"nested": False, "block_size": 32}
    ),
    "widest, two tiles": Case(200, 128, 1152, StreamKPlan(128, 2, 2, 3), BF16, "int4", GROUPS),
    "widest, equal parts": Case(127, 256, 1024, StreamKPlan(128, 2, 2, 6, shares=3), F16),
    "resident": Case(7, 256, 2048, StreamKPlan(8, 4, 2, 4, resident=2)),
    "a cluster": Case(30, 256, 2048, StreamKPlan(32, 4, 2, 4, resident=2, cluster=4), F16, "int4", GROUPS),
    "equal parts": Case(13, 300, 1024, StreamKPlan(16, 2, 3, 6, shares=2)),
    "equal parts, more than groups of rows": Case(7, 256, 2048, StreamKPlan(8, 4, 2, 4, resident=2, shares=4), F16),
    "equal parts of wide tiles": Case(90, 150, 1280, StreamKPlan(64, 2, 2, 20, shares=5), BF16, "int4", GROUPS),
    "equal parts, many": Case(100, 128, 2304, StreamKPlan(112, 2, 2, 9, shares=9)),
    "two tiles of x": Case(90, 128, 1024, StreamKPlan(80, 2, 2, 3), BF16, "int4", GROUPS),
    "many rows": Case(150, 200, 1024, GemmPlan(160, 2, 3, 4, 3, 1, 320), F16),
    "many rows in chunks": Case(200, 128, 512, GemmPlan(96, 2, 2, 4, 2, 1, 192), BF16, "int4", GROUPS),
    "look-ups in registers": Case(250, 129, 832, GemmPlan(256, 2, 2, 3, 2, 1, 256), BF16, "fp4", {"nested": False}),
    "many rows of narrow blocks": Case(
        100, 150, 352, GemmPlan(96, 2, 2, 4, 2, 1, 96), BF16, "nf4", {"nested": False, "block_size": 32}
    ),
    "many rows, computed": Case(130, 130, 384, GemmPlan(160, 2, 3, 5, 2, 1, 160), F16, "int4", {"group_size": 32}),
    "many rows, equal parts": Case(100, 256, 1024, GemmPlan(128, 2, 3, 4, 6, 1, 128, shares=3)),
    "in order, equal parts of wide tiles": Case(
        200, 128, 1024, GemmPlan(256, 2, 2, 3, 4, 1, 256, shares=4, in_order=True), F16, "int4", GROUPS
    ),
    "in order": Case(150, 200, 1024, GemmPlan(160, 2, 3, 4, 3, 1, 320, in_order=True), F16),
    "in order, in chunks": Case(200, 130, 832, GemmPlan(96, 2, 2, 4, 2, 1, 96, in_order=True), BF16, "nf4"),
    "in order, narrow blocks": Case(
        100, 150, 352, GemmPlan(96, 2, 2, 4, 2, 1, 96, in_order=True), BF16, "fp4", {"nested": False, "block_size": 32}
    ),
    "in order, computed": Case(
        130, 130, 352, GemmPlan(160, 2, 3, 5, 2, 1, 160, in_order=True), F16, "int4", {"group_size": 32}
    ),
    "in order, exponents": Case(120, 256, 1024, GemmPlan(128, 2, 3, 5, 2, 2, 128, in_order=True), BF16, "mxfp4"),
    "wide tiles": Case(350, 129, 768, GemmPlan(320, 2, 2, 2, 2, 1, 640)),
    "wide tiles, in order": Case(350, 129, 768, GemmPlan(320, 2, 2, 2, 2, 1, 640, in_order=True)),
    "wide tiles, computed": Case(330, 200, 1024, GemmPlan(320, 2, 3, 4, 3, 1, 640), F16, "int4", GROUPS),
    "wide tiles, equal parts": Case(300, 256, 1024, GemmPlan(320, 2, 3, 2, 6, 1, 320, shares=3), BF16, "fp4"),
    "twins": Case(150, 500, 1024, GemmPlan(160, 2, 3, 4, 3, 1, 320, twins=2), F16),
    "twins, the last without rows": Case(
        200, 130, 832, GemmPlan(96, 2, 2, 4, 2, 1, 192, twins=2), BF16, "int4", {"group_size": 64}
    ),
    "twins, a tile without rows": Case(100, 380, 768, GemmPlan(128, 2, 2, 4, 2, 1, 128, twins=2), BF16, "int4", GROUPS),
    "twins, in order": Case(300, 390, 768, GemmPlan(320, 2, 2, 2, 2, 1, 320, in_order=True, twins=2)),
    "twins, in order, computed": Case(
        500, 390, 768, GemmPlan(256, 2, 3, 4, 3, 1, 512, in_order=True, twins=2), F16, "int4", GROUPS
    ),
    "widest tiles": Case(350, 129, 768, GemmPlan(384, 2, 2, 2, 2, 1, 384)),
    "widest tiles, computed": Case(400, 200, 1024, GemmPlan(384, 2, 3, 3, 3, 1, 768), F16, "int4", GROUPS),
    "widest tiles, equal parts": Case(370, 256, 1024, GemmPlan(384, 2, 2, 2, 4, 1, 384, shares=2, in_order=True)),
    "wide tiles, short blocks": Case(
        350, 140, 608, GemmPlan(320, 2, 2, 2, 3, 1, 640), F16, "nf4", {"nested": False, "block_size": 32}
    ),
    "widest tiles, short blocks, in order": Case(
        350, 140, 608, GemmPlan(384, 2, 2, 2, 2, 1, 384, in_order=True), BF16, "int4", {"group_size": 32}
    ),
    "wide tiles, in order, computed": Case(
        330, 200, 1024, GemmPlan(320, 2, 3, 4, 3, 1, 640, in_order=True), BF16, "mxfp4"
    ),
    "many rows, a cluster": Case(120, 128, 1024, GemmPlan(128, 2, 3, 4, 1, 4, 128)),
    "back": Case(40, 192, 320, GemmPlan(64, 2, 3, 4, 2, 1, 64, back=True)),
    "back, mates": Case(190, 192, 832, GemmPlan(64, 2, 3, 4, 2, 1, 256, back=True, mates=2)),
    "back, mates, one without rows": Case(
        70, 144, 608, GemmPlan(96, 2, 2, 4, 3, 1, 192, back=True, mates=2), F16, "fp4", SHORT_BLOCKS
    ),
    "back, mates, in chunks": Case(300, 512, 256, GemmPlan(64, 2, 2, 4, 2, 1, 128, back=True, mates=2), BF16, "fp4"),
    "back, mates, equal parts": Case(
        250, 1024, 256, GemmPlan(128, 2, 2, 4, 6, 1, 256, back=True, mates=2, shares=3), F16
    ),
    "back, mates, widest": Case(500, 320, 192, GemmPlan(256, 2, 3, 4, 2, 1, 512, back=True, mates=2), F16),
    "back, decoders": Case(190, 192, 832, GemmPlan(64, 2, 6, 5, 5, 1, 192, back=True, decoders=2)),
    "back, decoders, few rows": Case(
        3, 144, 608, GemmPlan(32, 2, 2, 4, 3, 1, 32, back=True, decoders=2), F16, "fp4", SHORT_BLOCKS
    ),
    "back, decoders, in chunks": Case(
        300, 512, 256, GemmPlan(64, 2, 2, 7, 2, 1, 128, back=True, decoders=2), BF16, "fp4"
    ),
    "back, decoders, odd": Case(70, 77, 512, GemmPlan(96, 2, 5, 5, 3, 1, 96, back=True, decoders=2)),
    "back, decoders, equal parts": Case(
        250, 1024, 256, GemmPlan(256, 2, 2, 4, 6, 1, 256, back=True, decoders=1, shares=3), F16
    ),
    "back, decoders, computed": Case(
        190, 264, 832, GemmPlan(96, 2, 3, 4, 3, 1, 192, back=True, decoders=2), F16, "int4", {"group_size": 64}
    ),
    "back, decoders, exponents": Case(
        250, 512, 352, GemmPlan(128, 2, 2, 4, 2, 1, 256, back=True, decoders=2), BF16, "mxfp4"
    ),
    "back, twins": Case(
        40, 192, 672, GemmPlan(64, 2, 3, 4, 2, 1, 64, back=True, twins=2), BF16, "int4", {"group_size": 32}
    ),
    "back, odd, twins": Case(70, 77, 512, GemmPlan(96, 2, 3, 4, 2, 1, 96, back=True, twins=2)),
    "back, odd": Case(70, 77, 256, GemmPlan(96, 2, 3, 4, 2, 1, 96, back=True), F16, "int4", GROUPS),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_a_product(hopper: Driver, case: Case) -> None:
    m, n, k, plan, dtype, format, options = case
    torch.manual_seed(0)
    q = weight(n, k=k, dtype=dtype, format=format, **options)
    side, results = (n, k) if plan.back else (k, n)
    x, bias = torch.randn(m, side).to(dtype), None if plan.back else torch.randn(n).to(dtype)
    problem = problem_of(x, q, bias)
    plan = decoded(plan, problem)
    hopper.readable = [*parts_of(q), x]
    dense = hb.dequantize(q, F32)
    dense = dense.t() if plan.back else dense
    if isinstance(plan, StreamKPlan):
        assert narrow.is_valid(plan, m, n, k, span_of(problem), SMALL)
        multiply = streamk.bind(DEVICE, m, problem, addresses(q), plan)
    else:
        assert wide.is_valid(plan, m, results, side, span_of(problem), SMALL)
        multiply = gemm.bind(DEVICE, m, problem, addresses(q), plan)
        dense = dense.to(dtype).float()  # rounded as dequantize rounds
    right, theirs = (
        functional.linear(x.to(kind), dense.to(kind), None if bias is None else bias.to(kind)) for kind in (F64, dtype)
    )
    for _ in range(2):  # the second clears what the first has left
        out = torch.full((m + 1, results), 777.0, dtype=dtype)
        multiply(0, address(x), address(bias), address(out), m)
        assert (out[m] == 777).all()
        check(out[:m], right, theirs)


def test_sums_that_never_come(hopper: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """CTAs that wait for each other, one after the other: the launch ends all the same, and says so."""
    monkeypatch.setattr(hopper_on_cpu, "Shape", lambda *sizes: Shape(*sizes[:6]))
    with pytest.raises(AssertionError, match="multiply: all threads wait for each other"):
        test_a_product(hopper, CASES["equal parts"])


RESIDUAL, SILU, GELU = Fusion(residual=0.5), Fusion(activation="silu"), Fusion(activation="gelu_tanh")
NORM = Fusion(norm=(1e-5, 0.0))
FUSED: dict[str, tuple[Fusion, StreamKPlan | GemmPlan, dict[str, Any]]] = {
    "residual": (RESIDUAL, StreamKPlan(24, 2, 3, 4), {}),
    "residual, equal parts": (RESIDUAL, StreamKPlan(24, 2, 3, 8, shares=4), {}),
    "gate, then up": (SILU, StreamKPlan(24, 2, 3, 4), {}),
    "gate, then up, equal parts": (SILU, StreamKPlan(16, 2, 3, 8, shares=2), {}),
    "a pair": (SILU, StreamKPlan(24, 2, 3, 5, paired=True), {}),
    "a pair, resident": (GELU, StreamKPlan(16, 3, 2, 8, resident=2, paired=True), {"nested": False}),
    "a pair, a cluster": (SILU, StreamKPlan(24, 4, 2, 8, resident=2, cluster=4, paired=True), {"block_size": 128}),
    "a pair, short blocks": (GELU, StreamKPlan(32, 2, 3, 3, paired=True), {"block_size": 32}),
    "a pair, widest": (SILU, StreamKPlan(128, 2, 2, 3, paired=True), {}),
    "a pair, many rows": (SILU, GemmPlan(96, 2, 2, 4, 5, 1, 96, paired=True), {}),
    "a pair, in order": (SILU, GemmPlan(96, 2, 2, 4, 5, 1, 96, paired=True, in_order=True), {}),
    "a pair, many rows, permuted": (GELU, GemmPlan(256, 2, 2, 3, 3, 1, 256, paired=True), {"block_size": 32}),
    "a pair, wide tiles": (GELU, GemmPlan(320, 2, 2, 2, 3, 1, 320, paired=True), {}),
    "a pair, twins": (GELU, GemmPlan(256, 2, 2, 3, 2, 1, 256, paired=True, twins=2), {}),
    "a pair, twins, in order": (SILU, GemmPlan(256, 2, 2, 3, 3, 1, 256, paired=True, in_order=True, twins=2), {}),
    "a pair, many rows, a cluster": (SILU, GemmPlan(96, 2, 2, 4, 3, 2, 96, paired=True), {"block_size": 128}),
    "a norm": (NORM, StreamKPlan(16, 2, 3, 4, norm=True), {}),
    "a norm, a pair, equal parts": (
        replace(SILU, norm=(1e-6, 1.0)),
        StreamKPlan(24, 2, 3, 6, paired=True, norm=True, shares=2),
        {},
    ),
    "a norm, a pair": (replace(SILU, norm=(1e-6, 1.0)), StreamKPlan(24, 2, 3, 5, paired=True, norm=True), {}),
}


@pytest.mark.parametrize("n", [140, 141])
@pytest.mark.parametrize("case", FUSED.values(), ids=FUSED.keys())
def test_what_is_fused(hopper: Driver, case: tuple[Fusion, StreamKPlan | GemmPlan, dict[str, Any]], n: int) -> None:
    torch.manual_seed(0)
    fusion, plan, options = case
    m, k, parts = 20, 1024, 2 if fusion.activation else 1
    x, residual = torch.randn(m, k).bfloat16(), torch.randn(m, n).bfloat16()
    norm = (1 + torch.randn(k) / 8).bfloat16()
    weights = [weight(n, k=k, dtype=BF16, format="nf4", **options) for _ in range(parts)]
    if (nested := weights[-1].nested) is not None:  # weights may have codes of their own
        weights[-1] = replace(weights[-1], nested=nested._replace(code=nested.code * 1.5))
    biases = [torch.randn(n).bfloat16() for _ in range(parts)]
    group = [problem_of(x, q, bias) for q, bias in zip(weights, biases, strict=True)]
    last = replace(decoded(plan, group[0]), activation=fusion.activation)
    if isinstance(last, StreamKPlan):
        last = replace(last, residual=fusion.residual is not None)
        assert narrow.is_valid(last, m, n, k, span_of(group[0]), SMALL)
    else:
        assert wide.is_valid(last, m, n, k, span_of(group[0]), SMALL)
    plans = (last, last) if plan.paired else (*[plan] * (parts - 1), last)
    planned: GroupPlan[Any] = GroupPlan(plans, 0.0, is_one_launch=plan.paired)
    kernel: Any = streamk if isinstance(plan, StreamKPlan) else gemm
    hopper.readable = [x, *(part for q in weights for part in parts_of(q))]
    multiply = kernel.bind_fused(DEVICE, m, group, list(map(addresses, weights)), fusion, planned)

    def expected(kind: torch.dtype) -> Tensor:
        dense = [hb.dequantize(q, F32).to(kind) for q in weights]
        rows = x.to(kind)
        if fusion.norm:
            epsilon, offset = fusion.norm
            rows = functional.rms_norm(rows, (k,), offset + norm.to(kind), epsilon)
        first, *others = (functional.linear(rows, w, b.to(kind)) for w, b in zip(dense, biases, strict=True))
        if not others:
            return first if fusion.residual is None else residual.to(kind) + fusion.residual * first
        gate = functional.silu(first) if fusion.activation == "silu" else functional.gelu(first, approximate="tanh")
        return gate * others[0]

    right, theirs = expected(F64), expected(BF16)
    for _ in range(2):
        out = torch.full((m + 1, n), 777.0, dtype=BF16)
        places = [address(of_each) for pair in zip(biases, [out, None], strict=False) for of_each in pair]
        read = address(norm) if fusion.norm else 0, address(residual) if fusion.residual else 0
        multiply(0, address(x), *read, m, places)
        assert (out[m] == 777).all()
        check(out[:m], right, theirs)


@pytest.mark.parametrize("kind", ["q, k, v", "silu"])
def test_from_the_call_to_the_result(hopper: Driver, kind: str) -> None:
    """What is planned, with x normed as it is laid out."""
    torch.manual_seed(0)
    m, k, sides = 70, 768, (700, 700) if kind == "silu" else (320, 128, 128)
    x, norm = torch.randn(m, k).bfloat16(), Norm((1 + torch.randn(k) / 8).bfloat16(), 1e-5)
    weights = [weight(n, k=k, dtype=BF16, format="nf4") for n in sides]
    hopper.readable = [x, *(part for q in weights for part in parts_of(q))]
    found = cuda.fused(x, weights, [None] * len(sides), Beside(norm, kind if kind == "silu" else ""))
    assert found is not None
    (constants,) = (dict(variant.constants) for variant in hopper.variants)
    assert (constants["norm"], constants["paired"]) == (True, kind == "silu")

    def expected(kind: torch.dtype) -> list[Tensor]:
        rows = functional.rms_norm(x.to(kind), (k,), norm.weight.to(kind), norm.epsilon)
        products = [functional.linear(rows, hb.dequantize(q, F32).to(kind)) for q in weights]
        return [functional.silu(products[0]) * products[1]] if len(products) == 2 else products

    for y, right, theirs in zip(found, expected(F64), expected(BF16), strict=True):
        check(y, right, theirs)


# Rows of x, tiles of gate and up and of down, and what the weights are.
MLPS: list[tuple[int, int, StreamKPlan, str, dict[str, Any]]] = [
    (20, 24, StreamKPlan(16, 2, 3, 5, residual=True), "nf4", {}),
    (30, 32, StreamKPlan(32, 2, 2, 8, shares=2, residual=True), "mxfp4", {}),
    (100, 64, StreamKPlan(112, 2, 2, 3, residual=True), "int4", GROUPS),
]


@pytest.mark.parametrize(("m", "tile_m", "down", "format", "options"), MLPS)
def test_an_mlp(hopper: Driver, m: int, tile_m: int, down: StreamKPlan, format: str, options: dict[str, Any]) -> None:
    """Down takes what gate and up have laid out for it: the bits are those of the two products one after the other."""
    torch.manual_seed(0)
    k, inner = 512, 768
    x, norm, residual = torch.randn(m, k).bfloat16(), 1 + torch.randn(k).bfloat16() / 8, torch.randn(m, k).bfloat16()
    weights = [
        weight(n, k=depth, dtype=BF16, format=format, **options) for n, depth in ((inner, k), (inner, k), (k, inner))
    ]
    biases = [torch.randn(n).bfloat16() for n in (inner, inner, k)]
    between = torch.full((m + 1, inner), 777.0).bfloat16()
    hopper.readable = [x, *(part for q in weights for part in parts_of(q))]
    rows = (x, x, between)
    group = [problem_of(one, q, bias) for one, q, bias in zip(rows, weights, biases, strict=True)]
    fusion, after = Fusion((1e-5, 0.0), "silu", static=True), Fusion(residual=0.5, static=True)
    pair = StreamKPlan(tile_m, 2, 2, 5, paired=True, activation="silu", norm=True)
    gates, places = GroupPlan((pair, pair), 0.0, is_one_launch=True), list(map(addresses, weights))
    plan = handed_over(gates, down, group[2])
    assert plan is not None
    first = streamk.bind_fused(DEVICE, m, group[:2], places[:2], fusion, gates)
    second = streamk.bind_fused(DEVICE, m, group[2:], places[2:], after, GroupPlan((down,), 0.0))
    both = streamk.bind_mlp(DEVICE, m, group, places, fusion, plan, down, after)
    at = list(map(address, biases))
    for _ in range(2):
        right, found = (torch.full((m + 1, k), 777.0).bfloat16() for _ in range(2))
        first(0, address(x), address(norm), 0, m, (at[0], address(between), at[1], 0))
        second(0, address(between), 0, address(residual), m, (at[2], address(right)))
        both(0, address(x), address(norm), address(residual), m, at, address(found))
        assert torch.equal(found, right)
        assert (found[m] == 777).all()
    exact = hb.dequantize(weights[2], F32).double()
    wanted = residual.double() + 0.5 * (between[:m].double() @ exact.t() + biases[2].double())
    assert float((found[:m].double() - wanted).norm() / wanted.norm()) < 4e-3


def test_which_mlps() -> None:
    """Those whose two products are sm90_streamk's, with x of down laid out."""
    gate, down = (Problem(BF16, n, k, "nf4", 64, torch.uint8, 256) for n, k in ((14336, 4096), (4096, 14336)))
    fusion, after = Fusion((1e-5, 0.0), "silu", static=True), Fusion(residual=1.0, static=True)

    def chosen(m: int) -> MlpChoice | None:
        return choose_mlp(m, (gate, gate, down), fusion, after, H200)

    for m in (32, 64, 100):
        choice = chosen(m)
        assert choice is not None
        assert [plan.next_tile_m for plan in choice.gates.plans] == [choice.down.tile_m] * 2
    assert chosen(1) is None
    assert chosen(512) is None


@pytest.mark.parametrize(
    "plans",
    [
        [StreamKPlan(48, 2, 2, ctas) for ctas in (2, 5, 3)],
        [GemmPlan(96, 2, 2, 4, ctas, 1, 96) for ctas in (3, 4, 2)],
        [GemmPlan(96, 2, 2, 4, ctas, 1, 96, in_order=True) for ctas in (3, 4, 2)],
    ],
)
@pytest.mark.parametrize("k", [768, 704], ids=["alike", "scales of some come one by one"])
def test_several_weights_in_one_launch(hopper: Driver, plans: list[Any], k: int) -> None:
    torch.manual_seed(0)
    m, sides = 40, (128, 260, 132)
    x, kernel = torch.randn(m, k).half(), streamk if isinstance(plans[0], StreamKPlan) else gemm
    weights = [weight(n, k=k, dtype=F16, format="int4", group_size=64) for n in sides]
    biases = [torch.randn(n).half() for n in sides]
    group = [problem_of(x, q, bias) for q, bias in zip(weights, biases, strict=True)]
    hopper.readable = [x, *(part for q in weights for part in parts_of(q))]
    planned = GroupPlan(tuple(decoded(plan, group[0]) for plan in plans), 0.0, is_one_launch=True)
    multiply = kernel.bind_group(DEVICE, m, group, list(map(addresses, weights)), planned)
    for _ in range(2):
        results = [torch.full((m + 1, n), 777.0, dtype=F16) for n in sides]
        places = [address(one) for pair in zip(biases, results, strict=True) for one in pair]
        multiply(0, address(x), m, places)
        for q, bias, out in zip(weights, biases, results, strict=True):
            dense = hb.dequantize(q, F32 if kernel is streamk else F16)
            right, theirs = (functional.linear(x.to(kind), dense.to(kind), bias.to(kind)) for kind in (F64, F16))
            assert (out[m] == 777).all()
            check(out[:m], right, theirs)


class Stack(NamedTuple):
    """gates: the plan of gate and up. down: of what follows."""

    gates: StreamKPlan | GemmPlan
    down: StreamKPlan | GemmPlan
    activation: str
    format: str
    options: dict[str, Any] = {}  # noqa: RUF012
    hidden: int = 512
    ordered: bool = False


STACKS = {
    "narrow": Stack(StreamKPlan(24, 2, 3, 5), StreamKPlan(24, 3, 2, 5), "silu", "nf4"),
    "exponents": Stack(StreamKPlan(16, 2, 3, 5), StreamKPlan(16, 2, 3, 4), "swiglu_oai", "mxfp4", {}, 832),
    "wide": Stack(GemmPlan(96, 2, 2, 4, 5, 1, 0), GemmPlan(96, 2, 3, 4, 4, 1, 0), "gelu_tanh", "int4", GROUPS),
    "wide, a span a lane": Stack(
        GemmPlan(128, 2, 2, 4, 5, 1, 0), GemmPlan(128, 2, 2, 4, 3, 1, 0), "silu", "fp4", {"block_size": 64}, 832
    ),
    "wide, exponents": Stack(GemmPlan(96, 2, 2, 4, 4, 1, 0), GemmPlan(96, 2, 2, 4, 3, 1, 0), "gelu", "mxfp4", {}, 352),
    "in order": Stack(
        GemmPlan(96, 2, 2, 4, 5, 1, 0), GemmPlan(96, 2, 2, 4, 3, 1, 0), "silu", "nf4", {"nested": False}, ordered=True
    ),
    "in order, exponents": Stack(
        GemmPlan(128, 2, 2, 4, 5, 1, 0), GemmPlan(128, 2, 2, 4, 3, 1, 0), "swiglu_oai", "mxfp4", {}, 832, True
    ),
}


@pytest.mark.parametrize("case", STACKS.values(), ids=STACKS.keys())
def test_experts(hopper: Driver, case: Stack) -> None:
    """Gate and up of sorted pairs, and then down, whose results go to the pairs. Of some pairs the id is no expert, one
    expert has no pair, and one more than a tile."""
    torch.manual_seed(0)
    experts, inner, k, tokens, tile_m = 4, 384, case.hidden, 75, case.gates.tile_m
    gate_up = weight(experts, 2 * inner, k=k, dtype=BF16, format=case.format, **case.options)
    down = weight(experts, k, k=inner, dtype=BF16, format=case.format, **case.options)
    x, bias = torch.randn(tokens, k).bfloat16(), torch.randn(experts, 2 * inner).bfloat16()
    ids = torch.tensor([-1, 0, 2, 2, 2, 2, 2, 2, 3, 9])[torch.randint(10, (2 * tokens,))]
    room = len(ids) // tile_m + experts
    routes = routes_of(ids, experts, tile_m, room)
    table = table_of(routes, len(ids))
    sorted_rows = torch.full((len(ids) + 1, inner), 777.0, dtype=BF16)
    found = torch.full((len(ids) + 1, k), 777.0, dtype=F32 if case.ordered else BF16)
    hopper.readable = [table, sorted_rows, *parts_of(rows_of(gate_up)), *parts_of(rows_of(down))]
    first = Grouping(experts, case.activation, orders=case.ordered)
    second = Grouping(experts, ordered=case.ordered, wide=case.ordered, scatters=True)
    for q, plan, grouping, given, added, out, per_row in (
        (gate_up, case.gates, first, x, bias, sorted_rows, 2),
        (down, case.down, second, sorted_rows, None, found, 0),
    ):
        flat = rows_of(q)
        problem = problem_of(given, flat, None if added is None else added.flatten())
        plan = replace(decoded(plan, problem), chunk=room * tile_m)
        kernel: Any = narrow if isinstance(plan, StreamKPlan) else wide
        assert kernel.is_grouped_valid(plan, experts, q.shape[1], q.shape[2], span_of(problem), SMALL)
        multiply = grouped.bind(DEVICE, problem, addresses(flat), grouping, plan)
        rows = len(routes.order) if per_row == 0 else tokens
        multiply(
            0, address(given), address(table), address(added), address(out), len(ids) if per_row == 0 else rows, per_row
        )
        assert (out[-1] == 777).all()

    wanted = routes.places >= 0
    assert case.ordered or not found[:-1][~wanted].any()  # by `lay_out`

    def expected(kind: torch.dtype) -> Tensor:
        one, two = (hb.dequantize(q, F32).to(kind) for q in (gate_up, down))
        rows = []
        for pair in wanted.nonzero().flatten().tolist():
            e = int(ids[pair])
            both = functional.linear(x[pair // 2].to(kind), one[e], bias[e].to(kind)).double()
            rows.append(functional.linear(stacks.activate(both[None], case.activation)[0].to(kind), two[e]))
        return torch.stack(rows)

    check(found[:-1][wanted], expected(F64), expected(BF16))


BACK_STACKS = {
    "looked up": (GemmPlan(32, 2, 3, 4, 5, 1, 0, back=True), "nf4", {"nested": True}),
    "computed": (GemmPlan(96, 2, 2, 4, 4, 1, 0, back=True), "mxfp4", {}),
    "decoders": (GemmPlan(64, 2, 5, 5, 3, 1, 0, back=True, decoders=2), "nf4", {"nested": True}),
    "decoders, short blocks": (GemmPlan(32, 2, 3, 4, 5, 1, 0, back=True, decoders=2), "fp4", {"block_size": 32}),
    "one that decodes": (GemmPlan(256, 2, 2, 4, 2, 1, 0, back=True, decoders=1), "nf4", {"nested": True}),
}


@pytest.mark.parametrize("case", BACK_STACKS.values(), ids=BACK_STACKS.keys())
def test_gradients_of_experts(hopper: Driver, case: tuple[GemmPlan, str, dict[str, Any]]) -> None:
    """Rows times the transposes of their experts. Of some the id is no expert, one expert has no row, and one more than
    a tile."""
    torch.manual_seed(0)
    plan, format, options = case
    experts, n, k, tile_m = 4, 352, 192, plan.tile_m
    q = weight(experts, n, k=k, dtype=BF16, format=format, **options)
    ids = torch.tensor([-1, 0, 2, 2, 2, 2, 2, 2, 3, 9])[torch.randint(10, (150,))]
    grad = torch.randn(len(ids), n).bfloat16()
    room = len(ids) // tile_m + experts
    routes = routes_of(ids, experts, tile_m, room)
    table = table_of(routes, len(ids))
    found = torch.full((len(ids) + 1, k), 777.0, dtype=BF16)
    flat = rows_of(q)
    hopper.readable = [table, *parts_of(flat)]
    problem = problem_of(grad, flat, None)
    plan = replace(decoded(plan, problem), chunk=room * tile_m)
    assert wide.is_grouped_valid(plan, experts, k, n, span_of(problem), SMALL)
    multiply = grouped.bind(DEVICE, problem, addresses(flat), Grouping(experts, scatters=True), plan)
    multiply(0, address(grad), address(table), 0, address(found), len(ids), 1)
    assert (found[-1] == 777).all()
    wanted = routes.places >= 0
    assert not found[:-1][~wanted].any()

    def expected(kind: torch.dtype) -> Tensor:
        dense = hb.dequantize(q, F32).to(kind)
        return torch.stack([grad[i].to(kind) @ dense[int(ids[i])] for i in wanted.nonzero().flatten().tolist()])

    check(found[:-1][wanted], expected(F64), expected(BF16))
