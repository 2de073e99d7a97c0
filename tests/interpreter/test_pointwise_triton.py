"""Norms, gates and routers agree with their definition, whatever the sizes."""

import pytest
import torch
from torch import Tensor

from halfbyte.kernels.experts import reference as stacks
from halfbyte.kernels.experts import router, router_reference
from halfbyte.kernels.experts.combine import combine, combine_sorted
from halfbyte.kernels.linear.fusion import Residual
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


@pytest.mark.parametrize(("tokens", "experts", "k"), [(1, 128, 8), (5, 60, 4), (3, 8, 1), (2, 300, 6), (1, 4, 4)])
@pytest.mark.parametrize(("before", "normalizes"), [(True, True), (True, False), (False, True)])
def test_route(tokens: int, experts: int, k: int, before: bool, normalizes: bool) -> None:
    scores = 3 * random(tokens, experts, seed=tokens)
    assert router.supports(scores, k)
    ids, weights = router.route(scores, k, before, normalizes, torch.float32)
    right_ids, right = router_reference.route(scores, k, before, normalizes, torch.float32)
    torch.testing.assert_close(weights, right, rtol=1e-4, atol=1e-6)
    assert all(len(set(row)) == k for row in ids.tolist())
    torch.testing.assert_close(scores.gather(1, ids), scores.gather(1, right_ids))  # ties may fall otherwise


def test_route_supports() -> None:
    assert not router.supports(random(0, 8), 2)
    assert not router.supports(random(1, 8), 9)
    assert not router.supports(random(1, 2048), 8)


@pytest.mark.parametrize("kind", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("columns", [1, 512, 700])
def test_combine(columns: int, kind: torch.dtype) -> None:
    """Rows of ids that are no expert are left out, whatever they hold."""
    rows, weights = torch.randn(15, columns), torch.rand(5, 3)
    ids = torch.randint(-1, 5, (5, 3), dtype=kind)
    known = (ids >= 0) & (ids < 4)
    rows[~known.view(-1)] = float("nan")
    out = torch.full((5, columns), 9.0, dtype=torch.float16)
    combine(rows, ids, weights, out, 4)
    right = stacks.combine(rows.view(5, 3, columns).nan_to_num(), torch.where(known, weights, 0), torch.float16)
    torch.testing.assert_close(out, right)
    places = torch.randperm(15).int()
    there = rows[places.argsort()]
    places[~known.view(-1)] = -1
    combine_sorted(there, places, weights, out)
    torch.testing.assert_close(out, right)
    residual = random(5, columns)
    combine(rows, ids, weights, out, 4, Residual(residual, 0.3))
    torch.testing.assert_close(out, residual + 0.3 * right, **RIGHT)
