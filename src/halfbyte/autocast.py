"""What torch.autocast does to a linear layer: x, weight and bias are cast to its dtype, and the product has it.

`halfbyte.linear` takes the dtypes of its arguments as they are. Modules that stand in the place of torch.nn.Linear ask
here first.
"""

from __future__ import annotations

import torch
from torch import Tensor


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """The dtype to which autocast casts an x that a linear layer is given here, or None where it leaves x alone."""
    if not isinstance(x, Tensor):
        return None  # the product says what it accepts, as of float64 and integers, which are not cast either
    kind = x.device.type
    if not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
        return None
    return torch.get_autocast_dtype(kind) if x.is_floating_point() and x.dtype is not torch.float64 else None


def cast(x: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """x and bias as autocast hands them to a product. Their gradients come back in the dtypes that they have."""
    dtype = autocast_dtype(x)
    return (x, bias) if dtype is None else (x.to(dtype), None if bias is None else bias.to(dtype))
