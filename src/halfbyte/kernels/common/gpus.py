"""Facts of common NVIDIA GPUs, from their data sheets: what planners go by where the device itself does not say."""

from __future__ import annotations

from dataclasses import dataclass

GEFORCE = "GeForce"


@dataclass(frozen=True)
class Gpu:
    """name: as torch and CUDA report it. capability: 90 for sm_90. clock: boost, MHz. bandwidth: of memory, GB/s.

    l2_bytes: of the L2 cache. block_shared, sm_shared: the most shared memory of a block, and that of a multiprocessor,
    bytes. teraflops: dense products of fp16 on tensor cores, sums in fp32, TFLOP/s.
    """

    name: str
    capability: int
    sms: int
    clock: int
    bandwidth: int
    l2_bytes: int
    block_shared: int
    sm_shared: int
    teraflops: float

    @property
    def target(self) -> str:
        """Such as "sm_90"."""
        return f"sm_{self.capability}"


# Rows: name, capability, SMs, MHz, GB/s, MiB of L2, KiB of shared memory of a block and of a SM, TFLOP/s. GeForce cards
# have half of the TFLOP/s when sums are fp32: an RTX 3090 has 142 with sums in fp16, an RTX 4090 330, an RTX 5090 419.
# Clocks of a laptop's GPU depend on the laptop. The first row of a capability is its common GPU.
_ROWS = (
    ("Tesla T4", 75, 40, 1590, 320, 4, 64, 64, 65.0),
    ("NVIDIA A100-SXM4-80GB", 80, 108, 1410, 2039, 40, 163, 164, 312.0),
    ("NVIDIA A100-SXM4-40GB", 80, 108, 1410, 1555, 40, 163, 164, 312.0),
    ("NVIDIA A40", 86, 84, 1740, 696, 6, 99, 100, 149.7),
    ("NVIDIA A10", 86, 72, 1695, 600, 6, 99, 100, 125.0),
    ("NVIDIA GeForce RTX 3090", 86, 82, 1695, 936, 6, 99, 100, 71.0),
    ("NVIDIA GeForce RTX 4090", 89, 128, 2520, 1008, 72, 99, 100, 165.2),
    ("NVIDIA L4", 89, 58, 2040, 300, 48, 99, 100, 121.0),
    ("NVIDIA GeForce RTX 4070 Laptop GPU", 89, 36, 2175, 256, 32, 99, 100, 40.1),
    ("NVIDIA H200", 90, 132, 1980, 4800, 60, 227, 228, 989.4),
    ("NVIDIA H100 80GB HBM3", 90, 132, 1980, 3350, 50, 227, 228, 989.4),
    ("NVIDIA B200", 100, 148, 1965, 8000, 126, 227, 228, 2250.0),
    ("NVIDIA GeForce RTX 5090", 120, 170, 2407, 1792, 96, 99, 100, 209.5),
)
GPUS = tuple(
    Gpu(name, capability, sms, clock, bandwidth, l2 << 20, block << 10, sm << 10, teraflops)
    for name, capability, sms, clock, bandwidth, l2, block, sm, teraflops in _ROWS
)
COMMON = {gpu.capability: gpu for gpu in reversed(GPUS)}
H200 = COMMON[90]


def nearest(capability: int, name: str = "", sms: int | None = None) -> Gpu:
    """The GPU of that name, or else one that is most like it: of the last capability up to that one, if possible with
    so many multiprocessors, or a GeForce card if it is one, or the common one."""
    alike = max((known for known in COMMON if known <= capability), default=min(COMMON))
    rows = [gpu for gpu in GPUS if gpu.capability == alike]
    tests = (
        lambda gpu: gpu.name == name,
        lambda gpu: gpu.sms == sms,
        lambda gpu: name != "" and (GEFORCE in gpu.name) == (GEFORCE in name),
    )
    return next((gpu for test in tests for gpu in rows if test(gpu)), rows[0])
