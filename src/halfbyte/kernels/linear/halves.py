"""x in bf16 on GPUs from before Ampere, whose tensor cores know fp16 alone.

Each row of x becomes fp16 times a power of two, its own, so that the largest number of the row lies between 1/2 and 1.
Conversion is then exact for every number down to 2^-14 of that one, and off by 2^-25 of it at most elsewhere. The
product adds up in fp32 and is rounded to fp16, which has three bits more than bf16. It overflows only where the
absolute weights of a row of W add up to more than 65504, which no trained weight comes near.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

LEAST, MOST = 2, 254  # exponents of factors, as fp32 stores them: they and their inverses are normal numbers
NOT_FINITE, OF_ONE = 255, 127


def multiply(x: Tensor, bias: Tensor | None, product: Callable[[Tensor], Tensor]) -> Tensor:
    """product(x) + bias in bf16, for a product that gets and gives fp16 and is linear in every row.

    x [..., K] bf16, of any strides, K > 0; bias [N] bf16 or None. Rows do not depend on each other. A row with an
    infinite number or NaN has the results of such a row.
    """
    exponent = (x.abs().amax(-1, keepdim=True).float().view(torch.int32) >> 23) + 1  # of a power of two above
    exponent = torch.where(exponent > NOT_FINITE, OF_ONE, exponent).clamp(LEAST, MOST)
    factor = (exponent << 23).view(torch.float32)
    found = product((x / factor).half()).float().mul_(factor)
    return (found if bias is None else found.add_(bias)).bfloat16()
