"""INT4 groups as compressed-tensors stores them ("pack-quantized", symmetric): integers and a scale for every group.

A weight is [N, K]. Eight integers share an int32 word along K, element i in bits 4i to 4i + 3, stored as value + 8.
Each row is cut into groups of G along K, and each group has one scale, in the weight's own dtype.

    value = (nibble - 8) * scale[n, k // G]        in fp32, then one rounding to the output dtype

Written by us: scale = max|group| / 7, q = clamp(round(w / scale), -7, 7), both in fp32, the scale rounded to its dtype
first; a group of zeros has scale 0 and integers 0. Read from others: -8 to 7.
"""

from __future__ import annotations

from halfbyte.formats.spec import Format

BIAS = 8  # what is added to an integer, which makes it a nibble

INT4 = Format(
    name="int4",
    codebook=tuple(float(nibble - BIAS) for nibble in range(16)),
    low_first=True,
    words=True,
    along_k=True,
    block_sizes=(32, 64, 128),
    block_size=128,
    size_name="group_size",
    scale_dtype=None,
    largest=7.0,
    integers=True,
    factors={"float16": 1.0, "bfloat16": 1.0},  # exact
)
