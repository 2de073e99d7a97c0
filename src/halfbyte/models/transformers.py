"""transformers' `generate`: a plain call decodes on captured steps, which are kept between calls.

`generate` asks its model for a cache, for the prompt's logits, whether the decoding step may be compiled, and what to
call for it; all that is answered here. The loop over tokens is a function of transformers (`GenerationMixin._sample`)
that is looked up on the class, so it is replaced there for as long as any model is accelerated (sampling.py); so are
those of beam search and of speculation (driven.py). A call that says something of its own about the cache or
compilation, and any other mode of generation, goes as before.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from functools import cache
from types import MethodType
from typing import Any

import torch
from torch import nn

from halfbyte.kernels.common import slow
from halfbyte.models import sampling
from halfbyte.models.buckets import cache_bytes, free_bytes, layers_by_device, least_bytes
from halfbyte.models.caches import STORE, begin_short
from halfbyte.models.captured import can_replay
from halfbyte.models.fused import AGREES
from halfbyte.models.graphs import DecodeGraphs, can_capture
from halfbyte.models.outside import ANGLES
from halfbyte.models.patch import is_method_of
from halfbyte.models.prompts import begins_at_once, without_cudnn
from halfbyte.models.stages import devices_of, is_offloaded, why_not
from halfbyte.models.steps import POOL, StepPool, pool_of

signature = cache(inspect.signature)
HOOKS = ("_prepare_cache_for_generation", "_prefill", "_valid_auto_compile_criteria", "get_compiled_call")
ON_GRAPHS = "on CUDA graphs, from the second token on"
MODES = ("GREEDY_SEARCH", "SAMPLE")
DRIVEN = ("ASSISTED_GENERATION", "BEAM_SEARCH", "BEAM_SAMPLE")  # whose loop stays transformers'
OTHERS = ("assistant_early_exit", "use_mtp", "prefill_chunk_size")  # the model itself guesses; or a prompt in parts
ATTENTION = ("sdpa", "eager")
MOST_OF_FREE_MEMORY = 0.5  # that a cache for the longest possible text may take; beyond it, one that grows is better


def apply(model: nn.Module) -> str:
    """Let every model in it that can be captured decode on CUDA graphs; returns in words what `generate` will do."""
    generators = dict(_generators(model))
    if not generators:
        return "as before: there is no transformers model in it that generates"
    reasons = {path: reason for path, generator in generators.items() if (reason := _hook(generator))}
    if not reasons:
        return ON_GRAPHS
    if len(generators) == 1:
        return f"as before: {next(iter(reasons.values()))}"
    told = ", ".join(f"{path or type(model).__name__} ({reason})" for path, reason in reasons.items())
    return f"as before in {told}" if len(reasons) == len(generators) else f"{ON_GRAPHS}, but as before in {told}"


def undo(model: nn.Module) -> None:
    for module in model.modules():
        _unhook(module)


def release(module: nn.Module) -> None:
    """Free what a module keeps between calls of `generate`, if anything."""
    if pool := pool_of(module):
        pool.release()


def apply_to_library() -> None:
    if generation := sys.modules.get("transformers.generation.utils"):
        sampling.apply(generation.GenerationMixin)


def undo_in_library() -> None:
    if generation := sys.modules.get("transformers.generation.utils"):
        sampling.undo(generation.GenerationMixin)


def _hook(generator: Any) -> str | None:
    """Answer for one model; returns None, or why it was left alone."""
    _unhook(generator)  # of an earlier call, after which the model may have moved
    if reason := _reason(generator):
        return reason
    for name in HOOKS:
        setattr(generator, name, MethodType(globals()[name], generator))
    setattr(generator, POOL, StepPool())
    return None


def _unhook(module: nn.Module) -> None:
    release(module)
    vars(module).pop(POOL, None)
    for name in (AGREES, ANGLES):
        vars(module).pop(name, None)
    for name in HOOKS:
        if is_method_of(globals()[name], vars(module).get(name)):
            delattr(module, name)


def _prepare_cache_for_generation(
    self: Any, generation_config: Any, model_kwargs: Any, *args: Any, **kwargs: Any
) -> Any:
    original = type(self)._prepare_cache_for_generation
    given = signature(original).bind(self, generation_config, model_kwargs, *args, **kwargs).arguments
    mode = getattr(given["generation_mode"], "name", None)
    ours = _is_left_to_us(self, generation_config, given)
    if ours and mode in DRIVEN and not any(getattr(generation_config, name, None) for name in OTHERS):
        original(self, generation_config, model_kwargs, *args, **kwargs)
        sampling.mark(model_kwargs["past_key_values"], given["max_cache_length"])
        return None
    if ours and mode in MODES:
        generation_config.cache_implementation = "static"
        # transformers keeps the longest length ever seen, to compile no second time; we capture anew and need not.
        self._previous_max_cache_length = -1
        length, pool = given["max_cache_length"], pool_of(self)
        as_usual = not any(getattr(generation_config, name, None) for name in ("prefill_chunk_size", "max_cache_len"))
        again = pool.empty_cache(self, length) if pool is not None and as_usual else None
        if again is None:
            original(self, generation_config, model_kwargs, *args, **kwargs)
            if pool is not None and as_usual:
                pool.remember(self, model_kwargs.get("past_key_values"))
        else:
            model_kwargs["past_key_values"] = again
        if generation_config.prefill_chunk_size is None and can_capture(model_kwargs.get("past_key_values")):
            sampling.mark(model_kwargs["past_key_values"], length)
        return None
    return original(self, generation_config, model_kwargs, *args, **kwargs)


def _prefill(self: Any, input_ids: Any, generation_config: Any, model_kwargs: Any, *args: Any, **kwargs: Any) -> Any:
    """A prompt into kept memory; once more where memory is short, after all is freed that is kept and not in use."""
    if begins_at_once(input_ids):
        with without_cudnn:
            return _fill(self, input_ids, generation_config, model_kwargs, *args, **kwargs)
    return _fill(self, input_ids, generation_config, model_kwargs, *args, **kwargs)


def _fill(self: Any, input_ids: Any, generation_config: Any, model_kwargs: Any, *args: Any, **kwargs: Any) -> Any:
    original = type(self)._prefill
    pool, store = pool_of(self), getattr(model_kwargs.get("past_key_values"), STORE, None)
    if pool is None or store is None:
        return original(self, input_ids, generation_config, model_kwargs, *args, **kwargs)

    def fill() -> Any:
        if any(layer.is_initialized for layer in model_kwargs["past_key_values"].layers):  # a first attempt failed
            store.begin(len(input_ids))
        wants_more = generation_config.output_hidden_states or generation_config.output_attentions
        with pool.prompt_layers.at_work():
            found = None if wants_more else pool.prompt(self, input_ids, model_kwargs, store)
            if found is None:
                found = original(self, input_ids, generation_config, model_kwargs, *args, **kwargs)
            return found

    return pool.retried(fill)


def _valid_auto_compile_criteria(self: Any, model_kwargs: Any, generation_config: Any) -> bool:
    cache = model_kwargs.get("past_key_values")
    if _may_be_captured(self, generation_config) and can_capture(cache):
        begins = generation_config.prefill_chunk_size is None and STORE not in vars(cache)
        if begins and not any(layer.is_initialized for layer in cache.layers):
            begin_short(cache)  # what is asked for next is the call of DecodeGraphs, which lets it grow
        return True
    result: bool = type(self)._valid_auto_compile_criteria(self, model_kwargs, generation_config)
    return result


def get_compiled_call(self: Any, compile_config: Any) -> Any:
    if compile_config is None and can_replay(self.device):
        return DecodeGraphs(self)
    return type(self).get_compiled_call(self, compile_config)


def _generators(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """(path, module) of every model that generates."""
    for path, module in model.named_modules():
        if hasattr(type(module), "get_compiled_call") and getattr(type(module), "can_generate", bool)():
            yield path, module


def _reason(model: Any) -> str | None:
    """Why a model's steps cannot be captured, or None."""
    if missing := [name for name in HOOKS if not hasattr(type(model), name)]:
        return f"this version of transformers has no {missing[0]}; 5.17 has"
    if replaced := [name for name in HOOKS if name in vars(model)]:
        return f"its {replaced[0]} is not that of its class: other code has replaced it"
    devices = devices_of(model)
    reason = why_not(model)
    if reason is not None and (len(devices) > 1 or is_offloaded(model)):
        if any(map(can_replay, devices)):
            slow.warn("stages", f"{type(model).__name__} decodes without CUDA graphs: {reason}")
        return reason
    if not all(map(can_replay, devices)):
        return f"CUDA graphs need a GPU, and the model is on {', '.join(sorted(map(str, devices)))}"
    if model.config.is_encoder_decoder or not getattr(model, "_can_compile_fullgraph", False):
        return f"{type(model).__name__} does not decode with a static cache"
    return None


def _may_be_captured(model: Any, generation_config: Any) -> bool:
    """True if the model is still on a GPU and this call of `generate` says nothing about compilation."""
    return (
        can_replay(model.device) and generation_config.compile_config is None and not generation_config.disable_compile
    )


def _is_left_to_us(model: Any, generation_config: Any, given: Any) -> bool:
    """True if this call of `generate` says nothing of its cache, and one of full length serves it well."""
    return (
        _may_be_captured(model, generation_config)
        and generation_config.cache_implementation is None
        and generation_config.use_cache
        and not generation_config.is_assistant
        and given["model_kwargs"].get("past_key_values") is None
        # transformers counts the tokens of a mask for the loss that this means, and a static cache's has others.
        and not given["model_kwargs"].get("output_router_logits")
        and not _mixes_dtypes(model)
        and model.config._attn_implementation in ATTENTION
        and _has_memory(model, generation_config, given)
    )


def _mixes_dtypes(model: Any) -> bool:
    """True under an autocast to another dtype, where keys and values differ in theirs: a static cache has only one."""
    kind = model.device.type
    return torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) is not model.dtype


def _has_memory(model: Any, generation_config: Any, given: Any) -> bool:
    """True if there is, or is kept, plenty for the cache of the longest text that this call may make."""
    rows = given["batch_size"] * max(generation_config.num_return_sequences, generation_config.num_beams or 1)
    tokens, pool = given["max_cache_length"], pool_of(model)
    if pool is not None and pool.holds(model, rows, tokens):  # to ask CUDA takes half a millisecond
        return True
    return cache_bytes(model, rows, tokens) < MOST_OF_FREE_MEMORY * _free_bytes(model)


def _free_bytes(model: Any) -> int:
    """What a cache can have of what the devices have left, what we keep included."""
    pool = pool_of(model)
    if pool is None:
        return least_bytes(layers_by_device(model), free_bytes)
    known = pool.layers if model.device in pool.layers else layers_by_device(model)  # which takes a millisecond
    return least_bytes(known, free_bytes) + pool.nbytes
