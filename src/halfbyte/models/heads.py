"""Dense heads of accelerated models on a CPU: one row of x is multiplied by halfbyte's kernel.

A head is the largest weight of a small model, and torch reads it at half the speed of memory or less. Both products are
measured where a model is accelerated, and the head is left alone where torch's is as fast. On GPUs captured steps have
a kernel for it (outside.py).
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from halfbyte.kernels.common.slow import has_numba
from halfbyte.models.outside import dense_head, needs_gradients
from halfbyte.models.patch import patch, unpatch
from halfbyte.models.repacked import CACHE, least

GAIN = 0.9  # of torch's time, that ours takes at most
LEAST = 1 << 24  # bytes of a head; a smaller one lies in a cache, and takes little of a step


def apply(model: nn.Module) -> None:
    head = dense_head(model)
    if head is not None and head.weight.device.type == "cpu" and has_numba() and _is_faster(head):
        patch(forward, head)


def undo(model: nn.Module) -> None:
    for module in model.modules():
        unpatch(forward, module)


def forward(module: Any, x: Tensor) -> Tensor:
    weight, bias = module.weight, module.bias
    if not (needs_gradients(x, weight) or torch.is_autocast_enabled("cpu") or torch.compiler.is_compiling()):
        from halfbyte.kernels.head import cpu

        if cpu.supports(x, weight, bias):
            return cpu.head(x, weight, bias)
    return nn.Linear.forward(module, x)


def _is_faster(head: nn.Linear) -> bool:
    weight = head.weight.detach()
    return weight.nbytes >= LEAST and _measured(*weight.shape, weight.dtype, torch.get_num_threads())


@cache
def _measured(n: int, k: int, dtype: torch.dtype, threads: int) -> bool:
    """Whether one row of x takes less time by our kernel: for a weight of no more than a cache cannot hold."""
    from halfbyte.kernels.head import cpu

    x = torch.ones((1, k), dtype=dtype, device="cpu")
    weight = torch.ones((min(n, CACHE // (k * dtype.itemsize) + 1), k), dtype=dtype, device="cpu")
    if not cpu.supports(x, weight, None):
        return False
    with torch.no_grad():
        theirs, ours = least(lambda: nn.functional.linear(x, weight), lambda: cpu.head(x, weight, None))
    return ours < GAIN * theirs
