"""Products that are ready, on a driver that is not there (drivers.py)."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Barrier
from typing import Any

import pytest
import torch
from drivers import BF16, F16, F32, Driver, make, pretend, right
from gpus import A100, H200

from halfbyte.kernels.common import driver, nvrtc, workspace
from halfbyte.kernels.linear import cache, cuda
from halfbyte.kernels.linear.dispatch import GroupChoice
from halfbyte.kernels.linear.kernel import plan_for, run
from halfbyte.kernels.linear.problem import problem_of
from halfbyte.kernels.linear.simt import launch as exact
from halfbyte.kernels.linear.sm75 import launch as tensor
from halfbyte.kernels.linear.sm90_decode import launch as decode
from halfbyte.kernels.linear.sm90_gemm import launch as gemm
from halfbyte.kernels.linear.sm90_gemm import times as gemm_times
from halfbyte.kernels.linear.sm90_gemm.plan import gemm_plan
from halfbyte.kernels.linear.sm90_streamk import launch as hopper
from halfbyte.kernels.linear.tune import h200


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    """A Hopper in the place of the CPU."""
    yield from pretend(monkeypatch, H200)


@pytest.fixture
def ampere(monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    yield from pretend(monkeypatch, A100)


@pytest.mark.parametrize(
    ("shape", "options", "dtype", "kernel"),
    [
        ((64, 1024), {}, BF16, decode),
        ((64, 1024), {"nested": False}, F16, decode),
        ((64, 320), {}, BF16, hopper),
        ((64, 512), {"format": "int4"}, F16, decode),
        ((64, 512), {"format": "int4", "group_size": 32}, F16, hopper),
        ((64, 1024), {}, F32, exact),
        ((33, 1000), {}, BF16, exact),
    ],
)
def test_every_kernel(
    gpu: Driver, shape: tuple[int, int], options: dict[str, Any], dtype: torch.dtype, kernel: Any
) -> None:
    n, k = shape
    q = gpu.like = make(n, k, **options)
    gpu.dtype = dtype
    for m in (1, 7, 1, 8, 3):
        for bias in (None, torch.randn(n).to(dtype)):
            x = torch.randn(m, 1, k).to(dtype)
            known = cuda.ready(x, q, bias, False)
            y = cuda.linear(x, q, bias, False)
            assert y is not None
            assert y.shape == (m, 1, n)
            assert torch.equal(y, right(x, q, bias))
            assert known is None or torch.equal(known, y)
            again = cuda.ready(x, q, bias, False)
            assert again is not None
            assert torch.equal(again, y)
            assert again.data_ptr() != y.data_ptr()
            assert cuda.ready(x.view(m, k), q, bias, False).shape == (m, n)
    assert {found for found, _ in gpu.seen} == {kernel}


@pytest.mark.parametrize("biased", [(), (1,), (0, 1, 2)])
@pytest.mark.parametrize("nested", [True, False])
def test_a_group(gpu: Driver, nested: bool, biased: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: -1)
    gpu.group = [make(n, 1024, nested=nested) for n in (64, 20, 4)]
    for m in (1, 8, 1, 3):
        x = torch.randn(m, 1, 1024).bfloat16()
        biases = [torch.randn(q.shape[0]).bfloat16() if part in biased else None for part, q in enumerate(gpu.group)]
        for _ in range(2):
            found = cuda.linear_group(x, gpu.group, biases)
            assert found is not None
            for y, q, bias in zip(found, gpu.group, biases, strict=True):
                assert y.shape == (m, 1, q.shape[0])
                assert torch.equal(y, right(x, q, bias))
    assert [m for _, m in gpu.seen] == [1, 1, 8, 8, 1, 1, 3, 3]
    moved = gpu.group[1].packed.data.clone()
    old, gpu.group[1].packed.data = gpu.group[1].packed.data, moved
    old.zero_()
    found = cuda.linear_group(x, gpu.group, biases)
    assert found is not None
    assert torch.equal(found[1], right(x, gpu.group[1], biases[1]))


def check_group(gpu: Driver, x: torch.Tensor, biases: list[torch.Tensor | None]) -> None:
    """The products are right, and what the driver has seen is of them alone."""
    gpu.seen.clear()
    gpu.others.clear()
    found = cuda.linear_group(x, gpu.group, biases)
    assert found is not None
    for y, q, bias in zip(found, gpu.group, biases, strict=True):
        assert torch.equal(y, right(x, q, bias))


@pytest.mark.slow
@pytest.mark.parametrize("format", ["nf4", "int4"])
def test_a_group_whose_x_is_laid_out_once(gpu: Driver, format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: -1)
    monkeypatch.setattr(h200, "GEMM_COPIED_START", 1e6)
    gemm_plan.cache_clear()
    gpu.group = [make(n, 1024, format=format) for n in (6600, 9000, 7002)]
    for m in (200, 256):
        x = torch.randn(m, 1024).bfloat16()
        biases = [None, torch.randn(9000).bfloat16(), None]
        for _ in range(2):
            check_group(gpu, x, biases)
            assert gpu.seen == [(hopper, m)] * 3
            assert gpu.others == [b"lay_out"]
    gemm_plan.cache_clear()


def test_a_group_is_bound_for_all_rows_of_a_plan(gpu: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    bound, prepare = [], decode._prepare
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: -1)
    monkeypatch.setattr(decode, "_prepare", lambda *given: bound.append(given) or prepare(*given))
    gpu.group = [make(n, 1024) for n in (64, 20)]
    for m in (1, 8, 3):
        x = torch.randn(m, 1024).bfloat16()
        found = cuda.linear_group(x, gpu.group, [None, None])
        assert found is not None
        assert all(torch.equal(y, right(x, q)) for y, q in zip(found, gpu.group, strict=True))
    assert len(bound) == 1


@pytest.mark.slow
@pytest.mark.parametrize("x_bytes", [1 << 24, 1024 * 2 * 300])
def test_a_group_of_many_rows(gpu: Driver, x_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each chunk of x is laid out once, for all weights."""
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: -1)
    monkeypatch.setattr(h200, "GEMM_X_BYTES", x_bytes)
    monkeypatch.setattr(
        gemm_times, "_ways", lambda m, n, k, tile_m, *_: [gemm_times.Way(1, tile_m)]
    )  # slow, if all go in one launch
    monkeypatch.setattr(h200, "GEMM_COPIED_START", 1e6)
    gemm_plan.cache_clear()
    monkeypatch.setattr(cuda, "choose_group", lambda *given: GroupChoice(gemm, gemm.plan_group(*given)))
    gpu.group = [make(600, 1024, format="int4") for _ in range(2)]
    biases = [torch.randn(600).bfloat16(), None]
    for m in (700, 690):  # as many tiles of x
        x = torch.randn(m, 1024).bfloat16()
        check_group(gpu, x, biases)
        plan = gemm.plan_group(m, [problem_of(x, q, None) for q in gpu.group], H200)
        assert plan is not None
        chunk = plan.plans[0].chunk
        rows = [min(chunk, m - first) for first in range(0, m, chunk)]
        assert len(rows) == (1 if x_bytes == 1 << 24 else 3)
        assert [m for _, m in gpu.seen] == [m for m in rows for _ in gpu.group]
        assert gpu.others == [b"lay_out"] * len(rows)
    gemm_plan.cache_clear()


def test_x_is_not_laid_out_ahead_where_ctas_hold_it(gpu: Driver) -> None:
    q, x = make(600, 1024), torch.randn(70, 1024).bfloat16()
    gpu.like = q
    for _ in range(2):
        y = cuda.linear(x, q, None, False)
        assert y is not None
        assert torch.equal(y, right(x, q))
    assert gpu.seen == [(hopper, 70)] * 2
    assert gpu.others == []


def test_workspaces_of_shared_sums(gpu: Driver) -> None:
    """One launch clears what the one before has left."""
    q, x = make(300, 4096), torch.randn(200, 4096).bfloat16()
    gpu.like = q
    for _ in range(3):
        cuda.linear(x, q, None, False)
    (first, second, nothing), (*turned, count), again = gpu.workspaces
    assert nothing == 0
    assert count > 0
    assert turned == [second, first]
    assert again == (first, second, count)


def test_workspaces_of_graphs(gpu: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """All launches of a capture have one, which grows with them; the next capture has another, and none is kept."""
    q, wide, x = make(300, 4096), make(2048, 4096), torch.randn(200, 4096).bfloat16()
    gpu.like = q
    cuda.linear(x, q, None, False)
    of_thread = gpu.workspaces.pop()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    gpu.capture = 5
    for gpu.like in (q, q, q, wide, q):
        cuda.linear(x, gpu.like, None, False)
    (first, second, nothing), (*turned, count), again, (larger, *unused), last = gpu.workspaces
    assert nothing == unused[1] == 0
    assert turned == [second, first]
    assert again == (first, second, count)
    assert larger not in (first, second)
    assert last[:2] == (unused[0], larger)
    assert not {first, second, larger, unused[0]} & set(of_thread[:2])
    (graph,) = workspace.kept.of_capture.values()
    gpu.capture = 6
    cuda.linear(x, q, None, False)
    assert graph not in workspace.kept.of_capture.values()
    assert gpu.workspaces[-1][2] == 0
    workspace.forget_capture()
    assert not workspace.kept.of_capture
    cuda.linear(x, q, None, False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    cuda.linear(x, q, None, False)
    assert not workspace.kept.of_capture
    assert gpu.workspaces[-1][:2] == of_thread[1::-1]


def test_what_is_no_group(gpu: Driver) -> None:
    weights, x = [make(n, 1024) for n in (64, 32)], torch.randn(2, 1024).bfloat16()
    for no in (
        (x.float(), weights, [None, None]),
        (x, [weights[0], make(32, 1024, nested=False)], [None, None]),
        (x, [weights[0], make(32, 1024, format="fp4")], [None, None]),
        (x, [weights[0], make(32, 1024, block_size=128)], [None, None]),
        (x, weights * 3, [None] * 6),
        (x, weights[:1], [None]),
        (torch.randn(33, 1024).bfloat16(), [weights[0], make(32, 1024, block_size=32)], [None, None]),
        (x[:0], weights, [None, None]),
    ):
        assert cuda.linear_group(*no) is None
    assert not gpu.seen


def test_tensor_with_and_without_splits(ampere: Driver) -> None:
    for n, k in ((16, 16384), (4096, 64)):
        q = ampere.like = make(n, k)
        splits = set()
        for m in (1, 9, 9, 33):
            x, out = torch.randn(m, k).bfloat16(), torch.zeros(m, n).bfloat16()
            plan = plan_for(tensor, x, q)
            splits.add(plan.splits)
            for _ in range(2):
                run(tensor, x, q, None, out.zero_(), plan)
                assert torch.equal(out, right(x, q))
        assert (max(splits) > 1) == (n == 16)
    assert {found for found, _ in ampere.seen} == {tensor}


@pytest.mark.parametrize(("rows", "invariant", "parts"), [(27, False, [27]), (8, True, [8]), (27, True, [8, 8, 8, 3])])
def test_rows_go_as_many_at_a_time_as_the_plan_takes(gpu: Driver, rows: int, invariant: bool, parts: list[int]) -> None:
    q = gpu.like = make(64, 1024)
    x, bias, out = torch.randn(rows, 1024).bfloat16(), torch.randn(64).bfloat16(), torch.zeros(rows, 64).bfloat16()
    run(decode, x, q, bias, out, plan_for(decode, x, q, bias, invariant))
    assert gpu.seen == [(decode, part) for part in parts]
    assert torch.equal(out, right(x, q, bias))


def test_many_rows_go_256_at_a_time_where_the_batch_must_not_matter(gpu: Driver) -> None:
    q = gpu.like = make(64, 320)
    x = torch.randn(600, 320).bfloat16()
    for _ in range(2):
        gpu.seen.clear()
        assert torch.equal(cuda.linear(x, q, None, True), right(x, q))
        assert [m for _, m in gpu.seen] == [256, 256, 88]
        assert cuda.ready(x, q, None, True) is None


def test_other_rows_of_a_known_weight(gpu: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """They need no second look, and of many numbers of rows the first are forgotten."""
    monkeypatch.setattr(cache, "MOST_ROWS_KEPT", 5)
    q = gpu.like = make(64, 1024)
    x = torch.randn(300, 1024).bfloat16()
    cuda.linear(x[:4], q, None, False)
    for m in (3, 4, 1, 70, 300, 2, 8, 100, 4):
        found = cuda.ready(x[:m], q, None, False)
        assert found is not None
        assert torch.equal(found, right(x[:m], q))
    (known,) = cache.products.entries.values()
    assert len(known.products) <= 5
    assert known.products[100] is not None
    monkeypatch.setattr(cuda, "choose", lambda *_: None)  # as if the dense weight were the faster way
    assert cuda.ready(x[:5], q, None, False) is None


def shifted(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.numel() + 1, dtype=tensor.dtype)[1:].view(tensor.shape).copy_(tensor)


def test_what_is_not_as_before_takes_the_long_way(gpu: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    q = gpu.like = make(64, 1024)
    x, bias = torch.randn(4, 1024).bfloat16(), torch.randn(64).bfloat16()
    cuda.linear(x, q, bias, False), cuda.linear(x, q, None, False)
    assert cuda.ready(x, q, bias, False) is not None
    for other in (
        x[0, :-1], x[0, 0], x.t().contiguous().t(), x[:, :1000], torch._neg_view(x), x.half(), shifted(x),
        x.to_sparse(), torch.empty(0, 1024).bfloat16(), x.view(-1),
    ):  # fmt: skip
        assert cuda.ready(other, q, None, False) is None
    for other in (bias[:-1], bias[None], bias.float(), bias.repeat(2)[::2], torch._neg_view(bias), shifted(bias)):
        assert cuda.ready(x, q, other, False) is None
    assert cuda.ready(x, q, bias, True) is None
    assert cuda.ready(x, replace(q, format="fp4"), bias, False) is None
    assert cuda.ready(x, replace(q, shape=(1024, 64)), bias, False) is None
    assert torch.equal(cuda.linear(shifted(x), q, bias, False), right(x, q, bias))
    assert torch.equal(cuda.linear(x, q, shifted(bias), False), right(x, q, bias))
    assert cuda.ready(x, q, shifted(bias), False) is None
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 1)
    assert cuda.ready(x, q, bias, False) is None


@pytest.mark.parametrize("nested", [True, False])
def test_a_weight_whose_memory_moves(gpu: Driver, nested: bool) -> None:
    q, other = make(64, 1024, nested=nested), make(64, 1024, nested=nested)
    gpu.like, x = q, torch.randn(4, 1024).bfloat16()
    assert torch.equal(cuda.linear(x, q, None, False), right(x, q))
    for tensor_, source in zip(q.tensors, other.tensors, strict=True):
        assert cuda.ready(x, q, None, False) is not None
        old, tensor_.data = tensor_.data, source.clone()
        assert cuda.ready(x, q, None, False) is None
        old.zero_()
        assert torch.equal(cuda.linear(x, q, None, False), right(x, q))
    assert torch.equal(cuda.ready(x, q, None, False), right(x, other))
    q.packed.copy_(255 - q.packed)
    assert torch.equal(cuda.ready(x, q, None, False), right(x, q))


def test_nothing_is_kept_alive(gpu: Driver) -> None:
    q, x = make(64, 1024), torch.randn(4, 1024).bfloat16()
    gpu.like = replace(q, packed=q.packed.clone())
    cuda.linear(x, q, None, False), cuda.ready(x, q, None, False)
    gone = [weakref.ref(tensor_) for tensor_ in (q.packed, x)]
    del q, x
    gc.collect()
    assert [reference() for reference in gone] == [None, None]


@pytest.mark.parametrize("shape", [(64, 1024), (64, 320)])
def test_threads_have_arguments_of_their_own(gpu: Driver, shape: tuple[int, int]) -> None:
    q, barrier = make(*shape), Barrier(2)
    gpu.like, gpu.pause = q, 1e-4
    inputs = [torch.randn(4, shape[1]).bfloat16() for _ in range(2)]
    rights = [right(x, q) for x in inputs]

    def work(i: int) -> list[bool]:
        barrier.wait()
        return [torch.equal(cuda.linear(inputs[i], q, None, False), rights[i]) for _ in range(30)]

    with ThreadPoolExecutor(2) as pool:
        assert all(all(found) for found in pool.map(work, range(2)))


def test_choices_are_pure(gpu: Driver) -> None:
    """The variant that a call takes is the one which is foretold from sizes alone."""
    loaded: list[nvrtc.Variant] = []
    gpu_cubin: Callable[[nvrtc.Variant], bytes] = lambda variant: loaded.append(variant) or b"1 0 0"  # noqa: E731
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(driver, "cubin", gpu_cubin)
        from halfbyte import warm

        for shape, options in (((64, 1024), {}), ((64, 320), {"nested": False}), ((64, 512), {"format": "int4"})):
            q = gpu.like = make(*shape, **options)
            settings = warm.Settings(q.format, q.block_size, q.nested is not None)
            foretold = warm.variants(warm.of_shapes([shape], [BF16], settings), (1, 9, 33), H200)
            loaded.clear()
            for m in (1, 9, 33):
                for invariant in (False, True):
                    cuda.linear(torch.randn(m, shape[1]).bfloat16(), q, None, invariant)
            assert set(loaded) == set(foretold)
            assert len(loaded) == len(set(loaded)) > 1
