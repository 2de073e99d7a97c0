"""The weights that tests make of every registered format: a new one takes part by being registered."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

import halfbyte as hb
from halfbyte.formats.spec import FORMATS

# Format, block size, nested: the usual blocks, nested where scales may be; and the smallest blocks, with plain scales.
KINDS = list(
    dict.fromkeys(
        kind
        for name, spec in sorted(FORMATS.items())
        for kind in ((name, spec.block_size, spec.nests), (name, spec.block_sizes[0], False))
    )
)
kinds = pytest.mark.parametrize(("format", "size", "nested"), KINDS)


def options_of(format: str, size: int, nested: bool) -> dict[str, Any]:
    """What `quantize` must be told to make such a weight."""
    spec = FORMATS[format]
    return {spec.size_name: size} | ({"nested": nested} if spec.nests else {})


def quantize(weight: Tensor, format: str, size: int, nested: bool) -> hb.QuantizedWeight:
    return hb.quantize(weight, format, **options_of(format, size, nested))
