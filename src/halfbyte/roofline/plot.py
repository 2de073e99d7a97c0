"""The roofline as a picture: a panel a provider and batch, in the mode that decodes fastest."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from halfbyte.measure.report import pyplot
from halfbyte.roofline.analysis import Roofs, Row, rows
from halfbyte.roofline.names import GROUPS
from halfbyte.roofline.render import best_mode

COLORS = dict(
    zip(
        GROUPS,
        ("#d1495b", "#00798c", "#edae49", "#66a182", "#8d5a97", "#2e4057", "#7aa6c2", "#9a9a9a", "#d9dde1"),
        strict=True,
    )
)


def roofline(record: Mapping[str, Any], path: Path) -> None:
    """Flops a byte against TFLOP/s, both logarithmic; a point a class, its area its time. Needs matplotlib."""
    plt = pyplot()
    roofs, mode = Roofs.of(record["ceilings"]), best_mode(record)
    runs = [run for run in record["runs"] if run["mode"] == mode]
    providers = list(dict.fromkeys(run["provider"] for run in runs))
    batches = sorted({run["batch"] for run in runs})
    figure, panels = plt.subplots(
        len(providers), len(batches), figsize=(0.6 + 4.2 * len(batches), 0.8 + 3.3 * len(providers)),
        layout="constrained", squeeze=False, sharex=True, sharey=True,
    )  # fmt: skip
    for run in runs:
        panel = panels[providers.index(run["provider"]), batches.index(run["batch"])]
        _panel(panel, rows(run, roofs), roofs)
        panel.set_title(f"{run['provider']}, batch {run['batch']}: {run['step_ms']:.2f} ms a step", fontsize=9)
    for panel in panels[-1]:
        panel.set_xlabel("flops a byte", fontsize=8)
    for panel in panels[:, 0]:
        panel.set_ylabel("TFLOP/s", fontsize=8)
    figure.suptitle(f"{record['model']}, {mode}, {record['environment']['device']}", fontsize=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130, metadata={"Software": None})
    plt.close(figure)


def _panel(panel: Any, found: list[Row], roofs: Roofs) -> None:
    points = [row for row in found if row.intensity and row.tflop_per_s]
    low = min([row.intensity or 1 for row in points] + [0.1]) / 3
    high = max([row.intensity or 1 for row in points] + [3e3 * roofs.matrix / roofs.read])
    ridge = 1e3 * roofs.matrix / roofs.read
    panel.plot([low, ridge, high], [low * roofs.read / 1e3, roofs.matrix, roofs.matrix], color="#2b2d42", lw=1.2)
    panel.annotate(
        f"read {roofs.read:,.0f} GB/s", (low, low * roofs.read / 1e3), xytext=(12, 0), textcoords="offset points",
        fontsize=6.5, va="top",
    )  # fmt: skip
    panel.annotate(f"{roofs.matrix:,.3g} TFLOP/s", (ridge, roofs.matrix), fontsize=6.5, va="bottom")
    longest = max((row.ms for row in points), default=1.0)
    for row in points:
        panel.scatter(
            row.intensity, row.tflop_per_s, s=8 + 220 * row.ms / longest, color=COLORS[row.group], alpha=0.75,
            linewidths=0.4, edgecolors="white", zorder=3,
        )  # fmt: skip
    for row, place in placed(points):
        panel.annotate(
            row.name, (row.intensity, row.tflop_per_s), xytext=place, textcoords="data", fontsize=6.5, va="center",
            zorder=4, arrowprops={"arrowstyle": "-", "color": "#9aa4b2", "linewidth": 0.4, "shrinkB": 0},
        )  # fmt: skip
        panel.update_datalim([(place[0], place[1] / 1.6)])  # the axis stays below it
    panel.set_xscale("log")
    panel.set_yscale("log")
    panel.grid(color="#e6e8eb", which="major", zorder=0)
    panel.tick_params(labelsize=7)
    panel.spines[["top", "right"]].set_visible(False)


def placed(points: Sequence[Row], gap: float = 0.23) -> Iterator[tuple[Row, tuple[float, float]]]:
    """Where each point's label stands, in the axes' own numbers: in a column right of its neighbours, none on another.

    Products of one batch share an intensity, so their points stand in a line. gap: between labels, in decades.
    """
    columns: list[list[Row]] = []
    for row in sorted(points, key=lambda row: row.intensity or 0):
        if columns and math.log10((row.intensity or 1) / (columns[-1][0].intensity or 1)) < 0.35:
            columns[-1].append(row)
        else:
            columns.append([row])
    for column in columns:
        column.sort(key=lambda row: row.tflop_per_s or 0)
        heights = [math.log10(row.tflop_per_s or 1) for row in column]
        highest = heights[-1]
        for place in range(1, len(heights)):
            heights[place] = max(heights[place], heights[place - 1] + gap)
        excess = (heights[-1] - highest) / 2  # half of what they were pushed up
        right = 1.6 * max(row.intensity or 1 for row in column)
        for row, height in zip(column, heights, strict=True):
            yield row, (right, 10 ** (height - excess))
