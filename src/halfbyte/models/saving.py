"""`save_pretrained` of a model whose experts were quantized where they were: their 4-bit stacks as they are."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import PreTrainedModel

from halfbyte.nn.experts import PROJECTIONS


def keep_stacks(model: nn.Module, format: str) -> None:
    """Keep transformers from undoing its merges of dense experts, which would tear 4-bit stacks, and say in its
    configuration which format they have."""
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter

        from halfbyte.models.config import note_experts
    except ImportError:  # before transformers 5, which has no such merges
        return
    merges = tuple(f"experts.{name}" for name in PROJECTIONS)
    models = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    for outermost in models[:1]:
        note_experts(outermost.config, format)
    for module in models:
        conversions: Any = getattr(module, "_weight_conversions", None)
        if conversions is None:  # those that transformers would undo for a model that was not loaded
            conversions = get_model_conversion_mapping(module, add_legacy=False)
            conversions = [one for one in conversions if type(one).__name__ != "PrefixChange"]
        module._weight_conversions = [
            one
            for one in conversions
            if not (isinstance(one, WeightConverter) and one.target_patterns[0].endswith(merges))
        ]
