"""Traces, ceilings and records whose every number is known."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from halfbyte.roofline.ceilings import Ceilings, Speed
from halfbyte.roofline.events import Trace, parse

Launch = tuple[str, str, float, float, float]  # range or "", kernel, launched, start, duration: µs


def events(launches: Sequence[Launch], waits: Sequence[tuple[float, float]]) -> list[Any]:
    """Chrome's events. launches: (range or "", kernel, launched, start, duration); a range lasts 1 µs each."""
    found: list[dict[str, Any]] = []
    for number, (where, name, launched, start, duration) in enumerate(launches):
        call = {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "tid": 1, "ts": launched, "dur": 0.2}
        kernel = {"ph": "X", "cat": "kernel", "name": name, "tid": 7, "ts": start, "dur": duration}
        found += [event | {"args": {"correlation": number}} for event in (call, kernel)]
        if where:
            mark = {"cat": "user_annotation", "name": f"halfbyte|{where}", "ts": launched - 0.4, "dur": 1.0}
            found.append({"ph": "X", "tid": 1, "args": {}} | mark)
    for start, end in waits:
        wait = {"cat": "cuda_runtime", "name": "cudaDeviceSynchronize", "ts": start, "dur": end - start}
        found.append({"ph": "X", "tid": 1, "args": {}} | wait)
    return found


def trace(*launches: Launch, waits: Sequence[tuple[float, float]] = ()) -> Trace:
    return parse(events(launches, waits))


def limits() -> Ceilings:
    """Ceilings in round numbers: 100 GB/s read, 80 written, 50 copied, 1 TFLOP/s."""
    speeds = {"read": 100.0, "write": 80.0, "copy": 50.0}
    bandwidth = {
        kind: {2**20: Speed(4 * speed, speed, speed), 2**28: Speed(speed, speed, speed)}
        for kind, speed in speeds.items()
    }
    one = Speed(1.0, 0.9, 1.1)
    environment = {"device": "A CPU", "date": "2026-11-21"}
    return Ceilings(environment, bandwidth, {"bfloat16": one, "float32": one}, {"host": 3.0}, {"cpu": 2500.0})


def record(provider: str = "halfbyte", **ms: float) -> dict[str, Any]:
    """A profile's record of one run, with the milliseconds of its classes."""
    classes = [{"class": name, "ms": value, "kernels": 1.0} for name, value in ms.items()]
    for entry in classes:
        if entry["class"] == "q":
            entry |= {"bytes": 200_000_000, "flops": 800_000_000}
    total = sum(ms.values())
    measured = limits().as_json()
    measured["bandwidth"] = {
        k: {str(size): speed for size, speed in of.items()} for k, of in measured["bandwidth"].items()
    }
    environment = measured.pop("environment")
    return {
        "bench": "profile", "model": "m", "layers": 2, "context": 8, "method": "by hand",
        "environment": environment | {"torch": "2.11", "threads": 2, "commit": "abc"},
        "ceilings": {"date": "2026-11-21", **measured},
        "runs": [
            {
                "provider": provider, "mode": "eager", "batch": 1, "relative_error": 0.0, "step_ms": total * 0.9,
                "p20_ms": total * 0.9, "p80_ms": total * 0.9, "samples": 3, "profiled_ms": total, "sum_ms": total,
                "classes": classes, "other": [],
            }
        ],
    }  # fmt: skip
