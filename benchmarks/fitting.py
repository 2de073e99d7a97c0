"""Constants of tune/h200.py, fitted to measured times: what the benchmarks of plans share."""

from __future__ import annotations

import argparse
import csv
import math
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from rich.progress import track

from halfbyte.kernels.common import nvrtc
from halfbyte.kernels.common.device import DeviceProperties, properties_of
from halfbyte.kernels.linear.tune import h200


@dataclass(frozen=True)
class Constant:
    """A number of tune/h200.py: the name of a table, the key and the field of an entry where it has these, and between
    what it is sought."""

    table: str
    key: Hashable = None
    field: str | int | None = None
    low: float = 0.0
    high: float = 9.0

    def __str__(self) -> str:
        key = "" if self.key is None else f"[{str(self.key).strip('()')}]"
        field = f".{self.field}" if isinstance(self.field, str) else "" if self.field is None else f"[{self.field}]"
        return f"{self.table}{key}{field}"

    @property
    def value(self) -> float:
        found = getattr(h200, self.table)
        found = found if self.key is None else found[self.key]
        if self.field is not None:
            found = getattr(found, self.field) if isinstance(self.field, str) else found[self.field]
        return float(found)

    def put(self, value: float) -> None:
        table = getattr(h200, self.table)
        if self.key is None:
            setattr(h200, self.table, value)
        elif self.field is None:
            table[self.key] = value
        elif isinstance(self.field, str):
            table[self.key] = table[self.key]._replace(**{self.field: value})
        else:
            table[self.key] = (*table[self.key][: self.field], value, *table[self.key][self.field + 1 :])


class Measured(Protocol):
    @property
    def microseconds(self) -> float: ...


R = TypeVar("R", bound=Measured)


def fit_to(constants: Sequence[Constant], rows: Sequence[R], estimate: Callable[[R], float]) -> str:
    """Leaves in the tables of this process what brings estimates closest to the measured times, by least squares of
    the logarithms, and says how far they were off before and are then."""
    import numpy as np
    from scipy.optimize import least_squares

    def errors(values: Sequence[float]) -> list[float]:
        for constant, value in zip(constants, values, strict=True):
            constant.put(float(value))
        return [math.log(estimate(row) / row.microseconds) for row in rows]

    low, high = (np.array([getattr(constant, side) for constant in constants]) for side in ("low", "high"))
    start = np.clip([constant.value for constant in constants], low + 1e-4, high - 1e-4)
    found = least_squares(errors, start, bounds=(low, high), loss="soft_l1", f_scale=0.1)
    before, after = (float(np.sqrt(np.mean(np.square(errors(values))))) for values in (start, found.x))
    return f"rms error {before:.1%} -> {after:.1%}"


def compile_all(variants: Collection[nvrtc.Variant]) -> None:
    """Side by side, before anything is timed."""
    with ThreadPoolExecutor() as pool:
        list(track(pool.map(nvrtc.cubin, variants), "compiling", len(variants)))


def write(path: Path, columns: Sequence[str], parts: Iterable[Iterable[Sequence[Any]]]) -> None:
    """A file anew: its columns, and the rows of each part as soon as they are there."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        for rows in parts:
            writer.writerows(rows)
            file.flush()


def read(path: Path, row: Callable[..., R], columns: Sequence[str]) -> list[R]:
    """The rows of a file, made of its lines, all of one device.

    Raises ValueError where the file is not of this form.
    """
    with path.open(newline="", encoding="utf-8") as file:
        first, *lines = csv.reader(file)
    if first != list(columns):
        raise ValueError(f"{path} has the columns {','.join(first)} instead of {','.join(columns)}")
    if len(devices := {line[0] for line in lines}) != 1:
        raise ValueError(f"{path} has rows of {len(devices)} devices instead of one")
    return [row(*line) for line in lines]


def lost(times: Mapping[Any, Mapping[Any, float]], choose: Callable[[Any], Any]) -> str:
    """How much slower what is chosen for a product is than the fastest of its plans, as far as it was measured.
    times: by product and plan."""
    chosen = [(by_plan.get(choose(product)), min(by_plan.values())) for product, by_plan in times.items()]
    ratios = [time / fastest for time, fastest in chosen if time is not None]
    if not ratios:
        return "none was measured"
    mean = sum(ratios) / len(ratios)
    return f"{len(ratios)} of {len(times)} were measured; chosen / fastest: mean {mean:.4f}, most {max(ratios):.3f}"


Measure = Callable[[Path, torch.device, DeviceProperties], None]


def main(text: str | None, measure: Measure, fit: Callable[[Path], None]) -> None:
    """What a script does that is described so."""
    parser = argparse.ArgumentParser(description=(text or "").partition("\n")[0])
    parser.add_argument("command", choices=("measure", "fit"))
    parser.add_argument("path", type=Path)
    given = parser.parse_args()
    if given.command == "fit":
        fit(given.path)
        return
    device = torch.device("cuda", torch.cuda.current_device())
    measure(given.path, device, properties_of(device.index))
