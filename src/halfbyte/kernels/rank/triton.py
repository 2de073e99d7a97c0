"""Ranks of tokens under an LM head on a GPU: a product whose results are compared where they arise, and never written.

hidden [T, D], lm_head [V, D] -> int64 [T]. A program multiplies a tile of tokens with a tile of the head's rows in
tensor cores, fp32 sums, and counts which logits are above each token's own. Those that are nearer to it than such a sum
may be off go on a list, and a second kernel sums them again in fp64. A list that is full (if all rows are equal, every
pair is near) leaves the rest to the program that found them: slow, but right.

Bytes: the head once, the states from L2; nothing of size V is written. Flops: 2 T V D. Bound by tensor cores from about
300 tokens on, by the head's bytes below.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from halfbyte.kernels.common.device import DeviceProperties, properties_of
from halfbyte.kernels.common.launch import launch

# What a sum in tensor cores may be off by. Rounding at random: MARGIN of |h| |w|, twice the worst of a million
# sums. Cut off rather than rounded, always in one direction: LARGEST of the tile's largest logit for every 16 elements.
MARGIN, LARGEST = tl.constexpr(2.0**-20), tl.constexpr(2.0**-23)
TIE = tl.constexpr(2.0**-45)  # fp64 sums are equal if they differ by less, of |h| |w|

PAIRS = 32  # words of near logits a token that the list has room for
PROGRAMS = 1024  # that share the list


@triton.jit
def _wide(line, d, n_dims):
    """Elements d of a line in fp64, by way of fp32, for Triton's interpreter knows no other way from bf16."""
    return tl.load(line + d, mask=d < n_dims, other=0).to(tl.float32).to(tl.float64)


@triton.jit
def own_kernel(hidden, rows, index, own, n_tokens, n_rows, n_dims, h_stride, r_stride, DIMS: tl.constexpr):
    """own: fp64 [2, T], the product of hidden[t] and rows[index[t]], and |hidden[t]| |rows[index[t]]|."""
    t = tl.program_id(0).to(tl.int64)
    row = tl.minimum(tl.maximum(tl.load(index + t), 0), n_rows - 1)
    product = tl.zeros((DIMS,), tl.float64)
    h_square = tl.zeros((DIMS,), tl.float64)
    w_square = tl.zeros((DIMS,), tl.float64)
    for start in range(0, n_dims, DIMS):
        d = start + tl.arange(0, DIMS)
        h, w = _wide(hidden + t * h_stride, d, n_dims), _wide(rows + row * r_stride, d, n_dims)
        product += h * w
        h_square += h * h
        w_square += w * w
    tl.store(own + t, tl.sum(product, axis=0))
    tl.store(own + n_tokens + t, tl.sqrt(tl.sum(h_square, axis=0)) * tl.sqrt(tl.sum(w_square, axis=0)))


@triton.jit
def _settle(
    hidden, lm_head, own, tokens, above, t, v0, mask, n_tokens, n_dims, first, h_stride, w_stride,
    DIMS: tl.constexpr,
):  # fmt: skip
    """Count for token t those of the 32 rows from v0 on that `mask` has bits for, by their products in fp64."""
    mine, length, token = tl.load(own + t), tl.load(own + n_tokens + t), tl.load(tokens + t)
    for bit in range(32):
        if (mask >> bit) & 1:
            v = v0 + bit
            product = tl.zeros((DIMS,), tl.float64)
            for start in range(0, n_dims, DIMS):
                d = start + tl.arange(0, DIMS)
                product += _wide(hidden + t * h_stride, d, n_dims) * _wide(lm_head + v * w_stride, d, n_dims)
            lead = tl.sum(product, axis=0) - mine
            tie = tl.abs(lead) <= length * TIE
            beats = (tie & (v + first < token)) | (~tie & (lead > 0))
            tl.atomic_add(above + t, 1, mask=beats, sem="relaxed")


@triton.jit
def count_kernel(
    hidden, lm_head, hidden_tiles, head_tiles, own, tokens, above, pairs, n_pairs,
    n_tokens, n_rows, n_dims, first, h_stride, w_stride, t_tiles, n_words, room,
    TOKENS: tl.constexpr, ROWS: tl.constexpr, DIMS: tl.constexpr, EXACT_DIMS: tl.constexpr,
    DESCRIBED: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add to `above`, int64 [T], and to `pairs`, int64 [room, 2], of which `n_pairs` counts how many there would be:
    t * n_words + v // 32, and a bit for each of the 32 logits.

    Tokens are the faster side of the grid: the head comes from memory once. DESCRIBED: the tiles are tensor
    descriptors, and come by TMA; else they are the pointers once more. EVEN: DIMS divides n_dims.
    """
    program = tl.program_id(0)
    t0, v0 = program % t_tiles * TOKENS, program // t_tiles * ROWS
    t, v = t0 + tl.arange(0, TOKENS), v0 + tl.arange(0, ROWS)
    t_in, v_in = tl.minimum(t, n_tokens - 1).to(tl.int64), tl.minimum(v, n_rows - 1).to(tl.int64)
    dtype: tl.constexpr = lm_head.dtype.element_ty if PRECISION == "stored" else tl.float32
    precision: tl.constexpr = "ieee" if PRECISION == "stored" else PRECISION
    logits = tl.zeros((TOKENS, ROWS), tl.float32)
    for start in range(0, n_dims, DIMS):
        d = start + tl.arange(0, DIMS)
        if DESCRIBED:
            h = hidden_tiles.load([t0, start])
            w = head_tiles.load([v0, start]).T
        elif EVEN:
            h = tl.load(hidden + t_in[:, None] * h_stride + d[None, :])
            w = tl.load(lm_head + v_in[None, :] * w_stride + d[:, None])
        else:
            h = tl.load(hidden + t_in[:, None] * h_stride + d[None, :], mask=(d < n_dims)[None, :], other=0)
            w = tl.load(lm_head + v_in[None, :] * w_stride + d[:, None], mask=(d < n_dims)[:, None], other=0)
        logits = tl.dot(h.to(dtype), w.to(dtype), logits, input_precision=precision)

    mine = tl.load(own + t_in).to(tl.float32)
    bound = tl.load(own + n_tokens + t_in).to(tl.float32) * MARGIN
    cuts = (n_dims // 16 + 32) * (1 if PRECISION == "stored" else 6)
    margin = tl.maximum(bound, tl.max(tl.abs(logits), axis=1) * (cuts * LARGEST))[:, None]
    ahead = logits - mine[:, None]
    real = (t < n_tokens)[:, None] & (v < n_rows)[None, :]
    count = tl.sum((real & (ahead > margin)).to(tl.int32), axis=1)
    tl.atomic_add(above + t, count.to(tl.int64), mask=(t < n_tokens) & (count > 0), sem="relaxed")

    # A bit for every near logit, 32 of them a word, is all that is written of a tile, and only where there are any.
    close = real & ~(tl.abs(ahead) > margin)  # NaN, too
    bits = tl.where(close, 1 << (tl.arange(0, ROWS) % 32)[None, :], 0)
    bits = tl.sum(bits.reshape(TOKENS, ROWS // 32, 32), axis=2)
    word = t.to(tl.int64)[:, None] * n_words + (v0 // 32 + tl.arange(0, ROWS // 32))[None, :]
    place = tl.atomic_add(n_pairs + tl.zeros((TOKENS, ROWS // 32), tl.int32), 1, mask=bits != 0, sem="relaxed")
    kept = (bits != 0) & (place < room)
    tl.store(pairs + 2 * place, word, mask=kept)
    tl.store(pairs + 2 * place + 1, bits.to(tl.int64), mask=kept)
    left = tl.where(kept, 0, bits)
    corner = tl.arange(0, TOKENS)[:, None] * (ROWS // 32) + tl.arange(0, ROWS // 32)[None, :]
    for _ in range(tl.sum((left != 0).to(tl.int32))):
        chosen = tl.min(tl.where(left != 0, corner, TOKENS * ROWS))
        mask = tl.sum(tl.where(corner == chosen, left, 0))
        left = tl.where(corner == chosen, 0, left)
        line, row = (t0 + chosen // (ROWS // 32)).to(tl.int64), v0 + chosen % (ROWS // 32) * 32
        _settle(
            hidden, lm_head, own, tokens, above, line, row.to(tl.int64), mask,
            n_tokens, n_dims, first, h_stride, w_stride, EXACT_DIMS,
        )  # fmt: skip


@triton.jit
def pairs_kernel(
    hidden, lm_head, own, tokens, above, pairs, n_pairs, n_tokens, n_dims, first, h_stride, w_stride, n_words, room,
    PROGRAMS: tl.constexpr, EXACT_DIMS: tl.constexpr,
):  # fmt: skip
    """Settle the pairs of the list."""
    for place in range(tl.program_id(0), tl.minimum(tl.load(n_pairs), room), PROGRAMS):
        word, mask = tl.load(pairs + 2 * place), tl.load(pairs + 2 * place + 1).to(tl.int32)
        _settle(
            hidden, lm_head, own, tokens, above, word // n_words, word % n_words * 32, mask,
            n_tokens, n_dims, first, h_stride, w_stride, EXACT_DIMS,
        )  # fmt: skip


def own_logits(hidden: Tensor, rows: Tensor, index: Tensor) -> Tensor:
    """fp64 [2, T]: the logit of each token, by row index[t] of `rows`, of stride 1, and |h| |w| of it.

    index: int64 [T]. What is outside of `rows` is taken as its nearest end.
    """
    (t, d), n = hidden.shape, len(rows)
    own = hidden.new_empty((2, t), dtype=torch.float64)
    if t:
        arguments = (hidden, rows, index, own, t, n, d, hidden.stride(0), rows.stride(0))
        key = (hidden.dtype, rows.dtype)
        launch(own_kernel, own.get_device(), arguments, key, lambda properties: (t, {"DIMS": 512, "num_warps": 4}))
    return own


def count_above(hidden: Tensor, lm_head: Tensor, own: Tensor, tokens: Tensor, first: int, above: Tensor) -> None:
    """Add to `above`, int64 [T], how many rows of `lm_head` [V, D], of stride 1, beat each token.

    own: of `own_logits`. first: the index that row 0 of `lm_head` has among those that `tokens` counts.
    """
    (t, d), v = hidden.shape, len(lm_head)
    if t == 0 or v == 0:
        return
    index = above.get_device()
    constants = _constants(hidden, lm_head, properties_of(index))
    t_tiles, room, words = triton.cdiv(t, constants["TOKENS"]), PAIRS * t, triton.cdiv(v, 32)
    grid = triton.cdiv(v, constants["ROWS"]) * t_tiles
    pairs, n_pairs = above.new_empty((room, 2)), above.new_zeros(1, dtype=torch.int32)
    strides = hidden.stride(0), lm_head.stride(0)
    outputs = (own, tokens, above, pairs, n_pairs)
    integers = (t, v, d, first, *strides, t_tiles, words, room)
    tiles: tuple[Any, Any] = (hidden, lm_head)
    if constants["DESCRIBED"]:
        tiles = (
            TensorDescriptor.from_tensor(hidden, [constants["TOKENS"], constants["DIMS"]]),
            TensorDescriptor.from_tensor(lm_head, [constants["ROWS"], constants["DIMS"]]),
        )
    key = (hidden.dtype, lm_head.dtype)
    launch(
        count_kernel, index, (hidden, lm_head, *tiles, *outputs, *integers), key, lambda properties: (grid, constants)
    )
    few = {"PROGRAMS": PROGRAMS, "EXACT_DIMS": constants["EXACT_DIMS"], "num_warps": 4}
    again = (hidden, lm_head, *outputs, t, d, first, *strides, words, room)
    launch(pairs_kernel, index, again, key, lambda properties: (PROGRAMS, few))


def _constants(hidden: Tensor, lm_head: Tensor, properties: DeviceProperties) -> dict[str, Any]:
    t, d = hidden.shape
    # Triton's interpreter has no products of bf16.
    stored = properties.kind != "host" and hidden.dtype == lm_head.dtype != torch.float32
    large = properties.shared_memory >= 160_000
    tokens = max(16, min(256 if large and stored else 128, triton.next_power_of_2(t)))
    dims = (64 if large else 32) // (1 if stored else 2)
    addresses = [hidden.data_ptr(), lm_head.data_ptr(), *(2 * m.stride(0) for m in (hidden, lm_head))]
    return {
        "TOKENS": tokens, "ROWS": 128, "DIMS": dims, "EXACT_DIMS": max(16, min(4096, triton.next_power_of_2(d))),
        "DESCRIBED": properties.ptx >= 90 and stored and not any(address % 16 for address in addresses),
        "EVEN": d % dims == 0, "PRECISION": "stored" if stored else "tf32x3" if properties.ptx >= 80 else "ieee",
        "num_warps": 8, "num_stages": 4 if large else 2,
    }  # fmt: skip
