"""What the tests on a GPU share. They need a CUDA device and bitsandbytes' CUDA library; without a device each file is
imported and skipped as a whole."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import halfbyte as hb
from halfbyte.formats.spec import FORMATS, codebook_tensor
from halfbyte.formats.weight import FLOAT_DTYPES
from halfbyte.kernels.common import nvrtc
from halfbyte.kernels.common.capture import capture
from halfbyte.kernels.common.device import properties_of
from halfbyte.kernels.experts import cuda as experts
from halfbyte.kernels.experts import grouped as grouped_experts
from halfbyte.kernels.experts import sort
from halfbyte.kernels.linear import grouped
from halfbyte.kernels.linear.codebook import factor_of
from halfbyte.kernels.linear.kernel import Kernel
from halfbyte.kernels.linear.problem import Problem
from halfbyte.measure.error import relative_error as error

DEVICE = torch.device("cuda", 0)
F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
POISON = 777.0  # a number that no result has
NOISE = 1.003  # times F.linear's error, of products whose operands are the same: only the order of sums differs

every_dtype = pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
sixteen_bits = pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
needs_two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


class Unavailable(pytest.Module):
    """A file whose thousands of cases are not even listed, which takes ten seconds."""

    def collect(self) -> Iterable[pytest.Item | pytest.Collector]:
        assert self.obj.__doc__  # it can be imported
        pytest.skip("needs a CUDA device", allow_module_level=True)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    return None if torch.cuda.is_available() else Unavailable.from_parent(parent, path=module_path)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def sorts_as_other_gpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A Hopper GPU multiplies with experts as others do: by sm80_gemm, all pairs sorted, without a cluster."""
    monkeypatch.setattr(grouped, "HOPPER", 0)
    monkeypatch.setattr(sort, "ctas_of", lambda pairs, properties: 1)
    monkeypatch.setattr(experts, "_product", lambda *arguments, **options: None)  # the kernel for few pairs
    for kept in (grouped_experts.products, sort.launches):
        kept.entries.clear()
    yield
    for kept in (grouped_experts.products, sort.launches):
        kept.entries.clear()


@contextmanager
def poisoned(shape: Sequence[int], dtype: torch.dtype, before: int = 64) -> Iterator[Tensor]:
    """Memory for a result, full of poison, behind `before` more of it and ahead of 64, which must stay as they are."""
    numel = torch.Size(shape).numel()
    buffer = torch.full((before + numel + 64,), POISON, dtype=dtype, device=DEVICE)
    yield buffer[before : before + numel].view(shape)
    assert (buffer[:before] == POISON).all()
    assert (buffer[before + numel :] == POISON).all()


def weight(n: int, k: int, format: str = "nf4", dtype: torch.dtype = BF16, **options: Any) -> hb.QuantizedWeight:
    """A random weight whose products are of the size of x; the test is skipped where its groups do not divide K."""
    if k % options.get("group_size", 1):
        pytest.skip("groups do not divide K")
    return hb.quantize((torch.randn((n, k), device=DEVICE) / k**0.5).to(dtype), format, **options)


def check_product(
    x: Tensor,
    q: hb.QuantizedWeight,
    multiply: Callable[[Any, Tensor | None], Tensor],
    plans: Sequence[Any],
    noise: float = 1.0,
) -> None:
    """The error against fp64 is not above that of dequantize and F.linear, and the next run gives the same bits.

    multiply: of a plan and a bias. noise: how many times that error is as good, where operands are the same and only
    the order of sums is another.
    """
    m, n = len(x), q.shape[0]
    bias = torch.randn(n, device=DEVICE).to(x.dtype) if m % 2 else None
    exact, dense = hb.dequantize(q, F32).double(), hb.dequantize(q, x.dtype)
    right, sizes = x.double() @ exact.t(), x.double().abs() @ exact.abs().t()
    if bias is not None:
        right, sizes = right + bias.double(), sizes + bias.double().abs()
    most = error(torch.nn.functional.linear(x, dense, bias), right)
    for plan in plans:
        ours = multiply(plan, bias)
        assert torch.equal(ours, multiply(plan, bias)), plan
        # Two roundings, of the codebook and of the result, and little else.
        assert ((ours.double() - right).abs() <= 1.01 * torch.finfo(x.dtype).eps * sizes).all(), plan
        if m * n >= 1000:  # few outputs make a noisy norm
            assert error(ours, right) <= most * (noise if m * n >= 1 << 14 else 1.5), plan


def compile_ahead(kernel: Kernel[Any], problem: Problem, plans: Iterable[Any]) -> None:
    """The variants of many plans, side by side: one after the other they would take longer than all that they do."""
    variants = {kernel.variant(problem, plan, properties_of(0)) for plan in plans}
    with ThreadPoolExecutor() as pool:
        list(pool.map(nvrtc.cubin, variants))


def captured(function: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    """A call as a CUDA graph, and what it returned: memory that every replay writes anew."""
    graph = torch.cuda.CUDAGraph()
    with capture(graph):
        results = function()
    return graph, results


def on_another_stream(function: Callable[[], Any]) -> Any:
    """What a call returns that runs on a stream of its own, once it is done."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        results = function()
    side.synchronize()
    return results


def check_replay(function: Callable[[], Sequence[Tensor]], expected: Sequence[Tensor]) -> None:
    """A replayed call writes the bits that are expected, wherever there was something else."""
    graph, results = captured(function)
    for result in results:
        result.fill_(77)
    graph.replay()
    assert all(map(torch.equal, results, expected))


def decoded(q: hb.QuantizedWeight, dtype: torch.dtype) -> Tensor:
    """The weights as kernels have them that scale sums: of codebooks that 16 bits do not hold, a number rounded to
    `dtype` times its scale. For int4 and mxfp4 that is what dequantize gives."""
    if q.format in ("int4", "mxfp4"):
        return hb.dequantize(q, dtype)
    nibbles = torch.stack((q.packed.view(torch.uint8).view(-1) >> 4, q.packed.view(torch.uint8).view(-1) & 15), 1)
    codebook, factor = codebook_tensor(FORMATS[q.format], DEVICE), factor_of(q.format, dtype)
    ones = replace(q, packed=torch.full_like(q.packed, 17 * codebook.tolist().index(1.0)), dtype=F32)
    numbers = (codebook * factor).to(dtype).float()[nibbles.view(q.shape).long()] * hb.dequantize(ones)
    return (numbers * torch.tensor(1 / factor, dtype=F32, device=DEVICE)).to(dtype)
