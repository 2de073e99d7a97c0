"""What transformers' `generate` gives a model, and which models it gives no more: for others a captured prompt or step
would lack something."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from halfbyte.models.rotation import mask_names

INPUTS = {"past_key_values", "attention_mask", "position_ids", "use_cache", "logits_to_keep"}  # of a model that we know
PREPARES = ("prepare_inputs_for_generation", "_update_model_kwargs_for_generation")  # what may be of transformers only
MOVING = ("dynamic", "longrope")  # rotary embeddings that ask for the longest position
PROMPTS = {"token_type_ids", "mm_token_type_ids", "pixel_values", "mm_encoder_outputs"}  # of a prompt with images
# Models whose own preparation does not concern a step, and what else their prompts may have: that of Gemma 3 is for
# images in the prompt, that of Phi 3 for a rotary embedding that switches (see `is_plain`).
KNOWN: dict[str, set[str]] = {"Gemma3ForConditionalGeneration": PROMPTS, "Phi3ForCausalLM": set()}


def is_plain(model: Any) -> bool:
    """True where `generate` prepares the model's inputs and masks as it does for most."""
    from transformers import GenerationMixin

    text = model.config.get_text_config(decoder=True)
    if any(name in vars(model) for name in PREPARES) or mask_names(text) is None:
        return False
    if is_known(model):
        return "longrope" not in rotary_kinds(text)
    own = any(getattr(type(model), name) is not getattr(GenerationMixin, name) for name in PREPARES)
    return not own and not hasattr(model, "create_masks_for_generate")


def is_known(model: Any) -> bool:
    return type(model).__name__ in KNOWN and is_theirs(type(model))


def is_theirs(kind: type) -> bool:
    return kind.__module__.startswith("transformers.")


def rotary_kinds(config: Any) -> Iterator[Any]:
    """Of a text configuration, whose kinds of layers may have their own."""
    found = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    for part in (found, *found.values()):
        if isinstance(part, Mapping):
            yield part.get("rope_type")
