"""`halfbyte bench puzzle`: Unsloth's public challenge A, "convert nf4 to Triton", whole, with its marking scheme.

Three MLPs of bitsandbytes Linear4bit. For each, two rounds of checks: a forward pass through dequantized weights
against the module itself, and each weight against Unsloth's sequence. Then 1000 rounds of dequantizing the three
projections, with a synchronization after each. The score is the ratio of Unsloth's total time to ours.

The rule set awards 14 points: 3 for a single Triton kernel, 1 + 2 + 2 for a speed-up of 1.05, 1.10 and 1.15, 1 for
working under torch.compile, 3 for custom assembly, 1 for cache eviction hints and 1 for both fp16 and bf16. Every point
is decided by looking: at the kernels that run, at the PTX that was compiled, at the results.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from halfbyte import ops
from halfbyte.bench import baselines
from halfbyte.formats.bitsandbytes import from_bitsandbytes
from halfbyte.formats.weight import QuantizedWeight

Layer = Any  # bitsandbytes' Linear4bit
Dequantize = Callable[[Layer], Tensor]
ROUNDS = 1000
TOTAL_POINTS = 14


@dataclass(frozen=True)
class Option:
    batch: int
    tokens: int
    hidden: int
    intermediate: int
    seed: int
    dtype: torch.dtype

    @property
    def name(self) -> str:
        return f"{self.hidden}×{self.intermediate} {str(self.dtype).removeprefix('torch.')}"


OPTIONS = (
    Option(2, 3333, 2048, 8192, 3407, torch.float16),
    Option(5, 777, 1024, 4096, 3409, torch.bfloat16),
    Option(3, 2048, 4096, 14336, 3408, torch.bfloat16),
)


@dataclass(frozen=True)
class PuzzleResult:
    """seconds: provider to seconds for each option, in order. points: what was awarded, of TOTAL_POINTS."""

    seconds: Mapping[str, tuple[float, ...]]
    points: Mapping[str, int]

    @property
    def speedup(self) -> float:
        return sum(self.seconds["unsloth"]) / sum(self.seconds["halfbyte"])

    @property
    def score(self) -> int:
        return sum(self.points.values())


class Mlp(nn.Module):
    def __init__(self, option: Option, linear4bit: Any) -> None:
        super().__init__()

        def projection(inputs: int, outputs: int) -> Layer:
            layer = linear4bit(
                inputs, outputs, bias=None, compute_dtype=option.dtype, compress_statistics=True, quant_type="nf4"
            )
            layer.to("cuda")
            layer.weight.quant_state.dtype = option.dtype
            return layer

        self.gate_proj = projection(option.hidden, option.intermediate)
        self.up_proj = projection(option.hidden, option.intermediate)
        self.down_proj = projection(option.intermediate, option.hidden)

    def forward(self, x: Tensor) -> Tensor:
        hidden = nn.functional.silu(self.gate_proj(x)) * self.up_proj(x)
        result: Tensor = self.down_proj(hidden)
        return result

    @property
    def projections(self) -> tuple[Layer, ...]:
        return self.up_proj, self.gate_proj, self.down_proj


class Halfbyte:
    """Our solution. A layer's weight is looked at once and then known as a QuantizedWeight, which copies nothing."""

    def __init__(self) -> None:
        self.weights: WeakKeyDictionary[Layer, QuantizedWeight] = WeakKeyDictionary()

    def __call__(self, layer: Layer) -> Tensor:
        q = self.weights.get(layer)
        if q is None:
            q = self.weights[layer] = from_bitsandbytes(layer.weight)
        return ops.dequantize(q)


def run_puzzle(rounds: int = ROUNDS, repeats: int = 3, on_step: Callable[[str], None] = lambda _: None) -> PuzzleResult:
    """Check and time all three options; medians of `repeats` alternating runs of `rounds` rounds.

    Raises AssertionError when a result is wrong, ValueError without an NVIDIA GPU, ImportError without bitsandbytes.
    """
    if not torch.cuda.is_available() or torch.version.hip:
        raise ValueError("the puzzle needs an NVIDIA GPU: its yardstick is bitsandbytes' CUDA library")
    linear4bit = baselines.require("bitsandbytes").nn.Linear4bit
    unsloth_way = baselines.Unsloth()
    solutions: dict[str, Dequantize] = {
        "unsloth": lambda layer: unsloth_way.dequantize(layer.weight, layer.weight.quant_state),
        "halfbyte": Halfbyte(),
    }
    times: dict[str, list[float]] = {name: [] for name in solutions}
    compiles, single = True, True
    for option in OPTIONS:
        on_step(f"{option.name}: checking")
        torch.manual_seed(option.seed)
        mlp = Mlp(option, linear4bit)
        x = torch.randn((option.batch, option.tokens, option.hidden), device="cuda", dtype=option.dtype)
        for _ in range(2):
            for solution in solutions.values():
                _check(mlp, x, option.dtype, solution, solutions["unsloth"])
        compiles &= _works_compiled(mlp)
        single &= _is_one_kernel(mlp.up_proj, solutions["halfbyte"])
        runs: dict[str, list[float]] = {name: [] for name in solutions}
        for repeat in range(repeats):
            for name, solution in solutions.items():
                on_step(f"{option.name}: {name}, run {repeat + 1} of {repeats}")
                runs[name].append(_time(mlp, solution, rounds))
        for name, values in runs.items():
            times[name].append(median(values))
    seconds = {name: tuple(values) for name, values in times.items()}
    speedup = sum(seconds["unsloth"]) / sum(seconds["halfbyte"])
    return PuzzleResult(seconds, _mark(speedup, compiles, single, {option.dtype for option in OPTIONS}))


def _check(mlp: Mlp, x: Tensor, dtype: torch.dtype, solution: Dequantize, right: Dequantize) -> None:
    with torch.no_grad():
        up, gate, down = (solution(layer).t() for layer in mlp.projections)
        result = (nn.functional.silu(x @ gate) * (x @ up)) @ down
        torch.testing.assert_close(result, mlp(x), check_stride=True)
    for layer in mlp.projections:
        weight = solution(layer)
        assert weight.dtype == dtype
        torch.testing.assert_close(weight, right(layer), rtol=0, atol=0)


def _time(mlp: Mlp, solution: Dequantize, rounds: int) -> float:
    up, gate, down = mlp.projections
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(rounds):
        solution(up).t()
        torch.cuda.synchronize()
        solution(gate).t()
        torch.cuda.synchronize()
        solution(down).t()
        torch.cuda.synchronize()
    return time.perf_counter() - start


def _works_compiled(mlp: Mlp) -> bool:
    """True if dequantize compiles into one graph without a break, and gives the same bits."""
    compiled = torch.compile(ops.dequantize, fullgraph=True)
    weights = [from_bitsandbytes(layer.weight) for layer in mlp.projections]
    return all(torch.equal(compiled(q), ops.dequantize(q)) for q in weights)


def _is_one_kernel(layer: Layer, solution: Dequantize) -> bool:
    """True if one call runs exactly one kernel on the GPU, and that kernel is our Triton kernel."""
    from torch.autograd import DeviceType  # type: ignore[attr-defined]
    from torch.autograd.profiler_util import FunctionEvent
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        solution(layer)
        torch.cuda.synchronize()
    events: list[FunctionEvent] = list(profiler.events())
    kernels = [event.name for event in events if event.device_type == DeviceType.CUDA]
    return kernels == ["dequantize_kernel"]


def _mark(speedup: float, compiles: bool, single: bool, dtypes: set[torch.dtype]) -> dict[str, int]:
    ptx = _compiled_ptx()
    return {
        "single Triton kernel": 3 * single,
        "speed-up of 1.05": 1 * (speedup >= 1.05),
        "speed-up of 1.10": 2 * (speedup >= 1.10),
        "speed-up of 1.15": 2 * (speedup >= 1.15),
        "works under torch.compile": 1 * compiles,
        "custom assembly": 3 * ("begin inline asm" in ptx),
        "cache eviction hints": 1 * ("evict_first" in ptx),
        "fp16 and bf16": 1 * (dtypes >= {torch.float16, torch.bfloat16}),
    }


def _compiled_ptx() -> str:
    from halfbyte.kernels.dequantize.triton import dequantize_kernel

    caches = dequantize_kernel.device_caches.values()
    return "\n".join(compiled.asm["ptx"] for cache in caches for compiled in cache[0].values())
