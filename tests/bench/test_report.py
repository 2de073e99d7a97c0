"""Tables, plots and texts come out of records, wrong results marked as such."""

from __future__ import annotations

from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from halfbyte.bench import report

PUZZLE = {
    "bench": "puzzle",
    "environment": {
        "device": "NVIDIA H200",
        "driver": "580.95",
        "date": "2026-11-20",
        "torch": "2.11",
        "commit": "abc",
    },
    "options": ["2048×8192 float16", "1024×4096 bfloat16"],
    "seconds": {"unsloth": [0.4, 0.2], "halfbyte": [0.2, 0.1]},
    "score": 14,
    "of": 14,
}


@pytest.fixture
def fixed(record: dict[str, Any]) -> dict[str, Any]:
    """The record, with times that are known."""
    for row in record["rows"]:
        if "error" not in row:
            slow = 1 if row["provider"] == "halfbyte" else 2
            row |= {"median_us": 150.0 * slow, "p20_us": 140.0, "p80_us": 160.0, "gb_per_s": 4.0, "of_copy": 0.4}
    record["environment"] |= {"device": "A CPU", "date": "2026-11-20", "commit": "abc", "threads": 2}
    return record


def test_terminal_table(fixed: dict[str, Any]) -> None:
    console = Console(width=120, record=True, file=StringIO())
    console.print(report.terminal_table(fixed))
    text = console.export_text()
    assert "dequantize, nf4 nested, bfloat16, A CPU" in text
    assert "copy 10 GB/s; wall clock of cold calls, medians" in text
    assert text.count("150.0") == text.count("1.00") == 2
    assert text.count("300.0") == text.count("2.00") == 3
    assert text.count("wrong: 6 of 6 values differ") == 1


def test_markdown_table(fixed: dict[str, Any]) -> None:
    lines = report.markdown_table(fixed).splitlines()
    assert lines[:4] == [
        "| weight | halfbyte, µs | peft, µs | bitsandbytes, µs | GB/s | of copy | × bitsandbytes |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
        "| 2×3 | 150.0 | 300.0 | 300.0 | 4 | 40% | **2.00** |",
        "| 4×6 | 150.0 | wrong | 300.0 | 4 | 40% | **2.00** |",
    ]
    assert lines[-1].startswith("<sub>A CPU, 2 threads, 2026-11-20, torch ")
    assert lines[-1].endswith("; copy 10 GB/s; commit abc.</sub>")


def test_nothing_is_claimed_when_ours_is_wrong(fixed: dict[str, Any]) -> None:
    for row in fixed["rows"]:
        if row["provider"] == "halfbyte":
            for name in ("median_us", "p20_us", "p80_us", "gb_per_s", "of_copy"):
                del row[name]
            row["error"] = "all of it"
    table = report.markdown_table(fixed)
    assert table.count("wrong") == 3
    assert "**" not in table


def test_puzzle_markdown() -> None:
    lines = report.puzzle_markdown(PUZZLE).splitlines()
    assert lines[2] == "| 2048×8192 float16 | 0.400 | 0.200 | 2.00 |"
    assert lines[4] == "| together | 0.600 | 0.300 | **2.00** |"
    assert lines[-1].startswith("Points: 14 of 14. <sub>NVIDIA H200, driver 580.95, 2026-11-20, torch 2.11; commit")


def test_plot(fixed: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "figures" / "plot.png"
    report.plot(fixed, path)
    assert path.read_bytes().startswith(b"\x89PNG")
