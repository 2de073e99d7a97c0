"""A short decode with a model of a checkpoint's shapes, so that Triton's and torch's caches on disk hold what the whole
model will ask for.

The model has random weights and as few layers as show every kind that there is. Its products are in 4 bits, like the
checkpoint's, so that its regions are the same graphs.
"""

from __future__ import annotations

import gc
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from halfbyte.kernels.common.slow import has_triton
from halfbyte.models import accelerate as accelerated

PROMPT, NEW = 12, 6  # tokens: the first step compiles, the second is captured; of 8 texts a prompt has many rows
SIZES = ((1, 128), (1, 8192), (8, 128), (32, 128))  # texts, and tokens of the cache: kernels differ between these


class Settings(Protocol):
    """How weights are quantized. block_size: for int4 the group size."""

    @property
    def format(self) -> str: ...
    @property
    def block_size(self) -> int: ...
    @property
    def nested(self) -> bool: ...


def can_rehearse(folder: Path) -> bool:
    """True for a directory that transformers can read, where there is a GPU to decode on."""
    from importlib.util import find_spec

    found = torch.cuda.is_available() and has_triton() and find_spec("transformers") is not None
    return found and (folder / "config.json").is_file()


def rehearse(folder: Path, dtype: torch.dtype, settings: Settings) -> float:
    """Decode a few tokens; returns the seconds that it took. Raises ValueError for a config.json of which transformers
    makes no model that generates."""
    from transformers import AutoConfig, AutoModelForCausalLM

    start = time.monotonic()
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    config = AutoConfig.from_pretrained(folder).get_text_config(decoder=True)
    shorten(config)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval().requires_grad_(False)
    _quantize(model, settings)
    model.generation_config.eos_token_id = None
    accelerated.accelerate(model)
    longest = getattr(config, "max_position_embeddings", None) or SIZES[0][1]
    try:
        for texts, tokens in SIZES:
            ids = torch.ones((texts, PROMPT), dtype=torch.int64, device=device)
            length = min(tokens, longest)  # what the cache is made for
            with suppress(_Enough):
                model.generate(
                    ids, attention_mask=torch.ones_like(ids), do_sample=False, max_length=length, streamer=_Few()
                )
    finally:
        accelerated.restore(model)
        del model
        gc.collect()
    return time.monotonic() - start


class _Enough(Exception):
    """There are as many tokens as are needed."""


class _Few:
    """A streamer that ends a call early, whatever length it was prepared for."""

    def __init__(self) -> None:
        self.steps = 0

    def put(self, tokens: Any) -> None:
        self.steps += 1
        if self.steps > NEW:
            raise _Enough

    def end(self) -> None:
        pass


def shorten(config: Any) -> None:
    """Leave as many of a model's first layers as show each kind that it has."""
    kinds = getattr(config, "layer_types", None)
    layers = 1 if not kinds else 1 + max(kinds.index(kind) for kind in set(kinds))
    if kinds:
        config.layer_types = list(kinds[:layers])
    config.num_hidden_layers = layers


def _quantize(model: Any, settings: Settings) -> None:
    from halfbyte.formats.spec import FORMATS
    from halfbyte.nn import Linear4bit

    head = model.get_output_embeddings()
    spec = FORMATS[settings.format]
    options: dict[str, Any] = {spec.size_name: settings.block_size}
    if spec.nests:
        options["nested"] = settings.nested
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear and child is not head:
                with suppress(ValueError):  # of an odd shape, which stays as it is
                    setattr(parent, name, Linear4bit.from_linear(child, settings.format, **options))
