"""What reading the filled keys and values of a cache takes, for `bench attention`: a kernel that keeps one maximum of
each piece and does nothing else. No kernel that has to read them can be faster than such a one by much."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

PIECE, WARPS = 8192, 8  # numbers of keys, and as many of values, of a program; no other size was faster on an H200


@triton.jit
def _read(keys, values, out, tokens, filled, PIECE: tl.constexpr):
    """Program (piece, row): so many numbers of a head of keys of a text. tokens, filled: in numbers."""
    piece, row = tl.program_id(0), tl.program_id(1)
    number = piece * PIECE + tl.arange(0, PIECE)
    at, known = row.to(tl.int64) * tokens + number, number < filled
    key = tl.load(keys + at, known, float("-inf"))
    value = tl.load(values + at, known, float("-inf"))
    tl.store(out + row * tl.num_programs(0) + piece, tl.max(tl.maximum(key, value), axis=0))


def highest(keys: Tensor, values: Tensor, filled: int) -> Tensor:
    """[texts, heads, pieces]: the highest number of each piece of the first `filled` tokens. keys, values: [texts,
    heads, tokens, size], contiguous."""
    texts, heads, tokens, size = keys.shape
    pieces = triton.cdiv(filled * size, PIECE)
    out = keys.new_empty((texts, heads, pieces))
    _read[(pieces, texts * heads)](keys, values, out, tokens * size, filled * size, PIECE, num_warps=WARPS)
    return out


def right(keys: Tensor, values: Tensor, filled: int) -> Tensor:
    """The same in torch's operations."""
    most = torch.maximum(keys, values)[:, :, :filled].flatten(2)
    missing = -most.shape[2] % PIECE
    padded = torch.nn.functional.pad(most, (0, missing), value=float("-inf"))
    result: Tensor = padded.unflatten(2, (-1, PIECE)).amax(-1)
    return result
