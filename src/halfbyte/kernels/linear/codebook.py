"""The codebooks that tensor-core kernels look weights up in: sixteen values, rounded to 16 bits with little loss."""

from __future__ import annotations

import struct

import torch

from halfbyte.formats import blockwise, grouped

# What a codebook is multiplied by before it is rounded, so that all sixteen values fall close to numbers that exist in
# 16 bits. FP4's become exact and int4's are; NF4's error is 2.5 times (fp16) and 1.7 times (bf16) below that of
# rounding it as it is, and 3.4 and 2.7 times below that of rounding dense weights.
FACTORS = {
    ("nf4", torch.float16): 1.677689552307129,
    ("nf4", torch.bfloat16): 1.4370059967041016,
    ("fp4", torch.float16): 12.0,
    ("fp4", torch.bfloat16): 12.0,
    (grouped.NAME, torch.float16): 1.0,
    (grouped.NAME, torch.bfloat16): 1.0,
}


def _scaled(format: str, factor: float) -> bytes:
    values = range(-grouped.BIAS, grouped.BIAS) if format == grouped.NAME else blockwise.FORMATS[format].codebook
    return struct.pack("16f", *(value * factor for value in values))


# What kernels take: what a product must be multiplied by in the end, and the codebook times its factor as fp32 bytes.
UNIT_AND_CODEBOOK = {key: (1.0 / factor, _scaled(key[0], factor)) for key, factor in FACTORS.items()}
