"""The record of predictions as people read it, in Markdown and in the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from halfbyte.measure.report import line
from halfbyte.terminal import Table

FORMATS = {"nf4": "NF4, blocks of 64, nested scales", "int4": "INT4, groups of 128"}
BRANDS = ("NVIDIA ", "GeForce ", "Tesla ")


def blocks(record: Mapping[str, Any]) -> dict[str, str]:
    """Markdown by name: a table for each format, the dense way's, that of errors, and that of parts of a GPU."""
    found = {f"predictions/{name}": _markdown(*_of_format(record, name)) for name in FORMATS}
    found["predictions/dense"] = _markdown(*_of_dense(record))
    facts = record["environment"]
    sign = f"{facts['date']}; commit {facts['commit']}.</sub>"
    texts = {name: f"{text}\n\n<sub>Predicted, not measured; {sign}" for name, text in found.items()}
    errors = f"{_markdown(*_errors(record))}\n\n<sub>Predicted times over measured ones; {sign}"
    parts = f"{_markdown(*_parts(record))}\n\n<sub>Measured; {sign}"
    return texts | {"predictions/errors": errors, "predictions/parts": parts}


def terminal_tables(record: Mapping[str, Any]) -> list[Table]:
    named = {f"predicted: {title}": _of_format(record, name) for name, title in FORMATS.items()}
    named |= {"predicted: the dense way": _of_dense(record), "predicted over measured": _errors(record)}
    named |= {"a multiprocessor's GB/s, measured": _parts(record)}
    tables = []
    for title, (header, lines) in named.items():
        if not lines:
            continue
        table = Table(title=title)
        for i, heading in enumerate(header):
            table.add_column(heading, justify="right" if i >= 2 else "left")
        for cells in lines:
            table.add_row(*cells)
        tables.append(table)
    return tables


def _of_format(record: Mapping[str, Any], format: str) -> tuple[list[str], list[list[str]]]:
    """Heading and lines: µs and share of the bandwidth by GPU, weight and rows of x."""
    rows = [row for row in record["rows"] if row["format"] == format]
    header = ["GPU", "weight", "kernel", *(f"M = {m}" for m in _counts(rows))]
    lines = []
    for (gpu, case), cells in _by_weight(rows).items():
        kernels = list(dict.fromkeys(row["kernel"] for row in cells))
        times = [f"{_short(row['microseconds'])} ({row['of_bandwidth']:.0%})" for row in cells]
        lines.append([short_name(gpu), case, ", ".join(kernels), *times])
    return header, lines


def _of_dense(record: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    rows = [row for row in record["rows"] if row["format"] == next(iter(FORMATS))]
    header = ["GPU", "weight", *(f"M = {m}" for m in _counts(rows))]
    weights = _by_weight(rows).items()
    lines = [
        [short_name(gpu), case, *(_short(row["dense_microseconds"]) for row in cells)] for (gpu, case), cells in weights
    ]
    return header, lines


def _errors(record: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    header = ["measured on", "SMs", "kernel", "products", "predicted / measured, median", "error, median"]
    lines = [
        [
            short_name(row["device"]), str(row["sms"]), row["kernel"], f"{row['products']:,}",
            f"{row['median_ratio']:.3f}", f"{row['median_error']:.1%}",
        ]
        for row in record["errors"]
    ]  # fmt: skip
    return header, lines


def _parts(record: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """GB/s of a multiprocessor, by how many there are."""
    rows = record["parts"]
    counts = sorted({sms for row in rows for sms in row["sms"]})
    header = ["measured on", "weight", "M", *(f"{sms} SMs" for sms in counts)]
    lines = []
    for row in rows:
        speeds = dict(zip(row["sms"], row["gigabytes_per_s"], strict=True))
        cells = [f"{speeds[sms]:.1f}" if sms in speeds else "" for sms in counts]
        lines.append([short_name(row["device"]), f"{row['case']}, {row['format'].upper()}", str(row["m"]), *cells])
    return header, lines


def short_name(gpu: str) -> str:
    """Such as "RTX 4090"."""
    for brand in BRANDS:
        gpu = gpu.replace(brand, "")
    return gpu.removesuffix(" GPU")


def _counts(rows: Sequence[Mapping[str, Any]]) -> list[int]:
    return list(dict.fromkeys(row["m"] for row in rows))


def _by_weight(rows: Sequence[Mapping[str, Any]]) -> dict[tuple[str, str], list[Mapping[str, Any]]]:
    found: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in rows:
        found.setdefault((row["gpu"], row["case"]), []).append(row)
    return found


def _short(microseconds: float) -> str:
    return f"{microseconds:,.1f}" if microseconds < 100 else f"{microseconds:,.0f}"


def _markdown(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    words = [heading in ("GPU", "weight", "kernel", "measured on") for heading in header]
    return "\n".join([line(header), line(["---" if word else "---:" for word in words]), *map(line, lines)])
