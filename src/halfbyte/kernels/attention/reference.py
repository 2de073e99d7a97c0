"""Attention of few new tokens in plain torch: the definition, and what tests compare with."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from halfbyte.kernels.attention.fresh import Fresh
from halfbyte.kernels.attention.pages import Pages
from halfbyte.kernels.common.norm import Norm


def attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """As `attend` in triton.py, computed in the dtype of its arguments."""
    group = query.shape[1] // keys.shape[1]
    keys, values = (tensor.repeat_interleave(group, 1) for tensor in (keys, values))
    score = query @ keys.mT * scale
    if softcap is not None:
        score = softcap * torch.tanh(score / softcap)
    if mask is not None and mask.is_floating_point():
        score, mask = score + mask, mask > torch.finfo(mask.dtype).min
    if mask is not None:
        score = score.masked_fill(~mask, float("-inf"))
    if sinks is not None:
        sink = sinks.to(score.dtype)[None, :, None, None].expand(*score.shape[:3], 1)
        weights = torch.cat((score, sink), -1).softmax(-1)[..., :-1]
    else:
        weights = score.softmax(-1).nan_to_num(0.0) if mask is not None else score.softmax(-1)
    return (weights @ values).transpose(1, 2)


def put(query: Tensor, keys: Tensor, values: Tensor, fresh: Fresh) -> Tensor:
    """What `attend` does with a `Fresh` before it attends: norm and rotate the query, which is returned, and put
    the new tokens' keys and values into the cache, from their slot on."""
    assert fresh.slot is not None
    slots = fresh.slot + torch.arange(query.shape[2], dtype=torch.int64, device=query.device)
    query, key = turned(query, fresh)
    keys.index_copy_(2, slots, key.to(keys.dtype))
    values.index_copy_(2, slots, fresh.values.to(values.dtype))
    return query


def turn(query: Tensor, keys: Tensor, values: Tensor, fresh: Fresh) -> Tensor:
    """As `turn` in turn.py, computed in the dtype of its arguments."""
    query, key = turned(query, fresh)
    keys.copy_(key)
    values.copy_(fresh.values)
    return query


def turned(query: Tensor, fresh: Fresh) -> tuple[Tensor, Tensor]:
    """Queries and new keys, normed and rotated."""
    cos, sin = (torch.cat((t, t), -1) if fresh.halves else t for t in (fresh.cos, fresh.sin))
    heads = normed(query, fresh.query_norm), normed(fresh.keys, fresh.key_norm)
    return rotated(heads[0], cos, sin), rotated(heads[1], cos, sin)


def normed(x: Tensor, norm: Norm | None) -> Tensor:
    """x [..., size] with the RMS norm of each head, or as it is without one."""
    if norm is None:
        return x
    factor = torch.rsqrt(x.square().mean(-1, keepdim=True) + norm.epsilon)
    return x * factor * (norm.weight.to(x.dtype) + norm.offset)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [texts, heads, tokens, size], the first numbers of whose heads turn; cos, sin: [texts or 1, tokens, rotary]."""
    turning, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    first, second = turning.chunk(2, -1)
    turned = turning * cos[:, None].to(x.dtype) + torch.cat((-second, first), -1) * sin[:, None].to(x.dtype)
    return torch.cat((turned, rest), -1)


def attend_pages(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pages: Pages,
    query_ends: Tensor,
    key_ends: Tensor,
    scale: float,
    *,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    window: int = 0,
    **_: int,
) -> Tensor:
    """As `attend_pages` in paged.py, request by request, computed in the dtype of its arguments."""
    out = torch.zeros_like(query)
    ends, seen = query_ends.tolist(), key_ends.tolist()
    for request, (begin, end) in enumerate(pairwise(ends)):
        new = end - begin
        cached = seen[request + 1] - seen[request] - new
        if not new:
            continue
        token = torch.arange(cached + new, dtype=torch.int64, device=query.device)
        if pages.page:
            row = pages.places[request, token // pages.page].long() * pages.page + token % pages.page
            pages.keys[row[cached:]], pages.values[row[cached:]] = key[begin:end], value[begin:end]
            row = row[:cached]
        else:
            row = pages.places[seen[request] :][:cached]
        keys, values = torch.cat((pages.keys[row], key[begin:end])), torch.cat((pages.values[row], value[begin:end]))
        at = token[cached:, None]
        mask = (token <= at) & ((token > at - window) | (window == 0))
        q, k, v = (x.transpose(0, 1)[None] for x in (query[begin:end], keys, values))
        out[begin:end] = attend(q, k, v, mask[None, None], scale, softcap, sinks)[0]
    return out
