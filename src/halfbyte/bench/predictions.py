"""What planners predict for GPUs that nobody has measured, and how far predictions are off where somebody has.

A planner estimates its kernel's time. Estimates were fitted on one GPU and are scaled for others, so here they stand
beside each other for every known GPU, with the share of its memory's bandwidth that they amount to. Files of measured
times, which benchmarks/estimates.py writes, tell how good they are.
"""

from __future__ import annotations

import csv
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from halfbyte.formats.nested import NESTED_BLOCK_SIZE
from halfbyte.formats.spec import FORMATS
from halfbyte.kernels.common.device import DeviceProperties, properties_like
from halfbyte.kernels.common.gpus import GPUS, H200
from halfbyte.kernels.linear.dispatch import KERNELS, choose, dense_microseconds
from halfbyte.kernels.linear.kernel import Kernel
from halfbyte.kernels.linear.problem import Problem
from halfbyte.kernels.linear.sm75 import launch as sm75
from halfbyte.kernels.linear.sm80 import launch as sm80
from halfbyte.kernels.linear.sm80_gemm import launch as sm80_gemm

FITTED = H200.name  # the GPU that the constants of estimates come from
SHAPES = ((4096, 4096), (14336, 4096), (28672, 8192))
ROWS = (1, 8, 16, 64, 256)
WEIGHTS = {"nf4": ("nf4", 64, True), "int4": ("int4", 128, False)}  # format, block size, nested
DENSE = "dense"
FOLDER_FILE = "estimates.csv"
PART_SHAPES, PART_ROWS = ((4096, 4096), (4096, 14336), (8192, 28672)), (1, 16, 64)  # of which parts of a GPU are shown


class Cell(NamedTuple):
    """A product that was measured. sms: multiprocessors that its kernel could use."""

    device: str
    sms: int
    format: str
    block_size: int
    nested: bool
    n: int
    k: int
    m: int

    @property
    def problem(self) -> Problem:
        return problem(self.format, self.block_size, self.nested, self.n, self.k, properties_named(self.device).ptx)


FIELDS = (*Cell._fields, "kernel", "microseconds")


def problem(format: str, block_size: int, nested: bool, n: int, k: int, capability: int = 90) -> Problem:
    """x is bf16, or fp16 where there is no bf16."""
    dtype = torch.bfloat16 if capability >= 80 else torch.float16
    is_byte = nested or FORMATS[format].has_exponents
    scale = torch.uint8 if is_byte else dtype if format == "int4" else torch.float32
    return Problem(dtype, n, k, format, block_size, scale, NESTED_BLOCK_SIZE if nested else 0)


@cache
def properties_named(device: str) -> DeviceProperties:
    """Those of a known GPU. Raises ValueError for another one."""
    found = next((gpu for gpu in GPUS if gpu.name == device), None)
    if found is None:
        raise ValueError(f"no known GPU is called {device!r}; give it a row in halfbyte/kernels/common/gpus.py")
    return properties_like(found)


# -- Predictions -------------------------------------------------------------------------------------------------------


def rows() -> Iterator[dict[str, Any]]:
    """A row for each known GPU, weight, shape and number of rows of x: the kernel that is made for the GPU, its time in
    µs, the share of the bandwidth that this is, and the time of the dense way."""
    for gpu in GPUS:
        properties = properties_like(gpu)
        for name, weight in WEIGHTS.items():
            for n, k in SHAPES:
                o = problem(*weight, n, k, gpu.capability)
                for m in ROWS:
                    kernel, microseconds = _predicted(m, o, properties)
                    megabytes = _megabytes(m, o)
                    yield {
                        "gpu": gpu.name, "target": gpu.target, "format": name, "case": f"{n}×{k}", "m": m,
                        "kernel": kernel, "microseconds": round(microseconds, 2),
                        "of_bandwidth": round(megabytes * 1e3 / microseconds / gpu.bandwidth, 4),
                        "dense_microseconds": round(dense_microseconds(m, o, properties), 2),
                    }  # fmt: skip


def _megabytes(m: int, o: Problem) -> float:
    """Of W, of x and of the result."""
    return o.megabytes + m * o.k * o.dtype.itemsize / 1e6 + o.result_megabytes(m)


def _predicted(m: int, o: Problem, properties: DeviceProperties) -> tuple[str, float]:
    """On Hopper and B200 that of the kernel that is chosen, with the plan that it makes for the GPU itself; elsewhere
    that of the faster kernel on tensor cores, even where the dense way is faster."""
    if properties.capability in (90, 100):
        choice = choose(m, o, properties, False)
        if choice is None:
            return DENSE, dense_microseconds(m, o, properties)
        kernels: tuple[Kernel[Any], ...] = (choice.kernel,)
    else:
        kernels = (sm80, sm80_gemm) if properties.capability >= 80 else (sm75,)
    plans = ((kernel.NAME, kernel.plan(m, o, properties, False)) for kernel in kernels)
    found = [(name, plan.microseconds) for name, plan in plans if plan is not None]
    if not found:
        raise ValueError(f"no plan for {m} rows of {o} of {', '.join(kernel.NAME for kernel in kernels)}")
    return min(found, key=lambda pair: pair[1])


# -- Errors ------------------------------------------------------------------------------------------------------------


def read_cells(path: Path) -> dict[Cell, dict[str, float]]:
    """Measured µs by kernel of every product in a file. One that names no device is of the GPU of the constants."""
    cells: dict[Cell, dict[str, float]] = defaultdict(dict)
    with path.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            device = row.get("device") or FITTED
            sms = int(row.get("sms") or properties_named(device).sms)
            size, n, k, m = (int(row[name]) for name in ("block_size", "n", "k", "m"))
            cell = Cell(device, sms, row["format"], size, row["nested"] == "True", n, k, m)
            cells[cell][row["kernel"]] = float(row["microseconds"])
    return dict(cells)


def estimates(cell: Cell, names: Sequence[str]) -> dict[str, float]:
    """Predicted µs of the kernels of these names, as far as they support the product."""
    whole, o = properties_named(cell.device), cell.problem
    properties = whole if cell.sms == whole.sms else whole.limited(cell.sms)
    found = {DENSE: dense_microseconds(cell.m, o, whole)} if DENSE in names else {}
    for kernel in KERNELS:
        if kernel.NAME in names and (plan := kernel.plan(cell.m, o, properties, False)) is not None:
            found[kernel.NAME] = plan.microseconds
    return found


def errors(cells: Mapping[Cell, Mapping[str, float]]) -> list[dict[str, Any]]:
    """A row for each device, number of multiprocessors and kernel: how many products, the median of predicted over
    measured time, and the median of how far it is from 1."""
    ratios: dict[tuple[str, int, str], list[float]] = defaultdict(list)
    for cell, measured in cells.items():
        for name, microseconds in estimates(cell, list(measured)).items():
            ratios[cell.device, cell.sms, name].append(microseconds / measured[name])
    return [
        {
            "device": device, "sms": sms, "kernel": name, "products": len(found),
            "median_ratio": round(statistics.median(found), 4),
            "median_error": round(statistics.median(abs(ratio - 1) for ratio in found), 4),
        }
        for (device, sms, name), found in ratios.items()
    ]  # fmt: skip


def errors_of(results: Path) -> list[dict[str, Any]]:
    """Of every file of measured times under `results`."""
    return [row for cells in _measured(results) for row in errors(cells)]


def _measured(results: Path) -> Iterator[dict[Cell, dict[str, float]]]:
    return map(read_cells, sorted(results.glob(f"*/{FOLDER_FILE}")))


# -- Parts of a GPU ----------------------------------------------------------------------------------------------------


def parts_of(results: Path) -> list[dict[str, Any]]:
    """A row for each weight and number of rows of x that sm80 multiplied on all of a GPU's multiprocessors and on some
    of them: how many, and GB/s of each."""
    return [row for cells in _measured(results) for row in _parts(cells)]


def _parts(cells: Mapping[Cell, Mapping[str, float]]) -> Iterator[dict[str, Any]]:
    measured = {cell: times[sm80.NAME] for cell, times in cells.items() if sm80.NAME in times}
    counts = sorted({cell.sms for cell in measured})
    for cell in measured:
        same = [cell._replace(sms=sms) for sms in counts]
        kind = cell.format, cell.block_size, cell.nested
        shown = kind == WEIGHTS[cell.format] and (cell.n, cell.k) in PART_SHAPES and cell.m in PART_ROWS
        if shown and cell.sms == counts[-1] and len(counts) > 1 and all(one in measured for one in same):
            megabytes = _megabytes(cell.m, cell.problem)
            yield {
                "device": cell.device, "format": cell.format, "case": f"{cell.n}×{cell.k}", "m": cell.m, "sms": counts,
                "gigabytes_per_s": [round(megabytes * 1e3 / measured[one] / one.sms, 2) for one in same],
            }  # fmt: skip
