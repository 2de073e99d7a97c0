"""A format is data: one that is registered in a few lines runs everywhere, and no kernel hears of it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from toys import toy as toy

import halfbyte as hb
from halfbyte import warm
from halfbyte.formats.spec import FORMATS, Format, register
from halfbyte.kernels.common import nvrtc
from halfbyte.kernels.common.device import properties_for
from halfbyte.kernels.dequantize import reference as dequantized
from halfbyte.kernels.quantize import reference as quantized
from halfbyte.measure.error import relative_error

N, K = 48, 192
SOURCE = Path(hb.__file__).parent


def defined(weight: Tensor, toy: Format, block_size: int) -> Tensor:
    """What the format's definition makes of a weight [N, K], in fp64: of all values the nearest to weight / scale."""
    blocks = weight.double().view(-1, block_size)
    scales = (blocks.abs().amax(1, keepdim=True).float() / toy.largest).half().double()
    values = torch.tensor(toy.codebook, dtype=torch.float64)
    away = (blocks / scales).unsqueeze(-1) - values
    return (values[away.abs().argmin(-1)] * scales).view(weight.shape)


@pytest.mark.parametrize("block_size", [32, 64])
def test_quantize_and_dequantize(toy: Format, block_size: int) -> None:
    weight = torch.randn(N, K)
    q = hb.quantize(weight, toy.name, block_size=block_size)
    assert (q.scale.dtype, q.scale.shape) == (torch.float16, (N * K // block_size,))
    torch.testing.assert_close(hb.dequantize(q).double(), defined(weight, toy, block_size), rtol=1e-6, atol=0)
    packed, scale, out = torch.zeros_like(q.packed), torch.zeros_like(q.scale), torch.empty(N, K)
    for like in ("cpu", "cuda"):
        quantized.quantize(weight, toy, block_size, packed, scale, like=like)
        assert torch.equal(scale, q.scale)
        dequantized.dequantize(packed, scale, None, toy, block_size, out)
        assert torch.equal(out, hb.dequantize(q))  # of zero's two nibbles a CPU and a GPU choose differently


@pytest.mark.parametrize("shape", [(1, 1), (3, 31), (7, 33)])
def test_odd_shapes(toy: Format, shape: tuple[int, int]) -> None:
    weight = torch.randn(shape)
    back = hb.dequantize(hb.quantize(weight, toy.name))
    steps = max(b - a for a, b in zip(sorted(toy.codebook), sorted(toy.codebook)[1:], strict=False))
    assert ((back - weight).abs() <= 0.51 * steps * weight.abs().max() / toy.largest).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("m", [1, 5, 300])
def test_linear(toy: Format, m: int, dtype: torch.dtype) -> None:
    q = hb.quantize(torch.randn(N, K), toy.name)
    x, bias = torch.randn(m, K).to(dtype), torch.randn(N).to(dtype)
    exact = functional.linear(x.double(), hb.dequantize(q, torch.float32).double(), bias.double())
    theirs = functional.linear(x, hb.dequantize(q, dtype), bias)
    most = 1.05 * relative_error(theirs, exact) + torch.finfo(torch.float32).eps
    assert relative_error(hb.linear(x, q, bias), exact) <= most


def test_in_search(toy: Format) -> None:
    q, query = hb.quantize(torch.randn(N, K), toy.name), torch.randn(3, K)
    distance, row = hb.nearest(query, q, 2)
    expected = torch.cdist(query.double(), hb.dequantize(q).double()).topk(2, largest=False)
    torch.testing.assert_close(distance.double(), expected.values, rtol=1e-5, atol=0)
    assert torch.equal(row, expected.indices)


CASES = {  # target, N and K, block size: what each CUDA kernel is chosen for
    "decode": ("sm_90", (4096, 4096), 64),
    "hopper": ("sm_90", (4096, 4096), 32),
    "tensor": ("sm_80", (4096, 4096), 32),
    "exact": ("sm_80", (33, 63), 32),
}


@pytest.mark.parametrize("kernel", CASES)
def test_compiles_in_every_cuda_kernel(toy: Format, kernel: str) -> None:
    target, shape, block_size = CASES[kernel]
    settings = warm.Settings(toy.name, block_size, False)
    variants = warm.variants(warm.of_shapes([shape], [torch.bfloat16], settings), [1], properties_for(target))
    assert variants
    for variant in variants[:1]:
        assert nvrtc.compile_cubin(variant.source, variant.capability, dict(variant.constants))


def test_a_name_is_taken_once(toy: Format) -> None:
    with pytest.raises(ValueError, match=f"{toy.name}' is registered already"):
        register(toy)


def test_no_library_stores_it(toy: Format) -> None:
    q = hb.quantize(torch.randn(N, K), toy.name)
    with pytest.raises(ValueError, match="bitsandbytes has 'nf4' and 'fp4'"):
        hb.to_bitsandbytes(q)


# What measures names what it measures, and hosts that name formats in files of theirs say which name is whose.
NAMERS = ("formats", "bench", "roofline", "measure")


def test_no_format_is_named_outside_formats() -> None:
    """Neither as a string nor as an object of formats/: who asks for a name will not know the next one."""
    found = []
    for path in SOURCE.rglob("*.py"):
        if path.relative_to(SOURCE).parts[0] in NAMERS:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            named = isinstance(node, ast.Constant) and node.value in FORMATS
            imported = isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[-1] in FORMATS
            if named or imported:
                found.append(f"{path.relative_to(SOURCE)}:{node.lineno}")
    assert not found
