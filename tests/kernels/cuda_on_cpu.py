"""Kernels of this project on a CPU: their own source, as C++ (cuda_on_cpu.h), run by cuda_on_cpu.cpp. It is slow, and
finds on any machine what else only a GPU would: a wrong index, a wait too few, a read outside of a tensor."""

from __future__ import annotations

import ctypes
import re
import shutil
import struct
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from halfbyte.kernels.common.nvrtc import Variant, _config

HERE = Path(__file__).parent
COMPILER = shutil.which("g++")
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="needs g++")

# What stands in the place of functions that are instructions.
FUNCTIONS = {
    "from_fp16": "float from_fp16(u32 bits) { return number_of(bits, true); }",
    "narrow": "u16 narrow(float value) { return bits_of(value, FP16); }",
    "pack": "u32 pack(float first, float second) { return narrow(first) | u32(narrow(second)) << 16; }",
    "mma": "void mma(float (&sum)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {"
    " multiply_add(sum, {a0, a1, a2, a3}, b0, b1, FP16); }",
    "load_partial(const float4": "float4 load_partial(const float4* from) { return let_others(), *from; }",
    "load_id": "template <class Id> Id load_id(const Id* from) { return *from; }",
    "load_route": "uint4 load_route(const uint4* from) { return *from; }",
    "load_partial(const float2": "float2 load_partial(const float2* from) { return let_others(), *from; }",
    "store_partial(float4": "void store_partial(float4* to, float4 value) { *to = value; }",
    "store_partial(float2": "void store_partial(float2* to, float2 value) { *to = value; }",
    "weighted": "u32 weighted(u32 word, u32 weights, u32 adds) {"
    " const auto one = [&](u32 at) { return narrow(unpack(word >> at) * ((adds ? 1 : 0) + unpack(weights >> at))); };"
    " return one(0) | u32(one(16)) << 16; }",
    "scaled": "float scaled(float number, float scale) { return __fmul_rn(number, scale); }",
    "load_matrices": "void load_matrices(u32 (&to)[4], u32 at) { matrices(to, at, false); }",
    "load_transposed": "void load_transposed(u32 (&to)[4], u32 at) { matrices(to, at, true); }",
    "transposed": "u32 transposed(u32 pair) { return turned(pair); }",
    "fetch(const u16*": "void fetch(const u16* norm, u32 lane) {}",
    "prefetch_bytes": "void prefetch_bytes(const void* from, u32 bytes) { check(from, bytes); }",
    "kept": "u32 kept(u32 value) { return value; }",
    "copy_async": "void copy_async(u32 to, const void* from, bool exists) { copy(to, 16, from, exists); }",
    "copy_row_async": "void copy_row_async(u32 to, const void* from, bool there) { copy(to, 16, from, there); }",
    "copy_word_async": "void copy_word_async(u32 to, const u32* from) { copy(to, 4, from, true); }",
    "close_group": "void close_group() { close_copies(); }",
    "wait_for_groups": "",
    "settled": "",
    "permute": "u32 permute(u32 a, u32 b, u32 selector) { return permuted(a, b, selector); }",
    "every_other": "u32 every_other(u32 a, u32 b) { return a & 0x00ff00ff | b & 0xff00ff00; }",
    "insert": "u32 insert(u32 bits, u32 mask, u32 base) { return bits & mask | base; }",
    "minus_offset": "u32 minus_offset(u32 pair) { return minus(pair, FP16 ? 1032 : 136, FP16, 1); }",
    "fold": "u32 fold(u32 weights, u32 scale) { return times(weights, scale, FP16); }",
    "sixteenth_minus_offset": "u32 sixteenth_minus_offset(u32 pair) { return minus(pair, 72, true, 16); }",
    **{
        name: f"{kind} {name}(u32 at) {{ return loaded<{stored}>(at); }}"
        for name, kind, stored in (
            ("load_number", "u32", "u32"),
            ("load_byte", "u32", "u8"),
            ("load_short", "u32", "u16"),
            ("load_pair", "uint2", "uint2"),
            ("load_sums", "float4", "float4"),
            ("load_four_words", "uint4", "uint4"),
        )
    },
    "load_word": "u32 load_word(u32 at) { return loaded<u32>(at + BASE); }",
    "load_from": "u32 load_from(const u32* place, u32 rank) { return CTAS == 1 ? *place :"
    " loaded<u32>(address_in(u32(__cvta_generic_to_shared(place)), rank)); }",
    "load_code": "float load_code(u32 at) { return loaded<float>(at + BASE + 128); }",
    "numbers_of": "float2 numbers_of(u32 bytes, u32 column, u32 selector) {"
    " return loaded<float2>(__byte_perm(bytes, column, selector) + BASE); }",
    "load_global": "float load_global(const float* from) { return __ldg(from); }",
    "load_float(u32": "float load_float(u32 at) { return loaded<float>(at); }",
    "load_float(const": "float load_float(const float* from) { return __ldg(from); }",
    "load_16_bytes": "uint4 load_16_bytes(const void* from) { return __ldg(static_cast<const uint4*>(from)); }",
    "load_bytes": "uint4 load_bytes(const void* from) { uint4 value = {}; check(from, LOAD_BYTES);"
    " __builtin_memcpy(&value, from, LOAD_BYTES); return value; }",
    "store_short": "void store_short(u32 at, u32 value) { stored(at, u16(value)); }",
    "store_word": "void store_word(u32 at, u32 value) { stored(at, value); }",
    "store_float": "void store_float(u32 at, float value) { stored(at, value); }",
    "store_pair": "void store_pair(u32 at, float first, float second) { stored(at, make_float2(first, second)); }",
    "store_sums": "void store_sums(u32 at, float4 value) { stored(at, value); }",
    "store_four_words": "void store_four_words(u32 at, uint4 value) { stored(at, value); }",
    "store_copies": "void store_copies(u32 at, u32 value) { stored(at, make_uint4(value, value, value, value)); }",
    "take_places": "u32 take_places(u32 at, u32 number, bool wants) { return wants ? counted(at, number) : 0; }",
    "store_if": "template <class T, class V> void store_if(bool wanted, T* to, V value) {"
    " if (wanted) check_is_global(to), *to = value; }",
    "load_if": "template <class T> u32 load_if(bool wanted, const T* from) {"
    " return wanted ? check_is_global(from), *from : 0; }",
    "exponential": "float exponential(float t) { return expf(t); }",
    "reciprocal": "float reciprocal(float value) { return 1 / value; }",
    "address_in": "u32 address_in(u32 at, u32 rank) { return address_of_rank(at, rank); }",
    "shared": "u32 shared() { return u32(__cvta_generic_to_shared(memory)); }",
    "arrive_cluster": "",
    "wait_for_cluster": "",
    "sync_cluster": "void sync_cluster() { arrive_cluster(), wait_for_cluster(); }",
    "meet": "",
    "count(int": "u32 count(int* counter) { return (*counter)++; }",
    "multiply_add": "template <int Sums> void multiply_add(float (&sum)[Sums], u32 a0, u32 a1, u32 a2, u32 a3,"
    " u64 x_at, int adds) { multiply_group(sum, Sums, {a0, a1, a2, a3}, x_at, adds, FP16); }",
    "multiply_add_at": "template <int Sums> void multiply_add_at(float (&sum)[Sums], u64 a_at, u64 x_at, int adds) {"
    " multiply_group_at(sum, Sums, a_at, x_at, adds, FP16); }",
    "close_products": "",
    "wait_for_products": "",
    "init": "void init(u32 barrier, u32 count) { make_barrier(barrier, count); }",
    "arrive": "void arrive(u32 barrier) { arrive_once(barrier); }",
    "give_back_at": "void give_back_at(u32 barrier) { arrive_once(barrier); }",
    "expect": "void expect(u32 barrier, u32 bytes) { await_bytes(barrier, bytes); }",
    "wait": "void wait(u32 barrier, u32 parity) { wait_for_phase(barrier, parity); }",
    "send_sum": "void send_sum(u32 to, float sum, u32 barrier) { send(to, &sum, 4, barrier); }",
    "send_pair": "void send_pair(u32 to, float2 pair, u32 barrier) { send(to, &pair, 8, barrier); }",
    "send_sums": "void send_sums(u32 to, float4 sums, u32 barrier) { send(to, &sums, 16, barrier); }",
    "copy_to_other": "void copy_to_other(u32 to, u32 from, u32 bytes, u32 barrier) {"
    " copy_shared(to, from, bytes, barrier); }",
    "copy": "void copy(u32 to, const void* from, u32 bytes, u32 barrier) { copy_bulk(to, from, bytes, barrier); }",
    "copy_as": "void copy_as(u64, u32 to, const void* from, u32 bytes, u32 barrier) {"
    " copy_bulk(to, from, bytes, barrier); }",
    "copy_box": "",
    "copy_to_all": "void copy_to_all(u32 ctas, u32 to, const void* from, u32 bytes, u32 barrier) {"
    " for (u32 rank = 0; ctas >> rank; rank++)"
    " copy_bulk(address_in(to, rank), from, bytes, address_in(barrier, rank)); }",
    "copy_box_to_all": "void copy_box_to_all(u32 ctas, u32 to, u64 map, u32 x, u32 y, u32 barrier) {"
    " for (u32 rank = 0; ctas >> rank; rank++)"
    " copy_box(address_in(to, rank), map, x, y, address_in(barrier, rank)); }",
    "prefetch_box": "template <class... At> void prefetch_box(u64, At...) {}",
    "copy_box_as": "void copy_box_as(u64, u32 to, u64 map, u32 x, u32 y, u32 barrier) {"
    " copy_box(to, map, x, y, barrier); }",
    "leaving_first": "u64 leaving_first() { return 0; }",
    "staying": "u64 staying() { return 0; }",
    "copy_weights": "void copy_weights(u32 to, const Weight& w, u32 row, u32 chunk, u32 barrier, u64) {"
    " copy_box(to, reinterpret_cast<u64>(w.map), 0, row, chunk, barrier); }",
    "copy_scales": "void copy_scales(u32 to, const Weight& w, u32 row, u32 byte, u32 barrier) {"
    " copy_box(to, reinterpret_cast<u64>(w.scale_map), byte, row, barrier); }",
    "copy_absmax": "void copy_absmax(u32 to, const float* from) { copy(to, 4, from, true); }",
    "arrive_after_copies": "void arrive_after_copies(u32 barrier) { arrive_with_copies(barrier); }",
    **{
        name: f"void {name}({taken}) {{}}"
        for name, taken in (
            ("publish_barriers", ""),
            ("prefetch_map", "const void*"),
            ("prefetch_line", "const u16*"),
            ("prefetch_to_l2", "const void*"),
            ("publish_writes", ""),
            ("fence_registers", ""),
            ("launch_dependents", ""),
            ("wait_for_prior_kernel", ""),
        )
    },
    "take_registers": "",
    "leave_registers": "",
}
_NAME = r"(?:template <[^>]*>\s*)?__device__ __forceinline__ [\w ]+\b%s(?:[^()]|\([^()]*\))*\)\s*\{"
_ASSEMBLY = re.compile(r"\basm\s*(?:volatile)?\s*\((?:[^()\"]|\"[^\"]*\"|\((?:[^()\"]|\"[^\"]*\")*\))*\);")


# Of every kernel, which takes one structure.
_KERNEL = re.compile(r'extern "C" __global__ void[^;{]*?(\w+)\(const __grid_constant__')
_LAUNCH = """
template <class T> T told_by(void (*kernel)(T));
"""
_LAUNCH_OF = """
extern "C" size_t size_of_{0}() {{ return sizeof(decltype(told_by({0}))); }}
extern "C" unsigned run_{0}(const void* arguments, const Shape* shape, const Range* ranges, unsigned count) {{
  const auto kernel = [](const void* told) {{ {0}(*static_cast<const decltype(told_by({0}))*>(told)); }};
  return launch(kernel, arguments, size_of_{0}(), *shape, ranges, count);
}}
"""


def library(folder: Path, variant: Variant, functions: str = "") -> ctypes.CDLL:
    """The variant as C++, compiled in `folder`, with what launches its kernels, and C functions of the caller's behind
    it. One that was compiled before is used again."""
    if (found := _libraries.get((variant, functions))) is not None:
        return found
    text = variant.source.replace('#include "config.cuh"', _config(dict(variant.constants)))
    text = re.sub(r"^\s*#(?:line|pragma unroll).*$", "", text, flags=re.M)
    text = re.sub(r"^\s*extern __shared__.*;$", "", text, flags=re.M)
    for name, instead in FUNCTIONS.items():
        text = _replaced(text, name, instead)
    text = _ASSEMBLY.sub("__builtin_trap();", text)  # of functions that this kernel does not call
    functions_of_kernels = map(_LAUNCH_OF.format, _KERNEL.findall(text))
    text = text.replace('extern "C" __global__', "static")
    number = len(_libraries)  # a library is loaded once from a path
    source, compiled = folder / f"kernel{number}.cpp", folder / f"kernel{number}.so"
    parts = ('#include "cuda_on_cpu.h"', text, _LAUNCH, *functions_of_kernels, functions)
    source.write_text("\n".join(parts), encoding="utf-8")
    # CUDA C++ allows a little more than C++. Kernels run so briefly that -O1 costs more than it gains.
    _compile("-Og", "-w", "-fpermissive", "-shared", f"-I{HERE}", source, _what_runs_them(folder), "-o", compiled)
    _libraries[variant, functions] = loaded = ctypes.CDLL(str(compiled))
    return loaded


_libraries: dict[tuple[Variant, str], ctypes.CDLL] = {}
_objects: list[Path] = []


def _what_runs_them(folder: Path) -> Path:
    """Compiled once, in the folder of whoever comes first."""
    if _objects:
        return _objects[0]
    compiled = folder / "cuda_on_cpu.o"
    _compile("-O2", "-Wall", "-Wno-parentheses", "-c", HERE / "cuda_on_cpu.cpp", "-o", compiled)
    _objects.append(compiled)
    return compiled


def _compile(*arguments: object) -> None:
    assert COMPILER is not None
    subprocess.run([COMPILER, "-std=c++20", "-fPIC", "-U_FORTIFY_SOURCE", *map(str, arguments)], check=True)


def _replaced(text: str, name: str, instead: str) -> str:
    """name: of a function, all of whose overloads go, or with the beginning of its parameters."""
    pattern = re.compile(_NAME % re.escape(name if "(" in name else f"{name}("))
    if instead and not instead.startswith("template"):
        instead = f"inline {instead}"
    while match := pattern.search(text):
        end, depth = match.end(), 1
        while depth:
            depth += {"{": 1, "}": -1}.get(text[end], 0)
            end += 1
        text, instead = f"{text[: match.start()]}{instead}\n{text[end:]}", ""
    return text


WAITING = 0xFFFFFFFF  # what `run` says where no thread can go on


class Shape(NamedTuple):
    """Of a launch. ctas: along x. y, z: CTAs along those. cluster: those along y that share memory. together: those
    along x that wait for each other."""

    ctas: int
    threads: int
    shared_bytes: int
    y: int = 1
    z: int = 1
    cluster: int = 1
    together: int = 1


def size_of(folder: Path, variant: Variant, kernel: str) -> int:
    """Bytes of the structure that a kernel takes."""
    size: int = getattr(library(folder, variant), f"size_of_{kernel}")()
    return size


def run(
    folder: Path, variant: Variant, kernel: str, arguments: bytes, shape: Shape, readable: Sequence[torch.Tensor]
) -> int:
    """Launch a kernel. folder: where it is compiled. readable: the tensors that it may read by copies and read-only
    loads. Returns how many of those were outside of them, or wrong in another way; WAITING where its threads wait for
    each other."""
    ranges = torch.tensor([(t.data_ptr(), t.data_ptr() + t.nbytes) for t in readable], dtype=torch.int64)
    assert len(arguments) == size_of(folder, variant, kernel)
    found: int = getattr(library(folder, variant), f"run_{kernel}")(
        arguments,
        (ctypes.c_uint * 7)(
            shape.ctas, shape.y, shape.z, shape.cluster, shape.together, shape.threads, shape.shared_bytes
        ),
        ctypes.c_void_p(ranges.data_ptr()),
        len(ranges),
    )
    return found & WAITING  # ctypes takes it for a number with a sign


def map_of(address: int, sizes: Sequence[int], strides: Sequence[int], box: Sequence[int], swizzle: int) -> bytes:
    """What stands for the driver's tensor map here: cuda_on_cpu.cpp's Map."""
    more = 5 - len(sizes)
    values = (address, *sizes, *(1,) * more, *strides, *(0,) * more, *box, *(1,) * more, swizzle)
    return struct.pack("10Q6I", *values)
