"""The settings that `quantize` takes for each format. Nothing here needs torch."""

from __future__ import annotations

from halfbyte.formats.nf4 import NF4
from halfbyte.formats.spec import FORMATS, Format

DEFAULT = NF4.name  # what `quantize` makes unless one says otherwise


def check_format(format: str) -> Format:
    """The description of a format. Raises ValueError unless it is one that we know."""
    known = FORMATS.get(format) if isinstance(format, str) else None
    if known is None:
        raise ValueError(f"format is {format!r}; known formats are {', '.join(map(repr, FORMATS))}")
    return known


def check_settings(
    format: str, block_size: int | None, group_size: int | None, nested: bool | None
) -> tuple[int, bool]:
    """The block or group size and whether scales are nested, defaults filled in.

    Raises ValueError if they clash, and TypeError for a `nested` that is none of True, False and None.
    """
    known = check_format(format)
    if nested is not None and not isinstance(nested, bool):
        raise TypeError(f"nested is {nested!r}; nested takes True, False or None, the format's default")
    given = {"block_size": block_size, "group_size": group_size}
    size = given.pop(known.size_name)
    for name, value in given.items():
        if value is not None:
            raise ValueError(f"{name} is for {_those(size_name=name)}; {format} takes {known.size_name}")
    if nested and not known.nests:
        raise ValueError(f"nested is for {_those(nests=True)}; {format} has scales of its own dtype")
    size = known.block_size if size is None else size
    known.check_block_size(size)
    return size, known.nests if nested is None else nested


def _those(**asked: object) -> str:
    """The names of all formats that are as asked."""
    names = [f.name for f in FORMATS.values() if all(getattr(f, key) == value for key, value in asked.items())]
    return " and ".join(filter(None, (", ".join(names[:-1]), *names[-1:])))
