"""Options that several benches share, and what is made of their values."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from halfbyte.options import usage

Shapes = Annotated[str | None, typer.Option(help="Comma-separated weights, such as 4096x4096,14336x4096.")]
Dtype = Annotated[str, typer.Option(help="Of the dense weights: float16, bfloat16 or float32.")]
Format = Annotated[str, typer.Option(help="nf4 or fp4.")]
Nested = Annotated[bool, typer.Option("--nested/--flat", help="Scales in one byte, or in four.")]
Rounds = Annotated[int, typer.Option(min=3, help="Samples of each provider; medians are reported.")]
Out = Annotated[Path | None, typer.Option(help="Keep the record as a file in OUT/<device>.")]


def check_dtype(dtype: str) -> None:
    if dtype not in ("float16", "bfloat16", "float32"):
        raise typer.BadParameter(f"dtype {dtype!r} is not float16, bfloat16 or float32")


def check_short_dtype(dtype: str) -> None:
    if dtype not in ("float16", "bfloat16"):
        raise typer.BadParameter(f"dtype {dtype!r} is not float16 or bfloat16")


def models_of(text: str) -> list[str]:
    """The names of a comma-separated list, each of a model that there is."""
    from halfbyte.measure.models import check

    names = [name.strip() for name in text.split(",")]
    with usage():
        check(names)
    return names


def shapes_of(text: str | None) -> Sequence[tuple[int, int]]:
    """[(N, K), ...] of "NxK,NxK"."""
    if text is None:
        return ()
    shapes = []
    for part in text.split(","):
        sides = part.lower().replace("×", "x").split("x")
        if len(sides) != 2 or not all(side.strip().isdigit() and int(side) > 0 for side in sides):
            raise typer.BadParameter(f"{part!r} is not a shape; write 4096x4096, several with commas")
        if int(sides[0]) * int(sides[1]) % 2:
            raise typer.BadParameter(f"{part!r} has an odd number of weights, which not every peer takes")
        shapes.append((int(sides[0]), int(sides[1])))
    return shapes
