"""The packed distance kernels give what the reference gives for the dequantized weight, under any valid plan.

The interpreter turns fp32 into bf16 by leaving bits out, where a GPU rounds: so bf16 candidates are made of the fp32
weight less its low half here. That a GPU rounds is what the tests in gpu/ are for.
"""

from __future__ import annotations

import pytest
import torch
from kinds import KINDS, kinds, quantize
from pairs import every_pair
from torch import Tensor

import halfbyte as hb
from halfbyte.formats.weight import FLOAT_DTYPES, QuantizedWeight
from halfbyte.kernels.distance import packed, reference
from halfbyte.kernels.distance.packed_plan import PackedPlan, is_valid

pytestmark = pytest.mark.filterwarnings("ignore:(divide by zero|invalid value|overflow).*:RuntimeWarning")
POISON = 768.0


def made(v: int, d: int, dtype: torch.dtype, format: str, size: int, nested: bool) -> tuple[QuantizedWeight, Tensor]:
    """A weight, and the dense one that the interpreter makes of it."""
    torch.manual_seed(v + d)
    q = quantize(torch.randn(v, d).to(dtype), format, size, nested)
    if dtype != torch.bfloat16:
        return q, hb.dequantize(q)
    exact = hb.dequantize(q, torch.float32)
    return q, (exact.view(torch.int32) & -65536).view(torch.float32).bfloat16()


@every_pair({"format, size, nested": KINDS, "dtype": FLOAT_DTYPES, "p, v, d": [(2, 11, 256), (1, 3, 2176)]})
def test_distances(p: int, v: int, d: int, dtype: torch.dtype, format: str, size: int, nested: bool) -> None:
    q, dense = made(v, d, dtype, format, size, nested)
    assert packed.supports(q, p)
    for query in (torch.randn(p, d).to(dtype), dense[-1:].expand(p, d)):
        out, right = torch.full((p, v + 3), POISON), torch.empty(p, v)
        packed.distances(query, q, out[:, :v])
        reference.distances(query, dense, right)
        torch.testing.assert_close(out[:, :v], right, rtol=1e-6, atol=0)
        assert (out[:, v:] == POISON).all()
    assert (out[:, v - 1] == 0).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16], ids=str)
@kinds
@pytest.mark.parametrize(("p", "v", "k"), [(1, 1, 1), (2, 40, 1), (1, 70, 40)])
def test_nearest(p: int, v: int, k: int, dtype: torch.dtype, format: str, size: int, nested: bool) -> None:
    q, dense = made(v, 128, dtype, format, size, nested)
    query = torch.randn(p, 128)
    least, rows = packed.nearest(query, q, k)
    right, right_rows = reference.nearest(query.double(), dense.double(), k)
    torch.testing.assert_close(least, right, rtol=1e-6, atol=0)
    assert torch.equal(rows, right_rows)


@pytest.mark.parametrize("plan", [
    PackedPlan(16, 1, 1, 1), PackedPlan(4, 8, 2, 4), PackedPlan(8, 32, 1, 4), PackedPlan(4, 16, 2, 2),
], ids=str)  # fmt: skip
def test_any_valid_plan(plan: PackedPlan) -> None:
    q, dense = made(35, 448, torch.float16, "nf4", 64, True)
    assert is_valid(plan, 448, 64)
    query, out, right = torch.randn(1, 448), torch.empty(1, 35), torch.empty(1, 35)
    packed.distances(query, q, out, plan)
    reference.distances(query, dense, right)
    torch.testing.assert_close(out, right, rtol=1e-6, atol=0)
    assert torch.equal(packed.nearest(query, q, 1, plan)[1], reference.nearest(query, dense, 1)[1])


def test_small_nested_blocks_and_special_scales() -> None:
    """An entry of the nested scales for 16 of them; NaN is farthest, and equal rows come in order."""
    q, _ = made(96, 64, torch.float32, "nf4", 64, True)
    assert q.nested is not None
    absmax = torch.rand(6) + 1
    absmax[2], absmax[4] = float("nan"), float("inf")
    nested = q.nested._replace(absmax=absmax, block_size=16)
    q = QuantizedWeight("nf4", q.packed, q.scale, q.shape, q.dtype, 64, nested)
    dense, query = hb.dequantize(q), torch.zeros(1, 64)
    least, rows = packed.nearest(query, q, 96)
    right, right_rows = reference.nearest(query, dense, 96)
    torch.testing.assert_close(least, right, rtol=1e-6, atol=0, equal_nan=True)
    far = ~right.isfinite()
    assert torch.equal(rows[far], right_rows[far])
    assert set(range(32, 48)) <= set(rows[0, 64:].tolist())


def test_takes_whole_blocks_only() -> None:
    assert not packed.supports(hb.quantize(torch.randn(64, 96), "nf4", block_size=64), 1)
    assert not packed.supports(hb.quantize(torch.randn(128), "nf4", block_size=64), 1)
    assert not packed.supports(hb.quantize(torch.randn(64, 64), "nf4", block_size=64), packed.FEW + 1)
