"""Texts are filled with what the records say. tests/test_docs.py holds this tree's own texts against its records."""

import pytest

from halfbyte import figures


def test_fill() -> None:
    text = "a\n<!-- figures: h200/x -->\nold\nolder\n<!-- end -->\nb <!-- figures: none\n"
    filled = figures.fill(text, {"h200/x": "new"})
    assert filled == "a\n<!-- figures: h200/x -->\nnew\n<!-- end -->\nb <!-- figures: none\n"
    assert figures.fill(filled, {"h200/x": "new"}) == filled
    with pytest.raises(ValueError, match="no record for the figures 'h200/x'; there are a, b"):
        figures.fill(text, {"b": "", "a": ""})


def test_results() -> None:
    """One text of every record, by device; summaries of a record are not repeated."""
    text = figures.results_page({"cpu/a": "A", "h200/b": "B", "h200/b-summary": "S", "h200/c": "C"})
    assert text.startswith("# All results\n")
    assert [line for line in text.splitlines() if line.startswith("#") or len(line) == 1] == [
        "# All results", "## cpu", "### cpu: a", "A", "## h200", "### h200: b", "B", "### h200: c", "C",
    ]  # fmt: skip
