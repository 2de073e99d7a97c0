"""Records of cases as people read them: terminal tables, Markdown tables, plots. Figures come from nowhere else."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from halfbyte.measure.report import BASELINE, COLORS, OURS, line, provenance, pyplot, title
from halfbyte.terminal import Table, styled


def by_case(record: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, dict[str, Any]]]]:
    """(case, provider to row), in the record's order."""
    cases: dict[str, dict[str, dict[str, Any]]] = {}
    for row in record["rows"]:
        cases.setdefault(row["case"], {})[row["provider"]] = row
    yield from cases.items()


def terminal_table(record: Mapping[str, Any]) -> Table:
    """Every row: time and spread, bandwidth, share of the copy ceiling, times ours, and the error if measured."""
    caption = f"copy {record['copy_gb_per_s']:,.0f} GB/s; {_method(record)}"
    table = Table(title=title(record), caption=caption)
    table.add_column("")
    with_errors = any("relative_error" in row for row in record["rows"])
    for heading in ("µs", *(() if with_errors else ("p20–p80",)), "GB/s", "of copy", "× ours"):
        table.add_column(heading, justify="right")
    if with_errors:  # instead of the spread, which the record has: 80 columns do not hold both
        table.add_column("error", justify="right")
    for case, rows in by_case(record):
        ours = rows.get(OURS, {}).get("median_us")
        table.add_row(styled((f"{case}", "bold")))
        for provider, row in rows.items():
            if "error" in row:
                table.add_row(styled((f"{provider}, wrong: {row['error']}", "red")))
                continue
            times = f"{row['median_us'] / ours:.2f}" if ours else ""
            table.add_row(
                provider,
                _short(row["median_us"]),
                *(() if with_errors else (f"{_short(row['p20_us'])}–{_short(row['p80_us'])}",)),
                f"{row['gb_per_s']:,.0f}",
                f"{row['of_copy']:.0%}",
                times,
                *((f"{row['relative_error']:.1e}",) if with_errors else ()),
            )
        table.add_section()
    return table


def markdown_table(record: Mapping[str, Any]) -> str:
    """One line a case: our time, the peers' times, our share of the copy ceiling, the ratio to bitsandbytes."""
    providers = list(dict.fromkeys(row["provider"] for row in record["rows"]))
    header = ["weight", *(f"{name}, µs" for name in providers), "GB/s", "of copy", f"× {BASELINE}"]
    lines = [line(header), line(["---", *["---:"] * (len(header) - 1)])]
    for case, rows in by_case(record):
        ours, base = rows[OURS], rows.get(BASELINE, {})
        cells = [
            f"{rows[name]['median_us']:,.1f}" if "median_us" in rows.get(name, {}) else "wrong" for name in providers
        ]
        ratio = (
            f"**{base['median_us'] / ours['median_us']:.2f}**" if "median_us" in base and "median_us" in ours else ""
        )
        speed = [f"{ours['gb_per_s']:,.0f}", f"{ours['of_copy']:.0%}"] if "median_us" in ours else ["", ""]
        lines.append(line([case, *cells, *speed, ratio]))
    return "\n".join([*lines, "", provenance(record)])


def puzzle_markdown(record: Mapping[str, Any]) -> str:
    """Seconds of the puzzle for each option and provider, and the points."""
    header = ["1000 × 3 dequantizations", "Unsloth, s", "halfbyte, s", "speed-up"]
    lines = [line(header), line(["---", "---:", "---:", "---:"])]
    for option, theirs, ours in zip(
        record["options"], *(record["seconds"][name] for name in ("unsloth", OURS)), strict=True
    ):
        lines.append(line([option, f"{theirs:.3f}", f"{ours:.3f}", f"{theirs / ours:.2f}"]))
    totals = [sum(record["seconds"][name]) for name in ("unsloth", OURS)]
    lines.append(line(["together", f"{totals[0]:.3f}", f"{totals[1]:.3f}", f"**{totals[0] / totals[1]:.2f}**"]))
    points = f"Points: {record['score']} of {record['of']}."
    return "\n".join([*lines, "", f"{points} {provenance(record)}"])


def plot(record: Mapping[str, Any], path: Path) -> None:
    """Bandwidth of each provider, a group of bars a case, the copy ceiling as a line. Needs matplotlib."""
    plt = pyplot()
    cases = list(by_case(record))
    providers = list(dict.fromkeys(row["provider"] for row in record["rows"]))
    figure, axes = plt.subplots(figsize=(9, 3.8), layout="constrained")
    width = 0.8 / len(providers)
    unit, factor, digits = ("TB/s", 1000, 2) if record["copy_gb_per_s"] >= 1000 else ("GB/s", 1, 0)
    for number, provider in enumerate(providers):
        speeds = [rows.get(provider, {}).get("gb_per_s", 0.0) / factor for _, rows in cases]
        places = [index + (number - (len(providers) - 1) / 2) * width for index in range(len(cases))]
        bars = axes.bar(places, speeds, 0.92 * width, label=provider, color=COLORS.get(provider), zorder=2)
        if provider == OURS:
            axes.bar_label(
                bars, [f"{speed:.{digits}f}" for speed in speeds], padding=-10, fontsize=6.5, color="white", zorder=4
            )
    ceiling = record["copy_gb_per_s"] / factor
    axes.axhline(ceiling, color="#2b2d42", linewidth=1, linestyle=(0, (4, 3)), zorder=3)
    axes.annotate(
        f"copy {ceiling:.{digits}f} {unit}", (len(cases) - 0.55, ceiling), ha="right", va="bottom", fontsize=8
    )
    axes.set_xticks(range(len(cases)), [case for case, _ in cases], fontsize=9)
    axes.set_ylabel(unit)
    axes.set_ylim(0, 1.16 * max(ceiling, *(row.get("gb_per_s", 0) / factor for row in record["rows"])))
    axes.set_title(title(record), fontsize=10, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#e6e8eb", zorder=0)
    axes.legend(frameon=False, fontsize=8, ncols=len(providers), loc="upper left")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=160, metadata={"Software": None})
    plt.close(figure)


def _method(record: Mapping[str, Any]) -> str:
    clocks = {row["clock"] for row in record["rows"] if "clock" in row}
    by = "GPU time of cold calls" if clocks == {"gpu"} else "wall clock of cold calls"
    return f"{by}, medians"


def _short(microseconds: float) -> str:
    if microseconds >= 100_000:
        return f"{microseconds / 1000:,.0f}k"
    return f"{microseconds:,.0f}" if microseconds >= 1000 else f"{microseconds:.1f}"
