"""`halfbyte bench check`: nothing became slower, or less exact, than the committed records of this device say.

A fixed part of the benches runs in two minutes, without the peers. Compared is what depends on the GPU and not on its
host: kernels, and a model's step as a CUDA graph. What the wall clock of a host times (`generate`, training, recovery)
differs from machine to machine by more than a regression would, and stays with the benches themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

from halfbyte.bench.case import Case, run
from halfbyte.bench.dequantize import dequantize_cases, quantize_cases
from halfbyte.bench.gradients import gradient_cases
from halfbyte.bench.linear import linear_cases
from halfbyte.bench.search import search_cases
from halfbyte.measure import models, records
from halfbyte.measure.ab_run import ABRun
from halfbyte.measure.decoder import Decoder, errors_against_fp32
from halfbyte.terminal import Table

MOST = 1.05  # times the recorded median
MOST_ERROR = 1.1  # times the recorded error: inputs are random, and one row of results says little
TRIES = 3  # the least counts: whatever disturbs a GPU makes it slower
ROUNDS = 15
MODEL, CONTEXT, BATCHES, MODE = "llama-3-8b", 256, (1, 8), "graph"

TIMES = {"median_us", "median_ms"}  # of which a row that is right has one
OURS = ("halfbyte", "halfbyte int4", "nearest 1", "nearest 10", "nearest 128")


@dataclass(frozen=True)
class Cell:
    """A case and provider of a bench: medians in µs and relative errors, as recorded and as measured now."""

    bench: str
    case: str
    provider: str
    recorded: float
    measured: float
    recorded_error: float | None = None
    error: float | None = None

    @property
    def is_slower(self) -> bool:
        return self.measured > MOST * self.recorded

    @property
    def is_less_exact(self) -> bool:
        return None not in (self.error, self.recorded_error) and self.error > MOST_ERROR * self.recorded_error  # type: ignore[operator]


def check_cells(device: torch.device, results: Path, say: Callable[[str], None]) -> list[Cell]:
    """Measure, and compare with the records of this device under `results`.

    Raises FileNotFoundError where there are none, and ValueError for a result that is wrong or a cell that the records
    lack.
    """
    folder = results / records.folder_of(device)
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} holds no records of this device; make them with halfbyte bench ... --out")
    torch.manual_seed(0)
    cells: list[Cell] = []
    for bench, cases in _cases(device).items():
        recorded = _rows(folder, bench)
        for case in cases:
            say(f"{bench} {case.name}")
            cells += _checked(bench, case, recorded)
    return cells + list(_steps(device, _rows(folder, "decode"), say))


def _rows(folder: Path, bench: str) -> list[dict[str, Any]]:
    return list(records.read(folder / f"{bench}.json").get("rows", ()))


def _recorded(bench: str, rows: Iterable[Mapping[str, Any]], facts: Mapping[str, Any]) -> Mapping[str, Any]:
    """The row with these facts and a time. Raises ValueError where a record has none."""
    for row in rows:
        if facts.items() <= row.items() and not row.keys().isdisjoint(TIMES):
            return row
    told = ", ".join(f"{name} {value}" for name, value in facts.items())
    raise ValueError(f"the record of {bench} has no time of {told}; measure it: halfbyte bench {bench} --out ...")


def _cases(device: torch.device) -> dict[str, Iterator[Case]]:
    bf16, shapes = torch.bfloat16, ((4096, 4096), (28672, 8192))
    return {
        "dequantize": dequantize_cases(device, shapes, bf16, "nf4", True),
        "quantize": quantize_cases(device, shapes[1:], bf16, "nf4", True),
        "linear": linear_cases(device, (*shapes, (4096, 14336)), bf16, "nf4", True, (1, 8, 64, 256, 1024), alone=True),
        "gradients": gradient_cases(device, shapes, bf16, "nf4", True, (256, 1024)),
        "search": search_cases(device, ((32000, 4096, bf16),), ranks=False),
    }


def _checked(bench: str, case: Case, rows: Iterable[Mapping[str, Any]]) -> Iterator[Cell]:
    recorded = {
        name: _recorded(bench, rows, {"case": case.name, "provider": name}) for name in case.providers if name in OURS
    }
    # The clock of a record is the wall's where a peer waits for the GPU; so it must be here.
    wall = any(row["clock"] == "wall" for row in recorded.values())
    needed = {case.reference} if isinstance(case.reference, str) else set()
    tried = {name: provider for name, provider in case.providers.items() if wall or name in recorded or name in needed}
    best: dict[str, Cell] = {}
    for _ in range(TRIES):
        for row in run(replace(case, providers=tried), ROUNDS):
            if row.provider not in recorded:
                continue
            if row.timing is None:
                raise ValueError(f"{bench} {case.name}, {row.provider}, is wrong: {row.error}")
            kept = recorded[row.provider]
            if row.timing.clock != kept["clock"]:
                raise ValueError(f"{bench} {case.name} is timed by the {row.timing.clock} clock, its record by another")
            cell = Cell(
                bench, case.name, row.provider, kept["median_us"], row.timing.median, kept.get("relative_error"),
                row.facts.get("relative_error"),
            )  # fmt: skip
            best[row.provider] = min(best.get(row.provider, cell), cell, key=lambda one: one.measured)
        if not any(cell.is_slower for cell in best.values()):
            break
    yield from best.values()


def _steps(device: torch.device, rows: list[dict[str, Any]], say: Callable[[str], None]) -> Iterator[Cell]:
    """A decoding step as a CUDA graph."""
    wanted = {"model": MODEL, "provider": "halfbyte", "mode": MODE, "context": CONTEXT}
    recorded = {batch: _recorded("decode", rows, wanted | {"batch": batch}) for batch in BATCHES}
    say(f"decode {MODEL}: logits against fp32")
    error = errors_against_fp32(MODEL, device, torch.bfloat16)["halfbyte", MODE]
    say(f"decode {MODEL}: loading")
    ab_run = ABRun(models.load(MODEL, device, torch.bfloat16))
    for batch, kept in recorded.items():
        with ab_run.providers["halfbyte"]() as model:
            decoder = Decoder(model, batch, CONTEXT, MODE)
            least = min(median(decoder.sample() for _ in range(5)) for _ in range(TRIES))
        name = f"{MODEL}, {MODE}, batch {batch}"
        yield Cell("decode", name, "halfbyte", 1e3 * kept["median_ms"], 1e3 * least, kept.get("relative_error"), error)


def table(cells: list[Cell]) -> Table:
    """What was recorded and what is now, the worst first."""
    found = Table("bench", "case", "provider", "recorded µs", "now µs", "now / recorded", "error now / recorded", "")
    for column in found.columns[3:]:
        column.justify = "right"
    for cell in sorted(cells, key=lambda cell: cell.recorded / cell.measured):
        exact = f"{cell.error / cell.recorded_error:.3f}" if cell.error and cell.recorded_error else ""
        wrong = "slower" if cell.is_slower else "less exact" if cell.is_less_exact else ""
        found.add_row(
            cell.bench, cell.case, cell.provider, f"{cell.recorded:.2f}", f"{cell.measured:.2f}",
            f"{cell.measured / cell.recorded:.3f}", exact, wrong, style="red" if wrong else "",
        )  # fmt: skip
    return found
