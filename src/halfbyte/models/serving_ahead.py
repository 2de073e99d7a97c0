"""Kernels for a server over transformers, compiled while it starts: its steps come to have any number of rows."""

from __future__ import annotations

from threading import Thread
from typing import Any

from halfbyte.kernels.common import nvrtc
from halfbyte.kernels.common.device import properties_of
from halfbyte.kernels.linear import reach
from halfbyte.models import paged
from halfbyte.models.ahead import products_of_model, rows_up_to, variants
from halfbyte.models.captured import current

# Of a step, and of one of its requests. What is beyond compiles when it comes.
MOST_REQUESTS, MOST_TOKENS = 1024, 1 << 15


def begin_serving(model: Any, most: int) -> None:
    """Before a server's first step. Its steps may have any number of rows up to `most`. NVRTC goes on while the server
    answers; attention is compiled when this returns, because Triton keeps Python's lock, and answers would wait."""
    if not reach.can_compile(model.device):
        return
    ahead = variants(products_of_model(model), model, rows_up_to(most), properties_of(model.device.index))
    planning = Thread(target=nvrtc.compile_ahead, args=(ahead,), daemon=True)
    planning.start()  # takes a second or two for so many rows
    if paged.reason_against(model) is None:
        _compile_attention(model, most)
    planning.join()


def _compile_attention(model: Any, most: int) -> None:
    """Over pages: of each kind that layers have."""
    from transformers.generation.continuous_batching.utils import find_num_key_value_heads

    from halfbyte.kernels.attention.paged_ahead import compile_ahead

    config, kinds = model.config, set()
    shared, page = find_num_key_value_heads(config), paged.page_of(config)
    for module in model.modules():
        if hasattr(module, "layer_idx") and hasattr(module, "scaling"):
            sinks, window = getattr(module, "sinks", None), getattr(module, "sliding_window", None)
            softcap = getattr(module, "attn_logit_softcapping", None)
            kinds.add(
                (module.head_dim, float(module.scaling), softcap, None if sinks is None else sinks.dtype, window or 0)
            )
    with current(model.device):
        for size, scale, softcap, sinks, window in sorted(kinds, key=repr):
            compile_ahead(
                properties_of(model.device.index), model.dtype, config.num_attention_heads, shared, size, scale,
                page, MOST_REQUESTS, most, MOST_TOKENS, softcap=softcap, sinks=sinks, window=window,
            )  # fmt: skip
