"""Records of `halfbyte bench experts` as people read them: Markdown, and curves over the number of tokens."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from halfbyte.bench.report import by_case
from halfbyte.measure.report import COLORS, OURS, SORTED, line, provenance, pyplot, title

INK = "#2b2d42"


def markdown(record: Mapping[str, Any]) -> str:
    """One line a case: every provider's time, our bandwidth, share of the copy ceiling and flops a second, the peers'
    times over ours, and our error."""
    providers = list(dict.fromkeys(row["provider"] for row in record["rows"]))
    peers = [name for name in providers if name not in (OURS, SORTED)]
    columns = [*(f"{name}, µs" for name in providers), "GB/s", "of copy", "TFLOP/s", *(f"× {name}" for name in peers)]
    lines = [line(["experts", *columns, "error"]), line(["---", *["---:"] * (1 + len(columns))])]
    for case, rows in by_case(record):
        ours = rows[OURS]
        times = {name: row.get("median_us") for name, row in rows.items()}
        cells = ["" if name not in rows else _shown(times[name]) for name in providers]
        if (time := times[OURS]) is None:
            lines.append(line([case, *cells, *[""] * (4 + len(peers))]))
            continue
        speed = [f"{ours['gb_per_s']:,.0f}", f"{ours['of_copy']:.0%}", f"{ours['flops'] / time / 1e6:,.2f}"]
        ratios = [f"**{theirs / time:.2f}**" if (theirs := times.get(name)) else "" for name in peers]
        lines.append(line([case, *cells, *speed, *ratios, f"{ours['relative_error']:.1e}"]))
    return "\n".join([*lines, "", provenance(record)])


def _shown(time: float | None) -> str:
    return "wrong" if time is None else f"{time:,.1f}"


def plot(record: Mapping[str, Any], path: Path) -> None:
    """A row of panels a model, a panel a part of its block: time against tokens, both logarithmic, with the bytes of
    the 4-bit experts at copy speed. Needs matplotlib."""
    plt = pyplot()
    panels_of: dict[str, dict[str, dict[str, dict[int, Mapping[str, Any]]]]] = {}
    for row in record["rows"]:
        model, part = row["case"].split(",")[0], row["part"]
        curves = panels_of.setdefault(model, {}).setdefault(part, {})
        if "median_us" in row:
            curves.setdefault(row["provider"], {})[row["tokens"]] = row
    columns = max(map(len, panels_of.values()))
    size = (1.5 + 3.1 * columns, 0.9 + 2.6 * len(panels_of))
    figure, panels = plt.subplots(
        len(panels_of), columns, figsize=size, layout="constrained", squeeze=False, sharex=True
    )
    for of_model, (model, parts) in zip(panels, panels_of.items(), strict=True):
        for panel in of_model[len(parts) :]:
            panel.set_visible(False)
        for panel, (part, curves) in zip(of_model, parts.items(), strict=False):
            _curves(panel, curves, record["copy_gb_per_s"])
            panel.set_title(f"{model}, {part}", fontsize=9)
        of_model[0].set_ylabel("µs", fontsize=8)
    for panel in panels[-1]:
        panel.set_xlabel("tokens", fontsize=8)
    figure.suptitle(title(record), fontsize=10)
    labelled = {
        label: handle for panel in panels.flat for handle, label in zip(*panel.get_legend_handles_labels(), strict=True)
    }
    figure.legend(labelled.values(), labelled.keys(), loc="outside lower center", ncols=4, fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=160, metadata={"Software": None})
    plt.close(figure)


def _curves(panel: Any, curves: Mapping[str, Mapping[int, Mapping[str, Any]]], copy_gb_per_s: float) -> None:
    for name, curve in curves.items():
        times = {tokens: row["median_us"] for tokens, row in curve.items()}
        color, width = COLORS.get(name), 2.0 if name == OURS else 1.2
        panel.plot(times.keys(), times.values(), "o-", markersize=2.5, linewidth=width, color=color, label=name)
    least = {tokens: row["bytes"] / copy_gb_per_s / 1e3 for tokens, row in curves.get(OURS, {}).items()}
    panel.plot(least.keys(), least.values(), "--", linewidth=1, color=INK, label="bytes at copy speed")
    panel.set_xscale("log", base=2)
    panel.set_yscale("log")
    panel.set_xticks(list(least), [str(tokens) for tokens in least], fontsize=7)
    panel.tick_params(axis="y", labelsize=7)
    panel.minorticks_off()
    panel.grid(color="#e6e8eb", zorder=0)
    panel.spines[["top", "right"]].set_visible(False)
