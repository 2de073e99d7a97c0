"""Several weights in one launch: operands are the dequantized weights bit for bit, nothing is written beyond the end,
and the same input gives the same bits."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import halfbyte as hb
from halfbyte.kernels.common.device import properties_of
from halfbyte.kernels.linear import cuda
from halfbyte.kernels.linear.dispatch import choose_group
from halfbyte.kernels.linear.problem import addresses, problem_of
from halfbyte.kernels.linear.sm90_gemm import launch as gemm
from halfbyte.kernels.linear.sm90_gemm import plan as gemm_plans
from halfbyte.kernels.linear.sm90_streamk import launch as streamk
from halfbyte.kernels.linear.sm90_streamk import plan as streamk_plans
from halfbyte.kernels.linear.tune import h200

from .conftest import BF16, DEVICE, F16, captured, poisoned, weight

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0), reason="needs Hopper"
)
KERNELS = {gemm: gemm_plans, streamk: streamk_plans}
KINDS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("nf4", {}), ("nf4", {"nested": False}), ("fp4", {"block_size": 32, "nested": False}),
    ("int4", {"group_size": 128}),
)  # fmt: skip


class Group:
    """Weights, and their products by one launch of a kernel, into memory with poison around it."""

    def __init__(self, kernel: Any, weights: list[hb.QuantizedWeight], biases: list[Tensor | None]) -> None:
        self.kernel, self.weights, self.biases = kernel, weights, biases

    def __call__(self, x: Tensor, into: list[Tensor]) -> None:
        m, device = len(x), torch.device("cuda", torch.cuda.current_device())
        group = tuple(problem_of(x, q, bias) for q, bias in zip(self.weights, self.biases, strict=True))
        plan = KERNELS[self.kernel].in_one_launch(m, group, properties_of(0))
        assert plan is not None
        product = self.kernel.bind_group(device, m, group, tuple(map(addresses, self.weights)), plan)
        results = [0 if one is None else one.data_ptr() for one in self.biases]
        told = [address for bias, out in zip(results, into, strict=True) for address in (bias, out.data_ptr())]
        product(torch.cuda.current_stream().cuda_stream, x.data_ptr(), m, told)

    def checked(self, x: Tensor) -> list[Tensor]:
        with ExitStack() as around:
            outs = [around.enter_context(poisoned((len(x), q.shape[0]), x.dtype)) for q in self.weights]
            self(x, outs)
        return outs


def check(y: Tensor, x: Tensor, q: hb.QuantizedWeight, bias: Tensor | None) -> None:
    """Two roundings, of the codebook and of the result, and little else; of many results, the error against fp64 is
    about that of dequantize and F.linear, which adds up in another order."""
    dense = hb.dequantize(q, torch.float32).double()
    exact = functional.linear(x.double(), dense, None if bias is None else bias.double())
    sizes = x.double().abs() @ dense.abs().t() + (0 if bias is None else bias.double().abs())
    error, theirs = ((found - exact).abs() for found in (y, functional.linear(x, hb.dequantize(q), bias)))
    assert (error <= 1.01 * torch.finfo(x.dtype).eps * sizes).all()
    if y.numel() >= 1000:
        assert error.norm() <= (1.02 if y.numel() >= 1 << 14 else 1.5) * theirs.norm()


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of x, so that few rows take several launches."""
    monkeypatch.setattr(h200, "GEMM_X_BYTES", 1 << 20)


@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize(("format", "options"), KINDS)
def test_operands_are_the_dequantized_weights(format: str, options: dict[str, Any], dtype: torch.dtype) -> None:
    """Of sm90_gemm; the identity takes them out again, from every part of K."""
    k = 640
    weights = [weight(n, k, format, dtype, **options) for n in (700, 129, 66, 1)]
    for y, q in zip(
        Group(gemm, weights, [None] * 4).checked(torch.eye(k, dtype=dtype, device=DEVICE)), weights, strict=True
    ):
        assert torch.equal(y.t(), hb.dequantize(q))


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("m", [1, 9, 33, 64, 65, 97, 300])
@pytest.mark.parametrize(
    ("sides", "k"),
    [((4096, 1024, 1024), 4096), ((1000, 777, 65), 2304), ((130, 1), 64), ((14336, 14336), 1024), ((9, 8, 7, 6), 320)],
)
def test_products(kernel: Any, m: int, sides: tuple[int, ...], k: int) -> None:
    """Also one after the other: a launch clears what the one before has left."""
    weights = [weight(n, k) for n in sides]
    biases = [torch.randn(n, device=DEVICE).to(BF16) if n % 3 else None for n in sides]
    group, first = Group(kernel, weights, biases), None
    for seed in (1, 2, 1):
        x = torch.randn((m, k), device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(seed)).to(BF16)
        found = group.checked(x)
        for y, q, bias in zip(found, weights, biases, strict=True):
            check(y, x, q, bias)
        first = first or found
    assert all(map(torch.equal, first, found))


@pytest.mark.usefixtures("small_chunks")
def test_chunks_of_x() -> None:
    weights = [weight(n, 2048) for n in (700, 300)]
    x = torch.randn((900, 2048), device=DEVICE).to(BF16)
    for y, q in zip(Group(gemm, weights, [None, None]).checked(x), weights, strict=True):
        check(y, x, q, None)


@pytest.mark.parametrize("m", [32, 64, 200, 1024])
def test_the_public_way(m: int) -> None:
    """What `linear_group` takes, in a graph too, whose x then changes."""
    weights = [weight(n, 4096) for n in (4096, 1024, 1024)]
    x = torch.randn((m, 4096), device=DEVICE).to(BF16)
    choice = choose_group(m, tuple(problem_of(x, q, None) for q in weights), properties_of(0))
    assert choice is not None
    assert choice.plan.is_one_launch
    graph, outs = captured(lambda: cuda.linear_group(x, weights, [None] * 3))
    for _ in range(3):
        graph.replay()
        found = cuda.linear_group(x, weights, [None] * 3)
        assert all(map(torch.equal, outs, found))
        for y, q in zip(found, weights, strict=True):
            check(y, x, q, None)
        x.copy_(torch.randn_like(x))
