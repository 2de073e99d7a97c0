"""`halfbyte bench report`: what the records say, of benches and of profiles, put into README.md and docs.

What takes long to import is imported when the command runs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

RESULTS = "docs/results.md"
PREDICTIONS = "predictions.json"


def report(
    results: Annotated[Path, typer.Option(help="Where the records are.")] = Path("benchmarks/results"),
    root: Annotated[Path, typer.Option(help="The tree whose README.md and docs hold figures.")] = Path(),
    check: Annotated[bool, typer.Option("--check", help="Only say whether the texts agree with the records.")] = False,
) -> None:
    """Put the recorded figures into README.md and docs, and draw their plots."""
    print(write_figures(results, root, check))


def write_figures(results: Path, root: Path, check: bool) -> str:
    """Put the records under `results` into the texts and plots of the tree at `root`; returns in words what was done.

    check: write nothing. Raises ValueError then if a text does not agree with the records.
    """
    blocks = _blocks(results, None if check else root / "docs" / "figures")
    texts = {root / RESULTS: results_page(blocks)}
    blocks |= _predictions(results / PREDICTIONS)
    for path in [root / "README.md", *sorted((root / "docs").rglob("*.md"))]:
        if path not in texts:
            texts[path] = fill(path.read_text(encoding="utf-8"), blocks)
    stale = [path for path, text in texts.items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    told = ", ".join(map(str, stale))
    if check and stale:
        raise ValueError(f"figures in {told} are not those of the records; run: halfbyte bench report")
    for path in stale:
        path.write_text(texts[path], encoding="utf-8")
    return f"{len(blocks)} records; " + (f"wrote {told}" if stale else "texts agree with them")


def _blocks(results: Path, figures: Path | None) -> dict[str, str]:
    """The Markdown of every record, by device and bench; plots go to `figures`."""
    from halfbyte.bench import (
        attention,
        calls,
        engine_report,
        experts_report,
        nearest,
        pages,
        recover,
        search,
        serve,
        sweep,
        whole_models,
    )
    from halfbyte.bench import report as reports
    from halfbyte.measure import records
    from halfbyte.roofline import markdown as roofline
    from halfbyte.roofline import plot as roofline_plot

    kinds: dict[str, tuple[Callable[..., str], Callable[..., None] | None]] = {
        "puzzle": (reports.puzzle_markdown, None),
        "linear": (sweep.markdown, sweep.plot),
        "gradients": (sweep.markdown, sweep.plot),
        "search": (search.markdown, None),
        "nearest": (nearest.markdown, None),
        "attention": (attention.markdown, None),
        "pages": (pages.markdown, None),
        "experts": (experts_report.markdown, experts_report.plot),
        "decode": (whole_models.markdown, whole_models.plot),
        "generate": (calls.markdown, None),
        "train": (partial(whole_models.markdown, key="tokens"), None),
        "recover": (recover.markdown, None),
        "serve": (serve.markdown, None),
        "engine": (engine_report.markdown, None),
        "profile": (roofline.markdown, roofline_plot.roofline),
    }
    shorter = {
        "linear": sweep.summary, "decode": whole_models.summary, "train": whole_models.training_summary,
        "engine": engine_report.summary,
    }  # fmt: skip
    blocks: dict[str, str] = {}
    for path in sorted(results.glob("*/*.json")):
        record = records.read(path)
        name = f"{path.parent.name}/{path.stem}"
        text, plot = kinds.get(record["bench"], (reports.markdown_table, reports.plot))
        blocks[name] = text(record)
        if (short := shorter.get(record["bench"])) is not None:
            blocks[f"{name}-summary"] = short(record)
        if plot and figures is not None and (plot is not whole_models.plot or not whole_models.is_of_cpu(record)):
            plot(record, figures / f"{path.parent.name}-{path.stem}.png")
        if plot is sweep.plot and figures is not None:
            sweep.plot_against_dense(record, figures / f"{path.parent.name}-{path.stem}-against-dense.png")
    return blocks


def _predictions(path: Path) -> dict[str, str]:
    """The Markdown of what was predicted, which docs/results.md does not have: it is of what was measured."""
    from halfbyte.bench import predictions_report
    from halfbyte.measure import records

    return predictions_report.blocks(records.read(path)) if path.exists() else {}


def fill(text: str, blocks: Mapping[str, str]) -> str:
    """`text` with each block between `<!-- figures: NAME -->` and `<!-- end -->` put in anew.

    Raises ValueError where the text asks for a name that is not in `blocks`.
    """

    def block(match: re.Match[str]) -> str:
        name = match.group(2)
        if name not in blocks:
            raise ValueError(f"there is no record for the figures {name!r}; there are {', '.join(sorted(blocks))}")
        return f"{match.group(1)}\n{blocks[name]}\n{match.group(3)}"

    return re.sub(r"(<!-- figures: (\S+) -->)\n.*?(<!-- end -->)", block, text, flags=re.DOTALL)


def results_page(blocks: Mapping[str, str]) -> str:
    """The whole text of docs/results.md: every record's table, by device and bench. blocks: as for `fill`."""
    lines = [
        "# All results",
        "",
        "Every record under `benchmarks/results`, written by `halfbyte bench report`; nothing here is typed. How it is",
        "measured stands in [measuring.md](measuring.md), how to read a profile in [profiling.md](profiling.md).",
    ]
    device = ""
    for name, block in blocks.items():
        place, _, bench = name.partition("/")
        if bench.endswith("-summary"):  # of a record that has its own
            continue
        if place != device:
            lines += ["", f"## {place}"]
            device = place
        lines += ["", f"### {place}: {bench}", "", block]
    return "\n".join(lines) + "\n"
