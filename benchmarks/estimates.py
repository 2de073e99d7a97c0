"""How well `linear` estimates its kernels: measure each under its own plan, then see what dispatch.py would choose.

    python benchmarks/estimates.py measure benchmarks/results/h200/estimates.csv     # two minutes on a GPU
    python benchmarks/estimates.py report benchmarks/results/h200/estimates.csv      # anywhere

With `--sms 36,40,58,108` it also measures sm80 while all other multiprocessors are held, under plans for a GPU that has
no more. On another GPU than an H200 the report says how well its predictions carry over: no constant was fitted there.

The constants of tune/h200.py were fitted to such a file by least squares of the logarithms, class by class.
"""

from __future__ import annotations

import argparse
import csv
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from fitting import compile_all
from rich.progress import track
from torch.nn import functional

import halfbyte as hb
from halfbyte.bench.dequantize import input_sets
from halfbyte.bench.predictions import (
    DENSE,
    FIELDS,
    Cell,
    errors,
    estimates,
    problem,
    properties_named,
    read_cells,
)
from halfbyte.kernels.common import nvrtc
from halfbyte.kernels.common.device import DeviceProperties, properties_of
from halfbyte.kernels.linear.dispatch import KERNELS, choose
from halfbyte.kernels.linear.kernel import Kernel, Plan, run
from halfbyte.kernels.linear.problem import Problem, problem_of
from halfbyte.kernels.linear.sm80 import launch as sm80
from halfbyte.measure.fewer import only
from halfbyte.measure.records import device_name
from halfbyte.measure.timing import Provider, Timing, time_all

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
CHOOSABLE = {*(kernel.NAME for kernel in KERNELS), DENSE}
Weight = tuple[str, int, bool, int, int]  # format, block size, nested, N, K


def weights() -> Iterator[Weight]:
    """All shapes in two kinds, and a third of them in the others."""
    for i, kind in enumerate(KINDS):
        yield from ((*kind, n, k) for n, k in (SHAPES if i < 2 else SHAPES[::3]) if k % 128 == 0)


@dataclass(frozen=True)
class Measurement:
    """On a device. sms: multiprocessors that sm80 is also kept to. known: products and kernels that are left out."""

    device: torch.device
    properties: DeviceProperties
    sms: Sequence[int]
    known: frozenset[tuple[Cell, str]]

    def variants(self, weight: Weight) -> Iterator[nvrtc.Variant]:
        """What is to be compiled."""
        o = problem(*weight, self.properties.ptx)
        for m in ROWS:
            for kernel, _, plan in self._plans(m, weight, o):
                yield kernel.variant(o, plan, self.properties)

    def rows(self, weight: Weight) -> Iterator[tuple[object, ...]]:
        """Those of the file that are missing."""
        format, block_size, nested, n, k = weight
        size = {"group_size" if format == "int4" else "block_size": block_size}
        device, dtype = self.device, problem(*weight, self.properties.ptx).dtype

        def quantized() -> hb.QuantizedWeight:
            dense = torch.randn((n, k), dtype=torch.float32, device=device).to(dtype)
            return hb.quantize(dense, format, nested=nested, **size)

        sets = input_sets(quantized().nbytes, device)
        qs = [quantized() for _ in range(sets)]
        for m in ROWS:
            xs = [torch.randn((m, k), dtype=torch.float32, device=device).to(dtype) for _ in range(sets)]
            outs = [x.new_empty((m, n)) for x in xs]
            found: dict[int, dict[str, Provider]] = defaultdict(dict)
            for kernel, some, plan in self._plans(m, weight, problem_of(xs[0], qs[0], None)):
                found[some][kernel.NAME] = partial(_run, kernel, plan, xs, qs, outs)
            if m >= 64 and self._is_missing(weight, m, self.properties.sms, DENSE):
                found[self.properties.sms][DENSE] = partial(_run_dense, xs, qs, dtype)
            for some, providers in found.items():
                for name, timing in self._time(providers, sets, some).items():
                    yield *self._cell(weight, m, some), name, round(timing.median, 3)

    def _time(self, providers: Mapping[str, Provider], sets: int, sms: int) -> dict[str, Timing]:
        if sms != self.properties.sms:  # what is loaded and allocated cannot wait until others let multiprocessors go
            time_all(providers, 1, self.device, rounds=1)
        with only(sms, self.device):
            return time_all(providers, sets, self.device, rounds=5)

    def _plans(self, m: int, weight: Weight, o: Problem) -> Iterator[tuple[Kernel[Any], int, Plan]]:
        """Kernels with their plans, and the multiprocessors that these are for."""
        limited = [(sm80, self.properties.limited(some)) for some in self.sms if some < self.properties.sms]
        for kernel, facts in [*((kernel, self.properties) for kernel in KERNELS), *limited]:
            if m <= MOST_ROWS.get(kernel.NAME, m) and self._is_missing(weight, m, facts.sms, kernel.NAME):
                plan = kernel.plan(m, o, facts, False)
                if plan is not None:
                    yield kernel, facts.sms, plan

    def _is_missing(self, weight: Weight, m: int, sms: int, kernel: str) -> bool:
        return (self._cell(weight, m, sms), kernel) not in self.known

    def _cell(self, weight: Weight, m: int, sms: int) -> Cell:
        return Cell(device_name(self.device), sms, *weight, m)


def measure(path: Path, sms: Sequence[int], every: int, device: torch.device, properties: DeviceProperties) -> None:
    """µs of every kernel that supports a problem, of sm80 also on each number of `sms`, and of the dense way from 64
    rows on, for one weight in `every`. What the file has already is left out, so that a measurement can be gone on
    with.

    Raises ValueError where the file is not of this form.
    """
    whole = not path.exists()
    measurement = Measurement(device, properties, sms, frozenset() if whole else _known(path))
    chosen = list(weights())[::every]
    variants = {variant for weight in chosen for variant in measurement.variants(weight)}
    compile_all(variants)
    with path.open("a", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        if whole:
            writer.writerow(FIELDS)
        for weight in track(chosen, "measuring"):
            writer.writerows(list(measurement.rows(weight)))  # all rows of a weight or none
            file.flush()


def _known(path: Path) -> frozenset[tuple[Cell, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        if (columns := next(csv.reader(file), [])) != list(FIELDS):
            raise ValueError(f"{path} has the columns {','.join(columns)} instead of {','.join(FIELDS)}")
    return frozenset((cell, kernel) for cell, measured in read_cells(path).items() for kernel in measured)


def _run(kernel: Kernel[Any], plan: Plan, xs: list, qs: list, outs: list, i: int) -> None:
    run(kernel, xs[i], qs[i], None, outs[i], plan)


def _run_dense(xs: list, qs: list, dtype: torch.dtype, i: int) -> torch.Tensor:
    return functional.linear(xs[i], hb.dequantize(qs[i], dtype))


def report(path: Path) -> None:
    """Errors of the estimates by kernel and multiprocessors, and what the choice loses against the fastest, by rows of
    x."""
    cells = read_cells(path)
    logarithms: dict[tuple[str, int, str], list[float]] = defaultdict(list)
    lost: dict[int, list[float]] = defaultdict(list)
    for cell, measured in cells.items():
        for name, microseconds in estimates(cell, list(measured)).items():
            logarithms[cell.device, cell.sms, name].append(math.log(microseconds / measured[name]))
        properties = properties_named(cell.device)
        if cell.sms != properties.sms:
            continue
        choice = choose(cell.m, cell.problem, properties, False)
        chosen = DENSE if choice is None else choice.kernel.NAME
        choosable = {name: time for name, time in measured.items() if name in CHOOSABLE}
        if chosen in choosable:
            lost[cell.m].append(choosable[chosen] / min(choosable.values()))
    for row in errors(cells):
        device, sms, name = row["device"], row["sms"], row["kernel"]
        print(
            f"{device}, {sms} SMs, {name:13} {row['products']:5} products, estimate / measured: median "
            f"{row['median_ratio']:.3f}, median error {row['median_error']:.1%}, "
            f"rms error {_rms(logarithms[device, sms, name]):.1%}"
        )
    for m, ratios in sorted(lost.items()):
        print(f"M = {m:4} chosen / fastest: mean {sum(ratios) / len(ratios):.4f}, most {max(ratios):.3f}")
    if every := [ratio for ratios in lost.values() for ratio in ratios]:
        print(f"all        chosen / fastest: mean {sum(every) / len(every):.4f}, most {max(every):.3f}")


def _rms(values: list[float]) -> float:
    return math.sqrt(sum(value * value for value in values) / len(values))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("command", choices=("measure", "report"))
    parser.add_argument("path", type=Path)
    parser.add_argument("--sms", default="", help="numbers of multiprocessors that sm80 is kept to, comma-separated")
    parser.add_argument("--every", type=int, default=1, help="measure one weight in so many")
    given = parser.parse_args(arguments)
    if given.command == "report":
        report(given.path)
        return
    sms = [int(some) for some in given.sms.split(",") if some]
    device = torch.device("cuda", torch.cuda.current_device())
    measure(given.path, sms, given.every, device, properties_of(device.index))


if __name__ == "__main__":
    main()
