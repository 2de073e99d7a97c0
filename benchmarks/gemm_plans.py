"""The constants of sm90_gemm's planner: measure the plans that might be chosen, then fit the estimate to the times.

    python benchmarks/gemm_plans.py measure benchmarks/results/h200/gemm-plans.csv   # two minutes on a Hopper GPU
    python benchmarks/gemm_plans.py fit benchmarks/results/h200/gemm-plans.csv       # anywhere, with scipy

`fit` goes from what tune/h200.py has, prints what that should be by the file, how far both estimates are off, and what
the choice of each loses against the fastest plan that was measured. Weights are NF4 with nested scales, which are
looked up, and INT4, which are computed; `back` are products with the weight transposed. Of many rows the dense weight
and torch's product with it are measured as well, with 0 for all of a plan: that is what planners' estimates are held
against.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from fitting import Constant, compile_all, fit_to, lost, main, read, write
from rich.progress import track
from torch.nn import functional

import halfbyte as hb
from halfbyte.bench.dequantize import input_sets
from halfbyte.bench.predictions import problem, properties_named
from halfbyte.kernels.common.device import DeviceProperties
from halfbyte.kernels.linear.dispatch import dense_microseconds
from halfbyte.kernels.linear.kernel import run
from halfbyte.kernels.linear.laid_out import span_of
from halfbyte.kernels.linear.problem import Problem
from halfbyte.kernels.linear.sm90_gemm import launch as gemm
from halfbyte.kernels.linear.sm90_gemm.plan import gemm_plan
from halfbyte.kernels.linear.sm90_gemm.shape import DECODERS, W_STAGES, GemmPlan, decoding, is_valid, x_stages
from halfbyte.kernels.linear.sm90_gemm.times import estimate, plans
from halfbyte.kernels.linear.tune import h200
from halfbyte.measure.records import device_name
from halfbyte.measure.timing import time_all

SHAPES = (
    *((1024, 4096), (4096, 4096), (6144, 4096), (14336, 4096), (4096, 14336), (8192, 8192), (5120, 25600)),
    *((28672, 8192), (5376, 4096)),
)
ROWS = (32, 64, 96, 128, 160, 192, 256, 320, 384, 512, 640, 768, 960, 1024, 1280, 2048, 4096)
WEIGHTS = {"nf4": ("nf4", 64, True), "int4": ("int4", 128, False)}
DENSE, DENSE_ROWS = (0,) * 9, 512  # in place of a plan's shape; and from how many rows on
MOST_SETS, MOST_EMPTY = 4, 1.45  # weights that are timed in turn; and by how much tiles may be larger than x
Product = tuple[str, int, int, int, int]  # format, whether back, n, k, m


class Row(NamedTuple):
    """A line of the file."""

    device: str
    format: str
    back: int
    n: int
    k: int
    m: int
    tile_m: int
    workers: int
    cluster: int
    shares: int
    chunk: int
    in_order: int
    twins: int
    mates: int
    decoders: int
    microseconds: float

    @property
    def product(self) -> Product:
        return self[1:6]

    @property
    def shape(self) -> tuple[int, ...]:
        """As `shape_of` has it."""
        return self[6:15]

    @property
    def problem(self) -> Problem:
        return problem(*WEIGHTS[self.format], self.n, self.k)


def shape_of(plan: GemmPlan) -> tuple[int, ...]:
    p = plan
    return p.tile_m, p.workers, p.cluster, p.shares, p.chunk, int(p.in_order), p.twins, p.mates, p.decoders


def candidates(m: int, o: Problem, back: bool, properties: DeviceProperties) -> Iterator[GemmPlan]:
    """Those that fit and hold x well."""
    n, k = (o.k, o.n) if back else (o.n, o.k)
    for plan in plans(m, o, properties, back):
        if plan.x_rows * plan.x_tiles(m) < MOST_EMPTY * m and is_valid(plan, m, n, k, span_of(o), properties):
            yield plan


def measure(path: Path, device: torch.device, properties: DeviceProperties) -> None:
    """Writes the file anew."""
    every = [(problem(*weight, *shape), m) for weight in WEIGHTS.values() for shape in SHAPES for m in ROWS]
    variants = {
        gemm.variant(o, plan, properties)
        for o, m in every
        for back in (False, True)
        for plan in candidates(m, o, back, properties)
    }
    compile_all(variants)
    weights = ((name, *shape) for name in WEIGHTS for shape in track(SHAPES, f"measuring {name}"))
    write(path, Row._fields, (_rows_of_weight(*weight, device, properties) for weight in weights))


def _rows_of_weight(name: str, n: int, k: int, device: torch.device, properties: DeviceProperties) -> Iterator[Row]:
    o = problem(*WEIGHTS[name], n, k)

    def quantized() -> hb.QuantizedWeight:
        return hb.quantize(torch.randn((n, k), dtype=torch.float32, device=device).to(o.dtype), name)

    sets = min(MOST_SETS, input_sets(quantized().nbytes, device))
    qs = [quantized() for _ in range(sets)]
    for back in (False, True):
        of_x, of_y = (n, k) if back else (k, n)
        for m in ROWS:
            xs = [torch.randn((m, of_x), dtype=torch.float32, device=device).to(o.dtype) for _ in range(sets)]
            outs = [x.new_empty((m, of_y)) for x in xs]
            every = candidates(m, o, back, properties)
            providers = {shape_of(plan): _provider(plan, xs, qs, outs) for plan in every}
            if m >= DENSE_ROWS:
                providers[DENSE] = partial(_run_dense, xs, qs, back)
            for shape, timing in time_all(providers, sets, device, rounds=3).items():
                yield Row(device_name(device), name, int(back), n, k, m, *shape, round(timing.median, 3))


def _provider(plan: GemmPlan, xs: Sequence[Any], qs: Sequence[Any], outs: Sequence[Any]) -> Callable[[int], None]:
    return lambda i: run(gemm, xs[i], qs[i], None, outs[i], plan)


def _run_dense(xs: Sequence[torch.Tensor], qs: Sequence[hb.QuantizedWeight], back: bool, i: int) -> torch.Tensor:
    dense = hb.dequantize(qs[i], xs[i].dtype)
    return xs[i] @ dense if back else functional.linear(xs[i], dense)


def fit(path: Path) -> None:
    """Prints everything, and leaves what it has found in the tables of this process."""
    rows = read(path, read_row, Row._fields)
    properties = properties_named(rows[0].device)
    print(f"choices as they are: {_lost(rows, properties)}")
    of_plans, of_dense = [row for row in rows if row.tile_m], [row for row in rows if not row.tile_m]
    for name, constants, some in (
        ("forward", constants_forward(), [row for row in of_plans if not row.back]),
        ("back", constants_back(), [row for row in of_plans if row.back]),
        ("dense", constants_dense(), of_dense),
    ):
        every = list(constants)
        if not some:
            continue
        print(f"{name}: {len(some)} times, {fit_to(every, some, partial(_estimate, properties=properties))}")
        print("\n".join(f"    {constant} = {constant.value:.3f}" for constant in every))
    gemm_plan.cache_clear()
    print(f"choices as fitted: {_lost(rows, properties)}")


def constants_forward() -> Iterator[Constant]:
    for name in ("GEMM_COPIED_START", "GEMM_START", "GEMM_LAYING", "GEMM_PART", "GEMM_TILE"):
        yield Constant(name)
    yield Constant("GEMM_SHARED", high=30.0)
    yield from (Constant(name, low=0.9) for name in ("GEMM_APART", "GEMM_TWINS_APART"))
    yield from map(Constant, ("GEMM_CLUSTER_START", "GEMM_REDUCE", "GEMM_TWINS_START"))
    for table in ("GEMM_UNIT", "GEMM_COMPUTED_UNIT", "IN_ORDER_UNIT", "IN_ORDER_COMPUTED_UNIT"):
        yield from (Constant(table, tile_m, low=0.5) for tile_m in getattr(h200, table))


def constants_back() -> Iterator[Constant]:
    yield Constant("BACK_COPIED_START")
    yield from (Constant(name, low=0.9) for name in ("BACK_TWINS_APART", "BACK_MATES_APART"))
    for table in ("BACK_UNIT", "BACK_COMPUTED_UNIT", "BACK_MATES_UNIT", "BACK_DECODERS_UNIT"):
        yield from (Constant(table, tile_m, low=0.5) for tile_m in getattr(h200, table))


def constants_dense() -> Iterator[Constant]:
    yield from (Constant("DENSE_START"), Constant("DENSE_WRITE"), Constant("DENSE_TERAFLOPS", low=500.0, high=990.0))


def read_row(device: str, format: str, *numbers: str) -> Row:
    *shape, time = numbers
    return Row(device, format, *map(int, shape), float(time))


def _estimate(row: Row, properties: DeviceProperties) -> float:
    if not row.tile_m:
        return dense_microseconds(row.m, row.problem, properties)
    return estimate(_plan_of(row), row.m, row.problem, properties)


@cache
def _plan_of(row: Row) -> GemmPlan:
    stages = DECODERS[row.tile_m][1:] if row.decoders else (W_STAGES, x_stages(row.tile_m, row.problem, row.mates))
    plan = GemmPlan(row.tile_m, 2, *stages, row.workers, row.cluster, row.chunk, back=bool(row.back), shares=row.shares)
    plan = replace(plan, in_order=bool(row.in_order), twins=row.twins, mates=row.mates, decoders=row.decoders)
    return decoding(plan, row.problem)


def _lost(rows: Sequence[Row], properties: DeviceProperties) -> str:
    times: dict[Product, dict[tuple[int, ...], float]] = defaultdict(dict)
    for row in (row for row in rows if row.tile_m):
        times[row.product][row.shape] = row.microseconds

    def choose(product: Product) -> tuple[int, ...] | None:
        name, back, n, k, m = product
        plan = gemm_plan(m, problem(*WEIGHTS[name], n, k), properties.as_fitted, bool(back))
        return plan and shape_of(plan)

    return lost(times, choose)


if __name__ == "__main__":
    main(__doc__, measure, fit)
