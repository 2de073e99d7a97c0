"""What a captured step takes for granted of a model: where its weights lie, and what Python would do with them.

A graph that is kept between calls repeats kernels with addresses. A model that was moved, merged, trained with another
adapter or given hooks since must be captured anew. Values that were written in place are read as they are.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor, nn

ADAPTERS = ("_active_adapter", "_disable_adapters", "merged_adapters", "scaling")  # attributes of PEFT's layers
IMPLEMENTATIONS = ("_attn_implementation", "_experts_implementation")  # attributes of a model's configuration
HOOKS = ("_forward_hooks", "_forward_pre_hooks")


def fingerprint(model: nn.Module) -> Hashable:
    """Equal as long as graphs of the model's forward stay right. Every call of `generate` waits for it, so it is one
    loop over one list: half a microsecond a tensor, and one a module."""
    config: Any = getattr(model, "config", None)
    facts: list[Hashable] = [getattr(config, name, None) for name in IMPLEMENTATIONS]
    modules, seen = [model], {id(model)}
    with torch._C.DisableTorchFunctionSubclass():  # Params4bit hooks every torch call
        for module in modules:
            own = module.__dict__
            facts += (id(module), own["training"])
            if (forward := own.get("forward")) is not None:
                facts.append(id(getattr(forward, "__func__", forward)))
            for name in HOOKS:
                if own[name]:
                    facts.append((name, *own[name]))
            for name in ADAPTERS:
                if name in own:
                    facts.append(repr(own[name]))
            for tensors in (own["_parameters"], own["_buffers"]):
                for tensor in tensors.values():
                    if tensor is not None:
                        _add_places(facts, tensor)
            for child in own["_modules"].values():
                if child is not None and id(child) not in seen:
                    seen.add(id(child))
                    modules.append(child)
    return tuple(facts)


def _add_places(facts: list[Hashable], tensor: Tensor) -> None:
    """Addresses of a tensor, and of the scales that bitsandbytes keeps on it."""
    try:
        facts.append(tensor.data_ptr())
    except RuntimeError:  # a tensor that is made of others, as torchao's are
        facts.append(id(tensor))
    state = getattr(tensor, "quant_state", None)
    while state is not None:  # of the weight, then of its scales where they are nested
        scales = getattr(state, "absmax", None)
        if isinstance(scales, Tensor):
            facts.append(scales.data_ptr())
        state = getattr(state, "state2", None)
