"""Norms and gates agree with their definition, whatever the sizes."""

import pytest
import torch
from torch import Tensor

from halfbyte.kernels.pointwise import reference
from halfbyte.kernels.pointwise.triton import gated, rms_norm, supports

RIGHT = {"rtol": 2e-3, "atol": 2e-3}


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).half()


@pytest.mark.parametrize("shape", [(1, 1, 4096), (3, 1, 80), (2, 5, 257), (1, 1)], ids=str)
@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("residual", [True, False])
def test_rms_norm(shape: tuple[int, ...], offset: float, residual: bool) -> None:
    x, weight = 30 * random(*shape), random(shape[-1], seed=1)
    added = random(*shape, seed=2) if residual else None
    assert supports(x)
    found = rms_norm(x, weight, 1e-5, offset, added)
    right = reference.rms_norm(x.double(), weight, 1e-5, offset, added)
    torch.testing.assert_close(found.double(), right, **RIGHT)


@pytest.mark.parametrize("numbers", [1, 1024, 5000])
@pytest.mark.parametrize("activation", reference.GATES)
def test_gated(numbers: int, activation: str) -> None:
    gate, up = 4 * random(1, numbers), random(1, numbers, seed=1)
    gate[0, 0] = -65504.0
    right = reference.gated(gate.double(), up.double(), activation)
    torch.testing.assert_close(gated(gate, up, activation).double(), right, **RIGHT)
    both = random(3, 1, 2 * numbers)
    halves = both.chunk(2, dim=-1)
    right = reference.gated(*halves, activation)
    torch.testing.assert_close(gated(*halves, activation), right, **RIGHT)


def test_supports() -> None:
    assert not supports(random(0, 8))
    assert not supports(random(1, 1 << 16))
