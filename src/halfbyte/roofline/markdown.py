"""A profile's record as Markdown, for the docs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from halfbyte.measure.report import line, provenance
from halfbyte.roofline.analysis import Roofs, rows
from halfbyte.roofline.counters import beside
from halfbyte.roofline.names import GROUPS
from halfbyte.roofline.render import Runs, best_mode, by_batch, cells_of, names, number, place


def markdown(record: Mapping[str, Any]) -> str:
    """Every run of a record in a line, and the classes of each provider at the first batch, for the docs."""
    record = beside(dict(record))
    roofs, mode = Roofs.of(record["ceilings"]), best_mode(record)
    heads = [
        "batch",
        "mode",
        "provider",
        "step, ms",
        "profiled",
        "sum",
        "floor",
        "products",
        "of roof",
        "gaps",
        "other",
    ]
    lines = [line(heads), line(["---:", "---", "---", *["---:"] * (len(heads) - 3)])]
    for batch, runs in by_batch(record):
        for run in sorted(runs, key=place):
            step, profiled, *rest = cells_of(run, rows(run, roofs))[1:]
            lines.append(line([str(batch), run["mode"], run["provider"], step, profiled, number(run["sum_ms"]), *rest]))
    batch, runs = next(by_batch(record))
    lines += ["", f"Classes, {record['model']}, batch {batch}, {mode}:", "", *_markdown_classes(runs, mode, roofs)]
    said = record.get("counters", {}).get("said", "bytes are computed from shapes")
    roofline = (
        f"Roofs: read {roofs.read:,.0f} GB/s, copy {roofs.copy:,.0f} GB/s, bf16 {roofs.matrix:,.3g} TFLOP/s; {said}."
    )
    return "\n".join([*lines, "", *_markdown_counters(record), f"{roofline} {provenance(record)}"])


def _markdown_classes(runs: Runs, mode: str, roofs: Roofs) -> Iterator[str]:
    found = {run["provider"]: {row.name: row for row in rows(run, roofs)} for run in runs if run["mode"] == mode}
    yield line(["class", *(head for provider in found for head in (f"{provider}, ms", "share", "of roof", "GB/s"))])
    yield line(["---", *["---:"] * (4 * len(found))])
    for name in names(found.values()):
        cells = []
        for of in found.values():
            row = of.get(name)
            speed = f"{row.gb_per_s:,.0f}" if row and row.gb_per_s else ""
            share = f"{row.share:.1%}" if row else ""
            cells += [number(row.ms) if row else "", share, f"{row.of_roof:.0%}" if row and row.of_roof else "", speed]
        yield line([name, *cells])


def _markdown_counters(record: Mapping[str, Any]) -> Iterator[str]:
    """Computed bytes beside counted ones: of the copy, and of the products of one layer and the head."""
    counters = record.get("counters", {})
    if copy := counters.get("copy"):
        yield (
            f"A copy kernel: {copy['measured_gb_per_s']:,.0f} GB/s measured, {copy['counted_gb_per_s']:,.0f} by ncu's "
            f"bytes and time, {copy['apart']:+.1%}."
        )
        yield ""
    products = [entry for entry in counters.get("classes", ()) if entry["class"] not in GROUPS]
    if products:
        yield line(
            ["provider", "batch", "product", "computed, MB", "counted, MB", "counted / computed", "occupancy", "waits"]
        )
        yield line(["---", "---:", "---", *["---:"] * 4, "---"])
        for entry in products:
            computed, counted = entry["computed_bytes"], entry["counted_bytes"]
            ratio = f"{counted / computed:.2f}" if computed else ""
            cells = [
                f"{computed / 1e6:,.2f}",
                f"{counted / 1e6:,.2f}",
                ratio,
                f"{entry['occupancy']:.0f}%",
                entry["stalls"],
            ]
            yield line([entry["provider"], str(entry["batch"]), entry["class"], *cells])
        yield ""
