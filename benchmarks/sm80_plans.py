"""The shapes and constants of sm80's planner: measure every shape that might be the fastest, then fit the estimate.

    python benchmarks/sm80_plans.py measure benchmarks/results/h200/sm80-plans.csv   # two minutes on an NVIDIA GPU
    python benchmarks/sm80_plans.py fit benchmarks/results/h200/sm80-plans.csv       # anywhere, with scipy

`measure` tries shapes that the planner does not have, too. `fit` goes from what tune/h200.py has, prints what that
should be by the file, how far both estimates are off, and what the choice of each loses against the fastest shape that
was measured; and for each width which shapes were the fastest, the planner's and others. Shapes that spill registers
are not among them.
"""

from __future__ import annotations

import ctypes
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from fitting import Constant, compile_all, fit_to, lost, main, read, write
from rich.progress import track

import halfbyte as hb
from halfbyte.bench.dequantize import input_sets
from halfbyte.bench.predictions import problem, properties_named
from halfbyte.kernels.common.device import DeviceProperties
from halfbyte.kernels.common.driver import call, kernels
from halfbyte.kernels.common.nvrtc import Variant
from halfbyte.kernels.linear.kernel import run
from halfbyte.kernels.linear.problem import Problem
from halfbyte.kernels.linear.sm80 import launch as sm80
from halfbyte.kernels.linear.sm80.plan import Sm80Plan, columns_of, estimate, plan_of_shape, sm80_plan
from halfbyte.kernels.linear.tune import h200
from halfbyte.measure.records import device_name
from halfbyte.measure.timing import time_all

WEIGHTS = ((4096, 4096), (14336, 4096), (4096, 14336), (28672, 8192), (8192, 28672))
FORMATS = {"nf4": (64, True), "int4": (128, False)}  # to block size, and whether scales are nested
ROWS = (8, 16, 32, 48, 64, 128)
MOST_OVER = 1.1  # times the lowest estimate that a shape's may be
MOST_WARPS = 16  # of a CTA
LOCAL_SIZE_BYTES = 3  # of the driver's function attributes
Shape = tuple[int, int, int, int, int]  # row_groups, n_warps, k_warps, tile_k, CTAs that share a multiprocessor


class Row(NamedTuple):
    """A line of the file. x is fp16."""

    device: str
    format: str
    n: int
    k: int
    m: int
    row_groups: int
    n_warps: int
    k_warps: int
    tile_k: int
    resident_ctas: int
    local: int  # bytes of a thread's registers that went to memory
    microseconds: float

    @property
    def product(self) -> tuple[str, int, int, int]:
        return self[1:5]

    @property
    def shape(self) -> Shape:
        return self[5:10]

    @property
    def problem(self) -> Problem:
        return problem_of(self.format, self.n, self.k)


def problem_of(format: str, n: int, k: int) -> Problem:
    """In fp16."""
    found = problem(format, *FORMATS[format], n, k)
    scale = torch.float16 if found.scale is found.dtype else found.scale
    return replace(found, dtype=torch.float16, scale=scale)


def plans(m: int, o: Problem, properties: DeviceProperties) -> dict[Shape, Sm80Plan]:
    """Of every shape that might be the fastest, and those that the planner has."""
    columns = columns_of(m)
    own: tuple[Shape, ...] = h200.SM80_SHAPES[columns]
    every = [shape for shape in product((1, 2), (2, 4, 8), (1, 2, 4, 8), (64, 128, 256), (1, 2, 3, 4))
             if shape[1] * shape[2] <= MOST_WARPS]  # fmt: skip
    found = {shape: plan_of_shape(columns, shape, m, o, properties) for shape in (*own, *every)}
    fits = {shape: plan for shape, plan in found.items() if plan is not None}
    most = MOST_OVER * min(plan.microseconds for plan in fits.values())
    return {shape: plan for shape, plan in fits.items() if shape in own or plan.microseconds <= most}


def measure(path: Path, device: torch.device, properties: DeviceProperties) -> None:
    """Writes the file anew."""
    weights = [(format, *weight) for format in FORMATS for weight in WEIGHTS]
    variants = {
        sm80.variant(problem_of(*weight), plan, properties)
        for weight in weights
        for m in ROWS
        for plan in plans(m, problem_of(*weight), properties).values()
    }
    compile_all(variants)
    parts = (_rows_of_weight(*weight, device, properties) for weight in track(weights, "measuring"))
    write(path, Row._fields, parts)


def _rows_of_weight(format: str, n: int, k: int, device: torch.device, properties: DeviceProperties) -> Iterator[Row]:
    o = problem_of(format, n, k)

    def quantized() -> hb.QuantizedWeight:
        weight = torch.randn((n, k), dtype=torch.float32, device=device).to(o.dtype)
        return hb.quantize(weight, format)

    sets = input_sets(quantized().nbytes, device)
    qs = [quantized() for _ in range(sets)]
    for m in ROWS:
        xs = [torch.randn((m, k), dtype=torch.float32, device=device).to(o.dtype) for _ in range(sets)]
        outs = [x.new_empty((m, n)) for x in xs]
        every = plans(m, o, properties)
        providers = {shape: _provider(plan, xs, qs, outs) for shape, plan in every.items()}
        for shape, timing in time_all(providers, sets, device, rounds=3).items():
            local = local_bytes(sm80.variant(o, every[shape], properties), device)
            yield Row(device_name(device), format, n, k, m, *shape, local, round(timing.median, 3))


def local_bytes(variant: Variant, device: torch.device) -> int:
    """Of memory that a thread of the kernel has for registers that it lacks."""
    shared, found = int(dict(variant.constants)["shared_bytes"]), ctypes.c_int()
    (multiply,) = kernels(device.index, variant, (("multiply", shared),))
    call("cuFuncGetAttribute", ctypes.byref(found), LOCAL_SIZE_BYTES, multiply)
    return found.value


def _provider(plan: Sm80Plan, xs: Sequence[Any], qs: Sequence[Any], outs: Sequence[Any]) -> Callable[[int], None]:
    return lambda i: run(sm80, xs[i], qs[i], None, outs[i], plan)


def constants() -> list[Constant]:
    names = ("LOOK_UP", "ARITHMETIC", "CROSSED", "ISSUE", "MMA", "SERIAL", "START", "FIX_UP", "PART")
    return [
        *(Constant(f"SM80_{name}") for name in names), Constant("SM80_STAGE", high=300.0),
        Constant("SM80_LATENCY", high=2000.0), Constant("SM80_OVERLAP", low=1.0, high=6.0),
        Constant("SM80_BANDWIDTH", low=3.0),
    ]  # fmt: skip


def fit(path: Path) -> None:
    """Prints everything, and leaves what it has found in the tables of this process."""
    rows = [row for row in read(path, read_row, Row._fields) if row.local == 0]
    properties = properties_named(rows[0].device)
    print(f"choices as they are: {_lost(rows, properties)}")
    found = constants()
    plan_of = {row: plans(row.m, row.problem, properties.as_fitted).get(row.shape) for row in rows}
    known = [row for row in rows if plan_of[row] is not None]
    told = fit_to(found, known, lambda row: estimate(plan_of[row], row.m, row.problem, properties.as_fitted))
    print(f"{len(known)} plans, {told}")
    print("\n".join(f"    {constant} = {constant.value:.4g}" for constant in found))
    print(f"choices as fitted: {_lost(rows, properties)}")
    for columns in h200.SM80_COLUMNS:
        print("\n".join(_fastest(columns, [row for row in rows if columns_of(row.m) == columns])))


def _lost(rows: Sequence[Row], properties: DeviceProperties) -> str:
    times: dict[tuple[str, int, int, int], dict[Shape, float]] = defaultdict(dict)
    for row in rows:
        times[row.product][row.shape] = row.microseconds

    def choose(of: tuple[str, int, int, int]) -> Shape | None:
        format, n, k, m = of
        plan = sm80_plan(m, problem_of(format, n, k), properties.as_fitted)
        return None if plan is None else shape_of(plan)

    return lost(times, choose)


def _fastest(columns: int, rows: Sequence[Row]) -> Iterator[str]:
    """Of products of this width: how far each shape is from the fastest one, in the mean, and in how many of them it
    was measured; the planner's, and the five best of all others."""
    ratios: dict[Shape, list[float]] = defaultdict(list)
    least: dict[tuple[str, int, int, int], float] = {}
    for row in rows:
        least[row.product] = min(least.get(row.product, math.inf), row.microseconds)
    for row in rows:
        ratios[row.shape].append(row.microseconds / least[row.product])
    own = h200.SM80_SHAPES[columns]
    order = sorted(ratios, key=lambda shape: sum(ratios[shape]) / len(ratios[shape]))
    others = [shape for shape in order if shape not in own and len(ratios[shape]) * 2 > len(least)][:5]
    yield f"tiles of {8 * columns}, {len(least)} products:"
    for shape in order:
        if shape in own or shape in others:
            mean, lacks = sum(ratios[shape]) / len(ratios[shape]), "" if shape in own else ", which the planner lacks"
            yield f"    {shape}{lacks}: {mean:.3f} of {len(ratios[shape])}"


def shape_of(plan: Sm80Plan) -> Shape:
    return plan.row_groups, plan.n_warps, plan.k_warps, plan.tile_k, plan.resident_ctas


def read_row(device: str, format: str, *numbers: str) -> Row:
    *shape, time = numbers
    return Row(device, format, *map(int, shape), float(time))


if __name__ == "__main__":
    main(__doc__, measure, fit)
