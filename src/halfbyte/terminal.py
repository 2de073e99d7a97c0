"""What goes to the terminal goes through here: text as it is, and tables that stay readable in narrow windows.

rich reads "[plots]" as markup and ":100:" as a picture unless it is told not to. `console` tells it, so that every
string, whoever wrote it, is printed as it is; styles are put on by `styled`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import rich.table
from rich.box import SIMPLE_HEAD
from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.padding import Padding
from rich.text import Text

if TYPE_CHECKING:
    from rich.progress import Progress


def console(*, stderr: bool = False) -> Console:
    """The terminal. It takes no markup."""
    return Console(stderr=stderr, markup=False, emoji=False)


def styled(*parts: str | tuple[str, str]) -> Text:
    """Text put together of plain strings and (string, style) pairs."""
    return Text.assemble(*parts)


def say(step: str) -> None:
    """What is going on, on stderr. No spinner: its thread would compete with what is timed."""
    print(f"{step} ...", file=sys.stderr, flush=True)


def progress(wanted: bool | None = None, *, of_bytes: bool = False) -> Progress:
    """A progress bar on stderr, gone when it is done. wanted: whether to show it; by default on a terminal only."""
    from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    amount = DownloadColumn() if of_bytes else MofNCompleteColumn()
    description = TextColumn("{task.description}", markup=False)
    screen = console(stderr=True)
    shown = screen.is_terminal if wanted is None else wanted
    columns = (BarColumn(20), amount, TimeRemainingColumn(compact=True), description)
    return Bar(*columns, console=screen, transient=True, disable=not shown)


class Table(rich.table.Table):
    """A table that keeps its words whole: columns narrow down to their longest word, and where even that does not fit
    each row becomes a few lines, "head value; head value"."""

    def __init__(self, *heads: str, **options: Any) -> None:
        settings: dict[str, Any] = {"box": SIMPLE_HEAD, "pad_edge": False, "header_style": "bold"}
        super().__init__(*heads, **(settings | options))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        wide = options.update(width=10_000)
        for column in self.columns:
            column.width = None  # which an earlier, narrower terminal may have set
        ranges = [self._measure_column(console, wide, column) for column in self.columns]
        room = options.max_width - self._extra_width
        if sum(each.minimum for each in ranges) > room:
            yield from self._stacked()
            return
        for column, width in zip(self.columns, _widths(ranges, room), strict=True):
            column.width = width - self._get_padding_width(column._index)
        yield from super().__rich_console__(console, options)

    def _stacked(self) -> Iterator[Any]:
        heads = _whole_heads([str(column.header) for column in self.columns])
        if self.title:
            yield Text(str(self.title), style="table.title")
        if heads[0]:
            yield Text(heads[0], style="table.header")
        for row, cells in zip(self.rows, zip(*(column.cells for column in self.columns), strict=True), strict=True):
            first, *others = (cell if isinstance(cell, Text) else Text(str(cell)) for cell in cells)
            facts = [Text(head and f"{head} ") + cell for head, cell in zip(heads[1:], others, strict=True) if cell]
            yield Text(style=row.style or "bold") + first
            if facts:
                yield Padding(Text("; ").join(facts), (0, 0, 0, 2))
            if row.end_section:
                yield ""
        if self.caption:
            yield Text(str(self.caption), style="table.caption")
        yield ""


def _widths(ranges: Sequence[Measurement], room: int) -> list[int]:
    """Each column's width: its longest word at least, and what is left to those that have more to say."""
    widths = [each.minimum for each in ranges]
    left = room - sum(widths)
    wanting = sorted(range(len(ranges)), key=lambda i: ranges[i].maximum - ranges[i].minimum)
    for place, i in enumerate(wanting):  # the column that wants least first, so that the others share what it leaves
        more = min(ranges[i].maximum - widths[i], left // (len(wanting) - place))
        widths[i] += more
        left -= more
    return widths


def _whole_heads(heads: Sequence[str]) -> list[str]:
    """Heads of one line: below "halfbyte\nms" stands "\n%", which means halfbyte's as well."""
    whole, above = [], ""
    for head in heads:
        top, newline, bottom = head.partition("\n")
        above = top or above
        whole.append(f"{above} {bottom}" if newline else head)
    return whole
