"""A report in a folder: there whole, or not at all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from halfbyte.atomic import atomic_output
from halfbyte.roofline import page, plot, record
from halfbyte.roofline.run import Run

FILES = (record.NAME, "profile.csv", "profile.png", "profile.html")


def check(out: Path, overwrite: bool) -> None:
    """Raise before anything is measured if the report could not be written afterwards."""
    page.template()
    if out.exists() and not out.is_dir():
        raise FileExistsError(f"{out} is a file; a report needs a folder: give another name")
    held = {path.name for path in out.iterdir()} if out.is_dir() else set()
    if held and not overwrite:
        raise FileExistsError(f"{out} is not empty; give another name, or say that it may be replaced: --overwrite")
    if strange := sorted(held - set(FILES)):
        raise FileExistsError(f"{out} holds {strange[0]}, which no report does, so it is not replaced")


def write(out: Path, found: Mapping[str, Any], runs: Sequence[Run], overwrite: bool) -> str:
    """Write all files beside their place, and move them into it together; returns what could not be drawn, and why."""
    missing = ""
    check(out, overwrite)
    out.parent.mkdir(parents=True, exist_ok=True)
    with atomic_output(out, directory=True, overwrite=True, marker=record.NAME) as folder:
        (folder / record.NAME).write_text(record.dumps(found), encoding="utf-8")
        (folder / "profile.csv").write_text(record.to_csv([found]), encoding="utf-8")
        (folder / "profile.html").write_text(page.html(found, runs), encoding="utf-8")
        try:
            plot.roofline(found, folder / "profile.png")
        except ImportError as error:  # measured is measured
            missing = f"no profile.png: {error}"
    return missing
