"""The ceiling every memory-bound row is held against: how fast this machine copies, measured in the same run."""

from __future__ import annotations

import torch

from halfbyte.measure.timing import Timing, time_all


def copy_bandwidth(device: torch.device, rounds: int = 9) -> tuple[float, Timing]:
    """Gigabytes a second, read plus written, of torch's copy of one large tensor into another, and its timing.

    The tensors are far larger than any cache: 2 GiB on a GPU, 256 MiB on a CPU.
    """
    numel = 2**29 if device.type == "cuda" else 2**26
    source = torch.empty(numel, dtype=torch.float32, device=device).normal_()
    target = torch.empty_like(source)
    timing = time_all({"copy": lambda _: target.copy_(source)}, 1, device, rounds)["copy"]
    return 2 * source.nbytes / timing.median / 1e3, timing
