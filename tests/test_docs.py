"""README.md and docs/: examples are run and compared, links lead somewhere, figures are those of the records.

In a file, the ```python blocks are one session, in which examples after >>> are doctests. In a ```console block, what
stands below `$ halfbyte ...` is what the command prints at 80 columns; a line `...` stands for any lines.
"""

from __future__ import annotations

import doctest
import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from halfbyte.cli import app

ROOT = Path(__file__).parents[1]
TEXTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
texts = pytest.mark.parametrize("text", TEXTS, ids=lambda path: str(path.relative_to(ROOT)))


def blocks(text: Path, language: str) -> list[tuple[int, str]]:
    """(number of its first line, content) of each fenced block of `language`."""
    source = text.read_text(encoding="utf-8")
    found = re.finditer(rf"^```{language}\n(.*?)^```$", source, re.DOTALL | re.MULTILINE)
    return [(source.count("\n", 0, match.start(1)), match.group(1)) for match in found]


@texts
def test_python(text: Path) -> None:
    parser, runner = doctest.DocTestParser(), doctest.DocTestRunner(verbose=False)
    names: dict[str, object] = {"__name__": "__main__"}
    output: list[str] = []
    for line, block in blocks(text, "python"):
        test = parser.get_doctest(block, names, text.name, str(text), line)
        assert test.examples, f"{text}, line {line}: write examples as >>> so that they are checked"
        runner.run(test, out=output.append, clear_globs=False)
        names = test.globs
    assert not runner.summarize(verbose=False).failed, "".join(output)


@texts
def test_console(text: Path) -> None:
    for line, block in blocks(text, "console"):
        for command, expected in re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", block, re.MULTILINE):
            program, *arguments = shlex.split(command)
            assert program == "halfbyte", f"{text}, line {line}: {command}"
            result = CliRunner(env={"COLUMNS": "80", "TERM": "dumb"}).invoke(app, arguments)
            assert result.exit_code == 0, result.output
            pattern = "\n".join(map(_pattern, expected.rstrip("\n").split("\n")))
            printed = "\n".join(row.rstrip() for row in result.stdout.split("\n")).rstrip("\n")
            assert re.fullmatch(pattern, printed, re.DOTALL), f"{text}, line {line}: {command} prints\n{printed}"


def _pattern(line: str) -> str:
    return ".*" if line == "..." else re.escape(line)


@texts
def test_links(text: Path) -> None:
    """Files and headings of this tree that are linked to are there."""
    for target in re.findall(r"\]\(([^)\s]+)\)", text.read_text(encoding="utf-8")):
        if target.startswith("https://"):
            continue
        name, _, heading = target.partition("#")
        path = (text.parent / name).resolve() if name else text
        assert path.exists(), f"{text} links to {target}"
        if heading:
            titles = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
            assert heading in {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}, target


def test_figures_are_those_of_the_records(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    result = CliRunner().invoke(app, ["bench", "report", "--check"])
    assert result.exit_code == 0, result.output
