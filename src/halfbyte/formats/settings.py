"""The formats' names, and the settings that `quantize` takes for each. Nothing here needs torch."""

from __future__ import annotations

from halfbyte.formats import blockwise, grouped

FORMAT_NAMES = (*blockwise.FORMATS, grouped.NAME)


def check_format(format: str) -> None:
    """Raise ValueError unless `format` is one that we know."""
    if not isinstance(format, str) or format not in FORMAT_NAMES:
        raise ValueError(f"format is {format!r}; known formats are {', '.join(map(repr, FORMAT_NAMES))}")


def check_settings(
    format: str, block_size: int | None, group_size: int | None, nested: bool | None
) -> tuple[int, bool]:
    """The block or group size and whether scales are nested, defaults filled in.

    Raises ValueError if they clash, and TypeError for a `nested` that is none of True, False and None.
    """
    check_format(format)
    if nested is not None and not isinstance(nested, bool):
        raise TypeError(f"nested is {nested!r}; nested takes True, False or None, the format's default")
    if format == grouped.NAME:
        if block_size is not None or nested:
            raise ValueError("block_size and nested are for nf4 and fp4; int4 takes group_size")
        size = 128 if group_size is None else group_size
        grouped.check_group_size(size)
        return size, False
    if group_size is not None:
        raise ValueError(f"group_size is for int4; {format} takes block_size")
    size = 64 if block_size is None else block_size
    blockwise.check_block_size(format, size)
    return size, True if nested is None else nested
