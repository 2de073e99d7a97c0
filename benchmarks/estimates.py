"""How well `linear` estimates its kernels: measure each under its own plan, then see what dispatch.py would choose.

    python benchmarks/estimates.py measure benchmarks/results/h200/estimates.csv     # two minutes on a GPU
    python benchmarks/estimates.py report benchmarks/results/h200/estimates.csv      # anywhere

The constants of tune/h200.py were fitted to such a file by least squares of the logarithms, class by class.
"""

from __future__ import annotations

import csv
import math
import sys
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch
from rich.progress import track
from torch.nn import functional

import halfbyte as hb
from halfbyte.bench.dequantize import input_sets
from halfbyte.formats.nested import NESTED_BLOCK_SIZE
from halfbyte.kernels.common import nvrtc
from halfbyte.kernels.common.device import properties_for, properties_of
from halfbyte.kernels.linear.dispatch import KERNELS, choose, dense_microseconds
from halfbyte.kernels.linear.kernel import plan_for, run
from halfbyte.kernels.linear.problem import Problem
from halfbyte.measure.timing import time_all

SHAPES = (
    *((512, 2048), (768, 2048), (2048, 2048), (1536, 1536), (8960, 1536), (1536, 8960), (896, 4864), (2560, 2560)),
    *((3584, 3584), (18944, 3584), (3584, 18944), (1024, 4096), (4096, 4096), (6144, 4096), (12288, 4096)),
    *((11008, 4096), (4096, 11008), (14336, 4096), (4096, 14336), (28672, 4096), (4096, 5376), (5376, 4096)),
    *((21504, 5376), (5376, 21504), (8192, 5120), (5120, 8192), (13824, 5120), (5120, 13824), (25600, 5120)),
    *((5120, 25600), (18432, 7168), (7168, 18432), (1024, 8192), (8192, 8192), (10240, 8192), (28672, 8192)),
    *((8192, 28672), (57344, 8192)),
)
ROWS = (1, 2, 4, 8, 12, 16, 24, 32, 40, 48, 56, 64, 96, 128, 192, 256, 384)
KINDS = (("nf4", 64, True), ("int4", 128, False), ("nf4", 64, False), ("int4", 32, False))  # format, block, nested
MOST_ROWS = {"sm75": 128, "simt": 16}  # that are worth the time
DENSE = "dense"
FIELDS = ("format", "block_size", "nested", "n", "k", "m", "kernel", "microseconds")


def problem(format: str, block_size: int, nested: bool, n: int, k: int) -> Problem:
    scale = torch.uint8 if nested else torch.bfloat16 if format == "int4" else torch.float32
    return Problem(torch.bfloat16, n, k, format, block_size, scale, NESTED_BLOCK_SIZE if nested else 0)


def weights() -> Iterator[tuple[str, int, bool, int, int]]:
    """All shapes in two kinds, and a third of them in the others."""
    for i, kind in enumerate(KINDS):
        yield from ((*kind, n, k) for n, k in (SHAPES if i < 2 else SHAPES[::3]) if k % 128 == 0)


def measure(path: Path) -> None:
    """µs of every kernel that supports a problem, and of the dense way from 64 rows on."""
    device, properties = torch.device("cuda", torch.cuda.current_device()), properties_of(0)
    variants = {
        kernel.variant(problem(*weight), plan, properties)
        for weight in weights()
        for m in ROWS
        for kernel in KERNELS
        if (plan := kernel.plan(m, problem(*weight), properties, False)) is not None
    }
    with ThreadPoolExecutor() as pool:
        list(track(pool.map(nvrtc.cubin, variants), "compiling", len(variants)))
    rows = [row for weight in track(list(weights()), "measuring") for row in _measured(weight, device)]
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerows([FIELDS, *rows])


def _measured(weight: tuple[str, int, bool, int, int], device: torch.device) -> Iterator[tuple[object, ...]]:
    format, block_size, nested, n, k = weight
    size = {"group_size" if format == "int4" else "block_size": block_size}

    def quantized() -> hb.QuantizedWeight:
        dense = torch.randn((n, k), dtype=torch.float32, device=device).bfloat16()
        return hb.quantize(dense, format, nested=nested, **size)

    sets = input_sets(quantized().nbytes, device)
    qs = [quantized() for _ in range(sets)]
    for m in ROWS:
        xs = [torch.randn((m, k), dtype=torch.float32, device=device).bfloat16() for _ in range(sets)]
        outs = [x.new_empty((m, n)) for x in xs]
        providers = {}
        for kernel in KERNELS:
            plan = plan_for(kernel, xs[0], qs[0])
            if plan is not None and m <= MOST_ROWS.get(kernel.NAME, m):
                providers[kernel.NAME] = partial(_run, kernel, plan, xs, qs, outs)
        if m >= 64:
            providers[DENSE] = lambda i, xs=xs: functional.linear(xs[i], hb.dequantize(qs[i], torch.bfloat16))
        for name, timing in time_all(providers, sets, device, rounds=5).items():
            yield *weight, m, name, round(timing.median, 3)


def _run(kernel: object, plan: object, xs: list, qs: list, outs: list, i: int) -> None:
    run(kernel, xs[i], qs[i], None, outs[i], plan)


def report(path: Path) -> None:
    """Errors of the estimates by kernel, and what the choice loses against the fastest, by rows of x."""
    properties = properties_for("sm_90")
    cells: dict[tuple[object, ...], dict[str, float]] = defaultdict(dict)
    with path.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            nested = row["nested"] == "True"
            key = row["format"], int(row["block_size"]), nested, int(row["n"]), int(row["k"]), int(row["m"])
            cells[key][row["kernel"]] = float(row["microseconds"])
    errors: dict[str, list[float]] = defaultdict(list)
    lost: dict[int, list[float]] = defaultdict(list)
    for (*weight, m), measured in cells.items():
        one = problem(*weight)
        estimates = {DENSE: dense_microseconds(m, one)}
        for kernel in KERNELS:
            plan = kernel.plan(m, one, properties, False)
            if plan is not None:
                estimates[kernel.NAME] = plan.microseconds
        for name, microseconds in measured.items():
            errors[name].append(math.log(estimates[name] / microseconds))
        choice = choose(m, one, properties, False)
        chosen = DENSE if choice is None else choice.kernel.NAME
        if chosen in measured:
            lost[m].append(measured[chosen] / min(measured.values()))
    for name, found in errors.items():
        print(f"{name:13} {len(found):5} products, rms error of the estimate {_rms(found):.1%}")
    for m, ratios in sorted(lost.items()):
        print(f"M = {m:4} chosen / fastest: mean {sum(ratios) / len(ratios):.4f}, most {max(ratios):.3f}")
    every = [ratio for ratios in lost.values() for ratio in ratios]
    print(f"all        chosen / fastest: mean {sum(every) / len(every):.4f}, most {max(every):.3f}")


def _rms(values: list[float]) -> float:
    return math.sqrt(sum(value * value for value in values) / len(values))


if __name__ == "__main__":
    {"measure": measure, "report": report}[sys.argv[1]](Path(sys.argv[2]))
