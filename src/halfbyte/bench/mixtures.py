"""Blocks of experts to measure: the sizes of known models, random weights, tokens, and which experts they choose.

Experts are chosen by the product of random tokens with a random router, as in a model, so few experts have many tokens
and many have few. Then the experts are numbered anew, and with them the router's rows: those that a call needs are
those that were read longest ago, so that even a single token finds none of its experts in a cache. How many tokens each
has stays as it was drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from halfbyte.bench.dequantize import input_sets
from halfbyte.eager_experts import dense_expert
from halfbyte.formats.spec import FORMATS
from halfbyte.formats.stacks import StackWriter
from halfbyte.formats.weight import QuantizedWeight
from halfbyte.kernels.experts.router_reference import route
from halfbyte.ops import quantize

DTYPE = torch.bfloat16


@dataclass(frozen=True)
class Mixture:
    """E experts, of which each token has top_k; hidden and inner: H and I. format: in which the experts are published,
    or usually held. before: the router's softmax is over all experts, and the best are divided by their sum; else over
    the best."""

    experts: int
    top_k: int
    hidden: int
    inner: int
    activation: str = "silu"
    format: str = "nf4"
    before: bool = True
    bias: bool = False

    @property
    def gate_up(self) -> tuple[int, int, int]:
        return self.experts, 2 * self.inner, self.hidden

    @property
    def down(self) -> tuple[int, int, int]:
        return self.experts, self.hidden, self.inner


MODELS = {
    "qwen3-30b-a3b": Mixture(128, 8, 2048, 768),
    "mixtral-8x7b": Mixture(8, 2, 4096, 14336),
    "gpt-oss-120b": Mixture(128, 4, 2880, 2880, "swiglu_oai", "mxfp4", before=False, bias=True),
    "small": Mixture(16, 4, 1024, 512),
}
GPU_MODELS, CPU_MODELS = ("qwen3-30b-a3b", "mixtral-8x7b", "gpt-oss-120b"), ("small",)
GPU_TOKENS, CPU_TOKENS = (1, 4, 16, 64, 256, 2048), (1, 4, 16, 64)


class Stack:
    """Random experts [E, N, K] in bf16 and in a 4-bit format, and enough copies of both that no cache holds them, or
    most_copies."""

    def __init__(
        self, shape: tuple[int, int, int], format: str, device: torch.device, most_copies: int = 1 << 30
    ) -> None:
        self.shape = shape
        count, k = shape[0], shape[2]
        dense = torch.empty(shape, dtype=DTYPE, device=device)
        writer = StackWriter(shape)
        sizes = _sizes(format, k)
        for expert in range(count):
            writer.write(expert, 0, quantize(dense[expert].normal_(std=k**-0.5), format, nested=False, **sizes))
        q = writer.weight()
        self.copies = min(input_sets(q.nbytes, device), most_copies)
        self.dense = [dense, *(dense.clone() for _ in range(self.copies - 1))]
        self.weights = [q, *(_copied(q) for _ in range(self.copies - 1))]

    @property
    def bytes_of_expert(self) -> int:
        return self.weights[0].nbytes // self.shape[0]

    def exact(self, expert: int) -> Tensor:
        """What the 4-bit weights of an expert stand for, fp32 [N, K]."""
        return dense_expert(self.weights[0], expert, torch.float32)

    def exact_dense(self, expert: int) -> Tensor:
        return self.dense[0][expert]


def _sizes(format: str, k: int) -> dict[str, Any]:
    """The format's own block size, or the next smaller one that divides K: gpt-oss has K = 2880. Raises ValueError."""
    spec = FORMATS[format]
    fitting = [size for size in spec.block_sizes if size <= spec.block_size and k % size == 0]
    if not fitting:
        raise ValueError(f"K = {k} cannot be cut into blocks of {format}: {', '.join(map(str, spec.block_sizes))}")
    return {spec.size_name: max(fitting)}


def _copied(q: QuantizedWeight) -> QuantizedWeight:
    return replace(q, packed=q.packed.clone(), scale=q.scale.clone())


@dataclass(frozen=True)
class Choice:
    """Tokens x [T, H] and the router [E, H] (bias [E]) that gives them ids and weights [T, k]."""

    x: Tensor
    router: Tensor
    router_bias: Tensor | None
    ids: Tensor
    weights: Tensor

    @cached_property
    def experts(self) -> list[int]:
        """Those that any token has."""
        found: list[int] = self.ids.unique().tolist()
        return found

    @cached_property
    def pairs(self) -> Tensor:
        """The expert of each pair of a token and an expert, [T k]."""
        return self.ids.reshape(-1)

    @cached_property
    def order(self) -> Tensor:
        """The pairs sorted by expert."""
        return self.pairs.argsort(stable=True)

    def offsets(self, count: int) -> Tensor:
        """Where the pairs of each expert end in that order, int32 [E]."""
        return torch.bincount(self.pairs, minlength=count).cumsum(0).int()


def choices(mixture: Mixture, tokens: int, copies: int, bytes_of_expert: int, device: torch.device) -> list[Choice]:
    """As many as it takes to read more than any cache holds; number i is for copy i % copies of a stack."""
    longest_ago = [torch.arange(mixture.experts, dtype=torch.int64, device=device) for _ in range(copies)]
    found: list[Choice] = []
    sets = 2
    while len(found) < sets:
        queue = longest_ago[len(found) % copies]
        choice = _drawn(mixture, tokens, queue, device)
        used = torch.isin(queue, choice.ids)
        longest_ago[len(found) % copies] = torch.cat((queue[~used], queue[used]))
        found.append(choice)
        if len(found) == 1:
            sets = input_sets(bytes_of_expert * len(choice.experts), device)
    return found


def _drawn(mixture: Mixture, tokens: int, queue: Tensor, device: torch.device) -> Choice:
    """Of random tokens and a random router, whose experts are numbered such that those first in `queue` are chosen."""

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float32, device=device)

    x, router = random(tokens, mixture.hidden).to(DTYPE), random(mixture.experts, mixture.hidden)
    router = (router * mixture.hidden**-0.5).to(DTYPE)
    bias = torch.zeros(mixture.experts, dtype=DTYPE, device=device) if mixture.bias else None
    scores = functional.linear(x, router, bias)
    while len(tied := _tied(scores, mixture.top_k)):
        x[tied] = random(len(tied), mixture.hidden).to(DTYPE)
        scores = functional.linear(x, router, bias)
    chosen = torch.isin(torch.arange(mixture.experts, dtype=torch.int64, device=device), scores.topk(mixture.top_k)[1])
    renamed = torch.empty_like(router)
    renamed[queue] = torch.cat((router[chosen], router[~chosen]))
    scores = functional.linear(x, renamed, bias)
    ids, weights = route(scores, mixture.top_k, mixture.before, True, DTYPE)
    return Choice(x, renamed, bias, ids, weights)


def _tied(scores: Tensor, k: int) -> Tensor:
    """The tokens whose last expert has the score of the next one, so that providers might choose differently."""
    if k == scores.shape[1]:
        return scores.new_empty(0, dtype=torch.int64)
    best = scores.topk(k + 1).values
    return (best[:, -2] == best[:, -1]).nonzero().view(-1)


def wanted_by(chosen: Sequence[Choice]) -> int:
    """How many experts a call needs, on average."""
    return round(sum(len(choice.experts) for choice in chosen) / len(chosen))


def models_of(text: str) -> dict[str, Mixture]:
    """Of comma-separated names of MODELS, or EXPERTSxTOP_KxHIDDENxINNER. Raises ValueError for others."""
    chosen: dict[str, Mixture] = {}
    for name in (part.strip().replace("×", "x") for part in text.split(",")):
        if name in MODELS:
            chosen[name] = MODELS[name]
            continue
        sides = name.split("x")
        if len(sides) != 4 or not all(side.isdigit() and int(side) > 0 for side in sides):
            raise ValueError(f"{name!r} cannot be measured; write one of {', '.join(MODELS)}, or 128x8x2048x768")
        experts, top_k, hidden, inner = map(int, sides)
        mixture = Mixture(experts, top_k, hidden, inner)
        if mixture.top_k > mixture.experts:
            raise ValueError(f"{name}: a token cannot have {mixture.top_k} of {mixture.experts} experts")
        chosen[name] = mixture
    return chosen


def formats_of(text: str | None) -> Sequence[str]:
    """Of comma-separated names; none for each model's own. Raises ValueError for others."""
    names = [] if text is None else [name.strip() for name in text.split(",")]
    if unknown := [name for name in names if name not in FORMATS]:
        raise ValueError(f"format {unknown[0]!r} is none of {', '.join(FORMATS)}")
    return names


def facts_of(mixture: Mixture) -> dict[str, Any]:
    return {
        "experts": mixture.experts, "top_k": mixture.top_k, "hidden": mixture.hidden, "inner": mixture.inner,
        "activation": mixture.activation,
    }  # fmt: skip
