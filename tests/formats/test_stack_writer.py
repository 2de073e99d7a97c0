"""Stacks that are put together piece by piece have the bits of those that are quantized at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kinds import kinds, quantize

import halfbyte as hb
from halfbyte.formats.stacks import StackWriter, as_stack, block_size_of

E, N, K = 3, 8, 256


@kinds
def test_pieces_make_the_stack(format: str, size: int, nested: bool) -> None:
    torch.manual_seed(0)
    dense = torch.randn(E, N, K)
    writer = StackWriter((E, N, K))
    for expert in (2, 0, 1):
        for row in (0, N // 2):
            writer.write(expert, row, quantize(dense[expert, row : row + N // 2], format, size, nested))
    stack = writer.weight()
    assert stack.nested is None
    # Each piece has nested scales of its own; plain ones are those of the whole.
    expected = torch.stack(
        [torch.cat([hb.dequantize(quantize(half, format, size, nested)) for half in one.chunk(2)]) for one in dense]
    )
    assert torch.equal(hb.dequantize(stack), expected)
    if not nested:
        whole = as_stack(quantize(dense, format, size, False))
        assert torch.equal(stack.packed, whole.packed)
        assert torch.equal(stack.scale, whole.scale)
    assert len(stack.packed) == len(stack.scale) == E
    assert block_size_of(stack.packed, stack.scale, format) == size


def test_blocks_across_rows() -> None:
    """With K = 96 every second block of 64 lies in two rows."""
    dense = torch.randn(E, N, 96)
    writer = StackWriter((E, N, 96))
    for expert, weight in enumerate(dense):
        writer.write(expert, 0, hb.quantize(weight, nested=False))
    stack = writer.weight()
    assert stack.packed.shape == (E, N * 96 // 2)
    assert stack.scale.shape == (E, N * 96 // 64)
    assert torch.equal(hb.dequantize(stack), hb.dequantize(hb.quantize(dense, nested=False)))
    assert torch.equal(hb.dequantize(stack[1]), hb.dequantize(hb.quantize(dense[1], nested=False)))


@pytest.mark.parametrize(
    ("expert", "row", "shape", "options", "message"),
    [
        (0, 0, (N, 128), {}, "does not fit a stack"),
        (3, 0, (N, K), {}, "does not fit a stack"),
        (0, 1, (N, K), {}, "does not fit a stack"),
        (0, 0, (N, K), {"format": "fp4"}, "a stack has one kind"),
        (0, 0, (N, K), {"block_size": 128}, "a stack has one kind"),
    ],
)
def test_what_does_not_fit(expert: int, row: int, shape: Any, options: Any, message: str) -> None:
    writer = StackWriter((E, N, K))
    writer.write(1, 0, hb.quantize(torch.randn(N, K)))
    with pytest.raises(ValueError, match=message):
        writer.write(expert, row, hb.quantize(torch.randn(shape), **options))


def test_pieces_that_cut_blocks_and_missing_ones() -> None:
    writer = StackWriter((1, 4, 96))
    with pytest.raises(ValueError, match="is not whole blocks of 64"):
        writer.write(0, 0, hb.quantize(torch.randn(1, 96)))
    with pytest.raises(ValueError, match="not whole blocks of 128; take a block_size that divides 96"):
        StackWriter((1, 1, 96)).write(0, 0, hb.quantize(torch.randn(1, 96), block_size=128))
    with pytest.raises(ValueError, match="only 0 of 384 weights"):
        writer.weight()
    with pytest.raises(ValueError, match="are no stack of nf4 experts"):
        block_size_of(torch.empty(2, 5), torch.empty(2, 3), "nf4")
