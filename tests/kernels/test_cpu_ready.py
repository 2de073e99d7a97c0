"""Products on a CPU that are ready: the bits of the first call, of what is in memory now, and nothing kept alive."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import halfbyte as hb
from halfbyte import eager
from halfbyte.formats.spec import FORMATS
from halfbyte.formats.weight import FLOAT_DTYPES
from halfbyte.kernels.common import float_strips, paired_products, products, threads
from halfbyte.kernels.linear import cpu, cpu_ready

BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def _nothing_is_ready() -> None:
    cpu_ready.weights.entries.clear()


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of x of each product that was not ready."""
    found: list[int] = []
    linear = cpu.linear
    monkeypatch.setattr(cpu, "linear", lambda x, *given: found.append(len(x)) or linear(x, *given))
    return found


def weight(format: str = "nf4", n: int = 40, k: int = 256, **options: Any) -> hb.QuantizedWeight:
    return hb.quantize(torch.randn(n, k).to(options.pop("dtype", BF16)), format, **options)


def anew(x: Tensor, q: hb.QuantizedWeight, bias: Tensor | None = None) -> Tensor:
    return eager.linear_anew(x, q, bias, False)


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
@pytest.mark.parametrize("format", sorted(FORMATS))
def test_the_bits_of_the_first_call(format: str, dtype: torch.dtype, fresh: list[int]) -> None:
    for nested in {False, FORMATS[format].nests}:
        q = weight(format, dtype=torch.float32, **({"nested": nested} if FORMATS[format].nests else {}))
        bias = torch.randn(40).to(dtype)
        for m in (1, 5):
            x = torch.randn(m, 256).to(dtype)
            first = [hb.linear(x, q), hb.linear(x, q, bias)]
            fresh.clear()
            again = [hb.linear(x, q), hb.linear(x, q, bias)]
            assert fresh == []
            assert all(torch.equal(*pair) for pair in zip(first, again, strict=True))
            assert hb.linear(x.view(1, m, 256), q).shape == (1, m, 40)


def test_what_is_in_memory_now(fresh: list[int]) -> None:
    """Also where everything of a weight changes in place, and where x is another tensor."""
    q, other, x, bias = weight(), weight(), torch.randn(3, 256).to(BF16), torch.randn(40).to(BF16)
    hb.linear(x, q, bias)
    for tensor, new in zip(q.tensors, other.tensors, strict=True):
        tensor.copy_(new * 2 if tensor is q.nested.offset else new)
    bias.mul_(2)
    y = torch.randn(3, 256).to(BF16)
    found = hb.linear(y, q, bias)
    assert fresh == [3]
    assert torch.equal(found, anew(y, q, bias))
    assert not torch.equal(found, anew(y, other, bias))


def test_what_is_not_as_kernels_take_it(fresh: list[int]) -> None:
    q, x, bias = weight(), torch.randn(4, 256).to(BF16), torch.randn(80).to(BF16)
    right = hb.linear(x, q, bias[:40].contiguous())
    wide, twice = torch.randn(4, 512).to(BF16), torch.empty(80, dtype=BF16)
    wide[:, ::2], twice[::2] = x, bias[:40]
    for given, given_bias in ((wide[:, ::2], bias[:40]), (torch._neg_view(-x), bias[:40]), (x, twice[::2])):
        fresh.clear()
        assert torch.equal(hb.linear(given, q, given_bias), right)
        assert fresh == [4]
    for wrong, wrong_bias, words in (
        (x, bias, "bias has shape"), (x, bias[:40].float(), "bias has dtype"), (x[:, :128], None, "x has shape"),
        (x.double(), None, "float64"), (x.view(2, 512), None, "x has shape"),
    ):  # fmt: skip
        with pytest.raises((TypeError, ValueError), match=words):
            hb.linear(wrong, q, wrong_bias)


def test_rows_that_were_not_asked_for_yet(fresh: list[int]) -> None:
    q = weight()
    for m in (1, 2, 1, 2, cpu_ready.MOST_ROWS + 1, cpu_ready.MOST_ROWS + 1, 0, 0):
        hb.linear(torch.randn(m, 256), q)
    assert fresh == [1, 2, *2 * [cpu_ready.MOST_ROWS + 1], 0, 0]
    assert len(cpu_ready.weights.entries) == 1


@pytest.mark.parametrize("dtype", [torch.float16, BF16], ids=str)
def test_scales_of_16_bits(dtype: torch.dtype, fresh: list[int]) -> None:
    """They are read as they are, also when they have changed."""
    q, x = weight("int4"), torch.randn(1, 256).to(BF16)
    wide = replace(q, scale=q.scale.to(dtype).float())
    q = replace(q, scale=q.scale.to(dtype))
    once = hb.linear(x, q)
    assert torch.equal(once, hb.linear(x, wide))
    q.scale.mul_(2)
    fresh.clear()
    assert torch.equal(hb.linear(x, q), 2 * once)
    assert fresh == []


def test_nothing_is_kept_alive() -> None:
    q, x = weight(), torch.randn(1, 256).to(BF16)
    hb.linear(x, q)
    assert len(cpu_ready.weights.entries) == 1
    alive = [weakref.ref(tensor) for tensor in (q.packed, q.scale, q.nested.absmax, q.nested.offset, x)]
    del q, x
    gc.collect()
    assert [ref() for ref in alive] == [None] * 5


def test_gradients_go_where_they_went() -> None:
    """Also to an x whose product is ready."""
    q, x = weight(dtype=torch.float32), torch.randn(2, 256)
    hb.linear(x, q)
    x.requires_grad_()
    y = hb.linear(x, q)
    y.sum().backward()
    torch.testing.assert_close(x.grad, hb.dequantize(q).sum(0).expand(2, -1), atol=1e-4, rtol=1e-4)
    with torch.no_grad():
        assert not hb.linear(x, q).requires_grad


def test_weights_without_numbers(fresh: list[int]) -> None:
    for n, k in ((40, 0), (0, 256)):
        q = weight(n=n, k=k)
        for _ in range(2):
            assert torch.equal(hb.linear(torch.randn(2, k), q), torch.zeros(2, n))


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
def test_the_order_of_many_rows(
    dtype: torch.dtype, batch_invariant: bool, monkeypatch: pytest.MonkeyPatch, fresh: list[int]
) -> None:
    """A product that is ready has the one that it had before, where a few rows are more than some kernel's few."""
    assert cpu_ready.MOST_ROWS <= cpu.MOST_PAIRED
    monkeypatch.setattr(float_strips, "MOST_FEW", 4)
    q = weight(k=1024)
    for m in (4, 5, 16):
        x = torch.randn(m, 1024).to(dtype)
        first = hb.linear(x, q, batch_invariant=batch_invariant)
        fresh.clear()
        assert torch.equal(hb.linear(x, q, batch_invariant=batch_invariant), first)
        assert fresh == []
        if batch_invariant:
            assert torch.equal(hb.linear(x[:1], q, batch_invariant=True), first[:1])


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
@pytest.mark.parametrize("format", ["nf4", "int4"])
def test_threads(format: str, dtype: torch.dtype, fresh: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """The bits are those of one thread, where threads begin in machine code and where they cannot."""
    q, x = weight(format, n=600, k=4096), torch.randn(3, 4096).to(dtype)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        hb.linear(x, q)
        alone = hb.linear(x, q)
        torch.set_num_threads(2)
        assert torch.equal(hb.linear(x, q), alone)
        monkeypatch.setattr(threads, "_openmp", lambda: None)
        assert torch.equal(hb.linear(x, q), alone)
    finally:
        torch.set_num_threads(before)
    assert fresh == [3]


def test_a_thread_that_runs_out_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The result is not handed out."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    for module in (products, paired_products):
        monkeypatch.setattr(module, "_together", lambda *given: False)
    q, x = weight(n=600, k=4096), torch.randn(1, 4096).to(BF16)
    hb.linear(x, q)
    with pytest.raises(MemoryError, match="a thread of a CPU kernel"):
        hb.linear(x, q)
