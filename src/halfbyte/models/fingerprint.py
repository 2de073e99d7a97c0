"""What a captured step takes for granted of a model: where its weights lie, and what Python would do with them.

A graph that is kept between calls repeats kernels with addresses. A model that was moved, merged, trained with another
adapter or given hooks since must be captured anew. Values that were written in place are read as they are.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

ADAPTERS = ("_active_adapter", "_disable_adapters", "merged_adapters", "scaling")  # attributes of PEFT's layers
IMPLEMENTATIONS = ("_attn_implementation", "_experts_implementation")  # attributes of a model's configuration
HOOKS = ("_forward_hooks", "_forward_pre_hooks")


def fingerprint(model: nn.Module) -> Hashable:
    """Equal as long as graphs of the model's forward stay right. It takes about a microsecond a tensor."""
    config: Any = getattr(model, "config", None)
    with torch._C.DisableTorchFunctionSubclass():  # Params4bit hooks every torch call
        return tuple(getattr(config, name, None) for name in IMPLEMENTATIONS), tuple(_facts(model))


def _facts(model: nn.Module) -> Iterator[Hashable]:
    for module in model.modules():
        own = module.__dict__
        yield id(module)
        yield own["training"]
        forward = own.get("forward")
        yield forward and id(getattr(forward, "__func__", forward))
        for name in HOOKS:
            yield tuple(own[name])
        for name in ADAPTERS:
            if name in own:
                yield repr(own[name])
        for tensors in (own["_parameters"], own["_buffers"]):
            for tensor in tensors.values():
                if tensor is not None:
                    yield from _places(tensor)


def _places(tensor: Tensor) -> Iterator[Hashable]:
    """Addresses of a tensor, and of the scales that bitsandbytes keeps on it."""
    try:
        yield tensor.data_ptr()
    except RuntimeError:  # a tensor that is made of others, as torchao's are
        yield id(tensor)
    state = getattr(tensor, "quant_state", None)
    while state is not None:  # of the weight, then of its scales where they are nested
        scales = getattr(state, "absmax", None)
        if isinstance(scales, Tensor):
            yield scales.data_ptr()
        state = getattr(state, "state2", None)
