"""The constants of planners for stacks of experts: measure every plan, then fit the estimates to the times.

    python benchmarks/grouped_plans.py measure benchmarks/results/h200/grouped-plans.csv   # a minute on Hopper
    python benchmarks/grouped_plans.py fit benchmarks/results/h200/grouped-plans.csv       # anywhere, with scipy

`fit` goes from what tune/h200.py has, prints what that should be by the file, how far both estimates are off, and what
the choice of each loses against the fastest plan that was measured. Products are those of `halfbyte bench experts`, of
pairs that are sorted ahead; `back` are those of gradients with the transposes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import torch
from fitting import Constant, compile_all, fit_to, lost, main, read, write
from rich.progress import track
from torch import Tensor

from halfbyte.bench.mixtures import DTYPE, MODELS, Stack, choices
from halfbyte.bench.predictions import problem, properties_named
from halfbyte.kernels.common.device import DeviceProperties
from halfbyte.kernels.experts.sort import sort
from halfbyte.kernels.linear import grouped
from halfbyte.kernels.linear.grouped import EVERY_TILE_M, Grouping
from halfbyte.kernels.linear.problem import Problem, addresses, problem_of
from halfbyte.kernels.linear.sm90_decode.launch import rows_of
from halfbyte.kernels.linear.sm90_gemm import plan as wide
from halfbyte.kernels.linear.sm90_gemm.shape import GemmPlan
from halfbyte.kernels.linear.sm90_streamk import plan as narrow
from halfbyte.kernels.linear.sm90_streamk.shape import StreamKPlan
from halfbyte.kernels.linear.spread import most_tiles
from halfbyte.kernels.linear.tune import h200
from halfbyte.kernels.linear.tune.h200 import GroupedTimes
from halfbyte.measure.records import device_name
from halfbyte.measure.timing import time_all

STACKS = (("qwen3-30b-a3b", "nf4"), ("qwen3-30b-a3b", "int4"), ("mixtral-8x7b", "nf4"), ("gpt-oss-120b", "mxfp4"))
PARTS = ("gate_up", "down")
TOKENS = (32, 64, 128, 256, 512, 1024, 2048, 4096)
MOST_INPUTS, MOST_OVER = 3, 2.0  # that are timed in turn; and times the lowest estimate that a plan's may be
Plan = StreamKPlan | GemmPlan
Product = tuple[str, str, str, int, int]  # model, format, part, whether back, tokens


class Row(NamedTuple):
    """A line of the file. warpgroups: of sm90_streamk; 0: it is a plan of sm90_gemm. decoders: of that."""

    device: str
    model: str
    format: str
    part: str
    back: int
    tokens: int
    tile_m: int
    warpgroups: int
    decoders: int
    microseconds: float

    @property
    def product(self) -> Product:
        return self[1:6]

    @property
    def shape(self) -> tuple[int, int, int]:
        return self[6:9]


def shape_of(plan: Plan) -> tuple[int, int, int]:
    if isinstance(plan, StreamKPlan):
        return plan.tile_m, plan.warpgroups, 0
    return plan.tile_m, 0, plan.decoders


@cache
def problem_named(model: str, format: str, part: str) -> Problem:
    experts, n, k = getattr(MODELS[model], part)
    return problem(format, {"nf4": 64, "int4": 128, "mxfp4": 32}[format], False, experts * n, k)


def candidates(product: Product, properties: DeviceProperties) -> list[Plan]:
    """Those that might be the fastest."""
    every = list(chain.from_iterable(plans(product, tile_m, properties) for tile_m in EVERY_TILE_M))
    most = MOST_OVER * min(plan.microseconds for plan in every)
    return [plan for plan in every if plan.microseconds <= most]


def plans(product: Product, tile_m: int, properties: DeviceProperties) -> Iterator[Plan]:
    model, format, part, back, tokens = product
    mixture = MODELS[model]
    o = problem_named(model, format, part)
    given = tokens * mixture.top_k, mixture.experts, tile_m, o, properties, bool(back)
    yield from narrow.grouped_plans(*given)
    yield from wide.grouped_plans(*given)


def per_row_of(product: Product) -> int:
    """Pairs that share a row of x: of gate and up, all of a token."""
    return MODELS[product[0]].top_k if product[2:4] == ("gate_up", 0) else 1


def products() -> Iterator[Product]:
    for stack in STACKS:
        for part in PARTS:
            for back in (0, 1):
                yield from ((*stack, part, back, tokens) for tokens in TOKENS)


def measure(path: Path, device: torch.device, properties: DeviceProperties) -> None:
    """Writes the file anew."""
    variants = {
        grouped.variant(problem_named(*product[:3]), _grouping(product), plan, properties)
        for product in products()
        for plan in candidates(product, properties)
    }
    compile_all(variants)
    write(path, Row._fields, _parts(device, properties))


def _parts(device: torch.device, properties: DeviceProperties) -> Iterator[Iterator[Row]]:
    for model, format in STACKS:
        for part in PARTS:
            stack = Stack(getattr(MODELS[model], part), format, device, most_copies=MOST_INPUTS)
            of_stack = [product for product in products() if product[:3] == (model, format, part)]
            for product in track(of_stack, f"{model} {format} {part}"):
                yield _rows_of(product, stack, device, properties)


def _grouping(product: Product) -> Grouping:
    return Grouping(MODELS[product[0]].experts, scatters=True)


def _rows_of(product: Product, stack: Stack, device: torch.device, properties: DeviceProperties) -> Iterator[Row]:
    model, _, _, back, tokens = product
    mixture, per_row = MODELS[model], per_row_of(product)
    experts, n, k = stack.shape
    of_x, of_y = (n, k) if back else (k, n)
    pairs = tokens * mixture.top_k
    chosen = choices(mixture, tokens, stack.copies, stack.bytes_of_expert, device)[:MOST_INPUTS]
    ids = [choice.ids if per_row > 1 else choice.pairs[:, None] for choice in chosen]
    xs = [torch.randn((pairs // per_row, of_x), dtype=DTYPE, device=device) for _ in chosen]
    outs = [x.new_empty((pairs, of_y)) for x in xs]
    qs = [stack.weights[i % stack.copies] for i in range(len(chosen))]
    stream, o = torch._C._cuda_getCurrentRawStream(device.index), problem_named(*product[:3])
    assert all(problem_of(x, rows_of(q), None) == o for x, q in zip(xs, qs, strict=True))

    def provider(plan: Plan) -> Callable[[int], Tensor]:
        tiles = most_tiles(pairs, experts, plan.tile_m)
        routes = [sort(of_row, experts, plan.tile_m, tiles).table for of_row in ids]
        bound = [grouped.bind(device, o, addresses(rows_of(q)), _grouping(product), plan) for q in qs]

        def multiply(i: int) -> Tensor:
            bound[i](stream, xs[i].data_ptr(), routes[i].data_ptr(), 0, outs[i].data_ptr(), len(xs[i]), per_row)
            return outs[i]

        return multiply

    providers = {shape_of(plan): provider(plan) for plan in candidates(product, properties)}
    for shape, timing in time_all(providers, len(chosen), device, rounds=3).items():
        yield Row(device_name(device), *product, *shape, round(timing.median, 3))


def fit(path: Path) -> None:
    """Prints everything, and leaves what it has found in the tables of this process."""
    rows = read(path, read_row, Row._fields)
    properties = properties_named(rows[0].device)
    print(f"choices as they are: {_lost(rows, properties)}")
    for name, constants, some in (
        ("forward", constants_forward(), [row for row in rows if not row.back]),
        ("back", constants_back(), [row for row in rows if row.back]),
    ):
        every = list(constants)
        print(f"{name}: {len(some)} times, {fit_to(every, some, partial(_estimate, properties=properties))}")
        print("\n".join(f"    {constant} = {constant.value:.3f}" for constant in every))
    print(f"choices as fitted: {_lost(rows, properties)}")


def _estimate(row: Row, properties: DeviceProperties) -> float:
    of_width = plans(row.product, row.tile_m, properties.as_fitted)
    return next(plan.microseconds for plan in of_width if shape_of(plan) == row.shape)


def constants_forward() -> Iterator[Constant]:
    yield from constants_common(back=False)
    for table in ("GROUPED_TIMES", "GROUPED_STREAMK"):
        for shape in getattr(h200, table):
            yield from (Constant(table, shape, field) for field in GroupedTimes._fields)


def constants_back() -> Iterator[Constant]:
    yield from constants_common(back=True)
    for table in ("GROUPED_BACK_TIMES", "GROUPED_BACK_DECODERS_TIMES"):
        for tile_m in getattr(h200, table):
            yield from (Constant(table, tile_m, field) for field in GroupedTimes._fields)


def constants_common(back: bool) -> Iterator[Constant]:
    for field, low, high in (("laying", 0.0, 9.0), ("bandwidth", 1.0, 4.8), ("saved", 0.0, 1.0), ("of_32", 0.5, 2.0)):
        yield Constant("GROUPED_COMMON", back, field, low, high)


def read_row(device: str, model: str, format: str, part: str, *numbers: str) -> Row:
    *shape, time = numbers
    return Row(device, model, format, part, *map(int, shape), float(time))


def _lost(rows: Sequence[Row], properties: DeviceProperties) -> str:
    times: dict[Product, dict[tuple[int, ...], float]] = defaultdict(dict)
    for row in rows:
        times[row.product][row.shape] = row.microseconds

    def choose(product: Product) -> tuple[int, ...]:
        return shape_of(min(candidates(product, properties.as_fitted), key=lambda plan: plan.microseconds))

    return lost(times, choose)


if __name__ == "__main__":
    main(__doc__, measure, fit)
