"""CUDA C++ shipped as source: compiled for the GPU at hand on first use, and kept on disk.

NVRTC does the compiling, through NVIDIA's cuda.core; a warm cache needs neither. An entry's name is a digest of all
that its content depends on: source, target, macros, compiler. Entries are written whole or not at all, so processes may
race, and each begins with a digest of its own bytes: a damaged one is compiled again.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

_DIGEST = hashlib.sha256().digest_size


def read_sources(*paths: Path) -> str:
    """One source of several files, in order: NVRTC sees no folder to include from."""
    return "\n".join(path.read_text(encoding="utf-8") for path in paths)


def cubin(source: str, capability: int | str, macros: Mapping[str, int]) -> bytes:
    """Machine code of `source` for sm_<capability> (90, or "90a"), from the cache where it is there.

    Raises ImportError where it must be compiled and cuda.core is missing, RuntimeError where it does not compile.
    """
    key = "\n".join(
        [source, str(capability), _compiler(), *(f"{name}={value}" for name, value in sorted(macros.items()))]
    )
    path = cache_directory() / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.cubin"
    with suppress(OSError):
        content = path.read_bytes()
        if content[:_DIGEST] == hashlib.sha256(content[_DIGEST:]).digest():
            return content[_DIGEST:]
    code = compile_cubin(source, capability, macros)
    with suppress(OSError):  # a cache that cannot be written costs time, not results
        _write(path, hashlib.sha256(code).digest() + code)
    return code


def compile_cubin(source: str, capability: int | str, macros: Mapping[str, int]) -> bytes:
    """Compile, whatever is in the cache; no GPU is needed."""
    try:
        from cuda.core import Program, ProgramOptions
    except ImportError as error:
        raise ImportError(f"compiling CUDA kernels needs cuda.core ({error}); pip install 'halfbyte[cuda]'") from error
    defines = [f"{name}={value}" for name, value in macros.items()]
    options = ProgramOptions(arch=f"sm_{capability}", std="c++17", define_macro=defines or None)
    return bytes(Program(source, "c++", options).compile("cubin").code)


@cache
def has_compiler() -> bool:
    """True where cuda.core and the bindings it needs are installed; they are not imported to find out."""
    return find_spec("cuda") is not None and all(find_spec(f"cuda.{part}") for part in ("core", "bindings"))


def cache_directory() -> Path:
    """$HALFBYTE_CACHE, or halfbyte's folder in the user's cache."""
    if chosen := os.environ.get("HALFBYTE_CACHE"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "halfbyte"


@cache
def _compiler() -> str:
    """The versions of what compiles, as far as packages tell."""
    found = []
    for package in ("cuda-core", "cuda-bindings", "nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12"):
        with suppress(PackageNotFoundError):
            found.append(f"{package}={version(package)}")
    return " ".join(found)


def _write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
