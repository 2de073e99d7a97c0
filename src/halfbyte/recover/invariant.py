"""Products with 4-bit weights whose rows do not know how many they are.

The modules of an accelerated model call `halfbyte.linear`, which picks the fastest kernel for each number of rows, and
kernels sum in orders of their own. Here it is asked for `batch_invariant` in their place. Under a dispatch mode
halfbyte's functions become the operators `torch.ops.halfbyte`, which the mode sees; it belongs to one thread and ends
with its block. So the model stays as it is, whatever library its modules are of, and nobody else's products change.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class BatchInvariant(TorchDispatchMode):
    """Within, every `halfbyte.linear` is one with `batch_invariant=True`."""

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is torch.ops.halfbyte.linear.default:
            args = (*args[:-1], True)  # the last of its arguments says whether it is
        return func(*args, **(kwargs or {}))
