"""Products that are ready: planned, compiled, and with their arguments in place but for x, bias and out.

To plan and to gather what a launch needs takes several times as long as the launch, and is the same for every token. A
thread has products of its own, and they are known by addresses, sizes and dtypes, never by tensors: nothing is kept
alive, and a weight whose memory has moved is another weight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

import torch
from torch import Tensor

from halfbyte.formats.weight import QuantizedWeight
from halfbyte.kernels.common.driver import prepared
from halfbyte.kernels.linear.operands import Addresses, Operands, addresses, operands_of

# The stream, the addresses of x, bias (0: none) and out, and how many rows x has.
Product = Callable[[int, int, int, int, int], None]
# The stream, the address of x, and for each weight those of bias (0: none) and out.
GroupProduct = Callable[[int, int, Iterable[int]], None]


class Plan(Protocol):
    def tiles(self, m: int) -> int: ...


def ready(
    make: Callable[..., Product], device: torch.device, m: int, operands: Operands, weight: Addresses, plan: Plan
) -> Product:
    """A kernel's product with a weight on the current device, of m rows and all that are as many tiles under `plan`."""
    key = (make, device, plan.tiles(m), operands, weight, plan)
    return prepared(key, lambda: make(device, m, operands, weight, plan))


def run(
    make: Callable[..., Product], x: Tensor, q: QuantizedWeight, bias: Tensor | None, out: Tensor, plan: Plan
) -> None:
    """out = x @ W.T + bias under a plan of the caller's."""
    m, index = len(x), x.get_device()
    product = ready(make, x.device, m, operands_of(x, q, bias), addresses(q), plan)
    stream = torch._C._cuda_getCurrentRawStream(index)
    product(stream, x.data_ptr(), 0 if bias is None else bias.data_ptr(), out.data_ptr(), m)
