"""Distances straight from 4-bit bytes on the CPU are those of the dequantized weight."""

from __future__ import annotations

import pytest
import torch
from kinds import kinds, quantize

import halfbyte as hb
from halfbyte.formats.weight import FLOAT_DTYPES, QuantizedWeight
from halfbyte.kernels.distance import cpu, packed_cpu, reference

POISON = 768.0
dtypes = pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)


def made(v: int, d: int, dtype: torch.dtype, format: str, size: int, nested: bool) -> QuantizedWeight:
    torch.manual_seed(v + d)
    return quantize(torch.randn(v, d).to(dtype), format, size, nested)


@dtypes
@kinds
@pytest.mark.parametrize(("p", "v", "d"), [(1, 1, 128), (1, 77, 384), (3, 300, 1152)])
def test_distances(p: int, v: int, d: int, dtype: torch.dtype, format: str, size: int, nested: bool) -> None:
    q = made(v, d, dtype, format, size, nested)
    assert packed_cpu.supports(q, p)
    dense = hb.dequantize(q)
    for query in (torch.randn(p, d), dense[:1].expand(p, d).contiguous()):
        out, right = torch.full((p, v + 3), POISON), torch.empty(p, v)
        packed_cpu.distances(query, q, out[:, :v])
        cpu.distances(query, dense, right)
        torch.testing.assert_close(out[:, :v], right, rtol=1e-6, atol=0)
        assert (out[:, v:] == POISON).all()
    assert (out[:, 0] == 0).all()


@dtypes
@kinds
@pytest.mark.parametrize(("p", "v", "k"), [(1, 1, 1), (1, 500, 7), (2, 90, 33), (2, 4000, 1)])
def test_nearest(p: int, v: int, k: int, dtype: torch.dtype, format: str, size: int, nested: bool) -> None:
    q = made(v, 128, dtype, format, size, nested)
    query = torch.randn(p, 128)
    least, rows = packed_cpu.nearest(query, q, k)
    right, right_rows = reference.nearest(query.double(), hb.dequantize(q).double(), k)
    torch.testing.assert_close(least, right, rtol=1e-6, atol=0)
    assert torch.equal(rows, right_rows)


def test_equal_rows_come_in_order() -> None:
    q = hb.quantize(torch.ones(200, 64), "nf4", nested=False)
    q.scale[7], q.scale[70] = float("nan"), float("inf")
    least, rows = packed_cpu.nearest(torch.zeros(1, 64), q, 128)
    assert rows[0].tolist() == [row for row in range(200) if row not in (7, 70)][:128]
    assert (least == 8).all()


def test_takes_whole_blocks_only() -> None:
    assert not packed_cpu.supports(hb.quantize(torch.randn(64, 96), "nf4", block_size=64), 1)
    assert not packed_cpu.supports(hb.quantize(torch.randn(128), "nf4", block_size=64), 1)
