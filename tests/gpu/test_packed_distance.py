"""Distances straight from 4-bit bytes on a GPU are those of the dequantized weight, to the last roundings of a sum."""

from __future__ import annotations

import pytest
import torch

import halfbyte as hb
from halfbyte.formats.rows import row_chunks
from halfbyte.formats.weight import QuantizedWeight
from halfbyte.kernels.common.device import properties_of
from halfbyte.kernels.distance import packed, reference

from .conftest import DEVICE, POISON, check_replay, every_dtype, on_another_stream

WEIGHTS = [
    ("nf4", {"nested": True}), ("nf4", {"nested": False}), ("nf4", {"nested": True, "block_size": 32}),
    ("fp4", {"nested": True}), ("fp4", {"nested": False, "block_size": 256}), ("int4", {"group_size": 32}),
    ("int4", {"group_size": 128}),
]  # fmt: skip

weights = pytest.mark.parametrize(("format", "settings"), WEIGHTS, ids=str)


def made(v: int, d: int, dtype: torch.dtype, format: str, settings: dict[str, int]) -> QuantizedWeight:
    torch.manual_seed(v + d)
    return hb.quantize(torch.randn(v, d, device=DEVICE).to(dtype), format, **settings)  # type: ignore[arg-type]


@every_dtype
@weights
@pytest.mark.parametrize(("p", "v", "d"), [(1, 1, 256), (1, 1003, 4096), (1, 999, 3840), (3, 100, 768)])
def test_distances(p: int, v: int, d: int, dtype: torch.dtype, format: str, settings: dict[str, int]) -> None:
    q = made(v, d, dtype, format, settings)
    assert packed.supports(q, p)
    dense = hb.dequantize(q)
    for query in (torch.randn(p, d, device=DEVICE).to(dtype), dense[-1:].expand(p, d).contiguous()):
        out, right = torch.full((p, v + 3), POISON, device=DEVICE), torch.empty(p, v, device=DEVICE)
        packed.distances(query, q, out[:, :v])
        reference.distances(query.double(), dense.double(), right)
        torch.testing.assert_close(out[:, :v], right, rtol=2e-6, atol=0)
        assert (out[:, v:] == POISON).all()
    # A row that is the query is at no distance: every weight was rounded as `dequantize` rounds it.
    assert (out[:, v - 1] == 0).all()


@every_dtype
@weights
def test_every_weight_is_the_one_of_dequantize(dtype: torch.dtype, format: str, settings: dict[str, int]) -> None:
    q = made(3000, 512, dtype, format, settings)
    dense = hb.dequantize(q)
    out = torch.empty(1, 3000, device=DEVICE)
    for row in range(0, 3000, 61):
        packed.distances(dense[row : row + 1], q, out)
        assert out[0, row] == 0


@weights
@pytest.mark.parametrize(("p", "v", "k"), [(1, 1, 1), (1, 5000, 1), (1, 5000, 7), (3, 999, 10), (1, 40_000, 128)])
def test_nearest(p: int, v: int, k: int, format: str, settings: dict[str, int]) -> None:
    q = made(v, 512, torch.bfloat16, format, settings)
    query = torch.randn(p, 512, device=DEVICE)
    least, rows = packed.nearest(query, q, k)
    everything = torch.empty(p, v, device=DEVICE)
    packed.distances(query, q, everything)
    right, right_rows = reference.first_of(everything, None, k)
    assert torch.equal(rows, right_rows)
    assert torch.equal(least, right)
    right, _ = reference.nearest(query, hb.dequantize(q), k)
    torch.testing.assert_close(least, right, rtol=2e-6, atol=0)


@every_dtype
def test_special_scales(dtype: torch.dtype) -> None:
    """NaN, infinities, what rounds to a subnormal, to zero and to infinity: as `dequantize` has them."""
    special = [0.0, -0.0, torch.nan, torch.inf, -torch.inf, 3.4e38, 65520.0, 6e-8, 1e-38, 3e-42, 1e-45]
    q = made(len(special), 64, dtype, "nf4", {"nested": False})
    q.scale.copy_(torch.tensor(special))
    dense = hb.dequantize(q).float()
    query, out = torch.zeros(1, 64, device=DEVICE), torch.empty(1, len(special), device=DEVICE)
    packed.distances(query, q, out)
    right = dense.square().sum(dim=1).sqrt()[None]
    torch.testing.assert_close(out, right, rtol=2e-6, atol=0, equal_nan=True)


def test_more_than_two_thousand_million_weights() -> None:
    if properties_of(0).shared_memory < 160_000:
        pytest.skip("a large GPU's test")
    v, d = 1_100_000, 2048
    q = hb.quantize(torch.randn(v, d, device=DEVICE, dtype=torch.bfloat16), "nf4")
    *_, (_, rest) = row_chunks(q, 2**20)
    last = hb.dequantize(rest)[-1:]
    least, rows = packed.nearest(last, q, 2)
    assert rows[0, 0] == v - 1
    assert least[0, 0] == 0


def test_graph_and_stream() -> None:
    q = made(4000, 512, torch.bfloat16, "nf4", {"nested": True})
    query, out = torch.randn(1, 512, device=DEVICE), torch.empty(1, 4000, device=DEVICE)

    def everything() -> list[torch.Tensor]:
        packed.distances(query, q, out)
        return [out, *packed.nearest(query, q, 5)]

    expected = [result.clone() for result in everything()]
    on_another_stream(everything)
    check_replay(everything, expected)
