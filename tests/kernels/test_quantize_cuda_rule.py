"""The reference's other rule, that of bitsandbytes' CUDA kernels, as far as a CPU can tell: tests/gpu has the rest."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from halfbyte.formats.bitsandbytes import FORMATS
from halfbyte.formats.nested import dynamic_code
from halfbyte.formats.weight import FLOAT_DTYPES
from halfbyte.kernels.quantize import reference
from halfbyte.kernels.quantize.reference import Like

CPU = torch.device("cpu")

formats = pytest.mark.parametrize("format", FORMATS)
dtypes = pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)


def quantize(weight: Tensor, format: str, like: Like) -> tuple[Tensor, Tensor]:
    """Nibbles [numel] and absmax of `weight` in blocks of 64, from outputs full of rubbish."""
    packed = torch.randint(0, 256, ((weight.numel() + 1) // 2, 1), dtype=torch.uint8)
    absmax = torch.full((-(-weight.numel() // 64),), -12345.0)
    reference.quantize(weight, FORMATS[format], 64, packed, absmax, like=like)
    return torch.cat((packed >> 4, packed & 15), dim=1).view(-1), absmax


@dtypes
@formats
def test_the_cuda_rule_differs_only_where_it_should(format: str, dtype: torch.dtype) -> None:
    """Ordinary weights get the same nibbles, FP4's zero and its ties aside; blocks of zeros and NaN do not."""
    weight = torch.randn(512, 64).to(dtype)
    nibbles, absmax = quantize(weight, format, like="cuda")
    cpu_nibbles, cpu_absmax = quantize(weight, format, like="cpu")
    assert torch.equal(absmax, cpu_absmax)
    both_zero = (nibbles & 7 == 0) & (cpu_nibbles & 7 == 0) & (format == "fp4")
    assert ((nibbles == cpu_nibbles) | both_zero).float().mean() > (0.9999 if format == "nf4" else 0.99)

    weight = torch.tensor([[0.0] * 64, [torch.nan, 1.0] * 32, [torch.nan] * 64, [-1.0, 1e-4] * 32], dtype=dtype)
    nibbles, absmax = quantize(weight, format, like="cuda")
    assert absmax.tolist() == [0.0, 1.0, torch.finfo(torch.float32).min, 1.0]
    one, minus_one = (15, 0) if format == "nf4" else (3, 11)
    zero = 7 if format == "nf4" else 0
    expected = torch.tensor([[0, 0], [0, one], [0, 0], [minus_one, zero]], dtype=torch.uint8)
    assert torch.equal(nibbles.view(4, 64), expected.repeat(1, 32))


def search_one_by_one(x: float, code: list[float]) -> int:
    """bitsandbytes' search in its CUDA kernels, for one value."""
    pivot, below, above = 127, 0, 255
    for step in (64, 32, 16, 8, 4, 2, 1):
        if x > code[pivot]:
            below, pivot = pivot, pivot + step
        else:
            above, pivot = pivot, pivot - step
    half = torch.tensor(0.5)
    if x > code[pivot]:
        middle = (torch.tensor(code[above]) + torch.tensor(code[pivot])) * half
        return above if x > middle.item() else pivot
    middle = (torch.tensor(code[below]) + torch.tensor(code[pivot])) * half
    return below if x < middle.item() else pivot


def test_the_cuda_rule_for_scales() -> None:
    code = dynamic_code(CPU)
    middles = (code[:-1] + code[1:]) / 2
    values = torch.cat((code, middles, torch.rand(3000) * 2 - 1, torch.tensor([torch.nan, 0.0, -0.0])))
    scales = torch.cat((values.new_ones(1), values))
    codes, absmax2 = reference.quantize_scales(scales, torch.tensor(0.0), like="cuda")
    blocks = torch.nn.functional.pad(scales, (0, -len(scales) % 256)).view(-1, 256)
    scaled = (blocks * (1.0 / absmax2).unsqueeze(1)).view(-1)[: len(scales)]
    assert codes.tolist() == [search_one_by_one(x, code.tolist()) for x in scaled.tolist()]
    chosen = code[codes.long()]
    nearest = (scaled.unsqueeze(1) - code).abs().amin(1)
    assert ((chosen - scaled).abs()[:-3] <= nearest[:-3] * 1.0001).all()
