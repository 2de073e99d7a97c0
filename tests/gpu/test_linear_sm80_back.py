"""Gradients on any GPU from sm_80 on, dy @ W from 4 bits: operands are the dequantized weights bit for bit."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

import halfbyte as hb
from halfbyte.kernels.common.device import properties_of
from halfbyte.kernels.linear import dispatch
from halfbyte.kernels.linear.kernel import run
from halfbyte.kernels.linear.problem import problem_of
from halfbyte.kernels.linear.sm80_back import launch as back
from halfbyte.kernels.linear.sm80_back.plan import BackPlan, is_valid
from halfbyte.kernels.linear.tune import h200
from halfbyte.measure.error import relative_error as error

from .conftest import BF16, DEVICE, F32, NOISE, POISON, captured, compile_ahead, poisoned, sixteen_bits, weight

KINDS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("nf4", {}),
    ("nf4", {"nested": False}),
    ("nf4", {"block_size": 32}),
    ("fp4", {"block_size": 32, "nested": False}),
    ("fp4", {"block_size": 4096}),
    ("int4", {"group_size": 32}),
    ("int4", {"group_size": 128}),
    ("mxfp4", {}),
)


def plans(m: int, q: hb.QuantizedWeight, dtype: torch.dtype) -> list[BackPlan]:
    """Every width, few and many stages; one CTA, as many as there are tiles and numbers between and beyond."""
    dy, properties, found = torch.empty((m, q.shape[0]), dtype=dtype, device=DEVICE), properties_of(0), []
    problem = problem_of(dy, q, None)
    for columns, most in h200.SM80_BACK_SHAPES.items():
        for stages, resident in ((3, 1), (4, most)):
            row_tiles, column_tiles, depth = BackPlan(columns, stages, resident, 1).sizes(m, problem)
            tiles = row_tiles * column_tiles
            for ctas in sorted({1, tiles, tiles + 1, 3 * tiles // 2, tiles * depth, properties.sms * resident}):
                plan = BackPlan(columns, stages, resident, ctas)
                if is_valid(plan, m, problem, properties):
                    found.append(plan)
    return found


def multiplied(dy: torch.Tensor, q: hb.QuantizedWeight, plan: BackPlan) -> torch.Tensor:
    """The kernel's result, with poison under it and around it."""
    assert is_valid(plan, len(dy), problem_of(dy, q, None), properties_of(0))
    with poisoned((len(dy), q.shape[1]), dy.dtype) as out:
        run(back, dy, q, None, out, plan)
    return out


@sixteen_bits
@pytest.mark.parametrize(("format", "options"), KINDS)
def test_operands_are_what_dequantize_gives(format: str, options: dict[str, Any], dtype: torch.dtype) -> None:
    for n, k in ((336, 1024), (333, 1024), (128, 4096), (515, 96), (7, 64), (8, 64), (1, 32)):
        if k % options.get("group_size", 1):
            continue
        q = weight(n, k, format, dtype, **options)
        eye, dense = torch.eye(n, dtype=dtype, device=DEVICE), hb.dequantize(q, dtype)
        chosen = plans(n, q, dtype)
        compile_ahead(back, problem_of(eye, q, None), chosen)
        for plan in chosen:
            assert torch.equal(multiplied(eye, q, plan), dense), (n, k, plan)


@sixteen_bits
@pytest.mark.parametrize(("format", "options"), KINDS)
def test_error(format: str, options: dict[str, Any], dtype: torch.dtype) -> None:
    """Rows that fill no tile, tiles that several CTAs share; the same bits in every run."""
    for n, k in ((1029, 1024), (712, 5376), (4096, 4096), (14336, 160)):
        if k % options.get("group_size", 1):
            continue
        q = weight(n, k, format, dtype, **options)
        exact, dense = hb.dequantize(q, F32).double(), hb.dequantize(q, dtype)
        for m in (1, 17, 64, 97, 300):
            dy = torch.randn((m, n), device=DEVICE).to(dtype)
            right, chosen = dy.double() @ exact, back.plan_back(m, problem_of(dy, q, None), properties_of(0))
            assert chosen is not None
            # Few results make a noisy norm. One CTA adds 14,336 products up in a row, of which cuBLAS makes parts.
            noise = (1.01 if n > 1 << 13 else NOISE) if m * k >= 1 << 14 else 1.5
            for plan in (chosen, replace(chosen, ctas=1)):
                found = multiplied(dy, q, plan)
                assert torch.equal(found, multiplied(dy, q, plan))
                assert error(found, right) <= noise * error(dy @ dense, right), (m, plan)


@pytest.mark.parametrize("m", [7, 100])
@sixteen_bits
def test_every_way_to_share_the_work(m: int, dtype: torch.dtype) -> None:
    q, dy = weight(777, 672, dtype=dtype, block_size=32), torch.randn((m, 777), device=DEVICE).to(dtype)
    chosen = plans(m, q, dtype)
    assert len(chosen) >= 20
    right = dy.double() @ hb.dequantize(q, dtype).double()
    sizes = dy.double().abs() @ hb.dequantize(q, dtype).double().abs()
    for plan in chosen:
        found = multiplied(dy, q, plan)
        assert torch.equal(found, multiplied(dy, q, plan))
        allowed = 0.51 * torch.finfo(dtype).eps * right.abs() + 1e-6 * sizes
        assert ((found.double() - right).abs() <= allowed).all(), plan


@pytest.mark.parametrize("n", [256, 1001])
def test_cuda_graph_and_streams(n: int) -> None:
    q, dy = weight(n, 256), torch.randn((40, n), device=DEVICE).to(BF16)
    shape = back.plan_back(40, problem_of(dy, q, None), properties_of(0))
    assert shape is not None
    plan = replace(shape, ctas=3)
    right, dx = multiplied(dy, q, plan), torch.empty((40, 256), dtype=BF16, device=DEVICE)
    graph, _ = captured(lambda: run(back, dy, q, None, dx, plan))
    for _ in range(3):
        dx.fill_(POISON)
        graph.replay()
        assert torch.equal(dx, right)
    with torch.cuda.stream(torch.cuda.Stream()):
        assert torch.equal(multiplied(dy, q, plan), right)


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The kernel is chosen wherever it is for a weight."""
    monkeypatch.setattr(dispatch, "BACK_KERNELS", (back,))
    monkeypatch.setattr(dispatch, "dense_microseconds", lambda *_: math.inf)
    dispatch.choose_back.cache_clear()
    yield
    dispatch.choose_back.cache_clear()


@sixteen_bits
@pytest.mark.usefixtures("always")
def test_gradients_of_linear(dtype: torch.dtype) -> None:
    """Through the front door, once more when all is ready, and of gradients with strides that no kernel takes."""
    for n, k, sides in ((1024, 512, (2, 300)), (333, 1024, (97,)), (7, 64, (1,))):
        q, grad = weight(n, k, dtype=dtype), torch.randn((*sides, n), device=DEVICE).to(dtype)
        right = grad.double() @ hb.dequantize(q, F32).double()
        most = NOISE * error(grad @ hb.dequantize(q, dtype), right) if grad.numel() > 1 << 14 else 4e-3
        found = []
        for _ in range(2):
            x = torch.randn((*sides, k), device=DEVICE).to(dtype).requires_grad_()
            hb.linear(x, q).backward(grad)
            assert x.grad is not None
            found.append(x.grad)
        assert error(found[0], right) <= most
        assert torch.equal(*found)
        many = torch.randn((n, sides[-1]), device=DEVICE).to(dtype).t()
        first, second = (torch.ops.halfbyte.linear_backward(given, *q.parts) for given in (many, many.contiguous()))
        assert torch.equal(first, second)


@pytest.mark.usefixtures("always")
def test_no_dense_weight_is_made() -> None:
    n, k = 8192, 8192
    q, dy = weight(n, k), torch.randn((256, n), device=DEVICE).to(BF16)
    for _ in range(2):  # the first time a workspace is made, which stays
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        torch.ops.halfbyte.linear_backward(dy, *q.parts)
        torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before < n * k  # half of what the dense weight takes


def test_more_than_two_to_the_31_gradients() -> None:
    q = weight(256, 65536)
    dy = torch.randn((33000, 256), device=DEVICE).to(BF16)
    whole = back.plan_back(33000, problem_of(dy, q, None), properties_of(0))
    assert whole is not None
    out = torch.empty((33000, 65536), dtype=BF16, device=DEVICE)
    run(back, dy, q, None, out, whole)
    tail = multiplied(dy[-40:].clone(), q, replace(whole, ctas=1))
    torch.testing.assert_close(out[-40:], tail, rtol=2e-2, atol=2e-2)  # other CTAs share other tiles
