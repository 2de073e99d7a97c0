"""CUDA C++ shipped as source: compiled for the GPU at hand on first use, and kept on disk.

An entry's name is a digest of all that its content depends on: source, target, constants, compiler. Entries are written
whole or not at all, so processes may race, and each begins with a digest of its own bytes: a damaged one is compiled
again.
"""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
import threading
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from pathlib import Path

from halfbyte.kernels.common import compiler
from halfbyte.kernels.common.patience import compiling

_DIGEST = hashlib.sha256().digest_size
_CONFIG = "config.cuh"
_INCLUDE = re.compile(r'\s*#\s*include\s+"([^"]+)"\s*(?://.*)?')


def read_source(path: Path, root: Path) -> str:
    """The CUDA source at `path` as one text: NVRTC sees no folder, so what the source includes is put in place here.

    `#include "name"` names a file beside the one that says so, or else one under `root`; "config.cuh" stays, being a
    variant's own. Each file comes once, where it is first asked for, whatever conditions of the preprocessor stand
    around it. Compiler errors name the file and its own line. Raises FileNotFoundError where there is no such file.
    """
    return "".join(_lines(path, root, set()))


def _lines(path: Path, root: Path, seen: set[Path]) -> Iterator[str]:
    seen.add(path.resolve())
    name = path.relative_to(root).as_posix()
    yield f'#line 1 "{name}"\n'
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if (match := _INCLUDE.fullmatch(line)) is None or match[1] == _CONFIG:
            yield line + "\n"
            continue
        included = next((file for folder in (path.parent, root) if (file := folder / match[1]).is_file()), None)
        if included is None:
            raise FileNotFoundError(f"{path}:{number} includes {match[1]!r}, which is neither beside it nor in {root}")
        if included.resolve() not in seen:
            yield from _lines(included, root, seen)
        yield f'#line {number + 1} "{name}"\n'


Constant = bool | int | str


@dataclass(frozen=True)
class Variant:
    """A source, the target it is compiled for (90, or "90a" for what no later GPU has), and its constants.

    A source that includes "config.cuh" finds them there as the members of `struct Config`: a bool or an int as such, a
    str as the C++ expression that it is.
    """

    source: str
    capability: int | str
    constants: tuple[tuple[str, Constant], ...]

    @classmethod
    def of(cls, source: str, capability: int | str, constants: Mapping[str, Constant]) -> Variant:
        return cls(source, capability, tuple(sorted(constants.items())))


def cubin(variant: Variant) -> bytes:
    """Machine code, from the cache where it is there.

    Raises ImportError where it must be compiled and there is no NVRTC, RuntimeError where it does not compile.
    """
    code = cached(variant)
    if code is None:
        with compiling():
            ahead = _ahead.get(variant)
            # One that still waits in line is compiled here instead.
            code = _compiled(variant) if ahead is None or ahead.cancel() else ahead.result()
    return code


def compile_ahead(variants: Iterable[Variant]) -> None:
    """Begin to compile those that the cache lacks, on all CPUs, and return at once: NVRTC works without the interpreter
    lock. Who asks for one of them meanwhile waits for it, and gets its error if it has one.

    A process looks for each in a folder once, since it reads and hashes all of what it finds.
    """
    folder = cache_directory()
    for variant in variants:
        if variant in _ahead or (folder, variant) in _seen:
            continue
        if cached(variant) is None:
            _ahead[variant] = _compilers().submit(_compiled, variant)
        else:
            _seen.add((folder, variant))


_ahead: dict[Variant, Future[bytes]] = {}
_seen: set[tuple[Path, Variant]] = set()  # in the cache of this folder


@cache
def _compilers() -> ThreadPoolExecutor:
    pool = ThreadPoolExecutor(os.cpu_count(), "halfbyte-compiles")
    # The interpreter waits for such threads before it ends; for what nobody asked for yet it need not.
    threading._register_atexit(partial(pool.shutdown, wait=False, cancel_futures=True))  # type: ignore[attr-defined]
    return pool


def _compiled(variant: Variant) -> bytes:
    """From the cache if somebody else has been faster."""
    if (code := cached(variant)) is not None:
        return code
    code = compile_cubin(variant.source, variant.capability, dict(variant.constants))
    with suppress(OSError):  # a cache that cannot be written costs time, not results
        keep(variant, code)
    return code


def cached(variant: Variant) -> bytes | None:
    """What the cache holds of a variant, whole, or None."""
    with suppress(OSError):
        content = _entry(variant).read_bytes()
        if content[:_DIGEST] == hashlib.sha256(content[_DIGEST:]).digest():
            return content[_DIGEST:]
    return None


def keep(variant: Variant, code: bytes) -> None:
    """Put machine code into the cache. Raises OSError where it cannot be written."""
    _write(_entry(variant), hashlib.sha256(code).digest() + code)


def compile_cubin(source: str, capability: int | str, constants: Mapping[str, Constant]) -> bytes:
    """Compile, whatever is in the cache; no GPU is needed. Raises ImportError and RuntimeError as `cubin` does."""
    return compiler.compile_source(source, [f"-arch=sm_{capability}", "--std=c++17"], {_CONFIG: _config(constants)})


def _config(constants: Mapping[str, Constant]) -> str:
    """The header that a source includes as "config.cuh"."""
    types = {bool: "bool", int: "int", str: "auto"}
    members = (
        f"  static constexpr {types[type(value)]} {name} = {str(value).lower() if type(value) is bool else value};\n"
        for name, value in constants.items()
    )
    return f"struct Config {{\n{''.join(members)}}};\n"


def cache_directory() -> Path:
    """$HALFBYTE_CACHE, or halfbyte's folder in the user's cache."""
    if chosen := os.environ.get("HALFBYTE_CACHE"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "halfbyte"


def _entry(variant: Variant) -> Path:
    digest, config = _digest(variant.source).copy(), _config(dict(variant.constants))
    digest.update("\n".join(["", str(variant.capability), compiler.identity(), config]).encode())
    return cache_directory() / f"{digest.hexdigest()[:32]}.cubin"


@lru_cache  # a hundred kilobytes that many variants share
def _digest(source: str) -> hashlib._Hash:
    return hashlib.sha256(source.encode())


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
