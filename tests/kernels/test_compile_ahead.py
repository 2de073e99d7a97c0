from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from halfbyte.kernels.common import nvrtc
from halfbyte.kernels.common.nvrtc import Constant, Variant


class Compiler:
    """Compiles each source once it may, and says how often."""

    def __init__(self) -> None:
        self.may, self.asked = threading.Event(), 0
        self.lock = threading.Lock()

    def __call__(self, source: str, capability: int | str, constants: Mapping[str, Constant]) -> bytes:
        with self.lock:
            self.asked += 1
        self.may.wait(10)
        if "wrong" in source:
            raise RuntimeError("it does not compile")
        return source.encode()


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Compiler:
    there = Compiler()
    monkeypatch.setattr(nvrtc, "compile_cubin", there)
    monkeypatch.setattr(nvrtc, "_ahead", {})
    monkeypatch.setattr(nvrtc, "_seen", set())
    monkeypatch.setenv("HALFBYTE_CACHE", str(tmp_path / "cache"))
    return there


def test_who_asks_waits_for_what_is_on_its_way(compiler: Compiler) -> None:
    variants = [Variant.of(f"kernel {number}", 90, {}) for number in range(3)]
    nvrtc.compile_ahead(variants)
    nvrtc.compile_ahead(variants)
    threading.Timer(0.1, compiler.may.set).start()
    assert [nvrtc.cubin(variant) for variant in variants] == [b"kernel 0", b"kernel 1", b"kernel 2"]
    assert compiler.asked == 3
    assert all(nvrtc.cached(variant) for variant in variants)


def test_who_asks_does_not_wait_in_line(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind others that have not begun: it compiles at once what it needs."""
    with ThreadPoolExecutor(1) as pool:
        monkeypatch.setattr(nvrtc, "_compilers", lambda: pool)
        variants = [Variant.of(f"kernel {number}", 90, {}) for number in range(3)]
        nvrtc.compile_ahead(variants)
        found: list[bytes] = []
        asks = threading.Thread(target=lambda: found.append(nvrtc.cubin(variants[2])))
        asks.start()
        while compiler.asked < 2:  # the first in line, and the last one
            time.sleep(0.001)
        compiler.may.set()
        asks.join()
        assert found == [b"kernel 2"]
    assert compiler.asked == 3


def test_what_is_in_the_cache_is_not_compiled(compiler: Compiler) -> None:
    variant = Variant.of("kernel", 90, {})
    nvrtc.keep(variant, b"code")
    nvrtc.compile_ahead([variant])
    assert nvrtc.cubin(variant) == b"code"
    assert compiler.asked == 0


def test_a_folder_is_looked_into_once(compiler: Compiler, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    variant, looked = Variant.of("kernel", 90, {}), []

    def cached(variant: Variant) -> bytes:
        looked.append(nvrtc.cache_directory())
        return b"code"

    monkeypatch.setattr(nvrtc, "cached", cached)
    for folder in ("cache", "cache", "other"):
        monkeypatch.setenv("HALFBYTE_CACHE", str(tmp_path / folder))
        nvrtc.compile_ahead([variant, variant])
    assert looked == [tmp_path / "cache", tmp_path / "other"]
    assert compiler.asked == 0


def test_an_error_is_of_those_who_ask(compiler: Compiler) -> None:
    wrong = Variant.of("wrong", 90, {})
    compiler.may.set()
    nvrtc.compile_ahead([wrong])
    for _ in range(2):
        with pytest.raises(RuntimeError, match="does not compile"):
            nvrtc.cubin(wrong)


def test_a_cache_that_cannot_be_written(compiler: Compiler, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HALFBYTE_CACHE", str(tmp_path / "file"))
    compiler.may.set()
    nvrtc.compile_ahead([variant := Variant.of("kernel", 90, {})])
    assert nvrtc._ahead[variant].result() == b"kernel"  # one that had not begun would be compiled by who asks
    assert [nvrtc.cubin(variant), nvrtc.cubin(variant)] == [b"kernel"] * 2
    assert compiler.asked == 1
