"""Products with what stands beside them: when one launch does it, what it is handed, and that it compiles."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from drivers import BF16, F16, Driver, make, pretend
from gpus import H200
from torch import Tensor

import halfbyte as hb
from halfbyte import eager_fused
from halfbyte.kernels.common import nvrtc
from halfbyte.kernels.common.norm import Norm
from halfbyte.kernels.linear import cuda
from halfbyte.kernels.linear.dispatch import choose_fused
from halfbyte.kernels.linear.fusion import ACTIVATIONS, ALONE, Beside, Fusion, Residual
from halfbyte.kernels.linear.problem import Problem
from halfbyte.kernels.linear.sm90_decode import launch as decode
from halfbyte.kernels.linear.sm90_streamk import launch as streamk
from halfbyte.kernels.pointwise import reference as pointwise
from halfbyte.models.products import Fused, variant_of_product

NORM, GATE, ADD = Fusion(norm=(1e-5, 0.0)), Fusion(norm=(1e-6, 1.0), activation="silu"), Fusion(residual=1.0)


def problem(n: int, k: int, **changes: Any) -> Problem:
    return Problem(**{"dtype": BF16, "n": n, "k": k, "format": "nf4", "block_size": 64, "scale": torch.uint8,
                      "nested": 256} | changes)  # fmt: skip


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    yield from pretend(monkeypatch, H200)


@pytest.mark.parametrize("m", [1, 8, 16])
def test_the_products_of_a_layer_are_fused(m: int) -> None:
    hidden, inner = 4096, 14336
    cases = [
        ([problem(n, hidden) for n in (4096, 1024, 1024)], NORM),
        ([problem(hidden, hidden)], ADD),
        ([problem(inner, hidden)] * 2, GATE),
        ([problem(hidden, inner)], ADD),
    ]
    for group, fusion in cases:
        found = choose_fused(m, tuple(group), fusion, H200)
        assert found is not None
        assert found.kernel is (decode if m <= 8 or group[0].k == hidden else streamk)


def test_what_is_not_fused() -> None:
    one = problem(4096, 4096)
    assert choose_fused(1, (problem(4096, 4096, dtype=torch.float32),), ADD, H200) is None
    assert choose_fused(1, (one,), ALONE, H200) is None
    assert choose_fused(1, (problem(4094, 4096),), replace(NORM, residual=1.0), H200) is None
    with pytest.raises(AssertionError, match="of one size"):
        decode.plan_fused(1, [one, problem(4100, 4096)], GATE, H200)
    with pytest.raises(AssertionError, match="one product"):
        decode.plan_fused(1, [one, one], ADD, H200)


@pytest.mark.parametrize(("n", "changes"), [(4096, {"block_size": 32, "scale": BF16, "nested": 0}), (4094, {})])
def test_weights_that_are_not_for_sm90_decode(n: int, changes: dict[str, Any]) -> None:
    """The other kernel norms x, too."""
    group = (problem(n, 4096, **changes),)
    assert decode.plan_fused(1, group, NORM, H200) is None
    found = choose_fused(1, group, NORM, H200)
    assert found is not None
    assert found.kernel is streamk


def test_a_pair_that_is_not_alike_is_normed_first() -> None:
    """And then gated by two launches, of which others need one."""
    pair = (problem(25600, 5120), problem(25600, 5120, scale=torch.float32, nested=0))
    found = choose_fused(32, pair[:1] * 2, GATE, H200)
    assert found is not None
    assert found.kernel is streamk
    assert cast(Any, found.plan).is_one_launch
    assert choose_fused(32, pair, GATE, H200) is None
    found = choose_fused(32, pair, replace(GATE, norm=None), H200)
    assert found is not None
    assert found.kernel is streamk
    first, second = cast(Any, found.plan).plans
    assert (first.activation, second.activation) == ("", "silu")


def test_both_tiles_of_a_gated_pair_are_counted() -> None:
    """132 pairs are one for each multiprocessor of an H200, though they are 264 tiles."""
    pair = [problem(132 * 16, 4096)] * 2
    gated, plain = (decode.plan_fused(1, pair, fusion, H200) for fusion in (GATE, ALONE))
    assert gated is not None
    assert plain is not None
    assert gated.tiles_at_once == 2
    assert gated.microseconds == pytest.approx(plain.microseconds, rel=0.05)
    more = decode.plan_fused(1, [problem(133 * 16, 4096)] * 2, GATE, H200)
    assert more is not None
    assert more.microseconds > gated.microseconds * 1.1


@pytest.mark.parametrize("dtype", [F16, BF16])
@pytest.mark.parametrize("norm", [None, 0.0, 1.0])
@pytest.mark.parametrize("kind", ["group", "silu", "gelu_tanh", "residual"])
def test_what_is_handed_over(gpu: Driver, dtype: torch.dtype, norm: float | None, kind: str) -> None:
    """One launch gives what launches of their own give, for x and tensors that come and go."""
    n, k = 64, 1024
    sizes = {"group": (64, 20, 4), "residual": (n,)}.get(kind, (n, n))
    gpu.group, gpu.dtype = [make(size, k) for size in sizes], dtype
    gpu.activation = kind if kind in ACTIVATIONS else ""
    biases = [None if part == 1 else torch.randn(size).to(dtype) for part, size in enumerate(sizes)]
    for m in (1, 8, 1, 3):
        x = torch.randn(m, 1, k).to(dtype)
        given = None if norm is None else Norm(torch.randn(k).to(dtype), 1e-3, norm)
        residual = Residual(torch.randn(m, 1, n).to(dtype), 0.5) if kind == "residual" else None
        found = cuda.fused(x, gpu.group, biases, Beside(given, gpu.activation, residual))
        if kind == "group" and norm is None:  # that is what `linear_group` does
            assert found is None
            return
        assert found is not None
        exactly = normed(x, given).float()
        right = [
            hb.linear(exactly, q, None if bias is None else bias.float())
            for q, bias in zip(gpu.group, biases, strict=True)
        ]
        if gpu.activation:
            right = [pointwise.gated(*right, gpu.activation)]
        if residual is not None:
            right = [residual.value + 0.5 * right[0]]
        assert len(found) == len(right)
        for y, exact in zip(found, right, strict=True):
            assert y.shape == exact.shape
            assert y.dtype is dtype
            torch.testing.assert_close(y.float(), exact, rtol=2e-2, atol=0.1)
    assert [rows for _, rows in gpu.seen] == [1, 8, 1, 3]


@pytest.mark.parametrize("kind", ["silu", "residual"])
def test_what_is_handed_over_where_x_is_laid_out(gpu: Driver, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gate has a launch and a result of its own, and the other one combines with it."""
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: -1)
    n, k = 64, 320
    gpu.group, gpu.activation = (
        [make(n, k), make(n, k, nested=False)][: 1 if kind == "residual" else 2],
        kind if kind == "silu" else "",
    )
    biases = [torch.randn(n).bfloat16(), None][: len(gpu.group)]
    for m in (1, 20, 64):
        x = 0.05 * torch.randn(m, k).bfloat16()
        residual = Residual(torch.randn(m, n).bfloat16(), 0.5) if kind == "residual" else None
        beside = Beside(None, gpu.activation, residual)
        assert cuda.fused(x, gpu.group, biases, beside._replace(norm=Norm(torch.randn(k).bfloat16(), 1e-5))) is None
        found = cuda.fused(x, gpu.group, biases, beside)
        assert found is not None
        right = [hb.linear(x, q, bias).float() for q, bias in zip(gpu.group, biases, strict=True)]
        exact = pointwise.gated(*right, "silu") if residual is None else residual.value + 0.5 * right[0]
        torch.testing.assert_close(found[0].float(), exact, rtol=2e-2, atol=0.02)
    assert {kernel for kernel, _ in gpu.seen} == {streamk}


def normed(x: Tensor, norm: Norm | None) -> Tensor:
    return x if norm is None else pointwise.rms_norm(x, *norm)


@pytest.mark.parametrize("kind", ["group", "silu", "residual"])
def test_launches_of_their_own(kind: str) -> None:
    """On a CPU, which has no other way."""
    x, residual = torch.randn(3, 1, 128), torch.randn(3, 1, 64)
    weights = [make(64, 128), make(64, 128)][: 1 if kind == "residual" else 2]
    norm, biases = Norm(torch.randn(128), 1e-5), [torch.randn(64), None][: len(weights)]
    right = [hb.linear(normed(x, norm), q, bias) for q, bias in zip(weights, biases, strict=True)]
    if kind == "residual":
        found = eager_fused.products(x, weights, biases, Beside(norm, residual=Residual(residual, 2.0)))
        right = [residual + 2 * right[0]]
    else:
        found = eager_fused.products(x, weights, biases, Beside(norm, "" if kind == "group" else kind))
        right = right if kind == "group" else [pointwise.gated(*right, kind)]
    for y, exact in zip(found, right, strict=True):
        torch.testing.assert_close(y, exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["silu", "residual"])
def test_what_prompts_fuse(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A gate, behind a norm in a launch of its own, and nothing else; and that is what is compiled ahead."""
    asked = []

    def in_one_launch(*given: Any) -> None:
        asked.append(given[3:])

    monkeypatch.setattr(eager_fused, "_in_one_launch", in_one_launch)
    x, weights = torch.randn(70, 128), [make(64, 128)] * (2 if kind == "silu" else 1)
    norm, residual = Norm(torch.randn(128), 1e-5), Residual(torch.randn(70, 64)) if kind == "residual" else None
    activation = kind if kind == "silu" else ""
    eager_fused.products(x, weights, [None] * len(weights), Beside(norm, activation, residual), many=True)
    assert asked == ([(Beside(None, "silu"),)] if activation else [])
    fusion = Fusion((1e-5, 0.0), activation, residual and 1.0, static=True)
    group = (problem(4096, 4096),) * len(weights)
    variant = variant_of_product(300, Fused(group, fusion), H200, False)
    assert (variant is not None) is (kind == "silu")
    assert variant is None or dict(variant.constants)["paired"] is True


@pytest.mark.slow
@pytest.mark.parametrize(
    ("m", "sizes", "k", "fusion"),
    [
        (1, (4096, 1024, 1024), 4096, Fusion(norm=(1e-5, 0.0), static=True)),
        (8, (14336, 14336), 4096, Fusion(norm=(1e-5, 0.0), activation="silu", static=True)),
        (16, (25600, 25600), 5120, Fusion(norm=(1e-5, 1.0), activation="gelu_tanh", static=True)),  # in clusters
        (4, (4096,), 14336, Fusion(residual=1.0)),
        (32, (4096,), 14336, Fusion(residual=1.0)),
        (64, (14336, 14336), 4096, Fusion(activation="silu")),
    ],
)
def test_it_compiles(m: int, sizes: tuple[int, ...], k: int, fusion: Fusion) -> None:
    group = tuple(problem(n, k, dtype=F16 if m == 8 else BF16) for n in sizes)
    kernel = decode if m <= 16 else streamk
    plan = kernel.plan_fused(m, group, fusion, H200)
    assert plan is not None
    variant = kernel.group_variant(group, plan, H200)
    assert variant is not None
    assert len(nvrtc.cubin(variant)) > 1000
