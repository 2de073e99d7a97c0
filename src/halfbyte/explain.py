"""One number's way into 4 bits and back, step by step, as plain data: what `halfbyte explain` and docs/nf4.md show.

The steps are those of formats/, done on one number instead of a tensor, in the same
fp32 arithmetic: every rounding that the kernels do is done here.
"""

from __future__ import annotations

import math
import struct
from bisect import bisect_left
from dataclasses import dataclass
from itertools import pairwise

from halfbyte.formats.nested import dynamic_values
from halfbyte.formats.settings import DEFAULT, check_format
from halfbyte.formats.spec import Format, fp32


@dataclass(frozen=True)
class Candidate:
    """A nibble, its value, and the scaled weights from `low` to `high` that round to it."""

    nibble: int
    value: float
    low: float
    high: float


@dataclass(frozen=True)
class NestedExplanation:
    """A scale's way into one byte: centred = absmax - offset, scaled = centred / absmax2, and back.

    byte is the 8-bit code whose value (`code_value`) is nearest; absmax = code_value * absmax2 + offset comes back.
    """

    offset: float
    absmax2: float
    centred: float
    scaled: float
    byte: int
    code_value: float
    absmax: float
    result: float
    error: float


@dataclass(frozen=True)
class Explanation:
    """One number as 4 bits.

    scale: absmax for "nf4" and "fp4", absmax / 7 for "int4", a power of two for "mxfp4". scaled = value / scale, which
    the codebook's values surround (`candidates`, ascending). result = codebook value * scale, error = result - value.
    """

    format: str
    value: float
    absmax: float
    scale: float
    scaled: float
    candidates: tuple[Candidate, ...]
    nibble: int
    code_value: float
    result: float
    error: float
    nested: NestedExplanation | None

    @property
    def chosen(self) -> int:
        """The index of the chosen candidate."""
        return next(i for i, candidate in enumerate(self.candidates) if candidate.nibble == self.nibble)

    @property
    def scale_bytes(self) -> bytes:
        """The fp32 scale as it lies in memory, little-endian."""
        return struct.pack("<f", self.scale)


def explain(
    value: float, absmax: float, format: str = DEFAULT, *, offset: float | None = None, absmax2: float | None = None
) -> Explanation:
    """Follow `value` through `format`, in a block whose largest magnitude is `absmax`.

    offset, absmax2: the mean of all scales of the tensor, and the largest distance of a scale from it in its group of
    256. Both follow from the whole tensor; without them the scale is taken to lie halfway above a mean of 0.8 absmax.

    Raises ValueError for numbers that cannot be: not finite, or a value larger than its block's absmax.
    """
    spec = check_format(format)
    for name, number in (("value", value), ("absmax", absmax), ("offset", offset or 0.0), ("absmax2", absmax2 or 0.0)):
        if not math.isfinite(number) or abs(number) > 3.4e38:
            raise ValueError(f"{name} is {number}; a finite fp32 number is expected")
    if absmax <= 0:
        raise ValueError(f"absmax is {absmax}; it is the largest magnitude of a block and must be above 0")
    if abs(value) > absmax:
        raise ValueError(
            f"value {value} is larger than absmax {absmax}, the largest magnitude in its block; raise absmax"
        )
    value, absmax = fp32(value), fp32(absmax)
    scale = fp32(absmax / spec.largest)
    if spec.integers:
        return _explain_integers(spec, value, absmax, scale)
    if spec.has_exponents:
        return _explain_exponents(spec, value, absmax)
    scaled = fp32(value / scale)
    candidates = _candidates(spec)
    midpoints = [candidate.high for candidate in candidates[:-1]]
    chosen = candidates[bisect_left(midpoints, scaled)]  # on a midpoint the lower value wins
    result = fp32(chosen.value * scale)
    nested = _explain_nested(value, absmax, chosen.value, offset, absmax2) if spec.nests else None
    return Explanation(
        format, value, absmax, scale, scaled, candidates, chosen.nibble, chosen.value, result, result - value, nested
    )


def _explain_integers(format: Format, value: float, absmax: float, scale: float) -> Explanation:
    scaled = fp32(value / scale)
    largest, bias = int(format.largest), -int(format.codebook[0])
    candidates = tuple(Candidate(i + bias, float(i), i - 0.5, i + 0.5) for i in range(-largest, largest + 1))
    integer = max(-largest, min(largest, round(scaled)))  # round(): ties to even, as the kernels
    result = fp32(integer * scale)
    return Explanation(
        format.name, value, absmax, scale, scaled, candidates, integer + bias, float(integer), result, result - value,
        None,
    )  # fmt: skip


def _explain_exponents(format: Format, value: float, absmax: float) -> Explanation:
    scale = 2.0 ** max(math.frexp(absmax)[1] - 1 - format.largest_exponent, -127)
    scaled = value / scale  # exact
    rank = sum(abs(scaled) > threshold for threshold in format.thresholds)
    nibble = format.compared[rank] | (8 if math.copysign(1, scaled) < 0 else 0)
    result = format.codebook[nibble] * scale
    return Explanation(
        format.name, value, absmax, scale, scaled, _candidates(format), nibble, format.codebook[nibble], result,
        result - value, None,
    )  # fmt: skip


def _explain_nested(
    value: float, absmax: float, code_value: float, offset: float | None, absmax2: float | None
) -> NestedExplanation:
    offset = fp32(0.8 * absmax if offset is None else offset)
    centred = fp32(absmax - offset)
    absmax2 = fp32(2 * abs(centred) if absmax2 is None else absmax2)
    if abs(centred) > absmax2:
        raise ValueError(
            f"absmax2 is {absmax2:g}, yet this scale lies {centred:g} from the offset {offset:g}; absmax2 is the "
            "largest such distance in the group, so raise it"
        )
    scaled = fp32(centred / absmax2) if absmax2 else 0.0
    code = dynamic_values()
    byte = min(range(256), key=lambda i: abs(code[i] - scaled))
    absmax_back = fp32(fp32(code[byte] * absmax2) + offset)
    result = fp32(code_value * absmax_back)
    return NestedExplanation(offset, absmax2, centred, scaled, byte, code[byte], absmax_back, result, result - value)


def _candidates(format: Format) -> tuple[Candidate, ...]:
    values = [fp32(format.codebook[nibble]) for nibble in format.ascending]
    midpoints = [-math.inf, *(fp32(fp32(a + b) / 2) for a, b in pairwise(values)), math.inf]
    return tuple(
        Candidate(nibble, value, low, high)
        for nibble, value, low, high in zip(format.ascending, values, midpoints, midpoints[1:], strict=False)
    )
