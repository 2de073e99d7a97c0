"""transformers' continuous batching over an accelerated model: attention reads the cache's pages where they lie.

Without flash-attn, `generate_batch` and transformers' server copy every request's keys and values out of the cache in
every layer and step, and compute with a mask over all pairs of tokens of a batch. Here a manager that is made while a
model is accelerated and on one of DEVICES has an attention of ours, for prompts and for decoding
(kernels/attention/paged.py). It needs no mask and waits for nothing. So transformers captures its steps as CUDA graphs,
prepares the next batch while one is computed, and says by tables of pages where the tokens of decoding requests lie,
which it otherwise does for flash-attn alone.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from copy import deepcopy
from types import MethodType
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from halfbyte.kernels.attention import reference
from halfbyte.kernels.attention.pages import Pages
from halfbyte.kernels.common import slow
from halfbyte.kernels.common.device import properties_of
from halfbyte.models.batch_graphs import capture_once_it_pays
from halfbyte.models.captured import current
from halfbyte.models.patch import is_method_of
from halfbyte.models.prompt_layers import begin_batches
from halfbyte.models.steps import pool_of
from halfbyte.nn.experts import Experts4bit

# transformers asks by the name: only one with "flash" in it is taken to need no mask.
NAME = "halfbyte_flash"
HOOK = "init_continuous_batching"
KEPT = "_cached_continuous_batching_manager"  # attribute of a model: `persistent_manager=True`
BEFORE = "_halfbyte_attention"  # attribute of a model: the attention that it had before its first manager of ours
REPLACED = ("sdpa", "eager")  # a user who chose another attention has it
DEVICES = ("cuda",)  # types that the kernel is for; AMD GPUs have this one, too

_managers: WeakSet[Any] = WeakSet()


def apply(model: nn.Module) -> None:
    """Let every model in it that can batch continuously do so with our attention."""
    for module in model.modules():
        if hasattr(type(module), HOOK) and HOOK not in vars(module):
            setattr(module, HOOK, MethodType(init_continuous_batching, module))


def undo(model: nn.Module) -> None:
    """For managers to come. One that is kept between calls is ended, as it makes no masks for another attention; one
    that runs keeps ours until it is stopped."""
    for module in model.modules():
        if is_method_of(init_continuous_batching, vars(module).get(HOOK)):
            delattr(module, HOOK)
            kept = vars(module).get(KEPT)
            if kept is not None and kept in _managers and not kept.is_running():
                type(module).destroy_cached_continuous_batching_manager(module)  # type: ignore[attr-defined]
            before = vars(module).pop(BEFORE, None)
            if before and not any(manager.is_running() for manager in _managers if manager.model is module):
                module.config._attn_implementation = before  # type: ignore[union-attr]


def undo_in_library() -> None:
    """Forget the attention, unless a manager still runs with it."""
    modeling = sys.modules.get("transformers.modeling_utils")
    if modeling and not any(manager.is_running() for manager in _managers):
        functions = modeling.ALL_ATTENTION_FUNCTIONS
        if NAME in functions:
            del functions[NAME]


def apply_to_library() -> None:
    """Nothing yet: the first manager registers the attention."""


def init_continuous_batching(
    self: Any, generation_config: Any = None, continuous_batching_config: Any = None, workload_hints: Any = None
) -> Any:
    """transformers' own, whose manager gets our attention where that is for the model."""
    original = type(self).init_continuous_batching
    before = self.config._attn_implementation
    if before == NAME:  # an earlier manager was not stopped
        before = vars(self).get(BEFORE, "sdpa")
    if reason := reason_against(self):
        if before in REPLACED and self.device.type in DEVICES:
            slow.warn("paged", f"continuous batching has transformers' own attention, which is slower: {reason}")
        return original(self, generation_config, continuous_batching_config, workload_hints)
    from transformers import ContinuousBatchingConfig
    from transformers.generation.continuous_batching import initialization
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS as functions

    settings = continuous_batching_config
    if settings is None:
        settings = getattr(generation_config or self.generation_config, "continuous_batching_config", None)
    settings = deepcopy(settings) if isinstance(settings, ContinuousBatchingConfig) else ContinuousBatchingConfig()
    resolved = deepcopy(settings)
    initialization.resolve_using_hints(resolved, workload_hints)
    initialization.resolve_without_hints(resolved)
    settings.max_blocks_per_request = 0  # it would look for flash-attn; see below
    if settings.use_cuda_graph is None and not _can_be_captured(self):
        settings.use_cuda_graph = False
    functions[NAME] = torch.compiler.disable(attention)
    setattr(self, BEFORE, before)
    self.config._attn_implementation = NAME
    try:
        manager = original(self, generation_config, settings, workload_hints)
    except BaseException:
        self.config._attn_implementation = before
        raise
    _managers.add(manager)
    begin_batches(self)
    capture_once_it_pays(manager)
    manager._original_attn_impl = before  # which it gives back to the model when it stops
    if manager.batch_processor is None and _has_tables(self.config):
        manager.continuous_batching_config.max_blocks_per_request = resolved.max_blocks_per_request
    return manager


def attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    cache: Any = None,
    block_table: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """What transformers calls in every layer. query: [1, heads, tokens, size]; key, value: likewise, of the new tokens
    of all requests, which are put into the cache. Returns [1, tokens, heads, size]."""
    if cache is None:
        raise ValueError(
            "this model is set up for continuous batching, and a plain call has no paged cache: stop the manager that "
            "model.init_continuous_batching() gave, or call model.destroy_cached_continuous_batching_manager()"
        )
    if dropout or position_bias is not None:
        raise ValueError(
            "halfbyte's paged attention knows neither dropout nor a position bias; call halfbyte.restore(model) before "
            "continuous batching"
        )
    allocator = cache.layer_to_allocator[module.layer_idx]
    keys, values = (pages.flatten(0, 1) for pages in _views(allocator, module.layer_idx))
    states = [states[0].transpose(0, 1).to(keys.dtype) for states in (query, key, value)]
    if block_table is not None:
        table = block_table[allocator.index]
        pages = Pages(keys, values, table, allocator.tokens_per_page)
        most_new, most_tokens = 1, table.shape[1] * allocator.tokens_per_page
    else:
        pages = Pages(keys, values, others["read_index"][allocator.index])
        longest = others["max_length_k"][allocator.layer_type]
        # Few launches are kept where every number of tokens would have one of its own.
        most_new, most_tokens = others["max_length_q"], 1 << max(0, longest - 1).bit_length()
    attend: Callable[..., Tensor] = reference.attend_pages
    if query.is_cuda:
        from halfbyte.kernels.attention.paged import attend_pages as attend
    with current(query.device):
        out = attend(
            *states,
            pages,
            others["cu_seq_lens_q"],
            others["cu_seq_lens_k"][allocator.layer_type],
            query.shape[-1] ** -0.5 if scaling is None else float(scaling),
            most_new=most_new,
            most_tokens=most_tokens,
            softcap=None if softcap is None else float(softcap),
            sinks=s_aux,
            window=getattr(allocator, "sliding_window", None) or 0,
        )
    if block_table is None:  # after all have read: a window's new tokens take the place of old ones
        written = others["write_index"][allocator.index]
        keys.index_copy_(0, written, states[1])
        values.index_copy_(0, written, states[2])
    return out.to(query.dtype)[None], None


def reason_against(model: Any) -> str | None:
    """Why a manager for a model is left to transformers, or None."""
    config = model.config
    if model.device.type not in DEVICES:
        return f"there is no kernel for {model.device.type} devices"
    if config._attn_implementation not in (*REPLACED, NAME):
        return f"{config._attn_implementation} was asked for"
    if model.device.type == "cuda" and not slow.has_triton():
        return "Triton is missing; pip install triton"
    if config.get_text_config() is not config or not model._can_set_attn_implementation():
        return f"{type(model).__name__} has its attention in a part of it, or one of its own"
    if getattr(model, "_device_mesh", None) is not None or len({p.device for p in model.parameters()}) > 1:
        return "the model is on several devices"
    try:
        from transformers.generation.continuous_batching.cache_allocators import (
            FullAttentionCacheAllocator,  # noqa: F401
        )
        from transformers.generation.continuous_batching.utils import find_head_dim, find_num_key_value_heads
    except ImportError:
        return "this version of transformers keeps its pages in another way; 5.23 is known"
    size, heads, shared = find_head_dim(config), config.num_attention_heads, find_num_key_value_heads(config)
    return _not_supported(model, size, heads, shared)


def page_of(config: Any) -> int:
    """Tokens of a page in a table that says where a decoding request's tokens lie; 0 where transformers has none."""
    from transformers import ContinuousBatchingConfig

    return int(ContinuousBatchingConfig().page_size) if _has_tables(config) else 0


def _views(allocator: Any, layer: int) -> tuple[Tensor, Tensor]:
    """A layer's keys and values, [pages, tokens, heads, size]. A window's allocator has them as well, but refuses to
    say so, as flash-attn cannot read a page from its middle on."""
    from transformers.generation.continuous_batching.cache_allocators import FullAttentionCacheAllocator

    keys, values = FullAttentionCacheAllocator.get_cache_for_block_table(allocator, layer)
    return keys, values


def _has_tables(config: Any) -> bool:
    """Whether transformers can say of every layer in which pages a request's tokens lie: windows have none."""
    from transformers.generation.continuous_batching.cache import ATTN_TYPE_TO_ALLOCATOR, group_layers_by_attn_type

    return all(ATTN_TYPE_TO_ALLOCATOR[kind].supports_block_table for kind in group_layers_by_attn_type(config))


def _can_be_captured(model: Any) -> bool:
    """Whether `generate` decodes on CUDA graphs, and so can this. Experts have to be ours or to be none: transformers'
    own wait for the host, depending on the GPU."""
    from halfbyte.kernels.experts.serves import ONE_BY_ONE, serves

    experts = [module for module in model.modules() if isinstance(module, Experts4bit)]
    waits = any(serves(module.gate_up).startswith(ONE_BY_ONE) for module in experts)
    return pool_of(model) is not None and not waits


def _not_supported(model: Any, size: int, heads: int, shared: int) -> str | None:
    if model.device.type != "cuda":
        return None
    from halfbyte.kernels.attention.paged import supports

    properties = properties_of(model.device.index or 0)
    capability = properties.capability if properties.kind == "cuda" else 0
    if supports(model.dtype, size, heads, shared, capability):
        return None
    return f"the kernel is not for {heads} heads of {size}, {shared} of keys, in {model.dtype} on this GPU"
