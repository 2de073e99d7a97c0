"""What this machine has for halfbyte: devices, backends, versions, and how to get what is missing.

Nothing is imported that can be asked for its version without, and no GPU is touched beyond torch's queries.
"""

from __future__ import annotations

import os
import platform
import sys
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path

from halfbyte.version import __version__


@dataclass(frozen=True)
class Package:
    """A package: its version, or None where it is missing and `install` gets it. purpose: what it is needed for."""

    name: str
    version: str | None
    purpose: str
    install: str
    required: bool


@dataclass(frozen=True)
class Device:
    """A device, what it is, and the backend that converts weights on it. note: what would make it better, or ""."""

    name: str
    description: str
    backend: str
    note: str = ""


@dataclass(frozen=True)
class Info:
    halfbyte: str
    python: str
    system: str
    devices: tuple[Device, ...]
    packages: tuple[Package, ...]

    @property
    def missing(self) -> tuple[Package, ...]:
        return tuple(package for package in self.packages if package.version is None)


_TRANSFORMERS = "pip install 'halfbyte[transformers]'"
_PACKAGES = (
    ("torch", "tensors", "pip install torch", True),
    ("numba", "CPU kernels", "pip install numba", True),
    ("safetensors", "checkpoints", "pip install safetensors", True),
    ("triton", "GPU kernels", "pip install triton", False),
    ("NVRTC", "CUDA C++ kernels", "pip install nvidia-cuda-nvrtc", False),
    ("bitsandbytes", "to_bitsandbytes, benchmarks", _TRANSFORMERS, False),
    ("transformers", "loading models", _TRANSFORMERS, False),
    ("peft", "LoRA, benchmarks", "pip install 'halfbyte[bench]'", False),
    ("matplotlib", "plots", "pip install 'halfbyte[plots]'", False),
)
_TRITON_NAMES = ("triton", "triton-windows", "pytorch-triton", "pytorch-triton-rocm", "pytorch-triton-xpu")


def collect() -> Info:
    """Look around. Works whatever is missing, torch included."""
    versions_of = {"triton": lambda: _version(*_TRITON_NAMES), "NVRTC": _nvrtc}
    packages = tuple(
        Package(name, versions_of.get(name, partial(_version, name))(), purpose, install, required)
        for name, purpose, install, required in _PACKAGES
    )
    versions = {package.name: package.version for package in packages}
    return Info(
        halfbyte=__version__,
        python=f"{platform.python_version()} ({sys.executable})",
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        devices=(_cpu(versions), *_accelerators(versions)),
        packages=packages,
    )


def _version(*names: str) -> str | None:
    for name in names:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def _nvrtc() -> str | None:
    """The version of the NVRTC that compiles the CUDA kernels; None without one, or without a torch to fit it to."""
    try:
        import torch  # noqa: F401

        from halfbyte.kernels.common import compiler

        return compiler.version()
    except Exception:  # a broken torch or NVRTC is missing as well
        return None


def _cpu(versions: dict[str, str | None]) -> Device:
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        lines = [line for line in cpuinfo.read_text(errors="replace").splitlines() if line.startswith("model name")]
        model = lines[0].partition(":")[2].strip() if lines else model
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    backend, note = ("numba", "") if versions["numba"] else ("torch (slow)", "install numba for the CPU kernels")
    return Device("cpu", f"{model}, {cores} cores", backend, note)


def _accelerators(versions: dict[str, str | None]) -> list[Device]:
    try:
        import torch
    except Exception as error:  # a broken torch raises OSError and others as well; info must say so and go on
        return [Device("torch", f"cannot be imported: {error}", "none", "install torch again: pip install torch")]
    devices = []
    if torch.cuda.is_available():
        from halfbyte.kernels.common import slow
        from halfbyte.kernels.common.device import properties_of
        from halfbyte.kernels.linear import reach
        from halfbyte.kernels.linear.triton_plan import MOST_ROWS

        runtime = f"ROCm {torch.version.hip}" if torch.version.hip else f"CUDA {torch.version.cuda}"
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            memory = f"{properties.total_memory / 2**30:.0f} GiB"
            arch = (
                getattr(properties, "gcnArchName", "")
                if torch.version.hip
                else f"sm_{properties.major}{properties.minor}"
            )
            description = f"{properties.name}, {arch}, {memory}, {properties.multi_processor_count} SMs, {runtime}"
            lack, no_triton = reach.without_kernels(properties_of(index)), slow.no_kernels("cuda")
            if torch.version.hip:
                lack, linear = None, "torch (slow)" if no_triton else f"Triton (up to {MOST_ROWS} rows of x)"
            else:
                linear = "torch (slow)" if lack else "CUDA C++"
            backend = f"linear: {linear}, all else: {'torch (slow)' if no_triton else 'Triton'}"
            notes = [f"{lack.what}; {lack.mend}"] if lack else []
            devices.append(
                Device(f"cuda:{index}", description, backend, ". ".join([*notes, *filter(None, [no_triton])]))
            )
    elif Path("/proc/driver/nvidia/version").exists():
        note = "this torch sees no GPU: " + (
            f"it is built for CUDA {torch.version.cuda}, which the driver may be too old for"
            if torch.version.cuda
            else f"{torch.__version__} is built without CUDA; install a CUDA build as pytorch.org's selector says"
        )
        devices.append(Device("cuda", "an NVIDIA driver is loaded", "none", note))
    for kind in ("mps", "xpu"):
        module = getattr(torch.backends, kind, None) or getattr(torch, kind, None)
        if module is not None and module.is_available():
            devices.append(Device(kind, f"torch's {kind} device", "torch (slow)"))
    return devices
