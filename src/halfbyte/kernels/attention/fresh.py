"""A new token's own query, key and value, as a layer's projections leave them: normed, rotated and put into the cache
by the launch that attends to them."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from halfbyte.kernels.common.norm import Norm


class Fresh(NamedTuple):
    """keys, values: [texts, heads that share keys, 1, size], not rotated. cos, sin: [texts or 1, 1, rotary size]. slot:
    int64 without dimensions, the place in the cache. query_norm, key_norm: of heads, before rotation, or None. halves:
    cos and sin have half the rotary size, and are the same for both halves of it (gpt-oss).

    All but slot in the dtype of the query, on its device, their last dimension contiguous.
    """

    keys: Tensor
    values: Tensor
    cos: Tensor
    sin: Tensor
    slot: Tensor
    query_norm: Norm | None = None
    key_norm: Norm | None = None
    halves: bool = False

    @property
    def rotary(self) -> int:
        """Numbers of a head that turn."""
        return self.cos.shape[2] * (2 if self.halves else 1)


def supports(fresh: Fresh, query: Tensor, keys: Tensor, values: Tensor) -> bool:
    """Whether `attend` is for them beside a query and a cache that it supports."""
    texts, _, new, size = query.shape
    norms = [norm.weight for norm in (fresh.query_norm, fresh.key_norm) if norm is not None]
    tensors = (fresh.keys, fresh.values, fresh.cos, fresh.sin, *norms)
    return (
        new == 1
        and fresh.keys.shape == (texts, keys.shape[1], 1, size)
        and fresh.values.shape == (texts, keys.shape[1], 1, values.shape[3])
        and fresh.cos.shape == fresh.sin.shape
        and fresh.cos.shape[:2] in ((texts, 1), (1, 1))
        and 0 < fresh.rotary <= size
        and fresh.rotary % 2 == 0
        and fresh.cos.stride() == fresh.sin.stride()
        and all(weight.shape == (size,) for weight in norms)
        and all(tensor.dtype is query.dtype and tensor.device == query.device for tensor in tensors)
        and all(tensor.stride(-1) == 1 for tensor in tensors)
        and fresh.slot.dim() == 0
        and fresh.slot.device == query.device
    )
