"""The sizes of caches that are kept between calls: a call of any size uses the next larger one.

So a new prompt length rarely needs a new cache and a new capture. A cache has at most twice the texts and 1.5 times
the tokens of the call that uses it.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from itertools import chain
from typing import Any

import torch

LEAST_TOKENS = 128
ALIGNMENT = 64  # of a cache that is longer than the model's longest text
LEAST_PROMPT = 16  # tokens of a text
MOST_PROMPT = 2048  # rows on a graph
# Rows times weights of a layer that a row meets from which on a GPU takes longer than Python, about 1 ms a layer.
MOST_WORK = 2.5e11


def texts_bucket(texts: int) -> int:
    """The power of two that is not below `texts`."""
    return 1 << max(0, texts - 1).bit_length()


def tokens_bucket(tokens: int, most: int) -> int:
    """128, 192, 256, 384, 512, ...: the first that is not below `tokens`, but not above `most` unless tokens is.

    most: the longest text that the model was made for.
    """
    if tokens >= most:
        return -(-tokens // ALIGNMENT) * ALIGNMENT
    size = LEAST_TOKENS
    while size < tokens:
        step = size + size // 2
        size = step if step >= tokens else 2 * size
    return min(size, most)


def prompt_bucket(texts: int, tokens: int) -> int:
    """Tokens of the texts of a prompt on a graph: the first number not below `tokens` with a multiple of 32 rows in
    all, of 64 from 256 on; of many texts at least a multiple of 16 each."""
    step = max(LEAST_PROMPT, (32 if texts * tokens <= 256 else 64) // texts)
    return -(-tokens // step) * step


def longest_text(model: Any) -> int:
    """Tokens of the longest text that a model of transformers was made for."""
    found: Any = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    return found if isinstance(found, int) and found > 0 else 1 << 62


def cache_bytes(model: Any, texts: int, tokens: int) -> int:
    """Bytes of keys and values, counted as if no window slid."""
    config = model.config.get_text_config(decoder=True)
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    return int(2 * config.num_hidden_layers * heads * head * tokens * texts * model.dtype.itemsize)


def most_prompt_rows(model: Any) -> int:
    """Rows of the largest prompt that is computed on a graph: a GPU does not wait for Python in a larger one."""
    return min(MOST_PROMPT, int(MOST_WORK / layer_weights(model.config.get_text_config(decoder=True))))


def layer_weights(config: Any) -> int:
    """Weights of a decoder layer that a token meets, experts that are not chosen left out.

    config: of the model's text part.
    """
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    keys = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    attention = 2 * (config.num_attention_heads + keys) * head
    experts = experts_per_token(config)
    inner = getattr(config, "moe_intermediate_size", None) if experts else None
    return int(config.hidden_size * (attention + 3 * max(1, experts) * (inner or config.intermediate_size)))


def experts_per_token(config: Any) -> int:
    """0 in dense models."""
    return int(getattr(config, "num_experts_per_tok", None) or getattr(config, "experts_per_token", None) or 0)


def layers_by_device(model: Any) -> Counter[torch.device]:
    """How many of the model's layers with attention lie on each device."""
    places: dict[int, torch.device] = {}
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else None
    for module in (decoder or model).modules():
        index = vars(module).get("layer_idx")  # of attention
        first = next(chain(module.parameters(), module.buffers()), None) if isinstance(index, int) else None
        if first is not None:
            places.setdefault(index, first.device)
    return Counter(places.values()) or Counter([model.device])


def least_bytes(layers: Counter[torch.device], of: Callable[[torch.device], float]) -> int:
    """Bytes of a cache for all these layers, of which no device holds more than `of` says of it."""
    return min(int(of(device) * layers.total() / count) for device, count in layers.items())


def total_bytes(device: torch.device) -> int:
    """Memory of the device that a tensor lies on."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def free_bytes(device: torch.device) -> int:
    """What the device has left, torch's own reserve included."""
    if device.type != "cuda":
        return total_bytes(device)
    reserve = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(torch.cuda.mem_get_info(device)[0] + reserve)
