"""Tables and plots of the benches of whole models: decoding and training."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from halfbyte.measure.report import BASELINE, COLORS, DENSE, OURS, line, provenance, pyplot, title
from halfbyte.terminal import Table, styled

Group = dict[str, dict[str, Mapping[str, Any]]]


def by_case(record: Mapping[str, Any], key: str, form: str = "d") -> Iterator[tuple[tuple[str, str], Group]]:
    """((model, batch or tokens), mode to provider to row), in the record's order. Where a step has several texts, they
    stand before the tokens of each. form: of numbers."""
    cases: dict[tuple[str, str], Group] = {}
    for row in record["rows"]:
        numbers = [row[name] for name in ("texts", key) if name in row]
        case = row["model"], " × ".join(format(number, form) for number in numbers)
        cases.setdefault(case, {}).setdefault(row["mode"], {})[row["provider"]] = row
    yield from cases.items()


def terminal_table(record: Mapping[str, Any], key: str = "batch") -> Table:
    """Every mode of every case: milliseconds of all providers, bitsandbytes' over ours, our tokens a second."""
    providers = list(dict.fromkeys(row["provider"] for row in record["rows"]))
    table = Table(title=title(record), caption=record["method"])
    table.add_column("")
    for name in providers:
        table.add_column(f"{name}, ms", justify="right")
    table.add_column("ratio", justify="right")
    table.add_column("tokens/s", justify="right")
    for (model, number), modes in by_case(record, key):
        table.add_row(styled((f"{model}, {key} {number}", "bold")))
        for mode, rows in modes.items():
            speed = rows.get(OURS, {}).get("tokens_per_s")
            table.add_row(
                mode, *(_time(rows.get(name)) for name in providers), _ratio(rows), f"{speed:,.0f}" if speed else ""
            )
        table.add_section()
    return table


def markdown(record: Mapping[str, Any], key: str = "batch") -> str:
    """One line a case and mode, as in the terminal, with the peaks of memory. Below, where they are known, the losses
    of steps that learn."""
    providers = list(dict.fromkeys(row["provider"] for row in record["rows"]))
    header = ["model", key, "mode", *(f"{name}, ms" for name in providers), f"× {BASELINE}", "tokens/s", "peak, GB"]
    lines = [line(header), line(["---", "---:", "---", *["---:"] * (len(header) - 3)])]
    for (model, number), modes in by_case(record, key):
        for mode, rows in modes.items():
            ours = rows.get(OURS, {})
            speed = f"{ours['tokens_per_s']:,.0f}" if "tokens_per_s" in ours else ""
            peaks = [rows[name]["peak_gb"] for name in (BASELINE, OURS) if rows.get(name, {}).get("peak_gb")]
            times = [_time(rows.get(name)) for name in providers]
            ratio = f"**{found}**" if (found := _ratio(rows)) else ""
            lines.append(line([model, number, mode, *times, ratio, speed, " / ".join(f"{peak:.1f}" for peak in peaks)]))
    return "\n".join([*lines, "", *_losses(record, key), provenance(record)])


def _losses(record: Mapping[str, Any], key: str) -> list[str]:
    """A table of them, one line a case and provider, and what follows it; nothing of a record without any."""
    learned = {
        (*case, name): row["losses"]
        for case, modes in by_case(record, key)
        for rows in modes.values()
        for name, row in rows.items()
        if "losses" in row
    }
    if not learned:
        return []
    steps = max(map(len, learned.values()))
    header = ["model", key, "provider, loss at step", *map(str, range(1, steps + 1))]
    lines = [line(header), line(["---", "---:", "---", *["---:"] * steps])]
    lines += [line([*case, *(f"{loss:.4f}" for loss in losses)]) for case, losses in learned.items()]
    return [*lines, ""]


def summary(record: Mapping[str, Any]) -> str:
    """Tokens a second of a plain `generate`, theirs and ours: one line a model and batch, of a CPU one sentence."""
    if is_of_cpu(record):
        return _sentence(record)
    heads = ["model", "texts at once", f"{BASELINE}, tokens/s", f"{OURS}, tokens/s", "speed-up"]
    lines = [line(heads), line(["---", *["---:"] * (len(heads) - 1)])]
    for (model, batch), modes in by_case(record, "batch"):
        if BASELINE not in modes["generate"]:  # there was no memory for its dense experts
            continue
        theirs, ours = (modes["generate"][name]["tokens_per_s"] for name in (BASELINE, OURS))
        lines.append(line([model, batch, f"{theirs:,.0f}", f"{ours:,.0f}", f"**{ours / theirs:.1f}×**"]))
    return "\n".join([*lines, "", provenance(record)])


def is_of_cpu(record: Mapping[str, Any]) -> bool:
    """A CPU decodes in one mode, and one text at a time: too little for a table or a plot."""
    return "threads" in record["environment"]


def _sentence(record: Mapping[str, Any]) -> str:
    facts = record["environment"]
    told = []
    for (model, batch), modes in by_case(record, "batch"):
        theirs, ours = (modes["generate"][name]["tokens_per_s"] for name in (BASELINE, OURS))
        if batch == "1":
            told.append(f"`generate` with {model} makes {ours:.1f} tokens a second with {OURS}, {theirs:.1f} without")
    return f"On an {facts['device']} with {facts['threads']} threads, {' and '.join(told)}. {provenance(record)}"


def training_summary(record: Mapping[str, Any]) -> str:
    """One line a model and tokens of a step: milliseconds of a step by each provider, and the peaks of memory."""
    providers = sorted(dict.fromkeys(row["provider"] for row in record["rows"]), key=lambda name: name == OURS)
    others = [name for name in (BASELINE, DENSE) if name in providers]
    heads = ["model", "tokens a step", *(f"{name}, ms a step" for name in providers)]
    heads += [f"speed-up over {name}" for name in others]
    heads += [f"peak memory, {name}, GB" for name in (BASELINE, OURS)]
    lines = [line(heads), line(["---", *["---:"] * (len(heads) - 1)])]
    for (model, tokens), modes in by_case(record, "tokens", ","):
        rows = modes["step"]
        if not {BASELINE, OURS} <= rows.keys():  # there was no memory for one of them
            continue
        times = [_time(rows.get(name)) for name in providers]
        ratios = [f"**{found}×**" if (found := _ratio(rows, name)) else "" for name in others]
        peaks = [f"{rows[name]['peak_gb']:.1f}" for name in (BASELINE, OURS)]
        lines.append(line([model, tokens, *times, *ratios, *peaks]))
    return "\n".join([*lines, "", provenance(record)])


BARS: tuple[tuple[str, str, dict[str, Any]], ...] = (  # provider, mode, and how it is drawn
    (BASELINE, "generate", {"color": COLORS[BASELINE], "alpha": 0.45}),
    (BASELINE, "fused graph", {"color": COLORS[BASELINE]}),
    (DENSE, "fused graph", {"color": "#8d99ae", "hatch": "//"}),
    (OURS, "generate", {"color": COLORS[OURS], "alpha": 0.55}),
    (OURS, "fused graph", {"color": COLORS[OURS]}),
)


MOST_PANELS = 3  # side by side


def plot(record: Mapping[str, Any], path: Path) -> None:
    """A panel a model: tokens a second of the modes that matter, a group of bars a batch. Needs matplotlib."""
    plt = pyplot()
    cases = list(by_case(record, "batch"))
    models = list(dict.fromkeys(model for (model, _), _ in cases))
    lines = -(-len(models) // MOST_PANELS)
    columns = -(-len(models) // lines)
    figure, panels = plt.subplots(
        lines, columns, figsize=(1.5 + 3.2 * columns, 0.6 + 3 * lines), layout="constrained", squeeze=False
    )
    for panel in panels.flat[len(models) :]:
        panel.remove()
    for panel, model in zip(panels.flat, models, strict=False):
        groups = [(batch, modes) for (name, batch), modes in cases if name == model]
        for number, (provider, mode, style) in enumerate(BARS):
            speeds = [modes.get(mode, {}).get(provider, {}).get("tokens_per_s", 0.0) for _, modes in groups]
            places = [index + (number - 2) * 0.16 for index in range(len(groups))]
            bars = panel.bar(places, speeds, 0.15, label=f"{provider}, {mode}", zorder=2, **style)
            if provider == OURS:
                # Legible over a taller bar beside it.
                paper = {"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 0.4}
                panel.bar_label(bars, [f"{speed:,.0f}" for speed in speeds], fontsize=6, padding=1, bbox=paper)
        panel.set_yscale("log")
        panel.set_xticks(range(len(groups)), [f"batch {batch}" for batch, _ in groups], fontsize=8)
        panel.set_title(model, fontsize=9)
        panel.grid(axis="y", color="#e6e8eb", zorder=0)
        panel.spines[["top", "right"]].set_visible(False)
    for panel in panels[:, 0]:
        panel.set_ylabel("tokens a second", fontsize=8)
    figure.suptitle(title(record), fontsize=10)
    figure.legend(*panels[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=5, fontsize=7)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=160, metadata={"Software": None})
    plt.close(figure)


def _time(row: Mapping[str, Any] | None) -> str:
    return f"{row['median_ms']:,.2f}" if row and "median_ms" in row else ""


def _ratio(rows: Mapping[str, Mapping[str, Any]], other: str = BASELINE) -> str:
    if OURS not in rows or other not in rows:
        return ""
    return f"{rows[other]['median_ms'] / rows[OURS]['median_ms']:.2f}"
