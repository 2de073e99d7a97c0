"""What people read of a record of `halfbyte bench linear` or `bench gradients`: a table, and a plot of time against
the rows of x or of its gradient."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from halfbyte.measure.report import BASELINE, COLORS, OURS, line, provenance, pyplot, title

DENSE = ("bf16", "fp16", "fp32")
STYLES = {
    **dict.fromkeys(DENSE, "#3d5a80"),
    "tinygemm": "#98c1a3",
    "marlin": "#6d597a",
    "humming": "#588157",
    "halfbyte int4": "#f4a261",
    **dict.fromkeys(("dequantize + linear", "dequantize + matmul"), "#b8a9c9"),
    "bitsandbytes repacked": "#e9a23b",
}

Curves = dict[str, dict[int, dict[str, Any]]]


def by_shape(record: Mapping[str, Any]) -> dict[tuple[int, int], Curves]:
    """Shape (N, K) to provider to M to row: by M, else in the record's order."""
    shapes: dict[tuple[int, int], Curves] = {}
    for row in record["rows"]:
        curves = shapes.setdefault((row["n"], row["k"]), {})
        curves.setdefault(row["provider"], {})[row["m"]] = row
    return {
        shape: {provider: dict(sorted(curve.items())) for provider, curve in curves.items()}
        for shape, curves in shapes.items()
    }


def floor(record: Mapping[str, Any], row: Mapping[str, Any]) -> float:
    """Microseconds in which this machine copies as many bytes as the row's provider must move."""
    return float(row["bytes"] / record["copy_gb_per_s"] / 1e3)


def markdown(record: Mapping[str, Any]) -> str:
    """One line a shape and M: every provider's time; ours over the byte floor; dense and bitsandbytes over ours."""
    providers = list(dict.fromkeys(row["provider"] for row in record["rows"]))
    dense = next(name for name in providers if name in DENSE)
    against = [dense, *(name for name in (BASELINE,) if name in providers)]
    columns = [*(f"{name}, µs" for name in providers), "× floor", *(f"× {name}" for name in against), "error"]
    lines = [line(["weight", "M", *columns]), line(["---", *["---:"] * (1 + len(columns))])]
    for (n, k), curves in by_shape(record).items():
        for m, ours in curves[OURS].items():
            rows = {name: curve[m] for name, curve in curves.items() if m in curve}
            cells = [_time(rows.get(name)) for name in providers]
            over_floor = f"{ours['median_us'] / floor(record, ours):.2f}" if "median_us" in ours else ""
            ratios = [_ratio(rows.get(name), ours) for name in against]
            lines.append(line([f"{n}×{k}", str(m), *cells, over_floor, *ratios, f"{ours.get('relative_error', '')}"]))
    return "\n".join([*lines, "", provenance(record)])


SUMMARY_SHAPES, SUMMARY_ROWS = ((14336, 4096), (28672, 8192)), (1, 4, 16, 64)


def summary(record: Mapping[str, Any]) -> str:
    """Two large weights and a few M: the time of reading the 4-bit bytes, and every provider's."""
    providers = list(dict.fromkeys(row["provider"] for row in record["rows"]))
    header = ["weight", "M", "the bytes, µs", *(f"{name}, µs" for name in providers)]
    lines = [line(header), line(["---", *["---:"] * (len(header) - 1)])]
    for shape, curves in by_shape(record).items():
        for m, ours in curves[OURS].items():
            if shape in SUMMARY_SHAPES and m in SUMMARY_ROWS:
                times = [_time(curves.get(name, {}).get(m)) for name in providers]
                times[providers.index(OURS)] = f"**{times[providers.index(OURS)]}**"
                lines.append(line([f"{shape[0]}×{shape[1]}", str(m), f"{floor(record, ours):,.1f}", *times]))
    return "\n".join([*lines, "", provenance(record)])


def plot(record: Mapping[str, Any], path: Path) -> None:
    """A panel a shape: time against M, both logarithmic, with the byte floor of the 4-bit weights. Needs matplotlib."""
    plt = pyplot()
    shapes = by_shape(record)
    columns = min(4, len(shapes))
    lines = -(-len(shapes) // columns)
    size = (1.5 + 3.1 * columns, 0.9 + 2.6 * lines)
    figure, panels = plt.subplots(lines, columns, figsize=size, layout="constrained", squeeze=False, sharex=True)
    for panel in panels.flat[len(shapes) :]:
        panel.set_visible(False)
    for panel, ((n, k), curves) in zip(panels.flat, shapes.items(), strict=False):
        for name, curve in curves.items():
            times = _times(curve)
            color, width = {**STYLES, **COLORS}.get(name), 2.0 if name == OURS else 1.2
            panel.plot(times.keys(), times.values(), "o-", markersize=2.5, linewidth=width, color=color, label=name)
        least = {m: floor(record, row) for m, row in curves[OURS].items()}
        # One provider that falls far behind must not press the others into a line.
        common = [time for name in (OURS, BASELINE, *DENSE) for time in _times(curves.get(name, {})).values()]
        panel.set_ylim(0.8 * min(least.values()), 1.5 * max(common))
        panel.plot(least.keys(), least.values(), "--", linewidth=1, color="#2b2d42", label="4-bit bytes at copy speed")
        panel.set_xscale("log", base=2)
        panel.set_yscale("log")
        panel.set_xticks(list(least), [str(m) for m in least], fontsize=7)
        panel.minorticks_off()
        panel.set_title(f"{n}×{k}", fontsize=9)
        panel.grid(color="#e6e8eb", zorder=0)
        panel.spines[["top", "right"]].set_visible(False)
    for column in panels.T:
        last = [panel for panel in column if panel.get_visible()][-1]
        last.tick_params(labelbottom=True)
        last.set_xlabel(_rows(record), fontsize=8)
    for panel in panels[:, 0]:
        panel.set_ylabel("µs", fontsize=8)
    figure.suptitle(title(record), fontsize=10)
    figure.legend(*panels[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=160, metadata={"Software": None})
    plt.close(figure)


def plot_against_dense(record: Mapping[str, Any], path: Path) -> None:
    """How many times as fast as the dense weight in 16 or 32 bits: each provider's geometric mean over the weights that
    it has a time for, by rows of x, and each weight of ours as a point. Needs matplotlib."""
    plt = pyplot()
    figure, panel = plt.subplots(figsize=(7.5, 3.8), layout="constrained")
    for name, ratios in against_dense(record).items():
        color, width = {**STYLES, **COLORS}.get(name), 2.0 if name == OURS else 1.2
        if name == OURS:
            points = [(m, ratio) for m, each in ratios.items() for ratio in each]
            panel.scatter(*zip(*points, strict=True), s=9, color=color, alpha=0.35, linewidths=0, zorder=2)
        means = [geometric_mean(each) for each in ratios.values()]
        panel.plot(ratios.keys(), means, "o-", markersize=2.5, linewidth=width, color=color, label=name, zorder=3)
    dense = next(row["provider"] for row in record["rows"] if row["provider"] in DENSE)
    panel.axhline(1, color=STYLES[dense], linewidth=1, zorder=1)
    every = sorted({row["m"] for row in record["rows"]})
    numbers = [m for m in every if m.bit_count() == 1] or every  # there is no room for all
    panel.annotate(dense, (numbers[0], 1.03), fontsize=8, color=STYLES[dense])
    panel.set_xscale("log", base=2)
    panel.set_yscale("log", base=2)
    panel.set_ylim(0.25, 4.5)  # what is slower by more, with no product for many rows, is of no interest here
    panel.set_xticks(numbers, [str(m) for m in numbers], fontsize=7)
    panel.set_yticks([0.25, 0.5, 1, 2, 4], ["¼", "½", "1", "2", "4"], fontsize=8)
    panel.minorticks_off()
    panel.set_xlabel(_rows(record), fontsize=8)
    panel.set_ylabel(f"times as fast as {dense}", fontsize=8)
    panel.set_title(title(record), fontsize=10, loc="left")
    panel.grid(color="#e6e8eb", zorder=0)
    panel.spines[["top", "right"]].set_visible(False)
    panel.legend(frameon=False, fontsize=8, ncols=2, loc="upper right")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=160, metadata={"Software": None})
    plt.close(figure)


def against_dense(record: Mapping[str, Any]) -> dict[str, dict[int, list[float]]]:
    """Provider to M to the dense weight's time over its own, a number for each weight whose N is a multiple of 8; M
    ascends. Of others the dense product takes several times as long, which a mean would hide."""
    found: dict[str, dict[int, list[float]]] = {}
    for (n, _), curves in by_shape(record).items():
        if n % 8:
            continue
        dense = next(_times(curve) for name, curve in curves.items() if name in DENSE)
        for name, curve in curves.items():
            for m, time in _times(curve).items():
                if name not in DENSE and m in dense:
                    found.setdefault(name, {}).setdefault(m, []).append(dense[m] / time)
    return {name: dict(sorted(ratios.items())) for name, ratios in found.items()}


def _rows(record: Mapping[str, Any]) -> str:
    return "rows of dy" if record["bench"] == "gradients" else "rows of x"


def _times(curve: Mapping[int, Mapping[str, Any]]) -> dict[int, float]:
    return {m: row["median_us"] for m, row in curve.items() if "median_us" in row}


def _time(row: Mapping[str, Any] | None) -> str:
    if row is None:
        return ""
    return f"{row['median_us']:,.1f}" if "median_us" in row else "wrong"


def _ratio(row: Mapping[str, Any] | None, ours: Mapping[str, Any]) -> str:
    if row is None or "median_us" not in row or "median_us" not in ours:
        return ""
    return f"**{row['median_us'] / ours['median_us']:.2f}**"
