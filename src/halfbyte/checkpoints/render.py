"""What the command line prints of a converted checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING

from halfbyte.terminal import Table, styled

if TYPE_CHECKING:
    from rich.console import Console

    from halfbyte.checkpoints.stream import Summary


def summary(console: Console, summary: Summary) -> None:
    """A converted checkpoint: every layer, then the sizes."""
    measured = any(layer.relative_error is not None for layer in summary.layers)
    table = Table("layer", "shape", *(("error", "largest") if measured else ()), "MB")
    for column in table.columns[1:]:
        column.justify = "right"
    for layer in summary.layers:
        errors = (f"{layer.relative_error:.4f}", f"{layer.max_error:.2g}") if layer.relative_error is not None else ()
        table.add_row(
            layer.name.removesuffix(".weight"),
            "x".join(map(str, layer.shape)),
            *errors,
            f"{layer.bytes_after / 1e6:.2f}",
        )
    console.print(table)
    if measured:
        console.print("error: norm of the difference over norm of the weight; largest: of all weights\n")
    for name in summary.skipped:
        console.print(styled(("left as it was", "yellow"), f": {name}, which is not made of whole blocks or groups"))
    if summary.experts:
        size = f"{_count(len(summary.experts), 'weight')} of experts, {_bytes(summary.experts_bytes)}"
        why = "they were to stay so, or are of a kind that nothing loads in 4 bits"
        console.print(styled(("left dense", "yellow"), f": {size}; {why}"), highlight=False)
    would, about = ("would be ", "about ") if summary.dry_run else ("", "")
    ratio = summary.bytes_before / max(summary.bytes_after, 1)
    change = f"{ratio:.2f} times smaller" if ratio >= 1 else f"{1 / ratio:.2f} times larger"
    console.print(
        styled(
            f"{_count(len(summary.layers), 'weight')} {would}converted, ",
            f"{_count(summary.copied, 'tensor')} {would}copied as before\n{_bytes(summary.bytes_before)} -> {about}",
            (_bytes(summary.bytes_after), "bold"),
            f", {change}",
        ),
        highlight=False,
    )
    if measured:
        worst = max(summary.layers, key=lambda layer: layer.relative_error or 0.0)
        console.print(
            f"largest error {worst.relative_error:.4f}, in {worst.name.removesuffix('.weight')}", highlight=False
        )
    if summary.dry_run:
        console.print(f"files: {', '.join(summary.files)}", highlight=False)
        console.print(f"nothing was written to {summary.destination}: --dry-run", soft_wrap=True, highlight=False)
    else:
        console.print(f"written to {summary.destination}", soft_wrap=True, highlight=False)


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _bytes(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.2f} MB"
