"""What `halfbyte warm` compiles for the experts of a checkpoint: the blocks that a model makes of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from halfbyte.checkpoints.experts import place_of
from halfbyte.kernels.common.device import DeviceProperties
from halfbyte.kernels.common.nvrtc import Variant
from halfbyte.kernels.experts import cuda
from halfbyte.kernels.experts.reference import SWIGLU_OAI
from halfbyte.kernels.linear.problem import Problem

GATE_UP = (("gate_up_proj",), ("gate_proj", "up_proj"), ("w1", "w3"))  # parts of one stack, as checkpoints name them
DOWN = (("down_proj",), ("w2",))
TOP_K = (
    "num_experts_per_tok", "experts_per_token", "num_experts_per_token", "moe_k", "moe_topk", "top_k_experts",
)  # fmt: skip
ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh"}  # by config.json

# The experts that lie under a name, one or a stack of them, and their weights, whose rows are those of all.
Held = tuple[int, Problem]


class Experts(NamedTuple):
    """The products of a block of experts, k of which each token has chosen. The rows of gate_up and of down are those
    of all `experts`."""

    experts: int
    k: int
    gate_up: Problem
    down: Problem
    activation: str

    def of_dtype(self, dtype: torch.dtype) -> Experts:
        """The same with x of this dtype."""
        gate_up, down = (replace(one, dtype=dtype) for one in (self.gate_up, self.down))
        return self._replace(gate_up=gate_up, down=down)

    def variants(self, tokens: int, properties: DeviceProperties) -> list[Variant]:
        return cuda.variants(tokens, self.k, self.experts, self.gate_up, self.down, self.activation, properties)


def blocks(names: Iterable[str], held: Callable[[str], Held], config: Mapping[str, Any]) -> Iterator[Experts]:
    """Those that the weights of these names make. Of each layer only the first expert is looked at: a stack has one
    kind. Nothing where config.json does not tell what tokens choose and how gates are computed."""
    top_k, activation = _top_k(config), _activation(config)
    if top_k is None or activation is None:
        return
    layers: dict[str, dict[str, dict[int | None, str]]] = {}
    for name in names:
        if place := place_of(name):
            layers.setdefault(place.layer, {}).setdefault(place.part, {})[place.expert] = name
    for parts in layers.values():
        gate_up, down = _stack(parts, GATE_UP, held), _stack(parts, DOWN, held)
        if gate_up is not None and down is not None and gate_up[0] == down[0]:
            yield Experts(gate_up[0], top_k, gate_up[1], down[1], activation)


def _stack(
    parts: Mapping[str, Mapping[int | None, str]], choices: Sequence[tuple[str, ...]], held: Callable[[str], Held]
) -> Held | None:
    """The stack that a model makes of the parts which are there, with plain scales (formats/stacks.py)."""
    chosen = next((choice for choice in choices if all(part in parts for part in choice)), None)
    if chosen is None:
        return None
    rows, count = 0, 0
    for part in chosen:
        experts, problem = held(next(iter(parts[part].values())))
        rows += problem.n // experts
        count = experts if None in parts[part] else len(parts[part])
    if problem.nested:
        problem = replace(problem, nested=0, scale=torch.float32)
    return count, replace(problem, n=count * rows)


def _top_k(config: Mapping[str, Any]) -> int | None:
    return next((found for name in TOP_K if isinstance(found := config.get(name), int) and found > 0), None)


def _activation(config: Mapping[str, Any]) -> str | None:
    if config.get("model_type") == "gpt_oss":  # which has another name for it in config.json
        return SWIGLU_OAI
    return ACTIVATIONS.get(config.get("hidden_activation") or config.get("hidden_act") or "silu")
