"""CUDA sources that include each other become one text, which is all that NVRTC and the cache's key see."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from halfbyte.kernels.common import compiler, nvrtc
from halfbyte.kernels.common.nvrtc import Variant, read_source
from halfbyte.kernels.linear.simt import launch as simt
from halfbyte.kernels.linear.sm75 import launch as sm75
from halfbyte.kernels.linear.sm80 import launch as sm80
from halfbyte.kernels.linear.sm80_back import launch as sm80_back
from halfbyte.kernels.linear.sm80_gemm import launch as sm80_gemm
from halfbyte.kernels.linear.sm90_decode import launch as sm90_decode
from halfbyte.kernels.linear.sm90_gemm import launch as sm90_gemm
from halfbyte.kernels.linear.sm90_streamk import launch as sm90_streamk

LAUNCHES = {
    "simt": simt,
    "sm75": sm75,
    "sm80": sm80,
    "sm80_back": sm80_back,
    "sm80_gemm": sm80_gemm,
    "sm90_decode": sm90_decode,
    "sm90_streamk": sm90_streamk,
    "sm90_gemm": sm90_gemm,
}


def write(root: Path, **files: str) -> Path:
    for name, text in files.items():
        path = root / f"{name.replace('__', '/')}.cuh"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return root / "loop" / "kernel.cuh"


def test_what_is_included_comes_once_and_where_it_is_first_asked_for(tmp_path: Path) -> None:
    kernel = write(
        tmp_path,
        loop__kernel='// top\n#include "work.cuh"\n  #  include "device/ptx.cuh"  // why\nint kernel;\n',
        loop__work='#include "device/ptx.cuh"\nint work;\n',
        device__ptx="int ptx;",
        work="int other;",  # the one beside the file goes first
    )
    lines = read_source(kernel, tmp_path).splitlines()
    assert [line for line in lines if not line.startswith("#line")] == [
        "// top",
        "int ptx;",
        "int work;",
        "int kernel;",
    ]
    at = {name: lines[lines.index(f"int {name};") - 1] for name in ("ptx", "work", "kernel")}
    assert at == {
        "ptx": '#line 1 "device/ptx.cuh"',
        "work": '#line 2 "loop/work.cuh"',
        "kernel": '#line 4 "loop/kernel.cuh"',
    }


def test_a_file_that_is_not_there_is_named_with_the_one_that_asks_for_it(tmp_path: Path) -> None:
    kernel = write(tmp_path, loop__kernel='\n#include "gone.cuh"\n')
    with pytest.raises(FileNotFoundError, match=r"kernel\.cuh:2 includes 'gone\.cuh'"):
        read_source(kernel, tmp_path)


def test_the_cache_key_covers_what_is_included(tmp_path: Path) -> None:
    entries = set()
    for value in (1, 2):
        kernel = write(tmp_path, loop__kernel='#include "device/ptx.cuh"\n', device__ptx=f"int x = {value};")
        entries.add(nvrtc._entry(Variant.of(read_source(kernel, tmp_path), 90, {})))
    assert len(entries) == 2


@pytest.mark.skipif(compiler.find() is None, reason="no NVRTC here")
def test_a_source_finds_its_constants_in_config() -> None:
    text = """
        enum class Color { red, green };
        #include "config.cuh"
        static_assert(Config::count == -3 && Config::wide && !Config::narrow && Config::color == Color::green);
    """
    right = {"count": -3, "wide": True, "narrow": False, "color": "Color::green"}
    assert nvrtc.compile_cubin(text, 90, right)
    for wrong in ({"count": 3}, {"wide": False}, {"narrow": True}, {"color": "Color::red"}):
        with pytest.raises(RuntimeError, match="static assertion failed"):
            nvrtc.compile_cubin(text, 90, right | wrong)


def test_the_cache_key_covers_the_constants() -> None:
    entries = {nvrtc._entry(Variant.of("", 90, {"count": value})) for value in (1, 2, True, "1")}
    assert len(entries) == 4


@pytest.mark.skipif(compiler.find() is None, reason="no NVRTC here")
def test_the_compiler_names_the_file_and_the_line(tmp_path: Path) -> None:
    kernel = write(
        tmp_path,
        loop__kernel='#include "work.cuh"\n\nint here = nothing;\n',
        loop__work="// fine\nint there = unknown;\n",
    )
    with pytest.raises(RuntimeError) as caught:
        nvrtc.compile_cubin(read_source(kernel, tmp_path), 90, {})
    assert "loop/work.cuh(2): error" in str(caught.value)
    assert "loop/kernel.cuh(3): error" in str(caught.value)


@pytest.mark.parametrize("name", LAUNCHES)
def test_every_kernel_is_one_text(name: str) -> None:
    text = LAUNCHES[name].source()
    assert re.findall(r"#include.*", text) == ['#include "config.cuh"']
    assert text.startswith(f'#line 1 "{name}/kernel.cu"\n')


ROOT = Path(simt.__file__).parents[1]
SOURCES = [path for path in sorted(ROOT.rglob("*")) if path.suffix in (".cu", ".cuh")]


def test_every_header_is_in_use() -> None:
    files = {path.relative_to(ROOT).as_posix() for path in SOURCES}
    texts = "".join(launch.source() for launch in LAUNCHES.values())
    assert {name for name in files if f'#line 1 "{name}"\n' in texts} == files


def test_lines_fit() -> None:
    """clang-format leaves comments alone, and so tables and drawings in them."""
    every = [path for path in sorted(ROOT.parent.rglob("*")) if path.suffix in (".cu", ".cuh")]
    assert set(SOURCES) < set(every)
    longest = {path: max(map(len, path.read_text(encoding="utf-8").splitlines())) for path in every}
    assert {path: length for path, length in longest.items() if length > 120} == {}
