"""Random 4-bit weights for `--load-format dummy`, with which vLLM measures a shape without a checkpoint."""

from __future__ import annotations

import torch
from vllm.config import get_current_vllm_config

from halfbyte.formats.settings import DEFAULT
from halfbyte.formats.weight import QuantizedWeight
from halfbyte.ops import quantize
from halfbyte.serving.arrivals import Arrivals
from halfbyte.serving.vllm.scheme import Scheme

SPREAD = 0.02  # the standard deviation that models are initialized with


def wants_dummies() -> bool:
    """Whether vLLM is about to load nothing."""
    return str(get_current_vllm_config().load_config.load_format) == "dummy"


def dummy_weight(shape: tuple[int, int], scheme: Scheme, arrivals: Arrivals) -> QuantizedWeight:
    """A weight of what the configuration asks for; of a quantized checkpoint, which did not say, NF4."""
    settings = scheme.settings or {"format": DEFAULT}
    generator = torch.Generator(arrivals.device).manual_seed(shape[0] * 31 + shape[1])
    dense = torch.empty(shape, dtype=arrivals.dtype, device=arrivals.device)
    return quantize(dense.normal_(std=SPREAD, generator=generator), **settings)
