"""linear's Triton kernels compile for AMD GPUs, each way through W with every kind of scale, and use matrix cores."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from halfbyte.formats.spec import FORMATS
from halfbyte.formats.weight import FLOAT_DTYPES, NestedScale
from halfbyte.kernels.common.device import DeviceProperties
from halfbyte.kernels.common.targets import HIP_TARGETS, compile_for, pointer

pytest.importorskip("triton")

from halfbyte.kernels.linear import triton, triton_plan

pytestmark = pytest.mark.slow

F16, BF16, F32 = FLOAT_DTYPES
GPUS = {"gfx942": DeviceProperties("hip", 0, 304), "gfx1100": DeviceProperties("hip", 0, 96)}
LDS = 64 * 1024


def empty(*shape: int, dtype: torch.dtype = F32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


# Rows of x, N, K, dtype of x, format, block size, nested, batch_invariant; a few of them for each target, and all in
# `make compile-all`.
CASES = [
    (1, 4096, 4096, BF16, "nf4", 64, True, False),
    (1, 28672, 8192, F16, "mxfp4", 32, False, False),
    (1, 1024, 4096, F32, "int4", 128, False, False),
    (8, 4096, 4096, BF16, "nf4", 64, True, False),
    (64, 28672, 8192, F16, "mxfp4", 32, False, False),
    (20, 1024, 4096, F32, "int4", 128, False, False),
    (1, 4096, 4096, BF16, "int4", 128, False, True),
    (64, 4096, 14336, F32, "nf4", 64, True, False),
    (3, 1000, 1001, BF16, "nf4", 64, True, False),
    (64, 28672, 1000, F32, "fp4", 64, False, False),
    (1, 2**17, 2**15, BF16, "nf4", 64, True, False),
    (1, 4096, 64, BF16, "nf4", 64, True, False),
]
FEW = {"gfx942": (0, 3, 4, 8), "gfx1100": (0, 3, 5, 8)}


@pytest.mark.parametrize(
    ("target", "case"),
    [
        pytest.param(target, i, marks=[] if i in FEW[target] else [pytest.mark.compile_all])
        for target in HIP_TARGETS
        for i in range(len(CASES))
    ],
)
def test_compiles(target: str, case: int, monkeypatch: pytest.MonkeyPatch) -> None:
    m, n, k, dtype, format, size, nested, batch_invariant = CASES[case]
    properties, spec = GPUS[target], FORMATS[format]
    kept: list[tuple[Any, ...]] = []
    monkeypatch.setattr(triton, "launch", lambda *launch: kept.append(launch))
    monkeypatch.setattr(triton, "properties_of", lambda index: properties)
    blocks = -(-n * k // size)
    packed = empty(*spec.packed_shape((n, k)), dtype=getattr(torch, spec.packed_dtype))
    scale_dtype = torch.uint8 if nested else dtype if spec.scale_dtype is None else getattr(torch, spec.scale_dtype)
    scale = empty(*spec.scale_shape((n, k), size), dtype=scale_dtype)
    second = NestedScale(empty(256), empty(-(-blocks // 256)), empty(1)) if nested else None
    x, bias, out = (empty(*shape, dtype=dtype) for shape in ((m, k), (n,), (m, n)))
    triton.linear(x, packed, scale, second, spec, size, bias, out, batch_invariant)
    plan = triton_plan.plan(m, n, k, dtype, size, properties, batch_invariant)
    assert len(kept) == 1 + (plan.parts > 1)
    for kernel, _, arguments, _, configure in kept:
        signature, unaligned, ones = {}, [], {}
        for name, value in zip(kernel.arg_names, arguments, strict=False):
            if isinstance(value, torch.Tensor):
                signature[name] = pointer(value.dtype)
            elif value == 1:  # a constant to Triton
                ones[name] = 1
            else:
                signature[name] = "i32" if value < 2**31 else "i64"
                unaligned += [name] * (value % 16 > 0)
        _, options = configure(properties)
        constants = {name: options.pop(name) for name in kernel.arg_names if name in options}
        compiled = compile_for(kernel, target, signature, constants | ones, unaligned, **options)
        asm = compiled.asm["amdgcn"]
        assert compiled.metadata.shared <= LDS
        assert re.search(r"\.vgpr_spill_count: 0\b", asm)
        uses = bool(re.search(r"v_mfma_|v_wmma_", asm))
        assert uses == (kernel is triton.linear_product_kernel and (dtype != F32 or target == "gfx942"))
