"""MXFP4 of the OCP Microscaling formats: E2M1 values in blocks of 32 along K that share a scale, a power of two.

A nibble is a sign, two exponent bits and a mantissa bit. A scale is one byte, E8M0. The first weight of a byte is in
its low nibble, as gpt-oss and torchao store it.

    scale = 2 ** (floor(log2(max|block|)) - 2)          2 ** -127 at least, also for a block of zeros
    nibble = weight / scale, rounded to nearest even, at most 6

A block with a NaN has scale NaN and nibbles 0. Infinity has the exponent 128, so it comes back as infinity.
Source: OCP Microscaling Formats (MX) Specification 1.0, sections 5.3.3, 5.4.1 and 6.3.
"""

from __future__ import annotations

from halfbyte.formats.spec import E8M0, Format

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)

MXFP4 = Format(
    name="mxfp4",
    codebook=(*_MAGNITUDES, *(-value for value in _MAGNITUDES)),
    low_first=True,
    along_k=True,
    block_sizes=(32,),
    block_size=32,
    scale_dtype="uint8",
    scale_encoding=E8M0,
    largest=6.0,
    signed_magnitude=True,
    # What lies above one takes the larger value. A tie takes the even nibble: where that is the upper one, the
    # threshold is the fp32 number below the midpoint.
    thresholds=(0.25, 0.75 - 2**-24, 1.25, 1.75 - 2**-23, 2.5, 3.5 - 2**-22, 5.0),
    factors={"float16": 1.0, "bfloat16": 1.0},  # exact
)
