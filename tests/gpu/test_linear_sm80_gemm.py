"""Many rows on any GPU from sm_80 on, forward and back: operands are the dequantized weights bit for bit."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn import functional

import halfbyte as hb
from halfbyte.kernels.common.device import properties_of
from halfbyte.kernels.linear import dispatch
from halfbyte.kernels.linear.kernel import run
from halfbyte.kernels.linear.problem import Problem, problem_of
from halfbyte.kernels.linear.sm80_gemm import launch as many
from halfbyte.kernels.linear.sm80_gemm.plan import ManyPlan, is_valid, many_plan
from halfbyte.kernels.linear.tune import h200
from halfbyte.measure.error import relative_error as error

from .conftest import BF16, DEVICE, F32, NOISE, POISON, captured, compile_ahead, poisoned, sixteen_bits, weight
from .test_linear_sm80_back import KINDS

both_ways = pytest.mark.parametrize("back", [False, True], ids=["forward", "back"])


def plans(m: int, problem: Problem, back: bool) -> list[ManyPlan]:
    """Every shape; one CTA, as many as there are tiles and numbers between and beyond."""
    properties, found = properties_of(0), []
    for shape, most in h200.MANY_SHAPES.items():
        for stages, resident in ((3, most), (4, 1)):
            row_tiles, column_tiles, depth = ManyPlan(back, *shape, stages, resident, 1).sizes(m, problem)
            tiles = row_tiles * column_tiles
            for ctas in sorted({1, tiles, tiles + 1, 3 * tiles // 2, tiles * depth, properties.sms * resident}):
                plan = ManyPlan(back, *shape, stages, resident, ctas)
                if is_valid(plan, m, problem, properties):
                    found.append(plan)
    return found


def multiplied(x: torch.Tensor, q: hb.QuantizedWeight, bias: torch.Tensor | None, plan: ManyPlan) -> torch.Tensor:
    """The kernel's result, with poison under it and around it."""
    assert is_valid(plan, len(x), problem_of(x, q, bias), properties_of(0))
    with poisoned((len(x), q.shape[1 if plan.back else 0]), x.dtype) as out:
        run(many, x, q, bias, out, plan)
    return out


def chosen_plan(x: torch.Tensor, q: hb.QuantizedWeight, bias: torch.Tensor | None, back: bool) -> ManyPlan:
    plan = many_plan(len(x), problem_of(x, q, bias), properties_of(0), back)
    assert plan is not None
    return plan


@sixteen_bits
@both_ways
@pytest.mark.parametrize(("format", "options"), KINDS)
def test_operands_are_what_dequantize_gives(
    format: str, options: dict[str, Any], back: bool, dtype: torch.dtype
) -> None:
    for n, k in ((336, 1024), (333, 512), (128, 4096), (515, 96), (7, 64), (8, 64), (1, 32)):
        if k % options.get("group_size", 1):
            continue
        q = weight(n, k, format, dtype, **options)
        dense = hb.dequantize(q, dtype)
        eye, right = torch.eye(n if back else k, dtype=dtype, device=DEVICE), dense if back else dense.t()
        found = plans(len(eye), problem_of(eye, q, None), back)
        compile_ahead(many, problem_of(eye, q, None), found)
        for plan in found:
            assert torch.equal(multiplied(eye, q, None, plan), right), (n, k, plan)


@sixteen_bits
@both_ways
@pytest.mark.parametrize(("format", "options"), KINDS)
def test_error(format: str, options: dict[str, Any], back: bool, dtype: torch.dtype) -> None:
    """Rows that fill no tile, tiles that several CTAs share; the same bits in every run."""
    for n, k in ((1029, 1024), (712, 5376), (4096, 4096), (14336, 160)):
        if k % options.get("group_size", 1):
            continue
        q = weight(n, k, format, dtype, **options)
        exact, dense = hb.dequantize(q, F32).double(), hb.dequantize(q, dtype)
        for m in (1, 64, 97, 300, 1025):
            x = torch.randn((m, n if back else k), device=DEVICE).to(dtype)
            bias = torch.randn(n, device=DEVICE).to(dtype) if m % 2 and not back else None
            if back:
                right, peer = x.double() @ exact, x @ dense
            else:
                added = 0 if bias is None else bias.double()
                right, peer = x.double() @ exact.t() + added, functional.linear(x, dense, bias)
            chosen = chosen_plan(x, q, bias, back)
            # Few results make a noisy norm. One CTA adds 14,336 products up in a row, of which cuBLAS makes parts.
            noise = (1.01 if max(n, k) > 1 << 13 else NOISE) if right.numel() >= 1 << 14 else 1.5
            for plan in (chosen, replace(chosen, ctas=1)):
                found = multiplied(x, q, bias, plan)
                assert torch.equal(found, multiplied(x, q, bias, plan))
                assert error(found, right) <= noise * error(peer, right), (m, plan)


@both_ways
@pytest.mark.parametrize("m", [7, 300])
@sixteen_bits
def test_every_way_to_share_the_work(m: int, back: bool, dtype: torch.dtype) -> None:
    q, x = weight(777, 672, dtype=dtype, block_size=32), torch.randn((m, 777 if back else 672), device=DEVICE).to(dtype)
    chosen = plans(m, problem_of(x, q, None), back)
    assert len(chosen) >= 20
    dense = hb.dequantize(q, dtype).double() if back else hb.dequantize(q, dtype).double().t()
    right, sizes = x.double() @ dense, x.double().abs() @ dense.abs()
    for plan in chosen:
        found = multiplied(x, q, None, plan)
        assert torch.equal(found, multiplied(x, q, None, plan))
        allowed = 0.51 * torch.finfo(dtype).eps * right.abs() + 1e-6 * sizes
        assert ((found.double() - right).abs() <= allowed).all(), plan


@both_ways
@pytest.mark.parametrize("n", [256, 1001])
def test_cuda_graph_and_streams(n: int, back: bool) -> None:
    q, x = weight(n, 256), torch.randn((140, n if back else 256), device=DEVICE).to(BF16)
    plan = replace(chosen_plan(x, q, None, back), ctas=3)
    right = multiplied(x, q, None, plan)
    out = torch.empty_like(right)
    graph, _ = captured(lambda: run(many, x, q, None, out, plan))
    for _ in range(3):
        out.fill_(POISON)
        graph.replay()
        assert torch.equal(out, right)
    with torch.cuda.stream(torch.cuda.Stream()):
        assert torch.equal(multiplied(x, q, None, plan), right)


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The kernel is chosen wherever it is for a weight."""
    monkeypatch.setattr(dispatch, "KERNELS", (many,))
    monkeypatch.setattr(dispatch, "BACK_KERNELS", (many,))
    monkeypatch.setattr(dispatch, "dense_microseconds", lambda *_: math.inf)
    dispatch.choose.cache_clear(), dispatch.choose_back.cache_clear()
    yield
    dispatch.choose.cache_clear(), dispatch.choose_back.cache_clear()


@sixteen_bits
@pytest.mark.usefixtures("always")
def test_linear_and_its_gradients(dtype: torch.dtype) -> None:
    """Through the front door, once more when all is ready, and of gradients with strides that no kernel takes."""
    for n, k, sides in ((1024, 512, (2, 300)), (333, 1024, (97,)), (7, 64, (1,))):
        q, grad = weight(n, k, dtype=dtype), torch.randn((*sides, n), device=DEVICE).to(dtype)
        exact, dense = hb.dequantize(q, F32).double(), hb.dequantize(q, dtype)
        right = grad.double() @ exact
        most = NOISE * error(grad @ dense, right) if grad.numel() > 1 << 14 else 4e-3
        found = []
        for _ in range(2):
            x = torch.randn((*sides, k), device=DEVICE).to(dtype).requires_grad_()
            y = hb.linear(x, q)
            assert error(y, x.double() @ exact.t()) <= (4e-3 if y.numel() > 1 << 14 else 8e-3)  # few make a noisy norm
            y.backward(grad)
            assert x.grad is not None
            found.append(x.grad)
        assert error(found[0], right) <= most
        assert torch.equal(*found)


@both_ways
@pytest.mark.usefixtures("always")
def test_no_dense_weight_is_made(back: bool) -> None:
    n, k = 8192, 8192
    q, x = weight(n, k), torch.randn((256, n), device=DEVICE).to(BF16)
    for _ in range(2):  # the first time a workspace is made, which stays
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        torch.ops.halfbyte.linear_backward(x, *q.parts) if back else hb.linear(x, q)
        torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before < n * k  # half of what the dense weight takes


@both_ways
def test_more_than_two_to_the_31_results(back: bool) -> None:
    q = weight(256, 65536) if back else weight(65536, 256)
    x = torch.randn((33000, 256), device=DEVICE).to(BF16)
    whole = chosen_plan(x, q, None, back)
    out = torch.empty((33000, 65536), dtype=BF16, device=DEVICE)
    run(many, x, q, None, out, whole)
    tail = multiplied(x[-40:].clone(), q, None, replace(whole, ctas=1))
    torch.testing.assert_close(out[-40:], tail, rtol=2e-2, atol=2e-2)  # other CTAs share other tiles
