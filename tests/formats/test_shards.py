"""Cuts and concatenations of 4-bit weights keep every value."""

from __future__ import annotations

import pytest
import torch

import halfbyte as hb
from halfbyte.formats.shards import columns, concatenated, rows, stacked, unnested

KINDS = [
    pytest.param(("nf4", {"nested": True}), id="nf4-nested"),
    pytest.param(("nf4", {"nested": False}), id="nf4-flat"),
    pytest.param(("fp4", {"nested": True, "block_size": 128}), id="fp4-nested-128"),
    pytest.param(("int4", {"group_size": 32}), id="int4"),
    pytest.param(("mxfp4", {}), id="mxfp4"),
]


def made(kind: tuple[str, dict[str, object]], *shape: int, seed: int = 0) -> hb.QuantizedWeight:
    torch.manual_seed(seed)
    format, settings = kind
    return hb.quantize(torch.randn(shape, dtype=torch.bfloat16), format, **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("first", "last"), [(0, 96), (0, 32), (32, 64), (64, 96), (31, 33)])
def test_rows(kind: tuple[str, dict[str, object]], first: int, last: int) -> None:
    q = made(kind, 96, 512)
    part = rows(q, first, last)
    assert part.shape == (last - first, 512)
    assert torch.equal(hb.dequantize(part), hb.dequantize(q)[first:last])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("first", "last"), [(0, 512), (0, 256), (256, 512), (128, 384)])
def test_columns(kind: tuple[str, dict[str, object]], first: int, last: int) -> None:
    q = made(kind, 96, 512)
    part = columns(q, first, last)
    assert part.shape == (96, last - first)
    assert torch.equal(hb.dequantize(part), hb.dequantize(q)[:, first:last])


@pytest.mark.parametrize("kind", KINDS)
def test_concatenated_and_stacked(kind: tuple[str, dict[str, object]]) -> None:
    parts = [made(kind, n, 256, seed=n) for n in (64, 32, 48)]
    whole = concatenated(parts)
    assert whole.shape == (144, 256)
    assert torch.equal(hb.dequantize(whole), torch.cat([hb.dequantize(q) for q in parts]))
    experts = [made(kind, 48, 256, seed=seed) for seed in range(3)]
    stack = stacked(experts)
    assert stack.shape == (3, 48, 256)
    assert torch.equal(hb.dequantize(stack), torch.stack([hb.dequantize(q) for q in experts]))


def test_parts_own_their_memory() -> None:
    q = made(("nf4", {"nested": True}), 512, 512)
    part = rows(q, 256, 512)
    assert part.nested is not None
    for tensor, whole in zip((part.packed, part.scale, part.nested.absmax), (q.packed, q.scale, None), strict=True):
        assert tensor.untyped_storage().nbytes() == tensor.nbytes
        assert whole is None or tensor.data_ptr() != whole.data_ptr()
    assert rows(q, 0, 512) is q
    assert columns(q, 0, 512) is q


def test_nested_scales_stay_where_the_cut_allows_it() -> None:
    q = made(("nf4", {"nested": True}), 96, 512)  # 8 blocks a row, so 32 rows are a group of nested scales
    assert rows(q, 32, 64).nested is not None
    assert rows(q, 0, 31).nested is not None
    assert rows(q, 31, 62).nested is None
    assert columns(q, 0, 256).nested is None


@pytest.mark.parametrize("kind", KINDS[:3])
def test_unnested_scales_are_those_of_the_format(kind: tuple[str, dict[str, object]]) -> None:
    q = made(kind, 33, 130)
    plain = unnested(q)
    assert plain.nested is None
    assert torch.equal(hb.dequantize(plain, torch.float32), hb.dequantize(q, torch.float32))


def test_what_cuts_a_block_is_refused() -> None:
    q = made(("nf4", {"nested": False}), 8, 96)  # rows of one and a half blocks
    assert rows(q, 2, 4).shape == (2, 96)
    with pytest.raises(ValueError, match=r"rows 1 to 2 .* cut a scale block: a row has 96 weights, and 64 share"):
        rows(q, 1, 2)
    with pytest.raises(ValueError, match=r"columns 0 to 48 .* cut a scale block"):
        columns(q, 0, 48)
    with pytest.raises(ValueError, match=r"columns 0 to 48 .* cut a scale block"):
        columns(made(("int4", {"group_size": 32}), 8, 96), 0, 48)
    with pytest.raises(ValueError, match="whole block"):
        concatenated([made(("nf4", {}), 1, 96), q])
    with pytest.raises(ValueError, match="several formats"):
        concatenated([q, made(("fp4", {}), 8, 96)])
    with pytest.raises(ValueError, match="one shape"):
        stacked([q, made(("nf4", {}), 2, 96)])
