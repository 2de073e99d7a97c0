"""Many rows of x on Hopper: operands are the dequantized weights bit for bit, and nothing is written beyond the end."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch

import halfbyte as hb
from halfbyte.kernels.common.device import properties_of
from halfbyte.kernels.linear import cuda
from halfbyte.kernels.linear.dispatch import GroupChoice
from halfbyte.kernels.linear.kernel import plan_for, run
from halfbyte.kernels.linear.laid_out import span_of
from halfbyte.kernels.linear.problem import problem_of
from halfbyte.kernels.linear.sm90_gemm import launch as gemm
from halfbyte.kernels.linear.sm90_gemm.plan import gemm_plan, one_after_another
from halfbyte.kernels.linear.sm90_gemm.shape import TILES_M, WIDE_TILES_M, GemmPlan, decoding, is_valid
from halfbyte.kernels.linear.tune import h200

from .conftest import BF16, DEVICE, F16, NOISE, captured, check_product, poisoned, sixteen_bits, weight

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0), reason="needs Hopper"
)
KINDS = (
    ("nf4", {}),
    ("nf4", {"nested": False}),
    ("fp4", {"block_size": 32, "nested": False}),
    ("nf4", {"block_size": 32}),
    ("fp4", {"block_size": 4096}),
    ("int4", {"group_size": 32}),
    ("int4", {"group_size": 128}),
)


class Way(NamedTuple):
    """Of a tile, how many CTAs are a cluster, and how many have equal parts; and how many copy x to each other."""

    cluster: int = 1
    shares: int = 1
    twins: int = 1

    def __str__(self) -> str:
        return "".join(f"{name}{ctas}" for name, ctas in self._asdict().items() if ctas > 1) or "alone"


EVERY_WAY = [Way(), Way(cluster=2), Way(cluster=3), Way(shares=2), Way(shares=4), Way(twins=2)]
WAYS = pytest.mark.parametrize("way", EVERY_WAY, ids=str)
# Tiles with each way and order of x that there is for them.
TILES = [
    (tile_m, in_order, way)
    for tile_m in TILES_M
    for in_order in (False, True)
    for way in EVERY_WAY
    if way.cluster == 1 or tile_m not in WIDE_TILES_M
]


def plan(
    m: int,
    n: int,
    k: int,
    tile_m: int,
    workers: int = 132,
    way: Way = EVERY_WAY[0],
    chunk: int = 1 << 14,
) -> GemmPlan:
    """With so many CTAs, as far as there is work for them; in clusters, where K is long enough for these, as many as
    give every tile equally many, in one launch; or with equal parts, where all CTAs run at once."""
    (cluster, shares, twins), tiles, depth = way, -(-n // 128) * -(-m // tile_m), -(-k // 256)
    if depth >= shares > 1 and tiles * shares <= properties_of(0).sms:
        whole = -(-m // tile_m) * tile_m
        return GemmPlan(tile_m, 2, 3, min(8, 3 * 256 // tile_m), tiles * shares, 1, whole, shares=shares)
    if depth >= cluster > 1:
        shares = max(1, min(workers // cluster // tiles, depth // cluster))
        return GemmPlan(tile_m, 2, 3, min(8, 3 * 256 // tile_m), tiles * shares, cluster, -(-m // tile_m) * tile_m)
    chunk = max(1, chunk // tile_m) * tile_m
    last = (m - 1) % chunk + 1
    units = -(-n // (128 * twins)) * -(-last // tile_m) * depth
    return GemmPlan(tile_m, 2, 3, min(8, 3 * 256 // tile_m), min(workers // twins, units), 1, chunk, twins=twins)


def multiplied(
    x: torch.Tensor, q: hb.QuantizedWeight, plan: GemmPlan, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """The kernel's result, with poison under it and around it."""
    problem = problem_of(x, q, bias)
    plan = decoding(plan, problem)
    assert is_valid(plan, len(x), *q.shape, span_of(problem), properties_of(0))
    with poisoned((len(x), q.shape[0]), x.dtype) as out:
        run(gemm, x, q, bias, out, plan)
    return out


@sixteen_bits
@WAYS
@pytest.mark.parametrize("in_order", [False, True])
@pytest.mark.parametrize(("format", "options"), KINDS)
def test_operands_are_what_dequantize_gives(
    format: str, options: dict[str, int], in_order: bool, way: Way, dtype: torch.dtype
) -> None:
    for (n, k), tile_m in (((333, 1024), 96), ((130, 4096), 256), ((515, 96), 160)):
        if k % options.get("group_size", options.get("block_size", 64)):
            continue
        q = weight(n, k, format, dtype, **options)
        eye = torch.eye(k, dtype=dtype, device=DEVICE)
        for workers in (132, 6):
            planned = replace(plan(k, n, k, tile_m, workers, way, 1024), in_order=in_order)
            found = multiplied(eye, q, planned)
            assert torch.equal(found, hb.dequantize(q, dtype).t()), (n, k, workers)


@WAYS
@pytest.mark.parametrize("in_order", [False, True])
@pytest.mark.parametrize(("format", "options"), KINDS)
def test_what_is_read_is_not_overwritten(format: str, options: dict[str, Any], in_order: bool, way: Way) -> None:
    """As with experts: K ends within a unit."""
    m, n, k = 160, 5760, 2880
    if k % options.get("group_size", options.get("block_size", 64)):
        pytest.skip("groups do not divide K")
    q, x = weight(n, k, format, BF16, **options), torch.randn(m, k, device=DEVICE).to(BF16)
    shape = replace(plan(m, n, k, 160, way=way), in_order=in_order)
    first, others = multiplied(x, q, shape), torch.zeros((), dtype=torch.int64, device=DEVICE)
    for _ in range(300):
        torch.full((8 << 20,), 77, dtype=torch.uint8, device=DEVICE)
        others += (multiplied(x, q, shape) != first).any()
    assert others == 0


@pytest.mark.parametrize(("tile_m", "in_order", "way"), TILES, ids=str)
def test_error(tile_m: int, in_order: bool, way: Way) -> None:
    """Rows that fill no tile, tiles that several CTAs share, launches one after the other."""
    for dtype, (n, k), (format, options) in ((BF16, (1029, 1024), KINDS[0]), (F16, (700, 5376), KINDS[5])):
        q = weight(n, k, format, dtype, **options)
        for m, chunk in ((1, 1 << 14), (tile_m + 1, 1 << 14), (3 * tile_m - 7, 2 * tile_m)):
            x = torch.randn((m, k), device=DEVICE).to(dtype)
            each = (plan(m, n, k, tile_m, workers, way, chunk) for workers in (132, 10))
            plans = [replace(one, in_order=in_order) for one in each]
            multiply = partial(_with_bias, x, q)
            check_product(x, q, multiply, plans, NOISE)


def _with_bias(x: torch.Tensor, q: hb.QuantizedWeight, plan: GemmPlan, bias: torch.Tensor | None) -> torch.Tensor:
    return multiplied(x, q, plan, bias)


def test_linear_of_many_rows() -> None:
    """Through the front door, where the kernel is chosen; in a graph too, whose x then changes."""
    for n, k, m in ((4096, 4096, 700), (6001, 4096, 1500), (14336, 4096, 300)):
        q = weight(n, k)
        x = torch.randn((m, k), device=DEVICE).to(BF16)
        assert plan_for(gemm, x, q) is not None
        right = torch.nn.functional.linear(x, hb.dequantize(q, BF16))
        graph, out = captured(lambda x=x, q=q: hb.linear(x, q))
        for _ in range(2):
            graph.replay()
            found = hb.linear(x, q)
            assert torch.equal(found, out)
            torch.testing.assert_close(found, right, rtol=2e-2, atol=2e-2)
            x.neg_()
            right = -right


@pytest.mark.parametrize("format", ["nf4", "int4"])
def test_memory_beside_inputs_and_results(format: str) -> None:
    """At most 8 MiB for 2,048 rows of a large weight, at whichever time: x laid out, or sums that CTAs share."""
    n, k, m = 28672, 8192, 2048
    q, x = weight(n, k, format=format), torch.randn((m, k), device=DEVICE).to(BF16)
    hb.linear(x, q)  # a workspace is made the first time, and stays
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    y = hb.linear(x, q)
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before - y.nbytes <= 8 << 20


def test_more_than_two_to_the_31_weights() -> None:
    """The last rows are those of a weight of their own."""
    k, tail = 8192, 130
    n = (1 << 31) // k + 128  # whole tiles ahead of the last ones, of which one is not full
    packed = torch.randint(0, 256, ((n + tail) * k // 2,), dtype=torch.uint8, device=DEVICE)
    scale = torch.rand((n + tail) * k // 64, device=DEVICE)
    q = hb.QuantizedWeight("fp4", packed, scale, (n + tail, k), BF16, 64)
    last = hb.QuantizedWeight("fp4", packed[n * k // 2 :].clone(), scale[n * k // 64 :].clone(), (tail, k), BF16, 64)
    x = torch.randn((97, k), device=DEVICE).to(BF16)
    tiles = -(-(n + tail) // 128)  # a CTA each, so that sums are in one order
    whole, small = (plan(97, rows, k, 128, workers) for rows, workers in ((n + tail, tiles), (tail, 2)))
    assert torch.equal(multiplied(x, q, whole)[:, n:], multiplied(x, last, small))


def test_more_than_two_to_the_31_numbers_of_x() -> None:
    q, k = weight(130, 8192), 8192
    m = (1 << 31) // k + 300
    x = torch.randn((m, k), dtype=BF16, device=DEVICE)
    whole = plan_for(gemm, x, q)
    assert whole is not None
    tail = replace(plan(40, 130, k, whole.tile_m), chunk=whole.chunk)
    torch.testing.assert_close(multiplied(x, q, whole)[-40:], multiplied(x[-40:].clone(), q, tail))


def test_more_than_two_to_the_31_results() -> None:
    q = weight(66000, 256)
    x = torch.randn((33000, 256), device=DEVICE).to(BF16)
    whole = plan_for(gemm, x, q)
    assert whole is not None
    out = torch.empty((33000, 66000), dtype=BF16, device=DEVICE)
    run(gemm, x, q, None, out, whole)
    tail = torch.empty((40, 66000), dtype=BF16, device=DEVICE)
    like_it = decoding(replace(plan(40, 66000, 256, whole.tile_m), chunk=whole.chunk), problem_of(x, q, None))
    run(gemm, x[-40:].clone(), q, None, tail, like_it)
    assert torch.equal(out[-40:], tail)


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Of x, so that few rows take several launches."""
    monkeypatch.setattr(h200, "GEMM_X_BYTES", 1 << 23)
    gemm_plan.cache_clear()
    yield
    gemm_plan.cache_clear()


@pytest.mark.parametrize("m", [97, 700, 3000])
@pytest.mark.usefixtures("small_chunks")
def test_a_group_whose_x_is_laid_out_once(m: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each gets the bits that it gets alone, in a graph too, whose x then changes."""
    group = [weight(n, 4096) for n in (3000, 3000, 3000)]
    biases = [torch.randn(3000, device=DEVICE).to(BF16), None, None]
    x = torch.randn((m, 4096), device=DEVICE).to(BF16)
    chosen = lambda *given: GroupChoice(gemm, one_after_another(*given))  # noqa: E731
    monkeypatch.setattr(cuda, "choose_group", chosen)
    alone = []
    for q, bias in zip(group, biases, strict=True):
        with poisoned((m, 3000), BF16) as out:
            run(gemm, x, q, bias, out, gemm.plan(m, problem_of(x, q, bias), properties_of(0), False))
        alone.append(out)
    graph, found = captured(lambda: cuda.linear_group(x, group, biases))
    for _ in range(2):
        graph.replay()
        assert all(map(torch.equal, found, alone))
        assert all(map(torch.equal, cuda.linear_group(x, group, biases), alone))
    x.zero_()
    graph.replay()
    assert not found[1].any()
