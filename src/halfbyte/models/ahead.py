"""Kernels for a call of `generate`, or for a server's steps (serving_ahead.py), compiled side by side.

The products of a prompt, and then those of a step, ask for their kernels one by one, and a machine that has none of
them in its cache would wait a second for each. A call knows how many rows its products will have; so all CPUs begin
with what they need before the first product is launched. A server comes to ask for every number of rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from halfbyte.kernels.common import nvrtc
from halfbyte.kernels.common.device import DeviceProperties, properties_of
from halfbyte.kernels.common.nvrtc import Variant
from halfbyte.kernels.experts import cuda as experts
from halfbyte.kernels.head import launch as head
from halfbyte.kernels.linear import reach
from halfbyte.kernels.linear.problem import Problem, problem_of
from halfbyte.kernels.linear.sm90_decode.launch import rows_of
from halfbyte.models.buckets import experts_per_token, most_prompt_rows, prompt_bucket, texts_bucket
from halfbyte.models.linears import layers_of
from halfbyte.models.outside import dense_head
from halfbyte.models.products import Fused, Group, products_of, variant_of_product
from halfbyte.nn.experts import Experts4bit

GUESSED = 8  # tokens of a step that looks at guesses
# Numbers of rows of which each is looked at, and the steps beyond: kernels change less often.
STEPS = ((1, 64), (8, 512), (64, 2048), (512, 1 << 16))
MOST_REQUESTS, MOST_TOKENS = (
    1024,
    1 << 15,
)  # of a server's step, and of one of its requests; more compile when they come


class Ahead:
    """What was asked for, for one model. A copy of the model begins anew."""

    def __init__(self) -> None:
        self.forget()

    def __reduce__(self) -> tuple[type[Ahead], tuple[()]]:
        return type(self), ()

    def forget(self) -> None:
        """The model has changed."""
        self.products: set[Group | Fused] | None = None
        self.rows: set[int] = set()

    def begin(self, model: Any, texts: int, tokens: int, guesses: bool) -> None:
        """Before a prompt of so many texts and tokens each. guesses: its steps look at guessed tokens."""
        step = texts_bucket(texts) * (GUESSED if guesses else 1)
        rows = texts * prompt_bucket(texts, tokens)
        new = {rows if rows <= most_prompt_rows(model) else texts * tokens, step} - self.rows - {0}
        self.rows |= new
        if not new or not reach.can_compile(model.device):
            return
        if self.products is None:
            self.products = products_of_model(model)
        nvrtc.compile_ahead(variants(self.products, model, sorted(new), properties_of(model.device.index)))


def products_of_model(model: Any) -> set[Group | Fused]:
    return products_of(weights_of(model), model.config.get_text_config(decoder=True).to_dict())


def rows_up_to(most: int) -> list[int]:
    """The numbers of rows up to so many for which kernels may differ."""
    found, last = [most], 0
    for step, end in STEPS:
        found += range(last + step, min(end, most) + 1, step)
        last = end
    return sorted({row for row in found if row > 0})


def weights_of(model: Any) -> dict[str, Problem]:
    """The 4-bit weights on GPUs that `accelerate` has taken, by name, each with x of the model's dtype."""
    found = {}
    for path, module in model.named_modules():
        host = layers_of(module)
        q = host.weight_of(module) if host is not None and host.is_applied(module) else None
        if q is not None and q.device.type == model.device.type:
            dtype = getattr(module, "compute_dtype", None) or model.dtype
            x = torch.empty(0, dtype=dtype, device=q.device)
            found[f"{path}.weight"] = problem_of(x, q, x if getattr(module, "bias", None) is not None else None)
    return found


def variants(
    products: set[Group | Fused], model: Any, rows: list[int], properties: DeviceProperties
) -> Iterator[Variant]:
    """Of the fewest rows first: those of steps are needed by every call."""
    for m in rows:
        for product in sorted(products, key=repr):
            if (variant := variant_of_product(m, product, properties, False)) is not None:
                yield variant
    last = dense_head(model)
    if last is not None and last.weight.device.type == model.device.type:
        yield from head.variants(
            rows, (last.out_features, last.in_features), last.weight.dtype, last.bias is not None, properties
        )
    config = model.config.get_text_config(decoder=True)
    k = experts_per_token(config)
    blocks = [module for module in model.modules() if isinstance(module, Experts4bit)] if k else []
    seen = set()
    for module in blocks:
        x = torch.empty(0, dtype=model.dtype, device=module.gate_up.device)
        bias = x if module.gate_up_proj_bias is not None else None
        gate_up, down = (problem_of(x, rows_of(q), bias) for q in (module.gate_up, module.down))
        if (gate_up, down) not in seen:
            seen.add((gate_up, down))
            for m in rows:
                yield from experts.variants(m, k, module.num_experts, gate_up, down, module.activation, properties)
