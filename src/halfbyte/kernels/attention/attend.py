"""Attention of one to eight new tokens of each text: which kernel computes it.

On GPUs with clusters that is CUDA's (sm90/), for heads of 64, 128 and 256; elsewhere Triton's (triton.py).
"""

from __future__ import annotations

from torch import Tensor

from halfbyte.kernels.attention import triton
from halfbyte.kernels.attention.fresh import Fresh
from halfbyte.kernels.attention.sm90 import launch as clusters
from halfbyte.kernels.attention.spans import spans_of


def attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    scale: float,
    *,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    spans: Tensor | None = None,
    fresh: Fresh | None = None,
    settled: bool = False,
) -> Tensor:
    """softmax(query keysᵀ · scale) values, where the mask is true, in fp32 but for products of 16-bit numbers.

    query: [texts, heads, new tokens, size]. keys, values: [texts, heads that share keys, tokens, size]. mask: [texts or
    1, 1, new tokens, tokens], of booleans, or of numbers in the dtype of query, which are added to scores; the least of
    that dtype, or -inf, stands for a token that is not seen. softcap: scores become softcap · tanh(score / softcap).
    sinks: [heads], a score each that takes its share of the weights and has no value. Such that `supports` in triton.py
    says yes, on the current device.

    spans: what `spans_of` says of the mask, for callers that have several layers; without a mask every token of a span
    is seen. The tokens of a span that a mask leaves out are read all the same, and must be finite.

    fresh: the new tokens' keys and values, which with their queries are normed and rotated here, and which are put into
    the cache; such that `fresh.supports` says yes. Without it the cache holds them.

    settled: no kernel just ahead in the stream writes the cache, the mask, spans, cos, sin or slot, so that they may be
    read before that one ends.

    Returns [texts, new tokens, heads, size of values]; zeros for a new token that sees none.
    """
    if spans is None and mask is not None:
        spans = spans_of(mask, len(query))
    plan = clusters.plan_for(query, keys, values, fresh)
    if plan is None:
        return triton.attend(
            query, keys, values, mask, scale, softcap=softcap, sinks=sinks, spans=spans, fresh=fresh, settled=settled
        )
    return clusters.attend(query, keys, values, mask, scale, softcap, sinks, spans, fresh, settled, plan)
