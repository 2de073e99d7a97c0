"""FP4 as bitsandbytes stores it: a sign, two exponent bits and a mantissa bit, over 12 so that the largest is 1.

bitsandbytes' CUDA and CPU code disagree on the last digits of the midpoints and on the sign of zero. Source: the
behaviour of bitsandbytes 0.50.
"""

from __future__ import annotations

from halfbyte.formats.spec import BLOCK_SIZES, Format

_MAGNITUDES = (0.0, 0.0052083334885537624, 2 / 3, 1.0, 1 / 3, 0.5, 1 / 6, 0.25)  # written as the fp32 quotients
_NEGATIVE = tuple(-value for value in _MAGNITUDES[1:])

FP4 = Format(
    name="fp4",
    codebook=(*_MAGNITUDES, 0.0, *_NEGATIVE),
    cuda_codebook=(*_MAGNITUDES, -0.0, *_NEGATIVE),
    block_sizes=BLOCK_SIZES,
    block_size=64,
    nests=True,
    flushes=True,
    signed_magnitude=True,
    ascending=(11, 10, 13, 12, 15, 14, 9, 0, 8, 1, 6, 7, 4, 5, 2, 3),
    thresholds=(
        0.0026041700039058924,
        0.0859375,
        0.2083333283662796,
        0.2916666567325592,
        0.4166666865348816,
        0.5833330154418945,
        0.8333333134651184,
    ),
    factors={"float16": 12.0, "bfloat16": 12.0},  # exact
)
