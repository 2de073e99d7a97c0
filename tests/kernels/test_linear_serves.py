"""What is said of the kernel that serves a weight: what `choose` and `plan` pick, and what is missing elsewhere."""

from __future__ import annotations

import pytest
import torch
from gpus import MI300X

import halfbyte as hb
from halfbyte.kernels.common.device import properties_for
from halfbyte.kernels.linear import dispatch, reach
from halfbyte.kernels.linear import serves as module
from halfbyte.kernels.linear.problem import INVARIANT_ROWS, Problem
from halfbyte.kernels.linear.serves import serves
from halfbyte.kernels.linear.sm90_gemm import launch as sm90_gemm

HALF, FULL = torch.bfloat16, torch.float32


def problem(dtype: torch.dtype = HALF, n: int = 4096, k: int = 4096) -> Problem:
    return Problem(dtype, n, k, "nf4", 64, torch.uint8, 256)


@pytest.mark.parametrize("dtype", [torch.float16, HALF, FULL], ids=str)
def test_on_a_cpu(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    assert serves(hb.quantize(torch.randn(64, 128)), dtype) == "numba"
    told = serves(hb.quantize(torch.randn(64, 100)), dtype)
    assert told == "numba dequantize, then torch.matmul: K = 100 is no multiple of 32"
    monkeypatch.setattr(module, "has_numba", lambda: False)
    assert serves(hb.quantize(torch.randn(64, 128)), dtype) == "torch: numba is missing"


def test_on_a_device_without_kernels() -> None:
    q = hb.quantize(torch.randn(64, 128)).to("meta")
    assert serves(q, HALF) == "torch reference"


@pytest.mark.parametrize("dtype", [torch.float16, HALF, FULL], ids=str)
@pytest.mark.parametrize("target", ["sm_75", "sm_80", "sm_90", "sm_120"])
def test_on_cuda_it_is_the_kernel_that_is_chosen(target: str, dtype: torch.dtype) -> None:
    properties = properties_for(target)
    choice = dispatch.choose(1, problem(dtype), properties, False)
    assert choice is not None
    name = choice.kernel.NAME
    assert module._on_cuda(problem(dtype), properties, None) == f"CUDA C++ {name} ({target})"


def test_the_kernels_by_name() -> None:
    assert module._on_cuda(problem(HALF), properties_for("sm_90"), None) == "CUDA C++ sm90_decode (sm_90)"
    assert module._on_cuda(problem(HALF), properties_for("sm_80"), None) == "CUDA C++ simt (sm_80)"
    assert module._on_cuda(problem(FULL), properties_for("sm_90"), None) == "CUDA C++ simt (sm_90)"


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, HALF, FULL], ids=str)
@pytest.mark.parametrize("target", ["sm_75", "sm_80", "sm_90", "sm_120"])
def test_no_kernel_takes_bytes_that_are_not_nested(target: str, dtype: torch.dtype, batch_invariant: bool) -> None:
    """Their scales are exponents of two, which sm80 decodes for x of 16 bits, and sm90_decode for few rows of bf16."""
    properties = properties_for(target)
    served = dtype is not FULL and target != "sm_75"
    for block_size in (32, 64):
        o = Problem(dtype, 4096, 4096, "mxfp4", block_size, torch.uint8)
        for m in (1, 8, INVARIANT_ROWS) if batch_invariant else (1, 8, 300, 4096):
            plans = [kernel.plan(m, o, properties, batch_invariant) for kernel in (*dispatch.KERNELS, sm90_gemm)]
            assert any(plan is not None for plan in plans) == served
            assert (reach.without_scales(m, o, properties) is None) == served
            if m <= 256:
                assert (dispatch.choose(m, o, properties, batch_invariant) is not None) == served
    unknown = Problem(dtype, 64, 64, "mxfp4", 64, torch.uint8)
    told = module._on_cuda(unknown, properties, reach.without_scales(1, unknown, properties))
    lacks = "torch.matmul: linear has a CUDA kernel for the scales of mxfp4 from sm_80 (Ampere) on"
    assert told == f"CUDA C++ sm80 ({target})" if served else lacks in told
    assert reach.without_scales(300, problem(HALF), properties) is None


def test_on_an_amd_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for there, told in ((True, "Triton"), (False, "torch: Triton is missing")):
        monkeypatch.setattr(module, "has_triton", lambda there=there: there)
        for dtype in (torch.float16, HALF, FULL):
            assert module._on_amd(4096, 4096, dtype) == module._on_amd(33, 1001, dtype) == told
    monkeypatch.setattr(module, "has_triton", lambda: True)
    assert "torch.matmul: the weight has more rows or columns" in module._on_amd(2**31, 32, HALF)
    assert "no stacks of experts" in str(reach.without_kernels(MI300X))


def test_what_is_missing_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = properties_for("sm_90")
    lack = reach.Lack("the compiler is missing", "buy one")
    for there, name in ((True, "Triton"), (False, "torch")):
        monkeypatch.setattr(module, "has_triton", lambda there=there: there)
        told = module._on_cuda(problem(), properties, lack)
        assert told == f"{name} dequantize, then torch.matmul: the compiler is missing"
    assert "no kernel is for such a weight" in module._on_cuda(problem(n=0), properties, None)
