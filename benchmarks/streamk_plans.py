"""The constants of sm90_streamk's planner: measure every plan that might be chosen, then fit the estimate to the times.

    python benchmarks/streamk_plans.py measure benchmarks/results/h200/streamk-plans.csv   # two minutes on a Hopper GPU
    python benchmarks/streamk_plans.py fit benchmarks/results/h200/streamk-plans.csv       # anywhere, with scipy

`fit` goes from what tune/h200.py has, prints what that should be by the file, how far both estimates are off, and what
the choice of each loses against the fastest plan that was measured. Weights are NF4 with nested scales.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from fitting import Constant, compile_all, fit_to, lost, main, read, write
from rich.progress import track

import halfbyte as hb
from halfbyte.bench.dequantize import input_sets
from halfbyte.bench.predictions import problem, properties_named
from halfbyte.kernels.common.device import DeviceProperties
from halfbyte.kernels.linear.kernel import run
from halfbyte.kernels.linear.laid_out import UNIT_K, span_of
from halfbyte.kernels.linear.problem import Problem
from halfbyte.kernels.linear.sm90_streamk import launch as streamk
from halfbyte.kernels.linear.sm90_streamk.plan import streamk_plan
from halfbyte.kernels.linear.sm90_streamk.shape import TILES_M, StreamKPlan, is_valid
from halfbyte.kernels.linear.sm90_streamk.times import equal_shares, estimate, tiles_m
from halfbyte.kernels.linear.tune import h200
from halfbyte.measure.records import device_name
from halfbyte.measure.timing import time_all

SHAPES = (
    *((1024, 4096), (2048, 2048), (4096, 4096), (6144, 4096), (8192, 8192), (10240, 8192), (4096, 14336)),
    *((14336, 4096), (5376, 21504), (28672, 4096), (28672, 8192)),
)
ROWS = (8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160)
MOST_TILES, MOST_EMPTY = 3, 1.45  # of x; and by how much these may be larger than x


class Row(NamedTuple):
    """A line of the file."""

    device: str
    n: int
    k: int
    m: int
    tile_m: int
    warpgroups: int
    stages: int
    ctas: int
    resident: int
    cluster: int
    shares: int
    microseconds: float

    @property
    def plan(self) -> StreamKPlan:
        shape = self.tile_m, self.warpgroups, self.stages, self.ctas
        return StreamKPlan(*shape, self.resident, self.cluster, self.shares)

    @property
    def problem(self) -> Problem:
        return problem("nf4", 64, True, self.n, self.k)


def plans(m: int, o: Problem, properties: DeviceProperties) -> Iterator[StreamKPlan]:
    """Those that fit, of tiles that hold x well or that the planner thinks of: with x laid out, all units dealt out or
    every tile cut into as many parts as there are multiprocessors for; with x kept, as many parts, one fewer, and half
    as many."""
    depth, sms = -(-o.k // UNIT_K), properties.sms
    for tile_m in TILES_M:
        x_tiles = -(-m // tile_m)
        holds_well = x_tiles <= MOST_TILES and x_tiles * tile_m <= MOST_EMPTY * m + 8
        if not holds_well and tile_m not in tiles_m(m, o.n, sms):
            continue
        for warpgroups in (2, 3, 4) if tile_m <= 32 else (2, 3):
            tiles = -(-o.n // (64 * warpgroups)) * x_tiles
            most = min(depth, sms // tiles)
            shapes = [(tiles * most, 0, 1, equal_shares(most))] if most else []
            if tiles * most != min(sms, tiles * depth):
                shapes.append((min(sms, tiles * depth), 0, 1, 1))
            found = [(3, shape) for shape in shapes]
            for shares in {most, max(1, most - 1), max(1, most // 2)} if most and warpgroups < 4 else ():
                cluster = shares if tiles <= properties.clusters(shares) else 1
                equal = equal_shares(shares, cluster)
                found.append((4, (tiles * shares, -(-depth // shares), cluster, equal)))
            for stages, shape in found:
                every = (StreamKPlan(tile_m, warpgroups, some, *shape) for some in range(stages, 1, -1))
                yield from [plan for plan in every if is_valid(plan, m, o.n, o.k, span_of(o), properties)][:1]


def measure(path: Path, device: torch.device, properties: DeviceProperties) -> None:
    """Writes the file anew."""
    every = [(problem("nf4", 64, True, *shape), m) for shape in SHAPES for m in ROWS]
    variants = {streamk.variant(o, plan, properties) for o, m in every for plan in plans(m, o, properties)}
    compile_all(variants)
    parts = (_rows_of_weight(*shape, device, properties) for shape in track(SHAPES, "measuring"))
    write(path, Row._fields, parts)


def _rows_of_weight(n: int, k: int, device: torch.device, properties: DeviceProperties) -> Iterator[Row]:
    o = problem("nf4", 64, True, n, k)

    def quantized() -> hb.QuantizedWeight:
        return hb.quantize(torch.randn((n, k), dtype=torch.float32, device=device).to(o.dtype), "nf4")

    sets = input_sets(quantized().nbytes, device)
    qs = [quantized() for _ in range(sets)]
    for m in ROWS:
        xs = [torch.randn((m, k), dtype=torch.float32, device=device).to(o.dtype) for _ in range(sets)]
        outs = [x.new_empty((m, n)) for x in xs]
        for plan in plans(m, o, properties):
            (timing,) = time_all({"": _provider(plan, xs, qs, outs)}, sets, device, rounds=5).values()
            shape = plan.tile_m, plan.warpgroups, plan.stages, plan.ctas, plan.resident, plan.cluster, plan.shares
            yield Row(device_name(device), n, k, m, *shape, round(timing.median, 3))


def _provider(plan: StreamKPlan, xs: Sequence[Any], qs: Sequence[Any], outs: Sequence[Any]) -> Callable[[int], None]:
    return lambda i: run(streamk, xs[i], qs[i], None, outs[i], plan)


def constants_of_tile(tile_m: int) -> list[Constant]:
    """Where x is laid out ahead."""
    times = tile_m, False
    return [
        Constant("STREAMK_TIMES", times, "start", 0.5), Constant("STREAMK_TIMES", times, "bandwidth", 3.0, 6.0),
        Constant("STREAMK_TIMES", times, "scales", 0.0, 1.0), Constant("STREAMK_TIMES", times, "x", 0.0, 3.0),
        *(Constant(table, tile_m) for table in ("STREAMK_CUT", "STREAMK_RUN", "STREAMK_PART")),
        *(Constant("STREAMK_TILES", key, 1, 0.1) for key in h200.STREAMK_TILES if key[0] == tile_m),
    ]  # fmt: skip


def constants_with_x() -> list[Constant]:
    """Where CTAs keep x: all tiles have some in common."""
    found = [Constant("RESIDENT_UNIT", warpgroups, low=0.2) for warpgroups in h200.RESIDENT_UNIT]
    common = "RESIDENT_WARPGROUP", "FIX_UP", "FIX_UP_PART", "CLUSTER_REDUCE", "CLUSTER_PART"
    found += [Constant(name) for name in common]
    for tile_m in h200.RESIDENT_TILE_M:
        times = tile_m, True
        found += [Constant("RESIDENT_TILE_M", tile_m, low=0.3), Constant("STREAMK_TIMES", times, "start", 0.3)]
        found.append(Constant("STREAMK_TIMES", times, "result", 0.0, 4.0))
    return found


def fit(path: Path) -> None:
    """Prints everything, and leaves what it has found in the tables of this process."""
    rows = read(path, read_row, Row._fields)
    properties = properties_named(rows[0].device)
    print(f"choices as they are: {_lost(rows, properties)}")
    groups = [("x kept", constants_with_x(), [row for row in rows if row.resident])]
    for tile_m in h200.STREAMK_CUT:
        laid_out = [row for row in rows if row.tile_m == tile_m and not row.resident]
        groups.append((f"tiles of {tile_m}, x laid out", constants_of_tile(tile_m), laid_out))
    for name, constants, some in groups:
        known = [row for row in some if _is_known(row)]
        if known:
            found = fit_to(constants, known, lambda row: estimate(row.plan, row.m, row.problem, properties))
            print(f"{name}: {len(known)} plans, {found}")
            print("\n".join(f"    {constant} = {constant.value:.3f}" for constant in constants))
    streamk_plan.cache_clear()
    print(f"choices as fitted: {_lost(rows, properties)}")


def read_row(device: str, *numbers: str) -> Row:
    *shape, time = numbers
    return Row(device, *map(int, shape), float(time))


def _is_known(row: Row) -> bool:
    """The planner has constants for it."""
    if row.resident:
        return row.tile_m in h200.RESIDENT_TILE_M
    return (row.tile_m, row.warpgroups) in h200.STREAMK_TILES


def _lost(rows: Sequence[Row], properties: DeviceProperties) -> str:
    times: dict[tuple[int, int, int], dict[StreamKPlan, float]] = defaultdict(dict)
    for row in rows:
        times[row.n, row.k, row.m][row.plan] = row.microseconds

    def choose(product: tuple[int, int, int]) -> StreamKPlan | None:
        n, k, m = product
        return streamk_plan(m, problem("nf4", 64, True, n, k), properties.as_fitted, False)

    return lost(times, choose)


if __name__ == "__main__":
    main(__doc__, measure, fit)
