"""The product of one row of x with a dense weight on a CPU."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("numba")

from halfbyte.kernels.head import cpu

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
@pytest.mark.parametrize(("n", "k"), [(1, 1), (7, 33), (1000, 896), (3000, 4096)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_error(n: int, k: int, dtype: torch.dtype, has_bias: bool) -> None:
    torch.manual_seed(n)
    weight, x = (torch.randn(n, k) / k**0.5).to(dtype), torch.randn(1, 1, k).to(dtype)
    bias = torch.randn(n).to(dtype) if has_bias else None
    assert cpu.supports(x, weight, bias)
    found = cpu.head(x, weight, bias)
    right = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    assert found.shape == (1, 1, n)
    assert found.dtype is dtype
    torch.testing.assert_close(found.double(), right, rtol=torch.finfo(dtype).eps, atol=2e-6)


def test_threads_change_no_bit() -> None:
    weight, x = torch.randn(5000, 700).to(BF16), torch.randn(1, 700).to(BF16)
    right, threads = cpu.head(x, weight, None), torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            assert torch.equal(cpu.head(x, weight, None), right)
    finally:
        torch.set_num_threads(threads)


def test_what_is_no_number() -> None:
    weight, x = torch.ones(4, 64, dtype=BF16), torch.ones(1, 64, dtype=BF16)
    weight[1, 3], weight[2, 5] = float("nan"), float("inf")
    found = cpu.head(x, weight, None)[0]
    assert found[0] == found[3] == 64
    assert found[1].isnan()
    assert found[2] == float("inf")


def test_supports() -> None:
    weight, x = torch.zeros(8, 32, dtype=BF16), torch.zeros(1, 32, dtype=BF16)
    assert cpu.supports(x, weight, None)
    assert not cpu.supports(torch.zeros(2, 32, dtype=BF16), weight, None)
    assert not cpu.supports(x[:0], weight, None)
    assert not cpu.supports(x.float(), weight, None)
    assert not cpu.supports(x.to(F16), weight.to(F16), None)
    assert not cpu.supports(x[:, ::2], weight[:, ::2], None)
    assert not cpu.supports(x, weight, torch.zeros(8))
    assert cpu.head(x, weight[:0], None).shape == (1, 0)
