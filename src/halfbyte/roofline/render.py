"""What `halfbyte profile` prints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from rich.console import Console

from halfbyte.roofline.analysis import Roofs, Row, floor, in_order, products, rows
from halfbyte.terminal import Table, styled

Runs = list[Mapping[str, Any]]


def report(console: Console, record: Mapping[str, Any]) -> None:
    """Ceilings, every run in one line, and the classes of the mode that decodes fastest."""
    roofs = Roofs.of(record["ceilings"])
    console.print(ceilings(record))
    console.print(overview(record, roofs))
    mode = best_mode(record)
    for batch, runs in by_batch(record):
        console.print(classes(batch, [run for run in runs if run["mode"] == mode], roofs))
    if record.get("counters", {}).get("classes"):
        console.print(counted(record))
    for note in notes(record):
        console.print(note, highlight=False)


def by_batch(record: Mapping[str, Any]) -> Iterator[tuple[int, Runs]]:
    ordered = sorted(record["runs"], key=lambda run: run["batch"])
    for batch, runs in groupby(ordered, key=lambda run: run["batch"]):
        yield batch, list(runs)


def best_mode(record: Mapping[str, Any]) -> str:
    """The mode whose classes are shown: the fastest way to decode that was measured, or what there is."""
    found = {run["mode"] for run in record["runs"]}
    return next(mode for mode in ("fused graph", "graph", "eager", "prefill") if mode in found)


def ceilings(record: Mapping[str, Any]) -> Table:
    """What was measured of the machine, in one table."""
    measured = record["ceilings"]
    kinds = ("read", "write", "copy")
    table = table_of(f"{record['environment']['device']}, measured {measured['date']}", "buffer", *kinds)
    for size in measured["bandwidth"]["read"]:
        speeds = [measured["bandwidth"][kind][size]["median"] for kind in kinds]
        table.add_row(_size(int(size)), *(f"{speed:,.0f}" if speed >= 10 else f"{speed:.2f}" for speed in speeds))
    matrix = ", ".join(f"{name} {number(speed['median'])}" for name, speed in measured["matrix"].items())
    launch = ", ".join(f"{name} {us:.1f}" for name, us in measured["launch"].items())
    table.caption = f"GB/s; products, TFLOP/s: {matrix}\nµs a small kernel: {launch}"
    return table


def overview(record: Mapping[str, Any], roofs: Roofs) -> Table:
    """A line a run: the step without and with the profiler, and where it goes."""
    heads = ("step", "profiled", "floor", "products", "roof", "gaps", "other")
    title = f"{record['model']}, {record['context']} tokens of context, ms"
    table = table_of(title, "", *heads, padding=(0, 1, 0, 0))
    for batch, runs in by_batch(record):
        for mode, group in groupby(sorted(runs, key=place), key=lambda run: run["mode"]):
            table.add_row(styled((f"batch {batch}, {mode}", "bold")))
            for run in group:
                table.add_row(*cells_of(run, rows(run, roofs)))
        table.add_section()
    table.caption = (
        "step: without profiler; floor: bytes and flops at the measured ceilings;\n"
        "products: weight products' share of the profiled step, and of their roof"
    )
    return table


def place(run: Mapping[str, Any]) -> int:
    return ("eager", "graph", "fused graph", "prefill").index(run["mode"])


def cells_of(run: Mapping[str, Any], found: Sequence[Row]) -> tuple[str, ...]:
    share, reached = products(found)
    shares = {row.group: row.share for row in found}
    return (
        run["provider"], number(run["step_ms"]), number(run["profiled_ms"]), number(floor(found)),
        f"{share:.0%}", _percent(reached), f"{shares.get('gaps', 0):.0%}", f"{shares.get('other', 0):.1%}",
    )  # fmt: skip


def classes(batch: int, runs: Runs, roofs: Roofs) -> Table:
    """A line a class: milliseconds, share of the step and share of the roof, of every provider."""
    found = {run["provider"]: {row.name: row for row in rows(run, roofs)} for run in runs}
    heads = [head for provider in found for head in (f"{provider}\nms", "\n%", "\nroof")]
    mode = runs[0]["mode"] if runs else ""
    table = table_of(f"batch {batch}, {mode}", "class", *heads, padding=(0, 1, 0, 0))
    for name in names(found.values()):
        cells = [_cells(of.get(name)) for of in found.values()]
        table.add_row(name, *(text for cell in cells for text in cell))
    table.add_section()
    sums = [cell for of in found.values() for cell in (number(sum(row.ms for row in of.values())), "100", "")]
    table.add_row("together", *sums)
    return table


def names(found: Any) -> list[str]:
    """Every class of several runs, in their order."""
    return in_order(dict.fromkeys(name for of in found for name in of))


def _cells(row: Row | None) -> tuple[str, str, str]:
    if row is None:
        return "", "", ""
    return _five(row.ms), f"{100 * row.share:.1f}", _percent(row.of_roof)


def counted(record: Mapping[str, Any]) -> Table:
    """What ncu counted of the classes of one layer and the head, at the first batch."""
    counters = record["counters"]
    heads = ("computed, MB", "counted", "ratio", "occupancy", "waits for, cycles")
    batch = counters["classes"][0]["batch"]
    table = table_of(f"counted by ncu: one layer and the head, batch {batch}", "", *heads, padding=(0, 1, 0, 0))
    for provider, entries in groupby(counters["classes"], key=lambda entry: entry["provider"]):
        table.add_row(styled((provider, "bold")))
        for entry in entries:
            computed, found = entry["computed_bytes"], entry["counted_bytes"]
            if entry["batch"] == batch and computed:
                waits = " ".join(entry["stalls"].split()[:2])
                cells = (f"{computed / 1e6:,.2f}", f"{found / 1e6:,.2f}", f"{found / computed:.2f}")
                table.add_row(entry["class"], *cells, f"{entry['occupancy']:.0f}%", waits)
    if copy := counters.get("copy"):
        table.caption = (
            f"a copy: {copy['measured_gb_per_s']:,.0f} GB/s measured, {copy['counted_gb_per_s']:,.0f} counted, "
            f"{copy['apart']:+.1%}"
        )
    return table


def notes(record: Mapping[str, Any]) -> Iterator[str]:
    """What would help most, what is unknown, and how well the sums agree."""
    roofs = Roofs.of(record["ceilings"])
    mode = best_mode(record)
    yield f"most to gain in {mode}, ms a step:"
    for run in record["runs"]:
        if run["mode"] == mode:
            best = sorted(rows(run, roofs), key=lambda row: -row.gain)[:3]
            gains = ", ".join(f"{row.name} {number(row.gain)}" for row in best if row.gain > 0)
            yield f"  {run['provider']}, batch {run['batch']}: {gains}"
    apart = max(abs(run["sum_ms"] / run["profiled_ms"] - 1) for run in record["runs"])
    yield f"classes and gaps add up to the profiled step within {apart:.1%}, by two clocks"
    unknown = {entry["name"] for run in record["runs"] for entry in run["other"]}
    if unknown:
        yield f"other: {', '.join(sorted(unknown))}"
    counters = record.get("counters", {})
    yield counters.get("said") or "bytes are computed from shapes; --counters asks the hardware"


def table_of(title: str, *heads: str, padding: tuple[int, int, int, int] = (0, 2, 0, 0)) -> Table:
    table = Table(title=title, padding=padding, title_justify="left", caption_justify="left")
    for place, head in enumerate(heads):
        table.add_column(head, justify="right" if place else "left")
    return table


def _size(count: int) -> str:
    return f"{count / 2**30:.3g} GiB" if count >= 2**30 else f"{count / 2**20:.3g} MiB"


def number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.2f}" if value >= 1 else f"{value:.3f}"


def _five(ms: float) -> str:
    """Milliseconds in no more than five characters, so that three providers fit into 80 columns."""
    return f"{ms:.{3 if ms < 9.9995 else 2 if ms < 99.995 else 1 if ms < 999.95 else 0}f}"


def _percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.0f}"
