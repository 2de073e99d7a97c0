"""NF4 as bitsandbytes stores it: sixteen values between the quantiles of a normal distribution.

Source: QLoRA, arXiv 2305.14314, and the behaviour of bitsandbytes 0.50.
"""

from __future__ import annotations

from halfbyte.formats.spec import BLOCK_SIZES, Format

NF4 = Format(
    name="nf4",
    codebook=(
        -1.0,
        -0.6961928009986877,
        -0.5250730514526367,
        -0.39491748809814453,
        -0.28444138169288635,
        -0.18477343022823334,
        -0.09105003625154495,
        0.0,
        0.07958029955625534,
        0.16093020141124725,
        0.24611230194568634,
        0.33791524171829224,
        0.44070982933044434,
        0.5626170039176941,
        0.7229568362236023,
        1.0,
    ),
    block_sizes=BLOCK_SIZES,
    block_size=64,
    nests=True,
    flushes=True,
    # Several are the fp32 number below the midpoint: bitsandbytes' source writes midpoints as decimals cut off after 16
    # digits, which a compiler rounds once, down, where two roundings by way of fp64 would reach the even neighbour.
    thresholds=(
        -0.8480964303016663,
        -0.6106328964233398,
        -0.4599952697753906,
        -0.33967941999435425,
        -0.23460739850997925,
        -0.13791173696517944,
        -0.045525018125772476,
        0.03979014977812767,
        0.1202552542090416,
        0.2035212516784668,
        0.2920137643814087,
        0.3893125355243683,
        0.5016633868217468,
        0.6427869200706482,
        0.8614783883094788,
    ),
    # The error of the rounded codebook is 2.5 times (fp16) and 1.7 times (bf16) below that of rounding it as it is, and
    # 3.4 and 2.7 times below that of rounding dense weights.
    factors={"float16": 1.677689552307129, "bfloat16": 1.4370059967041016},
)
