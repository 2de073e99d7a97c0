"""NVRTC, called directly: where it is, and CUDA C++ into machine code.

Every CUDA build of torch comes with NVRTC: as a package beside it on Linux, as a library in its own folder on Windows.
That one fits the driver which torch runs on, so it goes first; another release, in a package or a CUDA toolkit, serves
where there is none. Nothing is loaded, and no GPU is touched, before something has to be compiled.
"""

from __future__ import annotations

import ctypes
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any

_NAMES = "nvrtc64_*_0.dll" if sys.platform == "win32" else "libnvrtc*.so*"


def compile_source(source: str, options: Sequence[str], headers: Mapping[str, str] = MappingProxyType({})) -> bytes:
    """The cubin of CUDA C++ source, compiled with NVRTC's options, such as "-arch=sm_90".

    headers: the text of each file that the source may include, by name. Raises ImportError where there is no NVRTC, and
    RuntimeError, with the compiler's words, where it does not compile.
    """
    nvrtc, program, size = _load(), ctypes.c_void_p(), ctypes.c_size_t()
    _check(nvrtc, nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), None, *_headers(headers)))
    try:
        arguments = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        if nvrtc.nvrtcCompileProgram(program, len(options), arguments):
            _check(nvrtc, nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size)))
            log = ctypes.create_string_buffer(size.value)
            _check(nvrtc, nvrtc.nvrtcGetProgramLog(program, log))
            raise RuntimeError(f"{find()} does not compile this source for {options[0]}:\n{log.value.decode()}")
        _check(nvrtc, nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size)))
        code = ctypes.create_string_buffer(size.value)
        _check(nvrtc, nvrtc.nvrtcGetCUBIN(program, code))
        return code.raw
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def _headers(headers: Mapping[str, str]) -> tuple[Any, ...]:
    """How many there are, their texts and their names, as NVRTC takes them."""
    strings = ctypes.c_char_p * len(headers)
    texts, names = (strings(*(text.encode() for text in each)) for each in (headers.values(), headers))
    return len(headers), texts, names


@cache
def find() -> Path | None:
    """The library, or None. Of several the one of the CUDA release that torch is built for, else the newest."""
    import torch

    wanted = int((torch.version.cuda or "0").partition(".")[0])
    candidates = (path for folder in _folders() for path in sorted(folder.glob(_NAMES)))
    found = [(path, major) for path in candidates if (major := _major(path))]
    return max(found, key=lambda one: (one[1] == wanted, one[1]), default=(None, 0))[0]


def install() -> str:
    """The command that gets NVRTC where there is none: the one of torch's CUDA, or the newest."""
    import torch

    return "pip install nvidia-cuda-nvrtc" + ("-cu12" if (torch.version.cuda or "").startswith("12.") else "")


def identity() -> str:
    """What tells this NVRTC from others, without loading it: its name, and its size, which differs between releases."""
    path = find()
    return "" if path is None else f"{path.name} {path.stat().st_size}"


def version() -> str:
    """NVRTC's own, such as "13.0". Loads the library; raises ImportError where there is none."""
    nvrtc, major, minor = _load(), ctypes.c_int(), ctypes.c_int()
    _check(nvrtc, nvrtc.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)))
    return f"{major.value}.{minor.value}"


def _folders() -> Iterator[Path]:
    """Where NVRTC may be: in NVIDIA's packages, beside torch's own libraries, in a CUDA toolkit, conda's included."""
    for root in _roots("nvidia"):
        for package in (root / "cuda_nvrtc", *sorted(root.glob("cu[0-9]*"))):
            yield from (package / "lib", package / "bin", package / "bin" / "x86_64")
    for root in _roots("torch"):
        yield root / "lib"
    toolkits = [sys.prefix, os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    for toolkit in filter(None, toolkits):
        yield from (Path(toolkit) / part for part in ("lib", "lib64", "bin", "bin/x64", "Library/bin"))


def _roots(package: str) -> list[Path]:
    spec = find_spec(package)
    return [Path(root) for root in (spec.submodule_search_locations or ())] if spec else []


def _major(path: Path) -> int:
    """13 of libnvrtc.so.13 and of nvrtc64_130_0.dll; 0 for a link that names no version, and for what is no NVRTC."""
    if match := re.fullmatch(r"libnvrtc(?:-[0-9a-f]+)?\.so\.(\d+)(?:\.\d+)*", path.name):
        return int(match[1])
    match = re.fullmatch(r"nvrtc64_(\d+)\d_0\.dll", path.name)
    return int(match[1]) if match else 0


@cache
def _load() -> Any:
    path = find()
    if path is None:
        raise ImportError(f"compiling CUDA kernels needs NVRTC, which comes with a CUDA build of torch; {install()}")
    if sys.platform == "win32":
        os.add_dll_directory(str(path.parent))
    for other in path.parent.glob("libnvrtc-builtins.so.*"):  # not every release finds its other half by itself
        ctypes.CDLL(str(other), ctypes.RTLD_GLOBAL)
    nvrtc = ctypes.CDLL(str(path))
    nvrtc.nvrtcGetErrorString.restype = ctypes.c_char_p
    return nvrtc


def _check(nvrtc: Any, status: int) -> None:
    if status:
        raise RuntimeError(f"{find()} answered: {nvrtc.nvrtcGetErrorString(status).decode()}")
