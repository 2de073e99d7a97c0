"""x @ W.T + bias in plain torch, of a W that is already dense: the definition, and what runs where no kernel does.

x [M, K], weight [N, K], bias [N] or None -> [M, N]. Bytes: the dense weight, written and read, besides the packed one.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

# Rows that "tiles" multiplies at once. Smaller ones would use less of the machine, larger ones waste more on few rows.
TILE = 64


def linear_exact(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The product in fp64, of the exact numbers; what errors are measured against."""
    return functional.linear(x.double(), weight.double(), None if bias is None else bias.double())


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """torch's own product. Autocast has no say: the dtypes are those of the arguments."""
    kind = x.device.type
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        with torch.autocast(kind, enabled=False):
            return functional.linear(x, weight, bias)
    return functional.linear(x, weight, bias)


def linear_in_tiles(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """torch's product of `TILE` rows at a time, the last tile filled up with zeros.

    A row's bits are the same however many rows there are and whatever they hold, as long as the library behind torch
    computes all rows of a product of one and the same size in one order. cuBLAS and MKL do; neither promises it.
    """
    m = len(x)
    padded = functional.pad(x, (0, 0, 0, -m % TILE))
    out = x.new_empty((len(padded), len(weight)))
    for first in range(0, len(padded), TILE):
        out[first : first + TILE] = linear(padded[first : first + TILE], weight, bias)
    return out[:m]
