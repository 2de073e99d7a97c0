"""Gradients through Hopper's kernel for many rows: when it is chosen, and what it is handed, GPU or not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from drivers import BF16, F16, F32, Driver, make, pretend
from gpus import A100, H200
from torch import Tensor

import halfbyte as hb
from halfbyte.formats.weight import QuantizedWeight
from halfbyte.kernels.linear import cuda, dispatch
from halfbyte.kernels.linear.dispatch import choose_back
from halfbyte.kernels.linear.problem import Problem
from halfbyte.kernels.linear.reference import linear_exact
from halfbyte.kernels.linear.sm80_gemm import launch as sm80_gemm
from halfbyte.kernels.linear.sm90_gemm import launch as gemm
from halfbyte.kernels.linear.sm90_gemm import times as gemm_times
from halfbyte.kernels.linear.sm90_gemm.plan import gemm_plan
from halfbyte.kernels.linear.tune import h200


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    for there in pretend(monkeypatch, H200):
        there.back = True
        yield there


def right(grad: Tensor, q: QuantizedWeight) -> Tensor:
    return linear_exact(grad, hb.dequantize(q, F32).t()).to(grad.dtype)


def multiplied(grad: Tensor, q: QuantizedWeight) -> Tensor | None:
    multiply = cuda.backward(grad, q)
    return None if multiply is None else multiply(grad)


def test_when_it_is_chosen() -> None:
    """On Hopper, for x of 16 bits, where it takes less time than the dense weight."""
    usual = Problem(BF16, 14336, 4096, "nf4", 64, torch.uint8, 256)
    for m in (1, 100, 512):
        choice = choose_back(m, usual, H200)
        assert choice is not None
        assert choice.kernel is gemm
        assert choice.plan.back
    for changes in ({"dtype": F32}, {"k": 4096 + 32}, {"align_packed": 8}):
        assert choose_back(512, replace(usual, **changes), H200) is None
    elsewhere = choose_back(512, usual, A100)
    assert elsewhere is not None
    assert elsewhere.kernel is sm80_gemm
    assert choose_back(512, replace(usual, n=14335), H200) is not None  # of rows of W there may be any number
    assert choose_back(8192, usual, H200) is None


def test_narrow_tiles_for_few_rows() -> None:
    usual = Problem(BF16, 14336, 4096, "nf4", 64, torch.uint8, 256)
    tiles = [choose_back(m, usual, H200).plan.tile_m for m in (1, 33, 512)]
    assert tiles[0] == 32 < tiles[1] <= 96 < tiles[2]


@pytest.mark.parametrize(
    ("shape", "options"),
    [((64, 1024), {}), ((333, 192), {"nested": False}), ((40, 96), {"format": "fp4", "block_size": 32})],
)
@pytest.mark.parametrize("dtype", [BF16, F16])
def test_what_it_is_handed(gpu: Driver, shape: tuple[int, int], options: dict[str, object], dtype: torch.dtype) -> None:
    q = gpu.like = make(*shape, dtype, **options)
    gpu.dtype = dtype
    for sides in ((1,), (70,), (2, 35)):
        grad = torch.randn(*sides, shape[0]).to(dtype)
        for _ in range(2):
            found = multiplied(grad, q)
            assert found is not None
            assert found.shape == (*sides, shape[1])
            assert torch.equal(found, right(grad, q))
    assert {rows for _, rows in gpu.seen} == {1, 70}
    assert set(gpu.others) == ({b"lay_out"} if shape[0] % 8 else set())


def test_a_weight_whose_memory_moves(gpu: Driver) -> None:
    q, other = make(64, 1024), make(64, 1024)
    gpu.like, grad = q, torch.randn(4, 64).bfloat16()
    assert torch.equal(multiplied(grad, q), right(grad, q))
    for tensor, source in zip(q.tensors, other.tensors, strict=True):
        old, tensor.data = tensor.data, source.clone()
        old.zero_()
        assert torch.equal(multiplied(grad, q), right(grad, q))


def test_rows_go_in_launches_one_after_the_other(gpu: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    q = gpu.like = make(64, 256)
    monkeypatch.setattr(gemm_times, "_ways", lambda m, n, k, tile_m, *others: [gemm_times.Way(1, tile_m)])
    monkeypatch.setattr(gemm_times, "_ways_of_mates", lambda *others: [])
    monkeypatch.setattr(h200, "BACK_DECODERS_UNIT", {})
    monkeypatch.setattr(h200, "DENSE_START", 1000.0)
    monkeypatch.setattr(h200, "SM80_BACK_START", 1000.0)
    for choice in (choose_back, gemm_plan):
        choice.cache_clear()
    grad = torch.randn(1000, 64).bfloat16()
    assert torch.equal(multiplied(grad, q), right(grad, q))
    assert len(gpu.seen) > 2
    assert sum(rows for _, rows in gpu.seen) == 1000
    for choice in (choose_back, gemm_plan):
        choice.cache_clear()


def test_what_is_left_to_torch(gpu: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    q = make(64, 1024)
    assert multiplied(torch.randn(0, 64).bfloat16(), q) is None
    assert multiplied(torch.randn(3, 64), q) is None
    monkeypatch.setattr(dispatch, "dense_microseconds", lambda *_: 0.0)
    choose_back.cache_clear()
    assert multiplied(torch.randn(3, 64).bfloat16(), q) is None
    choose_back.cache_clear()
    assert not gpu.seen
