"""New tokens' own queries, keys and values, as a layer's projections leave them. What attends to them norms and rotates
them and puts them into the cache: in the same launch, but for several of them by Triton's kernel, which has one ahead
(put.py). A prompt, whose attention is torch's, has one as well (turn.py)."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from halfbyte.kernels.common.norm import Norm


class Fresh(NamedTuple):
    """keys, values: [texts, heads that share keys, new tokens, size], not rotated. cos, sin: [texts or 1, new tokens,
    rotary size]. slot: int64 without dimensions, the place of the first new token in the cache, behind which the others
    go; None of a prompt, with which a cache begins. query_norm, key_norm: of heads, before rotation, or None. halves:
    cos and sin have half the rotary size, and are the same for both halves of it (gpt-oss).

    All but slot in the dtype of the query, on its device, their last dimension contiguous.
    """

    keys: Tensor
    values: Tensor
    cos: Tensor
    sin: Tensor
    slot: Tensor | None
    query_norm: Norm | None = None
    key_norm: Norm | None = None
    halves: bool = False

    @property
    def rotary(self) -> int:
        """Numbers of a head that turn."""
        return self.cos.shape[2] * (2 if self.halves else 1)

    @property
    def cos_text(self) -> int:
        """From one text's angles to the next one's, 0 where all have the same."""
        return 0 if len(self.cos) == 1 else self.cos.stride(0)

    def tensors(self, query: Tensor) -> tuple[Tensor, ...]:
        """As kernels take them, but for a slot that there is not; the query stands for norms that there are not, and is
        not read as such."""
        norms = (query if norm is None else norm.weight for norm in (self.query_norm, self.key_norm))
        slot = () if self.slot is None else (self.slot,)
        return (self.keys, self.values, self.cos, self.sin, *slot, *norms)

    @property
    def constants(self) -> dict[str, Any]:
        """What kernels are compiled for."""
        of_query, of_key = self.query_norm, self.key_norm
        return {
            "ROTARY": self.rotary, "HALVES": self.halves,
            "QUERY_NORM": of_query is not None, "KEY_NORM": of_key is not None,
            "QUERY_EPSILON": of_query.epsilon if of_query else 0.0, "KEY_EPSILON": of_key.epsilon if of_key else 0.0,
            "OFFSET": (of_query or of_key).offset if of_query or of_key else 0.0,  # type: ignore[union-attr]
        }  # fmt: skip


def supports(fresh: Fresh, query: Tensor, keys: Tensor, values: Tensor) -> bool:
    """Whether `attend` is for them beside a query and a cache that it supports, and `turn` for those of a prompt, which
    have no slot, beside what it writes."""
    texts, _, new, size = query.shape
    norms = [norm.weight for norm in (fresh.query_norm, fresh.key_norm) if norm is not None]
    tensors = (fresh.keys, fresh.values, fresh.cos, fresh.sin, *norms)
    return (
        fresh.keys.shape == (texts, keys.shape[1], new, size)
        and fresh.values.shape == (texts, keys.shape[1], new, values.shape[3])
        and fresh.cos.shape == fresh.sin.shape
        and fresh.cos.shape[:2] in ((texts, new), (1, new))
        and 0 < fresh.rotary <= size
        and fresh.rotary % 2 == 0
        and fresh.cos.stride() == fresh.sin.stride()
        and all(weight.shape == (size,) for weight in norms)
        and all(tensor.dtype is query.dtype and tensor.device == query.device for tensor in tensors)
        and all(tensor.stride(-1) == 1 for tensor in tensors)
        and (fresh.slot is None or (fresh.slot.dim() == 0 and fresh.slot.device == query.device))
    )
