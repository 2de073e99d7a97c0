"""What the planners need to know of a device, read once and kept."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

MOST_CLUSTER = 8  # CTAs of a cluster, everywhere clusters exist


@dataclass(frozen=True)
class DeviceProperties:
    """kind: "cuda" (NVIDIA), "hip" (AMD) or "host". capability: 90 for sm_90, or 0. sms: its multiprocessors."""

    kind: str
    capability: int = 0
    sms: int = 1
    shared_memory: int = 0

    @property
    def ptx(self) -> int:
        """The capability where kernels may hold PTX, and 0 where they may not (AMD, Triton's interpreter)."""
        return self.capability if self.kind == "cuda" else 0

    def clusters(self, size: int) -> int:
        """How many clusters of 2 to 8 CTAs run at once at least, one CTA on each multiprocessor; 0 for other sizes.

        Those of a cluster are neighbours: two of any pair, more of a group of 16 or 18, one of which may have lost half
        of its own. An H200 says 66, 39, 30, 22, 17, 15, 15.
        """
        if not 2 <= size <= MOST_CLUSTER:
            return 0
        groups = max(0, self.sms // 16 - 1) * (16 // size) + 8 // size
        return self.sms // 2 if size == 2 else min(groups, self.sms // size)


HOST = DeviceProperties("host")


@cache
def properties_of(index: int) -> DeviceProperties:
    """Those of CUDA (or ROCm) device number `index`; -1 stands for the host, where Triton can only interpret."""
    if index < 0:
        return HOST
    properties = torch.cuda.get_device_properties(index)
    if torch.version.hip:
        return DeviceProperties("hip", 0, properties.multi_processor_count)
    capability = 10 * properties.major + properties.minor
    shared: int = properties.shared_memory_per_block_optin  # type: ignore[attr-defined]  # torch forgot to declare it
    return DeviceProperties("cuda", capability, properties.multi_processor_count, shared)


# Multiprocessors of a common GPU of each target (T4, A100, A40, RTX 4090, H100 and H200, B200, RTX 5090), and the most
# shared memory of a block.
_TARGETS = {
    75: (40, 65536), 80: (108, 166912), 86: (84, 101376), 89: (128, 101376), 90: (132, 232448), 100: (148, 232448),
    120: (170, 101376),
}  # fmt: skip


def properties_for(target: str, sms: int | None = None) -> DeviceProperties:
    """The properties of an NVIDIA GPU that is not here, by its target, such as "sm_90".

    sms: its multiprocessors; by default those of a common GPU. Raises ValueError for a target that is not known.
    """
    known = {f"sm_{capability}": capability for capability in _TARGETS}
    if target not in known:
        raise ValueError(f"target is {target!r}; known targets are {', '.join(known)}")
    if sms is not None and sms < 1:
        raise ValueError(f"sms is {sms}; a GPU has one multiprocessor or more")
    usual, shared = _TARGETS[known[target]]
    return DeviceProperties("cuda", known[target], sms or usual, shared)


@cache
def cpu_capability() -> str:
    """The vector instructions that torch uses on this CPU, in its words: "AVX512", "AVX2", "DEFAULT", ..."""
    return torch.backends.cpu.get_cpu_capability()
