"""Gradients of many rows on Hopper, dy @ W from 4 bits: operands are the dequantized weights bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch

import halfbyte as hb
from halfbyte.kernels.common.device import properties_of
from halfbyte.kernels.linear import dispatch
from halfbyte.kernels.linear.kernel import run
from halfbyte.kernels.linear.laid_out import span_of
from halfbyte.kernels.linear.problem import Problem, problem_of
from halfbyte.kernels.linear.sm90_gemm import launch as gemm
from halfbyte.kernels.linear.sm90_gemm.shape import BACK_TILES_M, DECODERS, GemmPlan, decoding, is_valid
from halfbyte.measure.error import relative_error as error

from .conftest import BF16, DEVICE, F16, F32, NOISE, captured, poisoned, sixteen_bits, weight
from .test_linear_gemm import KINDS, WAYS, Way
from .test_linear_gemm import plan as forward

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0), reason="needs Hopper"
)


def plan(m: int, n: int, k: int, tile_m: int, workers: int, way: Way, chunk: int) -> GemmPlan:
    """As of forward, of W transposed."""
    return replace(forward(m, k, n, tile_m, workers, way, chunk), back=True)


def multiplied(dy: torch.Tensor, q: hb.QuantizedWeight, plan: GemmPlan) -> torch.Tensor:
    """The kernel's result, with poison under it and around it."""
    n, k = q.shape
    problem = problem_of(dy, q, None)
    plan = decoding(plan, problem)
    assert is_valid(plan, len(dy), k, n, span_of(problem), properties_of(0))
    with poisoned((len(dy), k), dy.dtype) as out:
        run(gemm, dy, q, None, out, plan)
    return out


@sixteen_bits
@WAYS
@pytest.mark.parametrize(("format", "options"), KINDS)
def test_operands_are_what_dequantize_gives(format: str, options: dict[str, int], way: Way, dtype: torch.dtype) -> None:
    for (n, k), tile_m in (
        ((336, 1024), 96),
        ((333, 1024), 32),
        ((128, 4096), 256),
        ((515, 96), 160),
        ((7, 64), 128),
        ((8, 64), 64),
    ):
        if k % options.get("group_size", options.get("block_size", 64)):
            continue
        q = weight(n, k, format, dtype, **options)
        eye = torch.eye(n, dtype=dtype, device=DEVICE)
        for workers in (132, 6):
            found = multiplied(eye, q, plan(n, n, k, tile_m, workers, way, 1024))
            assert torch.equal(found, hb.dequantize(q, dtype)), (n, k, workers)


def fitting(shape: GemmPlan, problem: Problem) -> GemmPlan:
    """With as many stages of x as there is room for."""
    made, most = decoding(shape, problem), properties_of(0).shared_memory
    tried = (replace(made, w_stages=w, x_stages=x) for w in (3, 2) for x in range(8, 2, -1))
    return next(plan for plan in tried if plan.shared_bytes(span_of(problem)) <= most)


def mates(tile_m: int, pairs: int, x_tiles: int, shares: int, problem: Problem) -> GemmPlan:
    """A plan of so many pairs, and pairs of tiles of x."""
    chunk = x_tiles * 2 * tile_m
    return fitting(GemmPlan(tile_m, 2, 3, 8, pairs, 1, chunk, back=True, mates=2, shares=shares), problem)


def decoders(tile_m: int, workers: int, x_tiles: int, shares: int, problem: Problem) -> GemmPlan:
    """A plan whose producers decode."""
    apart = DECODERS[tile_m][0]
    shape = GemmPlan(tile_m, 2, 3, 8, workers, 1, x_tiles * tile_m, back=True, decoders=apart, shares=shares)
    return fitting(shape, problem)


LOOKED_UP = ((712, 5376), KINDS[0]), ((1344, 1024), ("fp4", {"block_size": 32}))
COMPUTED = ((1344, 1024), KINDS[5])


def check_shape(
    q: hb.QuantizedWeight,
    dtype: torch.dtype,
    tile_m: int,
    together: int,
    shares: int,
    shape: Callable[[int, int, int, int, Problem], GemmPlan],
) -> None:
    """Of whole tiles all bits are those of the plan by which each CTA decodes what it multiplies. together: CTAs that
    work on tiles as one."""
    n, k = q.shape
    exact, dense = hb.dequantize(q, F32).double(), hb.dequantize(q, dtype)
    for m in (1, 3 * tile_m - 5, 4 * tile_m):
        dy = torch.randn((m, n), device=DEVICE).to(dtype)
        rows, x_tiles = k // 128, -(-m // (together * tile_m))
        tiles = rows * x_tiles
        if shares > 1 and (n < 256 * shares or together * tiles * shares > properties_of(0).sms):
            continue
        whole = multiplied(dy, q, plan(m, n, k, tile_m, rows * -(-m // tile_m), Way(), 1 << 14))
        right = dy.double() @ exact
        for workers in {tiles, min(tiles, 5), 2 * tiles} if shares == 1 else {tiles * shares}:
            made = shape(tile_m, workers, x_tiles, shares, problem_of(dy, q, None))
            found = multiplied(dy, q, made)
            assert torch.equal(found, multiplied(dy, q, made))
            if workers == tiles:
                assert torch.equal(found, whole), (n, m)
            assert error(found, right) <= NOISE * error(dy @ dense, right), (n, m, workers)


@sixteen_bits
@pytest.mark.parametrize("shares", [1, 2, 4])
@pytest.mark.parametrize("tile_m", BACK_TILES_M)
def test_mates(tile_m: int, shares: int, dtype: torch.dtype) -> None:
    """Those of a pair decode for each other what each would decode by itself."""
    for (n, k), (format, options) in LOOKED_UP:
        check_shape(weight(n, k, format, dtype, **options), dtype, tile_m, 2, shares, mates)


@sixteen_bits
@pytest.mark.parametrize("shares", [1, 2, 4])
@pytest.mark.parametrize("tile_m", DECODERS)
def test_decoders(tile_m: int, shares: int, dtype: torch.dtype) -> None:
    """Producers decode what others would decode that multiply."""
    for (n, k), (format, options) in (*LOOKED_UP, COMPUTED):
        check_shape(weight(n, k, format, dtype, **options), dtype, tile_m, 1, shares, decoders)


@WAYS
@pytest.mark.parametrize("tile_m", BACK_TILES_M)
def test_error(tile_m: int, way: Way) -> None:
    """Rows that fill no tile, tiles that several CTAs share, launches one after the other."""
    for dtype, (n, k), (format, options) in ((BF16, (1029, 1024), KINDS[0]), (F16, (712, 5376), KINDS[5])):
        q = weight(n, k, format, dtype, **options)
        exact, dense = hb.dequantize(q, F32).double(), hb.dequantize(q, dtype)
        for m, chunk in ((1, 1 << 14), (tile_m + 1, 1 << 14), (3 * tile_m - 7, 2 * tile_m)):
            dy = torch.randn((m, n), device=DEVICE).to(dtype)
            right = dy.double() @ exact
            for workers in (132, 10):
                chosen = plan(m, n, k, tile_m, workers, way, chunk)
                found = multiplied(dy, q, chosen)
                assert torch.equal(found, multiplied(dy, q, chosen))
                noise = NOISE if m * k >= 1 << 14 else 1.5  # few results make a noisy norm
                assert error(found, right) <= noise * error(dy @ dense, right), (m, workers)


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The kernel is chosen wherever it is for a weight."""
    choices = dispatch.choose, dispatch.choose_back
    monkeypatch.setattr(dispatch, "dense_microseconds", lambda *_: 1e9)
    for choice in choices:
        choice.cache_clear()
    yield
    for choice in choices:
        choice.cache_clear()


@pytest.mark.usefixtures("always")
def test_planned_and_captured() -> None:
    for n, k, m in ((4096, 4096, 700), (6001, 4096, 1500), (14336, 4096, 300)):
        q = weight(n, k)
        dy = torch.randn((m, n), device=DEVICE).to(BF16)
        chosen = gemm.plan_back(m, problem_of(dy, q, None), properties_of(0))
        assert chosen is not None
        out = torch.empty((m, k), dtype=BF16, device=DEVICE)
        graph, _ = captured(lambda dy=dy, q=q, out=out, chosen=chosen: run(gemm, dy, q, None, out, chosen) or [])
        for _ in range(2):
            out.fill_(777.0)
            graph.replay()
            torch.testing.assert_close(out, dy @ hb.dequantize(q, BF16), rtol=2e-2, atol=2e-2)
            dy.neg_()


@sixteen_bits
@pytest.mark.usefixtures("always")
def test_gradients_of_linear(dtype: torch.dtype) -> None:
    """Through the front door, once more when all is ready, and from the operator that torch.compile sees."""
    for n, k, sides in ((1024, 512, (2, 300)), (333, 1024, (97,)), (7, 64, (1,))):
        q, grad = weight(n, k, dtype=dtype), torch.randn((*sides, n), device=DEVICE).to(dtype)
        right = grad.double() @ hb.dequantize(q, F32).double()
        most = NOISE * error(grad @ hb.dequantize(q, dtype), right) if grad.numel() > 1 << 14 else 4e-3
        compiled = torch.compile(lambda x, q=q: hb.linear(x, q), fullgraph=True, backend="aot_eager")
        found = []
        for function in (hb.linear, hb.linear, lambda x, q, compiled=compiled: compiled(x)):
            x = torch.randn((*sides, k), device=DEVICE).to(dtype).requires_grad_()
            function(x, q).backward(grad)
            found.append(x.grad)
        assert error(found[0], right) <= most
        assert all(torch.equal(found[0], other) for other in found[1:])
        many = torch.randn((n, sides[-1]), device=DEVICE).to(dtype).t()  # strides that no kernel takes
        first, second = (torch.ops.halfbyte.linear_backward(given, *q.parts) for given in (many, many.contiguous()))
        assert torch.equal(first, second)


@pytest.mark.usefixtures("always")
def test_no_dense_weight_is_made() -> None:
    n, k = 8192, 8192
    q = weight(n, k)
    x = torch.randn((256, k), device=DEVICE).to(BF16).requires_grad_()
    for _ in range(2):  # the first time a workspace is made, which stays
        x.grad = None
        y = hb.linear(x, q)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        y.backward(y.detach())
        torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before < n * k  # half of what the dense weight takes


@pytest.mark.usefixtures("always")
def test_more_than_two_to_the_31_gradients() -> None:
    q = weight(256, 65536)
    dy = torch.randn((33000, 256), device=DEVICE).to(BF16)
    whole = gemm.plan_back(33000, problem_of(dy, q, None), properties_of(0))
    assert whole is not None
    out = torch.empty((33000, 65536), dtype=BF16, device=DEVICE)
    run(gemm, dy, q, None, out, whole)
    tail = torch.empty((40, 65536), dtype=BF16, device=DEVICE)
    like_it = replace(forward(40, 65536, 256, whole.tile_m), chunk=whole.chunk, back=True)
    run(gemm, dy[-40:].clone(), q, None, tail, decoding(like_it, problem_of(dy, q, None)))
    assert torch.equal(out[-40:], tail)
