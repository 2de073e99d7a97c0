"""Tables of the benches of whole models: decoding and training."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from halfbyte.bench.report import BASELINE, OURS, line, provenance, title

Group = dict[str, dict[str, Mapping[str, Any]]]


def by_case(record: Mapping[str, Any], key: str) -> Iterator[tuple[tuple[str, int], Group]]:
    """((model, batch or tokens), mode to provider to row), in the record's order."""
    cases: dict[tuple[str, int], Group] = {}
    for row in record["rows"]:
        cases.setdefault((row["model"], row[key]), {}).setdefault(row["mode"], {})[row["provider"]] = row
    yield from cases.items()


def terminal_table(record: Mapping[str, Any], key: str = "batch") -> Table:
    """Every mode of every case: milliseconds of all providers, bitsandbytes' over ours, our tokens a second."""
    providers = list(dict.fromkeys(row["provider"] for row in record["rows"]))
    table = Table(title=title(record), caption=record["method"], box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("")
    for name in providers:
        table.add_column(f"{name}, ms", justify="right", no_wrap=True)
    table.add_column("ratio", justify="right", no_wrap=True)
    table.add_column("tokens/s", justify="right", no_wrap=True)
    for (model, number), modes in by_case(record, key):
        table.add_row(f"[bold]{model}, {key} {number}[/]")
        for mode, rows in modes.items():
            speed = rows.get(OURS, {}).get("tokens_per_s")
            table.add_row(
                mode, *(_time(rows.get(name)) for name in providers), _ratio(rows), f"{speed:,.0f}" if speed else ""
            )
        table.add_section()
    return table


def markdown(record: Mapping[str, Any], key: str = "batch") -> str:
    """One line a case and mode, as in the terminal, with the peak of memory and the error of the logits."""
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
            lines.append(
                line([model, str(number), mode, *times, ratio, speed, " / ".join(f"{peak:.1f}" for peak in peaks)])
            )
    return "\n".join([*lines, "", provenance(record)])


def _time(row: Mapping[str, Any] | None) -> str:
    return f"{row['median_ms']:,.2f}" if row and "median_ms" in row else ""


def _ratio(rows: Mapping[str, Mapping[str, Any]]) -> str:
    if OURS not in rows or BASELINE not in rows:
        return ""
    return f"{rows[BASELINE]['median_ms'] / rows[OURS]['median_ms']:.2f}"
