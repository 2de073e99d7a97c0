"""Gradients of many rows on Hopper, dy @ W from 4 bits: operands are the dequantized weights bit for bit."""

from __future__ import annotations

import pytest
import torch

import halfbyte as hb
from halfbyte.kernels.common.device import properties_of
from halfbyte.kernels.linear.kernel import run
from halfbyte.kernels.linear.laid_out import span_of
from halfbyte.kernels.linear.problem import problem_of
from halfbyte.kernels.linear.sm90_gemm import launch as gemm
from halfbyte.kernels.linear.sm90_gemm.plan import TILES_M, GemmPlan, is_valid, x_stages
from halfbyte.measure.error import relative_error as error

from .conftest import BF16, DEVICE, F16, F32, captured, poisoned, sixteen_bits, weight
from .test_linear_gemm import KINDS, NOISE

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0), reason="needs Hopper"
)


def plan(m: int, n: int, k: int, tile_m: int, workers: int = 132, cluster: int = 1, chunk: int = 1 << 14) -> GemmPlan:
    chunk = max(1, chunk // tile_m) * tile_m
    last = (m - 1) % chunk + 1
    units = -(-k // (128 * cluster)) * -(-last // tile_m) * -(-n // 256)
    return GemmPlan(tile_m, 2, 3, x_stages(tile_m), min(workers // cluster, units), cluster, chunk, back=True)


def multiplied(dy: torch.Tensor, q: hb.QuantizedWeight, plan: GemmPlan) -> torch.Tensor:
    """The kernel's result, with poison under it and around it."""
    n, k = q.shape
    assert is_valid(plan, len(dy), k, n, span_of(problem_of(dy, q, None)), properties_of(0))
    with poisoned((len(dy), k), dy.dtype) as out:
        run(gemm, dy, q, None, out, plan)
    return out


@sixteen_bits
@pytest.mark.parametrize("cluster", [1, 2])
@pytest.mark.parametrize(("format", "options"), KINDS)
def test_operands_are_what_dequantize_gives(
    format: str, options: dict[str, int], cluster: int, dtype: torch.dtype
) -> None:
    for (n, k), tile_m in (((333, 1024), 96), ((130, 4096), 256), ((515, 96), 160), ((7, 64), 128)):
        if k % options.get("group_size", options.get("block_size", 64)):
            continue
        q = weight(n, k, format, dtype, **options)
        eye = torch.eye(n, dtype=dtype, device=DEVICE)
        for workers in (132, 6):
            found = multiplied(eye, q, plan(n, n, k, tile_m, workers, cluster, 1024))
            assert torch.equal(found, hb.dequantize(q, dtype)), (n, k, workers)


@pytest.mark.parametrize("cluster", [1, 2])
@pytest.mark.parametrize("tile_m", TILES_M)
def test_error(tile_m: int, cluster: int) -> None:
    """Rows that fill no tile, tiles that several CTAs share, launches one after the other."""
    for dtype, (n, k), (format, options) in ((BF16, (1029, 1024), KINDS[0]), (F16, (700, 5376), KINDS[5])):
        q = weight(n, k, format, dtype, **options)
        exact, dense = hb.dequantize(q, F32).double(), hb.dequantize(q, dtype)
        for m, chunk in ((1, 1 << 14), (tile_m + 1, 1 << 14), (3 * tile_m - 7, 2 * tile_m)):
            dy = torch.randn((m, n), device=DEVICE).to(dtype)
            right = dy.double() @ exact
            for workers in (132, 10):
                chosen = plan(m, n, k, tile_m, workers, cluster, chunk)
                found = multiplied(dy, q, chosen)
                assert torch.equal(found, multiplied(dy, q, chosen))
                assert error(found, right) <= NOISE * error(dy @ dense, right), (m, workers)


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
