"""What the planners need to know of a device, read once and kept."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec

import torch


@dataclass(frozen=True)
class DeviceFacts:
    """kind: "cuda" (NVIDIA), "hip" (AMD) or "host". capability: 90 for sm_90, or 0. sms: its multiprocessors."""

    kind: str
    capability: int = 0
    sms: int = 1
    shared_memory: int = 0

    @property
    def ptx(self) -> int:
        """The capability where kernels may hold PTX, and 0 where they may not (AMD, Triton's interpreter)."""
        return self.capability if self.kind == "cuda" else 0


HOST = DeviceFacts("host")


@cache
def facts_of(index: int) -> DeviceFacts:
    """The facts of CUDA (or ROCm) device number `index`; -1 stands for the host, where Triton can only interpret."""
    if index < 0:
        return HOST
    properties = torch.cuda.get_device_properties(index)
    if torch.version.hip:
        return DeviceFacts("hip", 0, properties.multi_processor_count)
    capability = 10 * properties.major + properties.minor
    shared: int = properties.shared_memory_per_block_optin  # type: ignore[attr-defined]  # torch forgot to declare it
    return DeviceFacts("cuda", capability, properties.multi_processor_count, shared)


@cache
def has_triton() -> bool:
    """True where Triton is installed; it is not imported to find out."""
    return find_spec("triton") is not None


@cache
def cpu_capability() -> str:
    """The vector instructions that torch uses on this CPU, in its words: "AVX512", "AVX2", "DEFAULT", ..."""
    return torch.backends.cpu.get_cpu_capability()
