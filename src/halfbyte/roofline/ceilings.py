"""What this machine can do, measured: bandwidth by size, matrix products by dtype, the cost of a launch.

Nothing here comes from a datasheet. A measurement is kept in the user's cache, one file a device, driver and torch,
and is made anew on request.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from halfbyte.kernels.common.capture import capture
from halfbyte.kernels.common.nvrtc import cache_directory
from halfbyte.kernels.common.slow import has_triton
from halfbyte.measure import records
from halfbyte.measure.timing import Timing, time_all

SIZES = {"cpu": (2**18, 2**21, 2**24, 2**28), "cuda": tuple(2**power for power in (20, 22, 24, 26, 28, 30, 31))}
DTYPES = {"cpu": ("bfloat16", "float32"), "cuda": ("bfloat16", "float16", "tf32", "float32")}
SIDE = {"cpu": 1024, "cuda": 8192}  # of the square matrices
MOVED = 2**31  # bytes that one timed launch moves on a GPU, at least
VERSION = 1  # of what is measured and kept


@dataclass(frozen=True)
class Speed:
    """A rate: median, and what the 80th and 20th percentile of the times give. GB/s, or TFLOP/s."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, amount: float, timing: Timing) -> Speed:
        """amount: thousands of the unit's base in a call: bytes / 1e3 for GB/s, flops / 1e6 for TFLOP/s."""
        return cls(*(round(amount / us, 4) for us in (timing.median, timing.p80, timing.p20)))


@dataclass(frozen=True)
class Ceilings:
    """What was measured, on which device, and when.

    bandwidth: "read", "write" and "copy" (read plus written), each by the size of the buffer in bytes, in GB/s.
    matrix: TFLOP/s by dtype. launch: "host", µs of Python and driver a small operation, "device", µs a small kernel
    takes in a queue, and "graph", µs in a CUDA graph. clocks: MHz as the driver tells them.
    """

    environment: Mapping[str, Any]
    bandwidth: Mapping[str, Mapping[int, Speed]]
    matrix: Mapping[str, Speed]
    launch: Mapping[str, float]
    clocks: Mapping[str, float]

    def memory(self, kind: str) -> float:
        """GB/s of memory: of the largest buffer, which no cache holds. kind: "read", "write" or "copy"."""
        sizes = self.bandwidth[kind]
        return sizes[max(sizes)].median

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, kept: Mapping[str, Any]) -> Ceilings:
        bandwidth = {
            kind: {int(size): Speed(**speed) for size, speed in sizes.items()}
            for kind, sizes in kept["bandwidth"].items()
        }
        matrix = {dtype: Speed(**speed) for dtype, speed in kept["matrix"].items()}
        return cls(kept["environment"], bandwidth, matrix, kept["launch"], kept["clocks"])


def ceilings(device: torch.device, *, anew: bool = False, say: Callable[[str], None] = lambda _: None) -> Ceilings:
    """This device's ceilings, from the cache where they are there and not to be measured anew."""
    path = cache_file(device)
    if not anew:
        with suppress(OSError, ValueError, KeyError, TypeError):
            return Ceilings.from_json(json.loads(path.read_text(encoding="utf-8")))
    say("measuring the ceilings")
    found = measure(device)
    with suppress(OSError):  # a cache that cannot be written costs time, not results
        records.write(path, found.as_json())
    return found


def cache_file(device: torch.device) -> Path:
    facts = records.environment(device)
    key = [VERSION, *(facts.get(name) for name in ("device", "driver", "torch", "threads"))]
    digest = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:16]
    return cache_directory() / f"ceilings-{digest}.json"


def measure(device: torch.device, rounds: int = 9) -> Ceilings:
    """Measure everything: seconds on a GPU and on a CPU."""
    bandwidth = {kind: _bandwidth(kind, device, rounds) for kind in ("read", "write", "copy")}
    matrix = {dtype: _matrix(dtype, device, rounds) for dtype in DTYPES[device.type]}
    return Ceilings(records.environment(device), bandwidth, matrix, _launch(device, rounds), clocks(device))


def _bandwidth(kind: str, device: torch.device, rounds: int) -> dict[int, Speed]:
    speeds = {}
    for size in SIZES[device.type]:
        source = torch.ones(size // 4, dtype=torch.int32, device=device)
        target = torch.empty_like(source)
        moved = size * (2 if kind == "copy" else 1)
        found = [Speed.of(moved / 1e3, time_one(_torch_way(kind, source, target), device, rounds))]
        if device.type == "cuda" and has_triton():
            passes = max(1, MOVED // moved)
            run = triton_way(kind, source, target, passes)
            found.append(Speed.of(passes * moved / 1e3, time_one(run, device, rounds)))
        speeds[size] = max(found, key=lambda speed: speed.median)
    return speeds


def _torch_way(kind: str, source: torch.Tensor, target: torch.Tensor) -> Callable[[], Any]:
    numbers = source.view(torch.float32)
    ways: dict[str, Callable[[], Any]] = {
        "read": lambda: numbers.sum(), "write": lambda: target.fill_(1), "copy": lambda: target.copy_(source),
    }  # fmt: skip
    return ways[kind]


def triton_way(kind: str, source: torch.Tensor, target: torch.Tensor, passes: int = 1) -> Callable[[], Any]:
    """Our own kernel; its launch is one whatever the number of passes."""
    from halfbyte.roofline import triton

    sink = target[: triton.TILE]
    return {
        "read": lambda: triton.read(source, sink, passes),
        "write": lambda: triton.write(target, passes),
        "copy": lambda: triton.copy(source, target, passes),
    }[kind]


def _matrix(dtype: str, device: torch.device, rounds: int) -> Speed:
    side = SIDE[device.type]
    kind = torch.float32 if dtype == "tf32" else getattr(torch, dtype)
    a, b = (torch.randn(side, side, dtype=torch.float32, device=device).to(kind) for _ in range(2))
    out = torch.empty_like(a)
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if dtype == "tf32" else "highest")
    try:
        return Speed.of(2 * side**3 / 1e6, time_one(lambda: torch.mm(a, b, out=out), device, rounds))
    finally:
        torch.set_float32_matmul_precision(precision)


def _launch(device: torch.device, rounds: int, calls: int = 200) -> dict[str, float]:
    number = torch.zeros(1, dtype=torch.float32, device=device)
    times = time_all({"op": lambda _: [number.add_(1) for _ in range(calls)]}, 1, device, rounds)
    if device.type == "cpu":
        return {"host": round(times["op"].median / calls, 3)}
    host = _host_time(lambda: number.add_(1), calls)
    graph = torch.cuda.CUDAGraph()
    with capture(graph):
        for _ in range(calls):
            number.add_(1)
    replay = time_one(graph.replay, device, rounds).median
    return {
        "host": round(host, 3), "device": round(times["op"].median / calls, 3), "graph": round(replay / calls, 3),
    }  # fmt: skip


def _host_time(run: Callable[[], Any], calls: int) -> float:
    """µs that the host takes for a call while the queue is not full."""
    import time

    samples = []
    for _ in range(9):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            run()
        samples.append(1e6 * (time.perf_counter() - start) / calls)
    torch.cuda.synchronize()
    return sorted(samples)[len(samples) // 2]


def time_one(run: Callable[[], Any], device: torch.device, rounds: int) -> Timing:
    return time_all({"it": lambda _: run()}, 1, device, rounds)["it"]


def clocks(device: torch.device) -> dict[str, float]:
    """MHz now and at most, as the driver or the kernel tell them; empty where they do not."""
    with suppress(AttributeError, OSError, ValueError, subprocess.SubprocessError):
        if device.type == "cuda":
            names = ("clocks.sm", "clocks.mem", "clocks.max.sm", "clocks.max.mem")
            query = ["nvidia-smi", f"--query-gpu={','.join(names)}", "--format=csv,noheader,nounits"]
            query += ["-i", str(torch.cuda.get_device_properties(device).uuid)]
            query[-1] = query[-1] if query[-1].startswith("GPU-") else f"GPU-{query[-1]}"
            told = subprocess.run(query, capture_output=True, text=True, check=True, timeout=20).stdout
            return {name: float(value) for name, value in zip(names, told.strip().split(","), strict=True)}
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return {"cpu": max(float(line.split(":")[1]) for line in lines if line.startswith("cpu MHz"))}
    return {}
