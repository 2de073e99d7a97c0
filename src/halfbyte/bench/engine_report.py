"""Tables of `halfbyte bench engine`: a line for each number of requests, a column for each engine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from textwrap import shorten
from typing import Any

from halfbyte.bench.engine_process import FIRST
from halfbyte.measure.report import BASELINE, OURS, line, provenance, title
from halfbyte.terminal import Table, styled

Rows = dict[str, Mapping[str, Any]]  # by provider
TP2 = f"{OURS}-tp2"  # on two GPUs
COMPARED = {OURS: BASELINE, TP2: OURS}  # whose tokens are to be alike
MOST_TOLD = 200  # characters of a note in a document; the record has all of it

EXPLAINED = (
    "Each cell has two speeds in tokens a second: that of whole calls and, after the slash, that of their decoding "
    "steps alone. The tokens beside a model's name are those of each prompt and of each answer. "
    f'"× {BASELINE}" is the speed of {OURS} over that of {BASELINE}, both of whole calls. "Same first tokens" is the '
    f"share of {OURS}'s answers whose first {FIRST} tokens are those of {BASELINE}."
)
OF_TWO_GPUS = f" {TP2} is {OURS} on two GPUs; its answers are compared with those of {OURS} on one."


def by_case(record: Mapping[str, Any]) -> Iterator[tuple[tuple[str, int], Rows]]:
    """((model and tokens, number of requests), provider to row), the numbers ascending."""
    cases: dict[str, dict[int, Rows]] = {}
    for row in record["rows"]:
        if "tokens_per_s" in row:
            cases.setdefault(_label(row), {}).setdefault(row["requests"], {})[row["provider"]] = row
    for label, numbers in cases.items():
        for requests, rows in sorted(numbers.items()):
            yield (label, requests), rows


def notes(record: Mapping[str, Any]) -> Iterator[tuple[str, bool]]:
    """What was not timed, and why; and whether that is an error."""
    timed = {(_label(row), row["provider"]) for row in record["rows"] if "tokens_per_s" in row}
    for row in record["rows"]:
        if "tokens_per_s" not in row:
            label, provider, is_error = _label(row), row["provider"], "error" in row
            requests = f" with {row['requests']} at once" if "requests" in row else ""
            left_out = "was not timed any further" if (label, provider) in timed else "was not timed"
            what = f"failed{requests}: {row['error']}" if is_error else f"{left_out}: {row['left_out']}"
            yield f"{label}: {provider} {what}", is_error


def heads(record: Mapping[str, Any]) -> list[str]:
    others = [f"those of {name}" for name in _compared(record)[1:]]
    return ["", "requests", *_providers(record), f"× {BASELINE}", "same first tokens", *others]


def cells(record: Mapping[str, Any]) -> Iterator[list[str]]:
    providers, compared = _providers(record), _compared(record)
    for (label, requests), rows in by_case(record):
        ours, base = rows.get(OURS), rows.get(BASELINE)
        ratio = f"{ours['tokens_per_s'] / base['tokens_per_s']:.2f}" if ours and base else ""
        same = [_same(rows.get(name)) for name in compared]
        yield [label, str(requests), *(_speeds(rows.get(name)) for name in providers), ratio, *same]


def terminal_table(record: Mapping[str, Any]) -> Table:
    table = Table(title=title(record), caption=f"{_explained(record)} Measured: {record['method']}.")
    for place, head in enumerate(heads(record)):
        table.add_column(head, justify="right" if place else "left")
    for row in cells(record):
        table.add_row(*row)
    for note, is_error in notes(record):
        table.add_row(styled((note, "red" if is_error else "dim")))
    return table


def markdown(record: Mapping[str, Any]) -> str:
    found = heads(record)
    lines = [line(["model", *found[1:]]), line(["---", *["---:"] * (len(found) - 1)]), *map(line, cells(record))]
    told = [f"- {shorten(note, MOST_TOLD, placeholder=' …')}" for note, _ in notes(record)]
    return "\n".join([*lines, "", _explained(record), "", *told, *[""][: len(told)], provenance(record)])


def summary(record: Mapping[str, Any]) -> str:
    """Tokens a second of whole calls: one line for each model and number of requests."""
    providers = _providers(record)
    found = ["model", "requests at once", *(f"{name}, tokens/s" for name in providers), f"speed-up over {BASELINE}"]
    lines = [line(found), line(["---", *["---:"] * (len(found) - 1)])]
    for (_, requests), rows in by_case(record):
        speeds = {name: row["tokens_per_s"] for name, row in rows.items()}
        ratio = f"**{speeds[OURS] / speeds[BASELINE]:.1f}×**" if {OURS, BASELINE} <= speeds.keys() else ""
        cells = [f"{speeds[name]:,.0f}" if name in speeds else "" for name in providers]
        lines.append(line([next(iter(rows.values()))["model"], str(requests), *cells, ratio]))
    return "\n".join([*lines, "", provenance(record)])


def _providers(record: Mapping[str, Any]) -> Sequence[str]:
    return list(dict.fromkeys(row["provider"] for row in record["rows"] if "tokens_per_s" in row))


def _compared(record: Mapping[str, Any]) -> list[str]:
    """Ours, and behind it others whose tokens were compared."""
    measured = _providers(record)
    return [OURS, *(name for name in COMPARED if name in measured and name != OURS)]


def _explained(record: Mapping[str, Any]) -> str:
    return EXPLAINED + OF_TWO_GPUS * (TP2 in _providers(record))


def _same(row: Mapping[str, Any] | None) -> str:
    return f"{row['same_first']:.0%}" if row and "same_first" in row else ""


def _label(row: Mapping[str, Any]) -> str:
    return f"{row['model']}, {row['prompt_tokens']} + {row['new_tokens']} tokens"


def _speeds(row: Mapping[str, Any] | None) -> str:
    if row is None:
        return ""
    decoding = row["decode_tokens_per_s"]
    return f"{row['tokens_per_s']:,.0f} / " + (f"{decoding:,.0f}" if decoding else "–")
