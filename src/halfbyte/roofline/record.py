"""What a profile leaves behind: a record like every bench's, and the same as a table of values.

A record holds what was measured: a class's time, kernels, bytes and flops. What follows from it and the ceilings is
worked out where it is shown (analysis.py), and stands in full in the CSV.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from halfbyte.measure import records
from halfbyte.roofline.analysis import Roofs, entries, floor, rows
from halfbyte.roofline.ceilings import Ceilings
from halfbyte.roofline.counters import beside
from halfbyte.roofline.names import OTHER, UNNAMED
from halfbyte.roofline.run import Run

NAME = "profile.json"
COLUMNS = (
    "model", "batch", "mode", "provider", "class", "group", "ms", "share", "kernels", "bytes", "flops", "gb_per_s",
    "tflop_per_s", "of_roof", "flops_a_byte", "floor_ms", "gain_ms", "bytes_are", "counted_bytes", "step_ms",
    "profiled_step_ms", "sum_ms", "floor_of_step_ms", "longest_kernel",
)  # fmt: skip


def make_record(facts: Mapping[str, Any], ceilings: Ceilings, device: torch.device) -> dict[str, Any]:
    """facts: of one model, as run.facts_of has them."""
    measured = ceilings.as_json()
    date = measured.pop("environment")["date"]
    return {
        "bench": "profile",
        "environment": records.environment(device),
        "method": f"torch's profiler, {facts['context']} tokens of context, static cache; step_ms without profiler, "
        "profiled_ms with it; bytes and flops from shapes",
        "ceilings": {"date": date, **measured},
        **{key: value for key, value in facts.items() if key != "runs"},
        "runs": [_run(run) for run in facts["runs"]],
    }


def _run(run: Run) -> dict[str, Any]:
    unknown = [
        {"name": name, "ms": round(us / 1e3, 5), "kernels": round(calls, 2)}
        for label in (OTHER, UNNAMED)
        for name, (us, calls) in run.profile.names.get(label, {}).items()
    ]
    return {
        "provider": run.provider, "mode": run.mode, "batch": run.batch, "relative_error": run.relative_error,
        "step_ms": run.step["median_ms"], "p20_ms": run.step["p20_ms"], "p80_ms": run.step["p80_ms"],
        "samples": run.step["samples"], "profiled_ms": round(run.profiled, 4),
        "sum_ms": round(run.profile.total / 1e3, 4), "classes": entries(run), "other": unknown,
    }  # fmt: skip


def dumps(record: Mapping[str, Any]) -> str:
    """JSON with a class a line: short enough to keep, and to read."""
    text = json.dumps(record, indent=1, ensure_ascii=False)
    # Objects that hold no others go on one line.
    return re.sub(r"\{[^{}\[\]]*\}", lambda match: re.sub(r"\s*\n\s*", " ", match.group()), text) + "\n"


def read(path: Path) -> dict[str, Any]:
    """The record at `path`, a file or the folder of a report. Raises ValueError for anything else."""
    file = path / NAME if path.is_dir() else path
    if not file.is_file():
        raise ValueError(f"{path} is no report of `halfbyte profile`: there is no {file.name}; give its folder or JSON")
    try:
        record = records.read(file)
    except json.JSONDecodeError as error:
        raise ValueError(f"{file} is not JSON ({error}); give what `halfbyte profile --out` wrote") from error
    if record["bench"] != "profile":
        raise ValueError(f"{file} is a record of `halfbyte bench {record['bench']}`; give one of `halfbyte profile`")
    return beside(record)


def to_csv(found: Sequence[Mapping[str, Any]]) -> str:
    """Every class of every run of the records, with all that follows from it."""
    out = io.StringIO()
    writer = csv.DictWriter(out, COLUMNS, lineterminator="\n")
    writer.writeheader()
    for record in found:
        writer.writerows(_lines(record))
    return out.getvalue()


def _lines(record: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    roofs = Roofs.of(record["ceilings"])
    for run in record["runs"]:
        found = rows(run, roofs)
        whole = floor(found)
        for row in found:
            yield {
                "model": record["model"], "batch": run["batch"], "mode": run["mode"], "provider": run["provider"],
                "class": row.name, "group": row.group, "ms": row.ms, "share": _short(row.share),
                "kernels": row.kernels, "bytes": row.bytes, "flops": row.flops, "gb_per_s": _short(row.gb_per_s),
                "tflop_per_s": _short(row.tflop_per_s), "of_roof": _short(row.of_roof),
                "flops_a_byte": _short(row.intensity), "floor_ms": _short(row.floor), "gain_ms": _short(row.gain),
                "bytes_are": "computed", "counted_bytes": row.counted, "step_ms": run["step_ms"],
                "profiled_step_ms": run["profiled_ms"], "sum_ms": run["sum_ms"], "floor_of_step_ms": _short(whole),
                "longest_kernel": row.kernel,
            }  # fmt: skip


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.5g}")
