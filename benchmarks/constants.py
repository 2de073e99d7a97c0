"""What constants of planners are worth: the same work under each of their settings, side by side in one run.

    python benchmarks/constants.py ROUTED_NEIGHBOURS=12,1 ROUTED_STAGES=4,3 --only down      # on a Hopper GPU
    python benchmarks/constants.py STREAMK_ONE_TILE=32,48 --only "llama 8b"
    python benchmarks/constants.py attention.sm90.plan.SHARED_ROWS=16,32 --only "llama 8b, layer"

Constants are those of linear/tune/h200.py, or named with their module. Settings are all combinations of the values that
are named; the first is what the others are compared with, in time and in bits. The work of a setting is captured in a
CUDA graph while the constants have its values, over weights that no cache holds together, so all are timed in turn.
Work: products of decoder layers with what is fused, and such layers with a step's attention, by rows of x; those of
blocks of experts, and the blocks, by tokens.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import itertools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import _lru_cache_wrapper, partial
from types import ModuleType
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

import halfbyte as hb
from halfbyte import eager_fused
from halfbyte import experts as operations
from halfbyte.bench.dequantize import input_sets
from halfbyte.bench.mixtures import GPU_MODELS, MODELS, Stack, choices
from halfbyte.kernels.attention.attend import attend
from halfbyte.kernels.attention.fresh import Fresh
from halfbyte.kernels.attention.spans import spans_of
from halfbyte.kernels.common.norm import Norm
from halfbyte.kernels.common.thread_cache import ThreadCache
from halfbyte.kernels.linear.fusion import Beside, Residual
from halfbyte.kernels.linear.tune import h200
from halfbyte.measure.error import relative_error
from halfbyte.measure.timing import time_all

BF16, KERNELS = torch.bfloat16, "halfbyte.kernels"
ROWS, TOKENS = (1, 8, 16, 32, 64, 100, 512), (1, 16, 64, 256, 1024)
PRODUCTS = {
    "llama 8b, q, k, v": ((4096, 1024, 1024), 4096),
    "llama 8b, output": ((4096,), 4096),
    "llama 8b, gate, up": ((14336, 14336), 4096),
    "llama 8b, down": ((4096,), 14336),
    "qwen 72b, down": ((8192,), 29568),  # whose K is no multiple of 256
}
Setting = Mapping[str, Any]
Work = list[Callable[[], Tensor]]  # one call for each set of weights
Weights = Sequence[hb.QuantizedWeight]


def settings(given: Sequence[str]) -> list[Setting]:
    """All combinations of NAME=VALUE,VALUE; raises ValueError for what there is not."""
    values = {}
    for text in given:
        name, _, listed = text.partition("=")
        if not listed or not hasattr(*place_of(name)):
            raise ValueError(
                f"got {text!r}: NAME=VALUE,VALUE with a name of {h200.__name__}, or MODULE.NAME, is expected"
            )
        values[name] = [ast.literal_eval(value) for value in listed.split(",")]
    return [dict(zip(values, chosen, strict=True)) for chosen in itertools.product(*values.values())]


def place_of(name: str) -> tuple[ModuleType, str]:
    """The module of a constant, and its name there."""
    module, _, constant = name.rpartition(".")
    return (importlib.import_module(f"{KERNELS}.{module}") if module else h200), constant


def works(
    only: str, models: Sequence[str], device: torch.device, rows: Sequence[int] = ROWS, tokens: Sequence[int] = TOKENS
) -> Iterator[tuple[str, Callable[[], Work]]]:
    """Names that contain `only`, and what makes the work."""
    kinds: list[tuple[Callable[[], Any], Mapping[str, tuple[Any, ...]]]] = []
    for part, (sides, k) in PRODUCTS.items():
        names = {f"{part}, M = {m}": (m,) for m in rows}
        kinds.append((partial(_Products, sides, k, device), names))
    kinds.append((partial(_Layers, device), {f"llama 8b, layer, M = {m}": (m,) for m in rows}))
    for model in models:
        parts = itertools.product(("gate_up", "down", "block"), tokens)
        named = {f"{model}, {part}, T = {some}": (part, some) for part, some in parts}
        kinds.append((partial(_Experts, model, device), named))
    for make, every in kinds:
        chosen = {name: what for name, what in every.items() if only in name}
        made = make() if chosen else None
        yield from ((name, partial(made.work, *what)) for name, what in chosen.items() if made is not None)


class _Products:
    """Weights of one x, and what stands beside them in a layer: the norm ahead, silu between two, a residual sum."""

    def __init__(self, sides: tuple[int, ...], k: int, device: torch.device) -> None:
        self.sides, self.k, self.device = sides, k, device
        first = self._weights()
        sets = input_sets(sum(q.nbytes for q in first), device)
        self.sets = [first, *(self._weights() for _ in range(sets - 1))]

    def _weights(self) -> list[hb.QuantizedWeight]:
        dense = (torch.randn((n, self.k), device=self.device) / self.k**0.5 for n in self.sides)
        return [hb.quantize(w.to(BF16), "nf4") for w in dense]

    def _random(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=self.device).to(BF16)

    def work(self, m: int) -> Work:
        x, gate = self._random(m, self.k), "silu" if len(self.sides) == 2 else ""
        if len(self.sides) == 1:
            beside = Beside(residual=Residual(self._random(m, self.sides[0])))
        else:
            beside = Beside(Norm(1 + self._random(self.k) / 8, 1e-5), gate)

        def call(weights: Sequence[hb.QuantizedWeight]) -> Tensor:
            return eager_fused.products(x, weights, [None] * len(weights), beside)[0]

        return [partial(call, weights) for weights in self.sets]


class _Layers:
    """Layers of a captured step of Llama-3 8B: their products, and attention of a token to a cache of so many."""

    TOKENS, ROOM, SHARED, SIZE = 288, 320, 8, 128  # filled and in all; heads of keys, and their size

    def __init__(self, device: torch.device) -> None:
        parts = (part for part in PRODUCTS if part.startswith("llama 8b"))
        self.products, self.device = [_Products(*PRODUCTS[part], device) for part in parts], device

    def work(self, m: int) -> Work:
        hidden, size, like = self.products[0].k, self.SIZE, {"dtype": BF16, "device": self.device}
        norms = [Norm(1 + torch.randn(hidden, **like) / 8, 1e-5) for _ in range(2)]
        slot = torch.tensor(self.TOKENS - 1, device=self.device)
        angles = torch.randn((1, 1, size), **like)
        mask = (torch.arange(self.ROOM, device=self.device) < self.TOKENS).expand(m, 1, 1, -1)
        spans = spans_of(mask, m)

        def layer(qkv: Weights, output: Weights, gate_up: Weights, down: Weights, x: Tensor, cache: Tensor) -> Tensor:
            query, key, value = (
                y.view(m, -1, 1, size) for y in eager_fused.products(x, qkv, [None] * 3, Beside(norms[0]))
            )
            fresh = Fresh(key, value, angles, angles, slot)
            seen = attend(query, *cache, mask, size**-0.5, spans=spans, fresh=fresh, settled=True)
            (x,) = eager_fused.products(seen.view(m, -1), output, [None], Beside(residual=Residual(x)))
            beside = Beside(norms[1], "silu", Residual(x))
            return eager_fused.whole_mlp(x, (*gate_up, *down), [None] * 3, beside)

        sets = zip(*(part.sets for part in self.products), strict=False)
        x, room = torch.randn((m, hidden), **like), (2, m, self.SHARED, self.ROOM, size)
        return [partial(layer, *weights, x, torch.randn(room, **like)) for weights in sets]


class _Experts:
    """Stacks of a model, their products, and its block with all that sorts, gates and adds up."""

    def __init__(self, model: str, device: torch.device) -> None:
        self.mixture, self.device = MODELS[model], device
        shapes = self.mixture.gate_up, self.mixture.down
        self.gate_up, self.down = (Stack(shape, self.mixture.format, device) for shape in shapes)

    def work(self, part: str, tokens: int) -> Work:
        mixture, stack = self.mixture, self.down if part == "down" else self.gate_up
        chosen = choices(mixture, tokens, stack.copies, stack.bytes_of_expert, self.device)
        weights = [stack.weights[i % stack.copies] for i in range(len(chosen))]
        if part == "block":
            down = [self.down.weights[i % self.down.copies] for i in range(len(chosen))]
            return [
                partial(operations.moe, one.x, one.ids, one.weights, gate_up, after, mixture.activation)
                for one, gate_up, after in zip(chosen, weights, down, strict=True)
            ]
        rows = [torch.randn((one.pairs.numel(), stack.shape[2]), device=self.device).to(BF16) for one in chosen]
        return [
            partial(operations.grouped_linear, x, q, one.pairs) for x, q, one in zip(rows, weights, chosen, strict=True)
        ]


def forget(bound: bool = True) -> None:
    """All plans, and what was bound under them: a constant has another value now. bound: that as well."""
    ours = tuple(f"{KERNELS}.{kind}" for kind in ("linear", "experts", "attention"))
    modules = [module for name, module in sys.modules.items() if name.startswith(ours)]
    for thing in (thing for module in modules for thing in vars(module).values()):
        if isinstance(thing, ThreadCache) and bound:
            thing.entries.clear()
        elif isinstance(thing, _lru_cache_wrapper):
            thing.cache_clear()


def captured(work: Work, setting: Setting) -> tuple[Callable[[int], Any], Tensor]:
    """What does all of the work again as it is done under the setting, and the first result."""
    before = {name: getattr(*place_of(name)) for name in setting}
    try:
        for name, value in setting.items():
            setattr(*place_of(name), value)
        forget()
        first = work[0]().clone()
        if first.device.type != "cuda":
            return lambda index: [call() for call in work], first
        for call in work:
            call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = [call() for call in work]

        def replay(index: int) -> list[Tensor]:
            graph.replay()
            return results

        return replay, first
    finally:
        for name, value in before.items():
            setattr(*place_of(name), value)
        forget()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("constants", nargs="+", metavar="NAME=VALUE,VALUE")
    parser.add_argument("--only", default="", metavar="TEXT", help="work whose name contains it")
    parser.add_argument("--models", nargs="*", default=GPU_MODELS, choices=sorted(MODELS), help="of experts")
    parser.add_argument("--rounds", type=int, default=9)
    given = parser.parse_args(arguments)
    try:
        every = settings(given.constants)
    except ValueError as error:
        parser.error(str(error))
    torch.manual_seed(0)  # experts are chosen alike in every run
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    console, table = Console(), Table("µs", *(", ".join(f"{n}={v}" for n, v in setting.items()) for setting in every))
    for name, make in works(given.only, given.models, device):
        work = make()
        made = [captured(work, setting) for setting in every]
        times = time_all({str(i): run for i, (run, _) in enumerate(made)}, 1, device, given.rounds).values()
        first, cells = made[0][1], []
        for timing, (_, result) in zip(times, made, strict=True):
            differs = "" if torch.equal(result, first) else f" ±{relative_error(result, first.double()):.1e}"
            cells.append(f"{timing.median / len(work):.2f}{differs}")
        table.add_row(name, *cells)
    console.print(table)


if __name__ == "__main__":
    main()
