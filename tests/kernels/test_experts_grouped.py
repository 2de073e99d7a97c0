"""Many pairs of a token and an expert on Hopper: what is planned and handed over, and that it compiles."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from drivers import BF16, F16, F32, Driver, order_of, pretend
from gpus import H200
from hypothesis import given
from hypothesis import strategies as st
from routes import routes_of
from sass import arrivals_with_reads_on_their_way
from torch import Tensor

import halfbyte as hb
from halfbyte.formats.spec import FORMATS
from halfbyte.kernels.common import nvrtc
from halfbyte.kernels.common.device import properties_for
from halfbyte.kernels.experts import combine, cuda, reference, sort
from halfbyte.kernels.experts import grouped as many
from halfbyte.kernels.experts.block import Block
from halfbyte.kernels.linear import grouped
from halfbyte.kernels.linear.grouped import Grouping
from halfbyte.kernels.linear.laid_out import span_of
from halfbyte.kernels.linear.problem import Problem
from halfbyte.kernels.linear.sm90_gemm import plan as gemm
from halfbyte.kernels.linear.sm90_gemm.shape import BACK_TILES_M, USUAL_TILES_M, W_STAGES, GemmPlan, decoding, x_stages
from halfbyte.kernels.linear.sm90_streamk import shape as streamk
from halfbyte.kernels.linear.sm90_streamk.shape import StreamKPlan
from halfbyte.kernels.linear.spread import most_tiles, usual_tiles, wanted
from halfbyte.kernels.linear.tune import h200

#         experts, I, H, experts of a token
MODELS = {
    "qwen3-30b": (128, 768, 2048, 8), "mixtral": (8, 14336, 4096, 2), "deepseek-v3": (256, 2048, 7168, 8),
    "gpt-oss-20b": (32, 2880, 2880, 4),
}  # fmt: skip
ACTIVATIONS = {"gpt-oss-20b": "swiglu_oai"}


def problem(n: int, k: int, **changes: Any) -> Problem:
    return Problem(**{"dtype": BF16, "n": n, "k": k, "format": "nf4", "block_size": 64, "scale": torch.uint8,
                      "nested": 256} | changes)  # fmt: skip


def problems(model: str, dtype: torch.dtype = BF16) -> tuple[Problem, Problem]:
    experts, inner, hidden, _ = MODELS[model]
    mxfp4 = {"format": "mxfp4", "block_size": 32, "nested": 0} if model == "gpt-oss-20b" else {}
    sides = ((2 * inner, hidden), (hidden, inner))
    gate_up, down = (problem(experts * n, k, dtype=dtype, **mxfp4) for n, k in sides)
    return gate_up, down


@given(
    ids=st.lists(st.integers(-2, 12), min_size=1, max_size=200),
    experts=st.integers(1, 12),
    tile_m=st.sampled_from([1, 2, 32]),
)
def test_tiles(ids: list[int], experts: int, tile_m: int) -> None:
    """Every pair with an expert is in one tile, of its expert; and there is room for all tiles."""
    room = most_tiles(len(ids), experts, tile_m)
    found = routes_of(torch.tensor(ids), experts, tile_m, room)
    assert found.count <= len(found.tiles) == room
    assert not found.tiles[found.count :].any()
    rows = [(first + i, expert) for expert, first, count, _ in found.tiles.tolist() for i in range(count)]
    assert [row for row, _ in rows] == list(range(len(found.order)))
    assert all(ids[found.order[row]] == expert for row, expert in rows)
    assert [place >= 0 for place in found.places.tolist()] == [0 <= e < experts for e in ids]
    assert torch.equal(found.places[found.order.long()], torch.arange(len(rows)).int())
    of_each = [[pair for pair in found.order.tolist() if ids[pair] == e] for e in range(experts)]
    assert all(pairs == sorted(pairs) for pairs in of_each)


def test_there_may_be_as_many_tiles_as_there_is_room_for() -> None:
    ids = torch.tensor([0] * 65 + [1] + [2])
    assert routes_of(ids, 3, 32, 5).count == 5 == most_tiles(67, 3, 32)


@given(pairs=st.integers(1, 1 << 20))
def test_rooms(pairs: int) -> None:
    room = many.room_of(pairs)
    assert pairs <= room <= pairs + pairs // 8
    assert many.room_of(room) == room


@given(
    pairs=st.integers(1, 1 << 17),
    experts=st.integers(1, 1024),
    n=st.integers(1, 200).map(lambda n: 8 * n),
    k=st.integers(1, 100).map(lambda k: 64 * k),
    block_size=st.sampled_from([32, 64, 128]),
    back=st.booleans(),
)
def test_every_plan_is_valid(pairs: int, experts: int, n: int, k: int, block_size: int, back: bool) -> None:
    o = problem(experts * n, k, block_size=block_size)
    plans = grouped.plan(pairs, experts, (o, o), H200, back)
    assert plans is not None
    assert plans[0] == plans[1]
    assert plans[0].back is back
    assert is_valid(plans[0], experts, *((k, n) if back else (n, k)), span_of(o), H200)
    assert plans[0].microseconds > 0
    assert plans[0].x_tiles(plans[0].chunk) == most_tiles(pairs, experts, plans[0].tile_m)
    assert 1 - 1e-6 <= wanted(pairs, experts) <= experts + 1e-6
    assert pairs / 32 - 1e-6 <= usual_tiles(pairs, experts, 32) <= most_tiles(pairs, experts, 32) + 1e-6


@pytest.mark.parametrize(("pairs", "experts"), [(512, 128), (2048, 128), (16384, 128), (128, 8), (5000, 3), (7, 1)])
@pytest.mark.parametrize("tile_m", [8, 32, 160])
def test_usual_tiles_are_those_of_a_fair_router(pairs: int, experts: int, tile_m: int) -> None:
    ids = torch.randint(0, experts, (50, pairs), generator=torch.Generator().manual_seed(0))
    counts = torch.stack([row.bincount(minlength=experts) for row in ids])
    seen = float((-(-counts // tile_m)).sum(1).double().mean())
    assert abs(usual_tiles(pairs, experts, tile_m) - seen) <= 0.06 * seen


def is_valid(plan: grouped.Plan, *given: Any) -> bool:
    if isinstance(plan, StreamKPlan):
        return streamk.is_grouped_valid(plan, *given)
    return gemm.is_grouped_valid(plan, *given)


def test_narrow_plans_that_would_be_wrong_are_not_valid() -> None:
    def valid(experts: int = 8, n: int = 1000, k: int = 4096, **changes: Any) -> bool:
        shape = {"tile_m": 32, "warpgroups": 3, "stages": 3, "ctas": 132}
        return is_valid(StreamKPlan(**shape | {"chunk": 320} | changes), experts, n, k, 64, H200)

    assert valid()
    assert not valid(ctas=0)
    assert not valid(chunk=100)
    assert not valid(tile_m=96, chunk=960)
    assert not valid(resident=4)
    assert not valid(stages=5)  # more than shared memory holds
    assert not valid(experts=1 << 20, n=1 << 13)


def test_wide_plans_that_would_be_wrong_are_not_valid() -> None:
    def valid(experts: int = 8, n: int = 1000, k: int = 4096, **changes: Any) -> bool:
        shape = {"tile_m": 128, "warpgroups": 2, "w_stages": 3, "x_stages": 6, "workers": 132, "cluster": 1}
        return is_valid(GemmPlan(**shape | {"chunk": 1280} | changes), experts, n, k, 64, H200)

    assert valid()
    assert valid(workers=1000)  # those without a tile end at once
    assert not valid(workers=0)
    assert not valid(chunk=1000)
    assert not valid(chunk=0)
    assert not valid(tile_m=64, chunk=640)  # sm90_streamk's
    assert not valid(x_stages=8, tile_m=192, chunk=1920)  # more than shared memory holds
    assert not valid(cluster=4)
    assert not valid(experts=1 << 20, n=1 << 13)
    assert valid(experts=1 << 20, n=1 << 13, k=1 << 11, back=True)  # whose rows of W are k
    assert not valid(experts=1 << 20, back=True)


@pytest.mark.parametrize("model", MODELS)
def test_models_have_tiles_for_their_experts(model: str) -> None:
    experts, _, _, k = MODELS[model]
    tiles = []
    for tokens in (64, 256, 1024, 4096, 16384):
        plans = grouped.plan(tokens * k, experts, problems(model), H200)
        assert plans is not None
        assert plans[0].tile_m == plans[1].tile_m
        tiles.append(plans[0].tile_m)
    assert tiles == sorted(tiles)
    assert tiles[0] <= 64 < 96 <= tiles[-1]


def test_what_is_supported() -> None:
    for model in MODELS:
        for dtype in (BF16, F16):
            assert all(map(grouped.supports, problems(model, dtype)))
    assert not grouped.supports(problem(64, 64, dtype=F32))
    assert not grouped.supports(problem(64, 96))
    assert grouped.supports(problem(64, 96, block_size=32))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    for module in (cuda, many):
        monkeypatch.setattr(module, "properties_of", lambda index: H200)
        module.products.entries.clear()
    monkeypatch.setattr(combine, "combine_sorted", combined)
    yield from pretend(monkeypatch, H200)
    for kept in (cuda.products, cuda.better_sorted, many.products):
        kept.entries.clear()


def combined(rows: Tensor, places: Tensor, weights: Tensor, out: Tensor, residual: Any = None) -> None:
    places = places.view(weights.shape).long()
    shares = torch.where(places >= 0, weights.float(), 0)
    rows = torch.where((places >= 0).unsqueeze(2), rows[places.clamp(min=0)], 0)
    out.copy_(reference.combine(rows, shares, out.dtype))


def told(gpu: Driver, monkeypatch: pytest.MonkeyPatch, *launches: tuple[hb.QuantizedWeight, Grouping]) -> None:
    """The driver is told what comes next."""
    launch, bind, coming = many._launch, many._bind, iter(launches * 100)

    def tell(*launched: Any) -> None:
        gpu.like, gpu.grouping = next(coming)
        launch(*launched)

    def note(*given: Any) -> Any:
        found = bind(*given)
        assert found is not None
        gpu.tile_m = found.tile_m
        return found

    monkeypatch.setattr(many, "_launch", tell)
    monkeypatch.setattr(many, "_bind", note)


@pytest.mark.parametrize("dtype", [F16, BF16])
@pytest.mark.parametrize("activation", reference.ACTIVATIONS)
@pytest.mark.parametrize("parts", [False, True])
@pytest.mark.parametrize("wide_tiles", [False, True])
def test_a_block(
    gpu: Driver, dtype: torch.dtype, activation: str, parts: bool, wide_tiles: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of ids that are none, of both kinds of ids and weights, in one part and in several. In wide tiles the second
    product reads what the first has stored as it is."""
    experts, inner, hidden = 3, 32, 64
    format = "mxfp4" if parts else "nf4"
    gate_up, down = (
        hb.quantize(torch.randn(experts, n, k), format, block_size=32)
        for n, k in ((2 * inner, hidden), (hidden, inner))
    )
    if parts:
        monkeypatch.setattr(many, "MOST_BYTES", 1)
    gpu.dtype = dtype
    if wide_tiles:
        monkeypatch.setattr(h200, "GROUPED_STREAMK", {})
    groupings = (
        Grouping(experts, activation, orders=wide_tiles),
        Grouping(experts, ordered=wide_tiles, wide=True),
    )
    told(gpu, monkeypatch, *zip((gate_up, down), groupings, strict=True))
    biases = torch.randn(experts, 2 * inner).to(dtype), torch.randn(experts, hidden).to(dtype)
    for tokens, kind, narrow in ((1, torch.int64, True), (37, torch.int32, False)):
        x = 0.1 * torch.randn(tokens, hidden).to(dtype)
        index = torch.randint(-1, experts + 1, (tokens, 3), dtype=kind)
        weights = torch.rand(tokens, 3).to(dtype if narrow else F32)
        for bias in (biases, (None, None)):
            found = many.moe(x, index, weights, Block(gate_up, down, activation, *bias))
            assert found is not None
            right = hb.moe(
                x.float(), index, weights.float(), gate_up, down, activation,
                *(None if one is None else one.float() for one in bias),
            )  # fmt: skip
            assert (found.float() - right).norm() <= 0.02 * right.norm()
    assert [per_row for _, per_row in gpu.seen[:2]] == [3, 0]


@pytest.mark.parametrize(
    ("model", "tokens", "sorts"),
    [
        ("qwen3-30b", 16, False),
        ("qwen3-30b", 64, False),
        ("mixtral", 1, False),
        ("mixtral", 64, True),
        ("mixtral", 256, True),
    ],
)
def test_few_pairs_are_sorted_where_experts_have_many(
    gpu: Driver, model: str, tokens: int, sorts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As measured."""
    experts, inner, hidden, k = MODELS[model]
    large = [problem(experts * n, k) for n, k in ((2 * inner, hidden), (hidden, inner))]
    stacks = [hb.quantize(torch.randn(experts, n, k)) for n, k in ((64, 256), (256, 32))]
    for module in (cuda, many):
        coming = iter(large)
        monkeypatch.setattr(module, "problem_of", lambda *given, coming=coming: next(coming))
    assert cuda._is_better_sorted(torch.randn(1, 256).bfloat16(), stacks, tokens * k) is sorts


def test_grouped_linear(gpu: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the front: more pairs than go unsorted, and few of a stack that the kernel for few is not for."""
    q = hb.quantize(torch.randn(4, 40, 64).bfloat16(), "int4", group_size=32)
    told(gpu, monkeypatch, (q, Grouping(4, scatters=True)))
    for rows, kind in ((1, torch.int64), (513, torch.int32)):
        x, expert = torch.randn(rows, 64).bfloat16(), torch.randint(-1, 5, (rows,), dtype=kind)
        bias = torch.randn(4, 40).bfloat16()
        found = cuda.grouped_linear(x, q, expert, bias)
        assert found is not None
        torch.testing.assert_close(found, hb.grouped_linear(x, q, expert, bias), rtol=2e-2, atol=0.2)
        assert not found[(expert < 0) | (expert >= 4)].any()
    assert cuda.grouped_linear(x[:0], q, expert[:0], None) is None


@pytest.mark.parametrize(
    ("sides", "format", "options"),
    [((4, 40, 64), "int4", {"group_size": 32}), ((3, 33, 128), "nf4", {}), ((2, 300, 96), "mxfp4", {})],
)
@pytest.mark.parametrize("dtype", [F16, BF16])
def test_gradients(
    gpu: Driver,
    sides: tuple[int, int, int],
    format: str,
    options: dict[str, Any],
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of one row and of many, of experts with an odd number of rows, of ids that are none."""
    experts, n, _ = sides
    q = hb.quantize(torch.randn(sides).to(dtype), format, **options)
    told(gpu, monkeypatch, (q, Grouping(experts, scatters=True)))
    gpu.back, gpu.dtype = True, dtype
    exact = hb.dequantize(q, F32).double()
    for rows, kind in ((1, torch.int64), (77, torch.int32), (77, torch.int64)):
        grad, expert = torch.randn(rows, n).to(dtype), torch.randint(-1, experts + 1, (rows,), dtype=kind)
        found = cuda.grouped_linear_backward(grad, q, expert)
        assert found is not None
        known = (expert >= 0) & (expert < experts)
        rows_of_w = exact[expert.clamp(0, experts - 1).long()]
        right = torch.where(known[:, None], torch.einsum("sn,snk->sk", grad.double(), rows_of_w), 0)
        assert torch.equal(found, right.to(dtype))
    assert {per_row for _, per_row in gpu.seen} == {1}
    assert len(many.products.entries) == 2
    assert cuda.grouped_linear_backward(grad[:0], q, expert[:0]) is None


def test_gradients_that_are_left_to_torch(gpu: Driver) -> None:
    """Of fp32, of rows that end within 32 weights, and of experts that begin where no copy can."""
    expert = torch.zeros(3, dtype=torch.int64)
    for k, dtype in ((64, F32), (80, BF16)):
        q = hb.quantize(torch.randn(2, 8, k))
        assert cuda.grouped_linear_backward(torch.randn(3, 8).to(dtype), q, expert) is None
    q = hb.quantize(torch.randn(2, 8, 64))
    behind = torch.empty(q.packed.numel() + 8, dtype=torch.uint8)[8:].view(q.packed.shape).copy_(q.packed)
    assert cuda.grouped_linear_backward(torch.randn(3, 8).bfloat16(), replace(q, packed=behind), expert) is None
    assert not gpu.seen


def test_forward_and_back_are_kept_apart(gpu: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a stack with square experts, whose products have all else in common."""
    q = hb.quantize(torch.randn(2, 64, 64).bfloat16(), "nf4")
    told(gpu, monkeypatch, (q, Grouping(2, scatters=True)))
    x, expert = torch.randn(600, 64).bfloat16(), torch.randint(0, 2, (600,))
    dense = hb.dequantize(q, F32)[expert]
    for gpu.back in (False, True, False):
        found = cuda.grouped_linear_backward(x, q, expert) if gpu.back else many.grouped_linear(x, q, expert, None)
        right = torch.einsum("sn,snk->sk" if gpu.back else "sk,snk->sn", x.float(), dense)
        torch.testing.assert_close(found, right.bfloat16(), rtol=2e-2, atol=0.2)


@pytest.mark.parametrize("sides", [(3, 333, 96), (2, 40, 320), (2, 256, 128)])
def test_units_on_the_way_back(sides: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """As fetch.cuh and back.cuh find them: rows and columns of one expert, each with its own scale, zeros beyond."""
    experts, n, k = sides
    monkeypatch.setattr(grouped, "tensor_map", lambda *given: given)
    q = hb.quantize(torch.randn(sides), block_size=32, nested=False)
    plan = GemmPlan(32, 2, 6, 8, 132, 1, 32, back=True)
    o = problem(experts * n, k, block_size=32, scale=F32, nested=0)
    _, sizes, strides, box = cast(Any, grouped.weight_map(0, o, Grouping(experts), plan))
    codebook, dense = torch.tensor(FORMATS["nf4"].codebook), hb.dequantize(q, F32)
    whole = torch.zeros(experts, -(-n // 256) * 256, -(-k // 128) * 128)
    for expert, first_column, first_row in product(range(experts), range(0, k, 128), range(0, n, 256)):
        begin = first_column // 2, first_row, expert
        at = torch.meshgrid(*(b + torch.arange(side) for b, side in zip(begin, box, strict=True)), indexing="ij")
        there = torch.stack([place < size for place, size in zip(at, sizes, strict=True)]).all(0)
        address = at[0] + at[1] * strides[0] + at[2] * strides[1]
        copied = torch.where(there, q.packed.flatten()[torch.where(there, address, 0)], 0)[..., 0].t()
        nibbles = torch.stack((copied >> 4, copied & 15), dim=2).flatten(1)
        row, column = first_row + torch.arange(256)[:, None], first_column + torch.arange(128)
        exists = (row < n) & (column < k)
        block = torch.where(exists, (expert * n + row) * k + column, 0) >> 5
        scale = torch.where(exists, q.scale.flatten()[block], 0)
        place = whole[expert, first_row : first_row + 256, first_column : first_column + 128]
        place.copy_(codebook[nibbles.long()] * scale)
    assert torch.equal(whole[:, :n, :k], dense)
    assert not whole[:, n:].any()
    assert not whole[:, :, k:].any()


@pytest.mark.parametrize("block_size", [32, 64, 128])
@pytest.mark.parametrize("activation", ["silu", "swiglu_oai"])
def test_results_in_the_order_of_the_next_product(
    activation: str, block_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies as copy_w.cuh asks for them: each brings the gates and ups of eight neighbours in that order."""
    experts, inner, k, span = 2, 192, 128, min(block_size, 64)
    monkeypatch.setattr(grouped, "tensor_map", lambda *given: given)
    o = problem(experts * 2 * inner, k, block_size=block_size, scale=F32, nested=0)
    plan = GemmPlan(96, 2, 3, 8, 132, 1, 96)
    _, sizes, strides, box = cast(Any, grouped.weight_map(0, o, Grouping(experts, activation, orders=True), plan))
    own = span // 8  # pieces in turn
    for expert, piece in product(range(experts), range(inner // 8)):
        turn = piece // own * 4
        begin = (piece % own * 2, turn, expert) if activation == "silu" else (turn, expert)
        begin = (0, *begin) if activation == "silu" else (piece % own * 4, *begin)
        sides = torch.meshgrid(*(b + torch.arange(n) for b, n in zip(begin, box[1:], strict=True)), indexing="ij")
        assert all((at < size).all() for at, size in zip(sides, sizes[1:], strict=True))
        address = torch.stack([at * stride for at, stride in zip(sides, strides, strict=True)]).sum(0)
        # The innermost dimension varies fastest in shared memory.
        rows = (address // (k // 2)).permute(*reversed(range(address.dim()))).flatten() - expert * 2 * inner
        results = order_of(inner, span)[8 * piece : 8 * piece + 8]
        gates, ups = (results, inner + results) if activation == "silu" else (2 * results, 2 * results + 1)
        assert rows.tolist() == torch.stack((gates, ups), dim=1).flatten().tolist()


VARIANTS = (
    (problem(64, 2048), "silu", {}),
    (problem(64, 1024, dtype=F16), "gelu", {}),
    (problem(64, 960, dtype=F16), "", {"wide": True}),
    (problem(64, 1024, scale=F32, nested=0), "", {"scatters": True}),
    (problem(64, 2880, format="mxfp4", block_size=32, nested=0), "swiglu_oai", {}),
    (problem(64, 1024, format="mxfp4", block_size=32, nested=0), "", {"wide": True}),
    (problem(64, 1024, block_size=32), "gelu_tanh", {}),
    (problem(64, 1024, format="int4", block_size=32, scale=F16, nested=0, dtype=F16), "", {"scatters": True}),
)


BACK_VARIANTS = (
    problem(64, 2048),
    problem(64, 1024, dtype=F16, scale=F32, nested=0),
    problem(64, 2880, format="mxfp4", block_size=32, nested=0),
    problem(64, 1024, block_size=32),
    problem(64, 1024, block_size=32, scale=F32, nested=0),
    problem(64, 1024, format="int4", block_size=32, scale=F16, nested=0, dtype=F16),
    problem(64, 1024, format="int4", block_size=128, scale=BF16, nested=0),
)


@pytest.mark.slow
@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.compile_all)])
def test_the_way_back_compiles_into_registers(every: bool, tmp_path: Path) -> None:
    import triton

    some = [(BACK_VARIANTS[0], 128), (BACK_VARIANTS[2], 32), (BACK_VARIANTS[3], 256), (BACK_VARIANTS[6], 64)]
    for o, tile_m in product(BACK_VARIANTS, BACK_TILES_M) if every else some:
        plan = GemmPlan(tile_m, 2, W_STAGES, x_stages(tile_m, o), 1, 1, tile_m, back=True)
        plan = decoding(plan, o)
        found = used(grouped.variant(o, Grouping(1, scatters=True), plan, H200), tmp_path, triton)
        assert found.keys() == {"multiply", "lay_out"}
        assert all(each["STACK"] == each["LOCAL"] == "0" for each in found.values()), (plan, o)
        assert not arrivals_with_reads_on_their_way(tmp_path / "kernel.cubin", "multiply", back=True), (plan, o)


@pytest.mark.slow
@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.compile_all)])
def test_compiles_into_registers(every: bool, tmp_path: Path) -> None:
    import triton

    wide = [GemmPlan(tile_m, 2, W_STAGES, 3, 1, 1, tile_m) for tile_m in USUAL_TILES_M]
    narrow = [StreamKPlan(tile_m, groups, 2, 1, chunk=tile_m) for tile_m, groups in h200.GROUPED_STREAMK]
    some = [(VARIANTS[0], narrow[0]), (VARIANTS[4], wide[1]), (VARIANTS[2], wide[-1]), (VARIANTS[3], narrow[-1])]
    for (o, activation, others), plan in product(VARIANTS, (*narrow, *wide)) if every else some:
        in_order = {"orders": bool(activation), "ordered": "wide" in others} if plan in wide else {}
        if isinstance(plan, GemmPlan):
            plan = decoding(replace(plan, x_stages=x_stages(plan.tile_m, o)), o)
        found = used(grouped.variant(o, Grouping(1, activation, **others, **in_order), plan, H200), tmp_path, triton)
        assert found.keys() == {"multiply", "lay_out"}
        assert all(each["STACK"] == each["LOCAL"] == "0" for each in found.values()), (plan, o)
        if isinstance(plan, GemmPlan):
            assert not arrivals_with_reads_on_their_way(tmp_path / "kernel.cubin", "multiply"), (plan, o)
    # A producer of nested scales of 32 weights each, one by one, holds 64 words of them.
    one_by_one = grouped.variant(problem(64, 96, block_size=32), Grouping(1), wide[-1], H200)
    assert int(used(one_by_one, tmp_path, triton)["multiply"]["STACK"]) <= 128


@pytest.mark.slow
@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100", "sm_120"])
def test_the_sort_compiles(target: str, tmp_path: Path) -> None:
    import triton

    properties = properties_for(target)
    for pairs in (1, 1 << 16):
        variant = sort.variant(pairs, 32, properties)
        assert variant.capability == properties.capability
        found = used(variant, tmp_path, triton)["sort_pairs"]
        assert int(found["REG"]) <= 64
        assert found["STACK"] == found["LOCAL"] == "0"


def used(variant: nvrtc.Variant, directory: Path, triton: Any) -> dict[str, dict[str, str]]:
    """What cuobjdump says of each kernel."""
    path = directory / "kernel.cubin"
    path.write_bytes(nvrtc.cubin(variant))
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    text = subprocess.run([tool, "-res-usage", path], capture_output=True, text=True, check=True).stdout
    kernels = re.findall(r"Function (\w+):\s+(REG.*)", text)
    return {name: dict(re.findall(r"(\w+):(\d+)", each)) for name, each in kernels}
