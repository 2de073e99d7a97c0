"""The codebooks that tensor-core kernels look weights up in: sixteen values, rounded to 16 bits with little loss."""

from __future__ import annotations

import struct
from functools import cache
from typing import Literal

import torch

from halfbyte.formats.spec import FORMATS, Format

STEPS = 4096  # factors that are tried between 1 and 2
INTEGERS = tuple(float(value) for value in range(-8, 8))
E2M1 = (*(0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0), *(-0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0))
Numbers = Literal["looked_up", "integers", "e2m1"]


@cache
def unit_and_codebook(format: str, dtype: torch.dtype) -> tuple[float, bytes]:
    """What kernels take: what a product must be multiplied by in the end, and the codebook times its factor, fp32."""
    scaled = factor_of(format, dtype)
    return 1.0 / scaled, struct.pack("16f", *(value * scaled for value in FORMATS[format].codebook))


def exact_codebook(format: str) -> bytes:
    """The codebook that a GPU dequantizes with, fp32."""
    spec = FORMATS[format]
    return struct.pack("16f", *(spec.cuda_codebook or spec.codebook))


@cache
def numbers_of(format: str, dtype: torch.dtype) -> Numbers:
    """How the codebook times its factor is had from nibbles: device/computed.cuh."""
    known: dict[tuple[float, ...], Numbers] = {INTEGERS: "integers", E2M1: "e2m1"}
    return known.get(tuple(value * factor_of(format, dtype) for value in FORMATS[format].codebook), "looked_up")


def has_integers(format: str, dtype: torch.dtype) -> bool:
    """True if the codebook times its factor is the integers from -8 to 7: such need no table."""
    return numbers_of(format, dtype) == "integers"


@cache
def numbers_of_weights(format: str, dtype: torch.dtype, scale: torch.dtype) -> Numbers:
    """The same of the codebook itself, where scales are numbers of `dtype` as well: side by side in that type weights
    become what dequantize gives. Else "looked_up"."""
    fits = scale is dtype or (FORMATS[format].has_exponents and dtype is torch.bfloat16)
    return numbers_of(format, dtype) if fits and factor_of(format, dtype) == 1 else "looked_up"


@cache
def factor_of(format: str, dtype: torch.dtype) -> float:
    """What a codebook is multiplied by before it is rounded to `dtype`, fp16 or bf16."""
    spec = FORMATS[format]
    return spec.factors.get(str(dtype).removeprefix("torch.")) or best_factor(spec, dtype)


def best_factor(format: Format, dtype: torch.dtype) -> float:
    """The factor from 1 to 2 with the least sum of squared rounding errors of all sixteen values; 1 where it is exact.

    A power of two more changes no error, since no value is so small that it would become subnormal.
    """
    values = torch.tensor(format.codebook, dtype=torch.float64, device="cpu")
    factors = 1 + torch.arange(STEPS, dtype=torch.float64, device="cpu") / STEPS
    scaled = factors.unsqueeze(1) * values
    errors = ((scaled.to(dtype).double() - scaled) / factors.unsqueeze(1)).square().sum(1)
    return float(factors[errors.argmin()])
