"""Two reports side by side: what each class takes in one and in the other."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from halfbyte.roofline import record
from halfbyte.roofline.analysis import in_order
from halfbyte.roofline.render import number, table_of
from halfbyte.roofline.run import PROVIDERS
from halfbyte.terminal import Table, styled

Key = tuple[int, str, str]  # batch, mode, provider; the provider is empty where each side has only one


def table(first: str, second: str) -> Table:
    """Every batch and mode that both reports have. first, second: a folder or JSON file, and after a colon the
    provider to take of it. Raises ValueError where there is no report, or nothing in common."""
    sides = [_side(text) for text in (first, second)]
    pairs = _pairs(*sides)
    names = [side["name"] for side in sides]
    heads = ("A, ms", "B, ms", "B - A", "A / B")
    found = table_of(f"A: {names[0]}\nB: {names[1]}", "", *heads, padding=(0, 1, 0, 0))
    found.caption = _difference(*(side["record"] for side in sides))
    for title, a, b in pairs:
        found.add_row(styled((title, "bold")))
        for name, left, right in _classes(a, b):
            found.add_row(name, *_cells(left, right))
        found.add_row("step, profiled", *_cells(a["profiled_ms"], b["profiled_ms"]))
        found.add_row("step", *_cells(a["step_ms"], b["step_ms"]))
        found.add_section()
    return found


def _side(text: str) -> dict[str, Any]:
    """A report, and its runs by key; only those of a provider where the text ends in one."""
    name, colon, provider = text.rpartition(":")
    chosen = provider if colon and provider in PROVIDERS else None
    path = Path(name if chosen else text)
    found = record.read(path)
    runs = {(run["batch"], run["mode"], run["provider"]): run for run in found["runs"]}
    if chosen:
        runs = {key: run for key, run in runs.items() if key[2] == chosen}
        if not runs:
            there = ", ".join(sorted({run["provider"] for run in found["runs"]}))
            raise ValueError(f"{path} has no run of {chosen}; it has {there}")
    return {"name": text, "record": found, "runs": runs}


def _pairs(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any], Mapping[str, Any]]]:
    """(title, run of A, run of B) of what both have: the same provider, or the only one of each."""
    only = [providers.pop() for side in (a, b) if len(providers := {key[2] for key in side["runs"]}) == 1]
    pairs = []
    for batch, mode, provider in a["runs"]:
        other = only[1] if len(only) == 2 else provider
        if run := b["runs"].get((batch, mode, other)):
            who = provider if other == provider else f"{provider}, {other}"
            pairs.append((f"batch {batch}, {mode}: {who}", a["runs"][batch, mode, provider], run))
    if not pairs:
        kinds = [", ".join(sorted({f"batch {k[0]} {k[1]} {k[2]}" for k in side["runs"]})) for side in (a, b)]
        raise ValueError(
            f"the reports have no run in common: A has {kinds[0]}; B has {kinds[1]}. To set two providers side by "
            "side, write FOLDER:bitsandbytes FOLDER:halfbyte"
        )
    return pairs


def _classes(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[tuple[str, float, float]]:
    """What is one class on one side, such as "q+k+v", is one on both."""
    names = [entry["class"] for run in (a, b) for entry in run["classes"]]
    whole = {part: name for name in names if "+" in name for part in name.split("+")}
    sides = []
    for run in (a, b):
        side: dict[str, float] = {}
        for entry in run["classes"]:
            name = whole.get(entry["class"], entry["class"])
            side[name] = side.get(name, 0.0) + entry["ms"]
        sides.append(side)
    return [(name, sides[0].get(name, 0.0), sides[1].get(name, 0.0)) for name in in_order(sides[1] | sides[0])]


def _cells(left: float, right: float) -> tuple[str, str, str, str]:
    ratio = f"{left / right:.2f}" if right and left else ""
    return number(left) if left else "", number(right) if right else "", f"{right - left:+.3f}", ratio


def _difference(a: Mapping[str, Any], b: Mapping[str, Any]) -> str:
    """What else differs between the reports than what was to be compared."""
    facts = [
        f"{name}: {x} and {y}"
        for name, x, y in (
            ("model", a["model"], b["model"]),
            ("context", a["context"], b["context"]),
            ("layers", a["layers"], b["layers"]),
            ("device", a["environment"]["device"], b["environment"]["device"]),
            ("torch", a["environment"].get("torch"), b["environment"].get("torch")),
        )
        if x != y
    ]
    return f"beware, they differ: {'; '.join(facts)}" if facts else "same model, context, device and torch"
