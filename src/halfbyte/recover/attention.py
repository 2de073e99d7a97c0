"""Attention of many candidates for one position: each sees the prefix and itself, and none sees another.

The candidates lie along the sequence axis, so the keys and values of the prefix are there once, however many
candidates there are; nothing is expanded or copied for each of them. It is registered with transformers as one more
attention implementation, and so serves every model whose attention can be chosen: grouped heads, sliding windows,
soft caps and attention sinks are what the model passes along.

Scores and sums are fp32 (fp64 for fp64 models), a little more accurate than the implementations it stands in for.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

NAME = "halfbyte_candidates"


class Prefix:
    """Keys and values of the tokens found so far, in memory for `length` of them; what layers get as their cache.

    Shapes and addresses stay the same from the first position to the last, so a call can be a CUDA graph. Which entries
    count is said by `back`, [1, 1, 1, length] int64: how far behind the candidates' position an entry lies, and
    nothing above zero where there is none yet. It takes the place of the attention mask. position: [1, 1] int64.
    """

    def __init__(self, length: int, device: torch.device) -> None:
        self.length = length
        self.count = 0
        self.places = torch.arange(length, dtype=torch.int64, device=device)
        self.back = torch.zeros((1, 1, 1, length), dtype=torch.int64, device=device)
        self.position = torch.zeros((1, 1), dtype=torch.int64, device=device)
        self.kept: dict[int, tuple[Tensor, Tensor]] = {}
        self.new: dict[int, tuple[Tensor, Tensor]] = {}
        self.reset()

    def reset(self) -> None:
        """Back to an empty prefix; the memory stays."""
        self._move(0)

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Called by a layer with the candidates' keys and values [1, heads, C, head]: the prefix's, then these."""
        if layer_idx not in self.kept:
            self.kept[layer_idx] = tuple(
                torch.zeros((1, new.shape[1], self.length, new.shape[3]), dtype=new.dtype, device=new.device)
                for new in (keys, values)
            )  # type: ignore[assignment]
        if not torch.is_grad_enabled():  # embeddings that are pulled towards a state are no tokens to append
            self.new[layer_idx] = keys, values
        old_keys, old_values = self.kept[layer_idx]
        return torch.cat((old_keys, keys), 2), torch.cat((old_values, values), 2)

    @torch.no_grad()
    def append(self, candidate: int) -> None:
        """Keep the keys and values of one candidate of the last call."""
        for layer, pair in self.new.items():
            for kept, new in zip(self.kept[layer], pair, strict=True):
                kept[:, :, self.count] = new[:, :, candidate]
        self._move(self.count + 1)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.count

    def _move(self, count: int) -> None:
        self.count = count
        self.position.fill_(count)
        torch.sub(self.position.view(1), self.places, out=self.back.view(-1))


@contextmanager
def candidates_attention(config: Any) -> Iterator[None]:
    """Within, the models of `config` attend as above."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, attend)
    before = config._attn_implementation
    config._attn_implementation = NAME
    try:
        yield
    finally:
        config._attn_implementation = before


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """query [1, H, C, d], key and value [1, h, L + C, d], attention_mask: Prefix.back -> [1, C, H, d]."""
    _, heads, count, size = query.shape
    shared, length = key.shape[1], key.shape[2] - count
    dtype = torch.promote_types(query.dtype, torch.float32)
    queries = query.to(dtype) * (size**-0.5 if scaling is None else scaling)
    keys, values = key[0].to(dtype), value[0].to(dtype)
    grouped = queries.reshape(shared, -1, size)  # the heads that share keys, one after the other
    scores = (grouped @ keys[:, :length].mT).view(shared, -1, count, length)
    own = (queries.view(shared, -1, count, size) * keys[:, None, length:]).sum(-1, keepdim=True)
    scores = torch.cat((scores, own), -1)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    back = attention_mask.view(-1)
    seen = back > 0
    if sliding_window is not None:
        seen = seen & (back < sliding_window)
    scores = scores.masked_fill(~torch.nn.functional.pad(seen, (0, 1), value=True), -torch.inf)
    if s_aux is not None:  # a score that takes its share and gives nothing
        sink = s_aux.to(dtype).view(shared, -1, 1, 1).expand(-1, -1, count, 1)
        scores = torch.cat((scores, sink), -1)
    shares = scores.softmax(-1)
    of_prefix = shares[..., :length].reshape(shared, -1, length) @ values[:, :length]
    of_itself = shares[..., length : length + 1] * values[:, None, length:]
    result = of_prefix.view_as(of_itself) + of_itself
    return result.view(1, heads, count, -1).transpose(1, 2).to(query.dtype), None
