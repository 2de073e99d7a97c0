"""Two formats that nobody uses, registered as any other would be: kernels know formats by their description alone."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from halfbyte.formats.spec import FORMATS, Format, register

# E2M1 over 1: its midpoints lie beyond the unit interval, and its high bit is a sign.
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)

TOYS = (
    Format(
        "toy-floats", (*_MAGNITUDES, *(-value for value in _MAGNITUDES)), (32, 64), 32, low_first=True,
        scale_dtype="float16", largest=6.0, signed_magnitude=True,
    ),
    Format(
        "toy-shuffled", (0.3, -1.0, 0.9, -0.7, 0.0, 1.0, -0.1, 0.1, 0.2, -0.2, 0.5, -0.5, 0.7, -0.3, 0.4, -0.4),
        (32, 64), 32, low_first=True, scale_dtype="float16",
    ),
)  # fmt: skip


@pytest.fixture(params=TOYS, ids=lambda toy: toy.name)
def toy(request: pytest.FixtureRequest) -> Iterator[Format]:
    """A format that is known while the test runs."""
    yield register(request.param)
    del FORMATS[request.param.name]
