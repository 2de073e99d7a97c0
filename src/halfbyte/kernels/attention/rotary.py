"""Queries and keys rotated in one launch, and gradients of them back, with the bits that transformers has.

transformers makes ten launches of it, and autograd some twenty: the half of each head is negated and laid beside the
other, both are multiplied, and every step is rounded to 16 bits. Here each number is rounded at the same places.

Bytes: queries and keys, read once and written once. What a number turns with is read a second time, from the L1 cache.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from halfbyte.kernels.common.device import DeviceProperties
from halfbyte.kernels.common.launch import launch

NUMBERS_OF_A_WARP = 1024  # that 32 threads hold without spilling, once as they are and once as what they turn with
DTYPES = (torch.bfloat16, torch.float16)  # of fp32, products and sums may be one instruction, which rounds once


@triton.jit  # type: ignore[untyped-decorator]
def _rotate(  # type: ignore[no-untyped-def]
    at, out, head_stride, out_head_stride, c, s, zero,
    HEADS: tl.constexpr, ROWS: tl.constexpr, SIZE: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """All heads of a token. c, s: fp32 [D], of which s belongs to the partner and has the sign that it adds with."""
    d = tl.arange(0, D)
    head = tl.arange(0, ROWS).to(tl.int64)
    there = (head < HEADS)[:, None] & (d < SIZE)[None, :]
    partner = tl.where(d < SIZE // 2, d + SIZE // 2, d - SIZE // 2)
    row = at + head[:, None] * head_stride
    x = tl.load(row + d[None, :], there, 0)
    y = tl.load(row + partner[None, :], there, 0)
    straight = _rounded(x.to(tl.float32) * c[None, :], zero, x.dtype)
    across = _rounded(y.to(tl.float32) * s[None, :], zero, x.dtype)
    tl.store(out + head[:, None] * out_head_stride + d[None, :], straight + across, there)


@triton.jit  # type: ignore[untyped-decorator]
def _rounded(product, zero, DTYPE: tl.constexpr):  # type: ignore[no-untyped-def]
    """fp32 to 16 bits, and back as fp32. Compilers make a rounded product and a sum one instruction, which rounds once;
    not of bits that they cannot know: `zero` is an argument."""
    bits = product.to(DTYPE).to(tl.int16, bitcast=True) ^ zero.to(tl.int16)
    return bits.to(DTYPE, bitcast=True).to(tl.float32)


# A text may have any number of tokens: no length must ask for a kernel of its own.
@triton.jit(do_not_specialize=["tokens", "zero"])  # type: ignore[untyped-decorator]
def rotate_kernel(  # type: ignore[no-untyped-def]
    query, key, cos, sin, query_out, key_out,
    tokens, query_text, query_head, query_token, key_text, key_head, key_token,
    query_out_text, query_out_head, query_out_token, key_out_text, key_out_head, key_out_token, cos_text, cos_token,
    zero,
    HEADS: tl.constexpr, SHARED: tl.constexpr, ROWS: tl.constexpr, SHARED_ROWS: tl.constexpr,
    SIZE: tl.constexpr, D: tl.constexpr, BACK: tl.constexpr,
):  # fmt: skip
    """Program i: all heads of token i % tokens of a text."""
    token = (tl.program_id(0) % tokens).to(tl.int64)
    text = (tl.program_id(0) // tokens).to(tl.int64)
    d = tl.arange(0, D)
    angle = text * cos_text + token * cos_token
    c = tl.load(cos + angle + d, d < SIZE, 0).to(tl.float32)
    if BACK:  # the transpose: the partner's own angle, the other way round
        partner = tl.where(d < SIZE // 2, d + SIZE // 2, d - SIZE // 2)
        s = tl.load(sin + angle + partner, d < SIZE, 0).to(tl.float32)
        s = tl.where(d < SIZE // 2, s, -s)
    else:
        s = tl.load(sin + angle + d, d < SIZE, 0).to(tl.float32)
        s = tl.where(d < SIZE // 2, -s, s)
    _rotate(
        query + text * query_text + token * query_token, query_out + text * query_out_text + token * query_out_token,
        query_head, query_out_head, c, s, zero, HEADS, ROWS, SIZE, D,
    )  # fmt: skip
    _rotate(
        key + text * key_text + token * key_token, key_out + text * key_out_text + token * key_out_token,
        key_head, key_out_head, c, s, zero, SHARED, SHARED_ROWS, SIZE, D,
    )  # fmt: skip


def supports(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> bool:
    """Whether `rotate` is for them, but for their device."""
    if query.dim() != 4 or key.dim() != 4 or cos.dim() != 3 or query.numel() == 0 or key.numel() == 0:
        return False
    texts, _, tokens, size = query.shape
    return (
        query.dtype in DTYPES
        and query.dtype is key.dtype is cos.dtype is sin.dtype
        and query.device == key.device == cos.device == sin.device
        and (key.shape[0], *key.shape[2:]) == (texts, tokens, size)
        and cos.shape == sin.shape
        and cos.shape[1:] == (tokens, size)
        and cos.shape[0] in (1, texts)
        and cos.stride() == sin.stride()
        and size % 2 == 0
        and query.stride(3) == key.stride(3) == cos.stride(2) == 1
    )


def rotate(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, back: bool) -> tuple[Tensor, Tensor]:
    """transformers' apply_rotary_pos_emb of 16-bit queries and keys or, `back`, of gradients of its results what
    autograd gives for its arguments.

    query: [texts, heads, tokens, size]; key: [texts, heads that share keys, tokens, size]; cos, sin: [texts or 1,
    tokens, size]; all of one dtype, on the current device, their last dimension contiguous. Results have the strides
    that torch gives a copy.
    """
    texts, heads, tokens, size = query.shape
    shared = key.shape[1]
    query_out, key_out = torch.empty_like(query), torch.empty_like(key)
    rows, d = triton.next_power_of_2(heads), max(16, triton.next_power_of_2(size))

    def configure(properties: DeviceProperties) -> tuple[int, dict[str, Any]]:
        constants = {
            "HEADS": heads, "SHARED": shared, "ROWS": rows, "SHARED_ROWS": triton.next_power_of_2(shared),
            "SIZE": size, "D": d, "BACK": back, "num_warps": min(16, max(1, rows * d // NUMBERS_OF_A_WARP)),
        }  # fmt: skip
        return texts * tokens, constants

    cos_text = 0 if len(cos) == 1 else cos.stride(0)
    arguments = (
        query, key, cos, sin, query_out, key_out, tokens, *query.stride()[:3], *key.stride()[:3],
        *query_out.stride()[:3], *key_out.stride()[:3], cos_text, cos.stride(1), 0,
    )  # fmt: skip
    launch(rotate_kernel, query.get_device(), arguments, (query.dtype, texts, heads, shared, size, back), configure)
    return query_out, key_out
