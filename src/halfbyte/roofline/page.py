"""The report as one HTML page: it holds its style, script and data, asks for nothing else, and opens offline."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.resources import files
from typing import Any

from halfbyte.roofline.analysis import HELP, Roofs, floor, rows
from halfbyte.roofline.attribution import Piece
from halfbyte.roofline.names import GROUPS, base
from halfbyte.roofline.plot import COLORS
from halfbyte.roofline.run import Run


def template() -> Any:
    """The page's template. Raises ImportError with what to install where jinja2 is missing."""
    try:
        import jinja2
    except ImportError as error:
        raise ImportError("the HTML report needs jinja2, which torch brings; pip install jinja2") from error
    return jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined).from_string(_file("page.html"))


def html(record: Mapping[str, Any], runs: Sequence[Run]) -> str:
    """The page of a record; runs: of the same order, for their timelines."""
    text: str = template().render(
        record=record, facts=_facts(record), style=_file("page.css"), script=_file("page.js"), data=_data(record, runs)
    )
    return text


def _file(name: str) -> str:
    return (files("halfbyte.roofline") / "template" / name).read_text(encoding="utf-8")


def _facts(record: Mapping[str, Any]) -> list[tuple[str, str]]:
    told = record["environment"]
    names = ("date", "driver", "cuda", "torch", "triton", "transformers", "bitsandbytes", "halfbyte", "commit")
    clocks = ", ".join(
        f"{name.removeprefix('clocks.')} {mhz:,.0f}" for name, mhz in record["ceilings"]["clocks"].items()
    )
    return [("device", told["device"])] + [(name, str(told[name])) for name in names if told.get(name)] + [
        ("ceilings measured", record["ceilings"]["date"]), ("clocks, MHz", clocks or "not told"),
        ("bytes", record.get("counters", {}).get("said") or "computed from shapes"),
    ]  # fmt: skip


def _data(record: Mapping[str, Any], runs: Sequence[Run]) -> str:
    """What the script shows, as JSON that can stand inside an HTML element."""
    roofs = Roofs.of(record["ceilings"])
    shown = {
        "groups": GROUPS, "colors": COLORS, "help": HELP, "roofs": asdict(roofs),
        "ceilings": {key: record["ceilings"][key] for key in ("bandwidth", "matrix", "launch")},
        "counters": record.get("counters", {}).get("classes", []),
        "runs": [_run(kept, run, roofs) for kept, run in zip(record["runs"], runs, strict=True)],
    }  # fmt: skip
    return json.dumps(shown, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")


def _run(kept: Mapping[str, Any], run: Run, roofs: Roofs) -> dict[str, Any]:
    found = rows(kept, roofs)
    shown = {key: kept[key] for key in ("provider", "mode", "batch", "step_ms", "profiled_ms", "sum_ms", "other")}
    return shown | {
        "floor": floor(found),
        "rows": [asdict(row) | {"gain": row.gain} for row in found],
        **_timeline(run.profile.timeline),
    }


def _timeline(pieces: Sequence[Piece]) -> dict[str, Any]:
    """Pieces as [start, duration (0.01 µs), group, name], names by number."""
    names: dict[tuple[str, str], int] = {}
    events = []
    for piece in pieces:
        key = (base(piece.name)[:60], piece.label.name)
        number = names.setdefault(key, len(names))
        start, length = round(100 * piece.start), round(100 * piece.duration)
        events.append([start, length, GROUPS.index(piece.label.group), number])
    return {"names": [f"{role}: {name}" for name, role in names], "events": events}
