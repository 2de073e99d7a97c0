"""Small models spread over devices as `device_map` does it, and told to cut their steps on one device too."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from halfbyte.models.stages import CUTS


def dispatched(model: Any, devices: Sequence[torch.device | int | str]) -> Any:
    """With accelerate's hooks; the embedding on the first device, norm and head on the last, layers in their order.

    A head that shares the embedding's weight stays with it, as "auto" has it.
    """
    import accelerate

    devices = [0 if str(device) == "cuda" else device for device in devices]
    layers = model.model.layers
    of_layers = {f"model.layers.{i}": devices[i * len(devices) // len(layers)] for i in range(len(layers))}
    ends = {"model.embed_tokens": devices[0], "model.rotary_emb": devices[0], "model.norm": devices[-1]}
    tied = model.lm_head.weight is model.model.embed_tokens.weight
    return accelerate.dispatch_model(
        model,
        ends | of_layers | {"lm_head": devices[0 if tied else -1]},
        main_device=devices[0],
        force_hooks=True,
        skip_keys=model._skip_keys_device_placement,
    )


def cut(model: Any) -> Any:
    """A stage begins at the second layer, at the third and at the head."""
    setattr(model, CUTS, (*model.model.layers[1:3], model.lm_head))
    return model
