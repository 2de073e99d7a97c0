"""What the planners need to know of a device, read once and kept."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any, NamedTuple

import torch

from halfbyte.kernels.common import gpus

MOST_CLUSTER = 8  # CTAs of a cluster, everywhere clusters exist
HOPPER = 90


class Rates(NamedTuple):
    """Of a device, over those of the H200 that the constants of planners come from. cores: clock times
    multiprocessors."""

    bandwidth: float = 1.0
    clock: float = 1.0
    cores: float = 1.0
    teraflops: float = 1.0
    l2: float = 1.0


@dataclass(frozen=True)
class DeviceProperties:
    """kind: "cuda" (NVIDIA), "hip" (AMD) or "host". capability: 90 for sm_90, or 0. sms: its multiprocessors.

    shared_memory: the most of a block, bytes. bandwidth: of memory, GB/s. clock: MHz. l2_bytes: of the L2 cache.
    teraflops: dense products of 16 bits on tensor cores, sums in fp32, TFLOP/s. Of an NVIDIA GPU these four are by
    default what a common one of the capability has; of others 0, which stands for unknown. fitted: estimates are those
    of the H200, whatever the device has.
    """

    kind: str
    capability: int = 0
    sms: int = 1
    shared_memory: int = 0
    bandwidth: float = 0.0
    clock: float = 0.0
    l2_bytes: int = 0
    teraflops: float = 0.0
    fitted: bool = False

    def __post_init__(self) -> None:
        if self.kind != "cuda":
            return
        gpu = gpus.nearest(self.capability)
        clock = self.clock or float(gpu.clock)
        facts = {
            "bandwidth": self.bandwidth or float(gpu.bandwidth),
            "clock": clock,
            "l2_bytes": self.l2_bytes or gpu.l2_bytes,
            "teraflops": self.teraflops or _teraflops(gpu, self.sms, clock),
        }
        for name, value in facts.items():
            object.__setattr__(self, name, value)

    @property
    def ptx(self) -> int:
        """The capability where kernels may hold PTX, and 0 where they may not (AMD, Triton's interpreter)."""
        return self.capability if self.kind == "cuda" else 0

    @cached_property
    def rates(self) -> Rates:
        """What estimates scale by; all are 1 where the device's own are not known."""
        if self.fitted or not self.bandwidth:
            return Rates()
        known, clock = gpus.H200, self.clock / gpus.H200.clock
        return Rates(
            self.bandwidth / known.bandwidth, clock, clock * self.sms / known.sms, self.teraflops / known.teraflops,
            self.l2_bytes / known.l2_bytes,
        )  # fmt: skip

    @cached_property
    def as_fitted(self) -> DeviceProperties:
        """What choices go by: the device itself, but a Hopper GPU is taken for an H200 with so many multiprocessors.

        The constants of Hopper's kernels were fitted on an H200, where they tell close competitors apart. They do on an
        H100 as well: benchmarks/estimates.py reports what its choices lose against the fastest.
        """
        return replace(self, fitted=True) if self.capability == HOPPER else self

    def limited(self, sms: int) -> DeviceProperties:
        """The same device, of which a kernel uses so many multiprocessors only."""
        return replace(self, sms=sms, teraflops=self.teraflops * sms / self.sms)

    def clusters(self, size: int, resident: int = 1, widest: int = MOST_CLUSTER) -> int:
        """How many clusters of 1 to `widest` CTAs run at once at least, where a multiprocessor holds `resident` CTAs; 0
        for other sizes.

        Those of a cluster are neighbours: two of any pair, more of a group of 16 or 18, one of which may have lost half
        of its own. Of 2 to 8 CTAs, one on each multiprocessor, an H200 says 66, 39, 30, 22, 17, 15, 15.
        """
        if not 1 <= size <= widest:
            return 0
        if size <= 2:
            return self.sms // size * resident
        groups = max(0, self.sms // 16 - 1) * (16 * resident // size) + 8 * resident // size
        return min(groups, self.sms * resident // size)


HOST = DeviceProperties("host")


@cache
def properties_of(index: int) -> DeviceProperties:
    """Those of CUDA (or ROCm) device number `index`; -1 stands for the host, where Triton can only interpret."""
    if index < 0:
        return HOST
    properties = torch.cuda.get_device_properties(index)
    if torch.version.hip:
        return DeviceProperties("hip", 0, properties.multi_processor_count)
    return told(properties)


def told(properties: Any) -> DeviceProperties:
    """Of torch's properties of an NVIDIA GPU. Releases of torch differ in what they tell; the rest is what the GPU of
    this name has, or one like it."""
    capability, sms = 10 * properties.major + properties.minor, properties.multi_processor_count
    gpu = gpus.nearest(capability, properties.name)
    clock = getattr(properties, "clock_rate", 0) / 1e3 or float(gpu.clock)  # kHz
    # kHz and bits; data moves at both edges of the clock.
    wires = 2 * getattr(properties, "memory_clock_rate", 0) * getattr(properties, "memory_bus_width", 0)
    return DeviceProperties(
        "cuda", capability, sms, properties.shared_memory_per_block_optin, wires / 8e6 or float(gpu.bandwidth), clock,
        getattr(properties, "L2_cache_size", 0) or gpu.l2_bytes, _teraflops(gpu, sms, clock),
    )  # fmt: skip


def _teraflops(gpu: gpus.Gpu, sms: int, clock: float) -> float:
    """Of a GPU whose multiprocessors are like those of another."""
    return gpu.teraflops * (sms * clock) / (gpu.sms * gpu.clock)


def properties_for(target: str, sms: int | None = None) -> DeviceProperties:
    """The properties of an NVIDIA GPU that is not here, by its target, such as "sm_90".

    sms: its multiprocessors; by default those of a common GPU. A known GPU that has so many is taken as a whole, such
    as an L4 for sm_89 and 58. Raises ValueError for a target that is not known.
    """
    known = {gpu.target: capability for capability, gpu in sorted(gpus.COMMON.items())}
    if target not in known:
        raise ValueError(f"target is {target!r}; known targets are {', '.join(known)}")
    if sms is not None and sms < 1:
        raise ValueError(f"sms is {sms}; a GPU has one multiprocessor or more")
    return properties_like(gpus.nearest(known[target], sms=sms), sms)


def properties_like(gpu: gpus.Gpu, sms: int | None = None) -> DeviceProperties:
    """Those of a known GPU; sms: of one like it with another number of multiprocessors."""
    sms = sms or gpu.sms
    return DeviceProperties(
        "cuda", gpu.capability, sms, gpu.block_shared, float(gpu.bandwidth), float(gpu.clock), gpu.l2_bytes,
        _teraflops(gpu, sms, gpu.clock),
    )  # fmt: skip


@cache
def cpu_capability() -> str:
    """The vector instructions that torch uses on this CPU, in its words: "AVX512", "AVX2", "DEFAULT", ...; or
    "AVX512-BF16" where there are those that multiply bf16 numbers in pairs, and "AMX" where there are those that
    multiply tiles as well."""
    vectors = torch.backends.cpu.get_cpu_capability()
    for name, asks in (("AMX", "_is_amx_tile_supported"), ("AVX512-BF16", "_is_avx512_bf16_supported")):
        if vectors == "AVX512" and getattr(torch.cpu, asks, lambda: False)():
            return name
    return vectors
