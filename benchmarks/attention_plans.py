"""The constants of the planner of attention: measure every plan, then fit the estimates to the times.

    python benchmarks/attention_plans.py measure benchmarks/results/h200/attention-plans.csv   # two minutes on Hopper
    python benchmarks/attention_plans.py fit benchmarks/results/h200/attention-plans.csv       # anywhere, with scipy

`fit` goes from what attention/sm90/plan.py has, prints what that should be by the file, how far estimates are off, and
what its choices lose against the fastest plan that was measured. What they lose is what it looks for: the least errors
of all estimates are those of plans that nobody would choose. Attention stands between products, as in a step: those of
queries, keys and values ahead, and that of the output behind, whose time without it is taken off.
"""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from fitting import compile_all, lost, main, read, write
from rich.progress import track
from torch import Tensor

import halfbyte as hb
from halfbyte import eager_fused
from halfbyte.bench.dequantize import input_sets
from halfbyte.bench.predictions import properties_named
from halfbyte.kernels.attention.fresh import Fresh
from halfbyte.kernels.attention.sm90 import launch, plan
from halfbyte.kernels.attention.sm90.plan import ClusterPlan
from halfbyte.kernels.attention.spans import spans_of
from halfbyte.kernels.common.device import DeviceProperties
from halfbyte.kernels.linear.fusion import Beside, Residual
from halfbyte.measure.records import device_name
from halfbyte.measure.timing import time_all

# Of queries, of keys, and their size.
HEADS = ((32, 8, 128), (32, 4, 128), (32, 32, 128), (64, 8, 64), (16, 8, 256), (16, 2, 256))
CACHES = (
    (1, 288), (8, 288), (32, 288), (1, 512), (8, 512), (1, 1024), (8, 1024), (1, 2048), (8, 2048), (1, 4096),
    (1, 8192), (2, 8192), (4, 8192), (8, 8192), (1, 32768),
)  # fmt: skip
HIDDEN, DTYPE = 2048, torch.bfloat16
MOST_BYTES, MOST_OVER = 8 << 30, 2.0  # of caches that are read in turn; and times the lowest estimate a plan's may be
STEPS = 3000  # of a fit
Load = tuple[int, int, int, int, int]  # heads of queries, of keys, their size, texts, tokens
Shape = tuple[int, int, int]  # warps that share rows, CTAs, whether they meet in memory


class Row(NamedTuple):
    """A line of the file."""

    device: str
    heads: int
    shared: int
    size: int
    texts: int
    tokens: int
    token_warps: int
    ctas: int
    in_memory: int
    microseconds: float

    @property
    def load(self) -> Load:
        return self[1:6]

    @property
    def shape(self) -> Shape:
        return self[6:9]


def loads() -> Iterator[Load]:
    yield from ((*heads, *cache) for heads in HEADS for cache in CACHES)


def plans(load: Load, properties: DeviceProperties) -> dict[Shape, tuple[float, ClusterPlan]]:
    """Every plan with its estimate."""
    heads, shared, size, texts, tokens = load
    rows = heads // shared
    every = plan.every_plan(properties, size, rows)
    estimates = ((plan.microseconds(one, properties, texts * shared, tokens, size, rows), one) for one in every)
    return {shape_of(one): (estimate, one) for estimate, one in estimates}


def shape_of(one: ClusterPlan) -> Shape:
    return one.token_warps, one.ctas, int(one.in_memory)


def candidates(load: Load, properties: DeviceProperties) -> dict[Shape, ClusterPlan]:
    """Those that might be the fastest."""
    every = plans(load, properties)
    most = MOST_OVER * min(estimate for estimate, _ in every.values())
    return {shape: one for shape, (estimate, one) in every.items() if estimate <= most}


def measure(path: Path, device: torch.device, properties: DeviceProperties) -> None:
    """Writes the file anew."""
    variants = {
        launch.variant(
            properties, load[0] // load[1], 1, load[2], one, True, DTYPE, 1, 0, True, False, True,
            (load[2], False, False, False),
        )
        for load in loads()
        for one in candidates(load, properties).values()
    }  # fmt: skip
    compile_all(variants)
    write(path, Row._fields, _parts(device, properties))


def _parts(device: torch.device, properties: DeviceProperties) -> Iterator[Iterator[Row]]:
    for heads in HEADS:
        products = Products(heads, device)
        of_heads = [load for load in loads() if load[:3] == heads]
        for load in track(of_heads, " x ".join(map(str, heads))):
            yield _rows_of(load, products, device, properties)


class Products:
    """What stands before attention and behind it."""

    def __init__(self, heads: tuple[int, int, int], device: torch.device) -> None:
        queries, shared, self.size = heads
        sides = [(count * self.size, HIDDEN) for count in (queries, shared, shared)]
        *self.before, self.behind = (self._weight(shape, device) for shape in (*sides, (HIDDEN, queries * self.size)))

    @staticmethod
    def _weight(shape: tuple[int, int], device: torch.device) -> hb.QuantizedWeight:
        return hb.quantize(torch.randn(shape, dtype=DTYPE, device=device) / shape[1] ** 0.5, "nf4")

    def query_key_value(self, x: Tensor) -> tuple[Tensor, ...]:
        made = eager_fused.products(x, self.before, [None] * 3, Beside())
        return tuple(y.view(len(x), -1, 1, self.size) for y in made)

    def output(self, seen: Tensor, x: Tensor) -> Tensor:
        return eager_fused.products(seen.view(len(x), -1), [self.behind], [None], Beside(residual=Residual(x)))[0]


def _rows_of(load: Load, products: Products, device: torch.device, properties: DeviceProperties) -> Iterator[Row]:
    _, shared, size, texts, tokens = load
    like = {"dtype": DTYPE, "device": device}
    of_cache = 4 * texts * shared * tokens * size
    sets = max(1, min(input_sets(of_cache, device), MOST_BYTES // of_cache))
    caches = [torch.randn((2, texts, shared, tokens, size), **like) for _ in range(sets)]
    x, angles, slot = torch.randn((texts, HIDDEN), **like), torch.randn((1, 1, size), **like), tokens - 1
    mask = torch.ones((texts, 1, 1, tokens), dtype=torch.bool, device=device)
    spans, place = spans_of(mask, texts), torch.tensor(slot, device=device)

    def attend(i: int, one: ClusterPlan) -> Tensor:
        query, key, value = products.query_key_value(x)
        fresh = Fresh(key, value, angles, angles, place)
        seen = launch.attend(query, *caches[i], mask, size**-0.5, None, None, spans, fresh, True, one)
        return products.output(seen, x)

    def without(i: int) -> Tensor:
        return products.output(products.query_key_value(x)[0], x)

    every = candidates(load, properties)
    providers: dict[Shape | None, Callable[[int], Tensor]] = {None: without}
    providers.update({shape: partial(attend, one=one) for shape, one in every.items()})
    times = {shape: timing.median for shape, timing in time_all(providers, sets, device, rounds=3).items()}
    beside = times.pop(None)
    for shape, time in times.items():
        assert shape is not None
        yield Row(device_name(device), *load, *shape, round(time - beside, 3))


def fit(path: Path) -> None:
    """Prints everything, and leaves what it has found in the table of this process."""
    rows = read(path, read_row, Row._fields)
    properties = properties_named(rows[0].device)
    print(f"choices as they are: {_lost(rows, properties)}")
    for size in plan.TIMES:
        some = [row for row in rows if row.size == size]
        print(f"heads of {size}: {len(some)} times, rms error {descend(size, some, properties.as_fitted, STEPS):.1%}")
        print(f"    {plan.TIMES[size]}")
    print(f"choices as fitted: {_lost(rows, properties)}")


def descend(size: int, rows: Sequence[Row], properties: DeviceProperties, steps: int) -> float:
    """Leaves in TIMES[size] what makes choices lose least, and a tenth as much estimates err, as far as steps by chance
    find it. Returns the rms error."""
    planned = [plans(row.load, properties)[row.shape][1] for row in rows]
    of_load = defaultdict(list)
    for number, row in enumerate(rows):
        of_load[row.load].append(number)
    chance = random.Random(0)

    def judge(times: plan.Times) -> tuple[float, float]:
        plan.TIMES[size] = times
        found = [_estimate(row, one, properties) for row, one in zip(rows, planned, strict=True)]
        errors = [math.log(estimate / row.microseconds) ** 2 for estimate, row in zip(found, rows, strict=True)]
        chosen = [min(numbers, key=found.__getitem__) for numbers in of_load.values()]
        fastest = [min(rows[number].microseconds for number in numbers) for numbers in of_load.values()]
        ratios = [rows[number].microseconds / least for number, least in zip(chosen, fastest, strict=True)]
        error = math.sqrt(sum(errors) / len(errors))
        return sum(ratios) / len(ratios) - 1 + error / 10, error

    def near(times: plan.Times) -> plan.Times:
        moved = [value * math.exp(chance.gauss(0, 0.15)) if chance.random() < 0.4 else value for value in times]
        return plan.Times(*moved)._replace(overlap=min(max(moved[-1], 1.0), 4.0))

    best = plan.TIMES[size]
    least = judge(best)
    for _ in range(steps):
        if (judged := judge(tried := near(best))) < least:
            best, least = tried, judged
    plan.TIMES[size] = plan.Times(*(round(value, 4) for value in best))
    return least[1]


def _estimate(row: Row, one: ClusterPlan, properties: DeviceProperties) -> float:
    heads = row.texts * row.shared
    return plan.microseconds(one, properties, heads, row.tokens, row.size, row.heads // row.shared)


def read_row(device: str, *numbers: str) -> Row:
    *shape, time = numbers
    return Row(device, *map(int, shape), float(time))


def _lost(rows: Sequence[Row], properties: DeviceProperties) -> str:
    times: dict[Load, dict[Shape, float]] = defaultdict(dict)
    for row in rows:
        times[row.load][row.shape] = row.microseconds

    def choose(load: Load) -> Shape:
        every = plans(load, properties.as_fitted)
        return min(every, key=lambda shape: every[shape][0])

    return lost(times, choose)


if __name__ == "__main__":
    main(__doc__, measure, fit)
