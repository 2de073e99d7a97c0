"""Stacks [E, N, K]: an expert is a view of the stack, or there is an error that says why it is none."""

from __future__ import annotations

import copy
import io
import re

import pytest
import torch
from kinds import kinds, quantize
from torch import Tensor

import halfbyte as hb
from halfbyte.formats.spec import FORMATS
from halfbyte.formats.weight import QuantizedWeight

E = 4
# 256 nested scales, of 64 weights or fewer, end where an expert does.
N, K = 64, 512


def stack_of(format: str, size: int, nested: bool, dtype: torch.dtype = torch.bfloat16) -> QuantizedWeight:
    torch.manual_seed(0)
    return quantize(torch.randn(E, N, K).to(dtype), format, size, nested)


def is_inside(part: Tensor, whole: Tensor) -> bool:
    """Whether a tensor lies in the memory of another."""
    first, last = whole.data_ptr(), whole.data_ptr() + whole.nbytes
    return part.numel() == 0 or (first <= part.data_ptr() and part.data_ptr() + part.nbytes <= last)


def assert_view(part: QuantizedWeight, q: QuantizedWeight, rows: slice | int) -> None:
    assert (part.kind, part.dtype) == (q.kind, q.dtype)
    assert all(map(is_inside, part.tensors, q.tensors))
    assert torch.equal(hb.dequantize(part), hb.dequantize(q)[rows])


@kinds
def test_an_expert_is_a_view(format: str, size: int, nested: bool) -> None:
    q = stack_of(format, size, nested)
    assert (len(q), q.shape) == (E, (E, N, K))
    for expert in (0, 1, 3, -1, -4):
        assert q[expert].shape == (N, K)
        assert_view(q[expert], q, expert)
    assert [one.packed.data_ptr() for one in q] == [q[expert].packed.data_ptr() for expert in range(E)]
    x = torch.randn(3, K, dtype=torch.bfloat16)
    assert torch.equal(hb.linear(x, q[2]), hb.linear(x, copy.deepcopy(q[2])))


@kinds
def test_a_slice_is_a_smaller_stack(format: str, size: int, nested: bool) -> None:
    q = stack_of(format, size, nested)
    for rows in (slice(1, 3), slice(None), slice(-1, None), slice(2, 99), slice(2, 2), slice(3, 1)):
        part = q[rows]
        assert part.shape == (len(range(E)[rows]), N, K)
        assert_view(part, q, rows if len(part) else slice(0, 0))
        if len(part) > 1:
            assert_view(part[1], q, range(E)[rows][1])


@kinds
def test_moves_saves_and_prints(format: str, size: int, nested: bool) -> None:
    q = stack_of(format, size, nested)
    for one in (q, q[1], q[1:3]):
        file = io.BytesIO()
        torch.save(one, file)
        file.seek(0)
        for again in (torch.load(file), QuantizedWeight.from_parts(one.parts, one.dtype)):
            assert repr(again) == repr(one)
            assert all(map(torch.equal, again.tensors, one.tensors))
        assert one.to("meta").shape == one.shape
        assert f"{list(one.shape)}" in repr(one)


@kinds
def test_bits_are_those_of_each_expert(format: str, size: int, nested: bool) -> None:
    weight = torch.randn(E, N, K)
    q = quantize(weight, format, size, False)
    for expert, alone in zip(q, weight, strict=True):
        assert all(map(torch.equal, expert.tensors, quantize(alone, format, size, False).tensors))


@kinds
def test_under_compile(format: str, size: int, nested: bool) -> None:
    torch._dynamo.reset()
    q, x = stack_of(format, size, nested), torch.randn(2, K, dtype=torch.bfloat16)
    compiled = torch.compile(lambda x: hb.linear(x, q[1]) + hb.linear(x, q[-1]), fullgraph=True, backend="eager")
    assert torch.equal(compiled(x), hb.linear(x, q[1]) + hb.linear(x, q[-1]))


@pytest.mark.parametrize("format", sorted(name for name, spec in FORMATS.items() if not spec.along_k))
def test_where_an_expert_is_no_view(format: str) -> None:
    """Blocks, and groups of nested scales, run over the whole stack. Its ends are no obstacle."""
    q = hb.quantize(torch.randn(4, 3, 32), format, nested=False)
    words = (
        "the experts of [4, 3, 32] have 96 weights each and cannot be views: blocks of 64 reach from one into "
        "the next; quantize with a block_size that divides 96, or each expert alone"
    )
    for index in (0, 1, slice(1, 2), slice(0, 3)):
        with pytest.raises(ValueError, match=re.escape(words)):
            q[index]
    for rows in (slice(0, 4), slice(0, 2), slice(2, 4)):
        assert_view(q[rows], q, rows)
    q = hb.quantize(torch.randn(3, 3, 64), format)
    with pytest.raises(ValueError, match=r"share a number among 16384 weights; quantize with nested=False, or each"):
        q[1]
    assert_view(q[0], q, 0)
    one = hb.quantize(torch.randn(1, 3, 5), format)
    assert_view(one[0], one, 0)


def test_what_is_refused() -> None:
    q = stack_of("nf4", 64, False)
    for index in (4, -5):
        with pytest.raises(IndexError, match=f"expert {index} is out of range; the stack has 4"):
            q[index]
    with pytest.raises(ValueError, match="the slice has step 2"):
        q[::2]
    for index in (1.0, "1", None, (0, 1)):
        with pytest.raises(TypeError):
            q[index]  # type: ignore[index]
    with pytest.raises(TypeError, match=r"the weight has shape \[64, 512\]; only a stack"):
        q[0][0]
    with pytest.raises(TypeError, match="no length"):
        len(hb.quantize(torch.tensor(1.0)))
    assert len(q[0]) == N
    assert q[0:0]  # a weight is there


@kinds
def test_beyond_32_bits(format: str, size: int, nested: bool) -> None:
    """More than 2**31 weights, of whose memory only the last expert is ever touched."""
    e, n, k = 2**17 + 2, 32, 512
    alone = quantize(torch.randn(n, k), format, size, False)
    numel, spec = e * n * k, alone.spec
    assert numel > 2**31
    packed = torch.empty(spec.packed_shape((e, n, k)), dtype=alone.packed.dtype)
    scale = torch.empty(spec.scale_shape((e, n, k), size), dtype=alone.scale.dtype)
    packed.view(-1)[-alone.packed.numel() :] = alone.packed.view(-1)
    scale.view(-1)[-alone.scale.numel() :] = alone.scale.view(-1)
    q = QuantizedWeight(format, packed, scale, (e, n, k), torch.float32, size)
    assert torch.equal(hb.dequantize(q[-1]), hb.dequantize(alone))
    meta = quantize(torch.empty(e, n, k, device="meta"), format, size, nested)
    assert hb.dequantize(meta).shape == (e, n, k)
    assert hb.dequantize(meta[: e // 2]).shape == (e // 2, n, k)
