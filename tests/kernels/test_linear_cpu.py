"""The CPU kernels: exact weights, or those of a codebook that is rounded to bf16; exact sums to the last places
of fp32; the same bits always, on every kind of CPU."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from halfbyte.formats.nested import dynamic_code
from halfbyte.formats.spec import BLOCK_SIZES, FORMATS
from halfbyte.formats.weight import FLOAT_DTYPES, NestedScale
from halfbyte.kernels.common import float_strips, paired_products
from halfbyte.kernels.dequantize import reference as dequantize
from halfbyte.kernels.linear import cpu
from halfbyte.kernels.linear.codebook import factor_of
from halfbyte.kernels.linear.reference import linear_exact

CPU = torch.device("cpu")
POISON = 12345.0

# Sums of K products in fp32, then one rounding: far below what a wrong weight, scale or row would make.
BOUND = {torch.float32: 1e-6, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}

formats = pytest.mark.parametrize("format", sorted(FORMATS))
# Whose blocks run over the weight flattened, and whose lie along K.
FLAT = sorted(name for name, spec in FORMATS.items() if not spec.along_k)
ALONG_K = sorted(FORMATS.keys() - FLAT)
dtypes = pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)


class Weight:
    """Random bytes and scales, as a kernel takes them."""

    def __init__(self, format: str, n: int, k: int, size: int, nested: bool = False) -> None:
        self.spec, self.shape, self.size = FORMATS[format], (n, k), size
        self.nested: NestedScale | None = None
        packed = torch.randint(0, 256, ((n * k + 1) // 2,), dtype=torch.uint8)
        self.packed = packed.view(getattr(torch, self.spec.packed_dtype)).view(self.spec.packed_shape((n, k)))
        self.scale = torch.rand(self.spec.scale_shape((n, k), size)) + 0.1
        if self.spec.has_exponents:
            self.scale = torch.randint(120, 130, self.scale.shape, dtype=torch.uint8)
        if nested:
            self.scale = torch.randint(0, 256, self.scale.shape, dtype=torch.uint8)
            self.nested = NestedScale(dynamic_code(CPU), torch.rand(-(-len(self.scale) // 256)), torch.rand(()))

    def linear(self, x: Tensor, bias: Tensor | None = None, batch_invariant: bool = False) -> Tensor:
        """Of more than 16 rows of bf16 numbers by strips, where a CPU has them, unless the bits may not change."""
        out = torch.full((len(x), self.shape[0]), POISON, dtype=x.dtype)
        cpu.linear(x, self.packed, self.scale, self.nested, self.spec, self.size, bias, out, batch_invariant)
        return out

    def dense(self, dtype: torch.dtype = torch.float32) -> Tensor:
        out = torch.full(self.shape, POISON, dtype=dtype)
        dequantize.dequantize(self.packed, self.scale, self.nested, self.spec, self.size, out)
        return out

    def as_multiplied(self, dtype: torch.dtype) -> Tensor:
        """Dense; where bf16 numbers are multiplied in pairs, of the codebook that is rounded to them."""
        if not paired_products.supports(dtype, self.shape[1]):
            return self.dense(dtype)
        factor = factor_of(self.spec.name, dtype)
        rounded = (torch.tensor(self.spec.codebook) * factor).to(dtype).tolist()
        out = torch.full(self.shape, POISON)
        spec = replace(self.spec, codebook=tuple(rounded))
        dequantize.dequantize(self.packed, self.scale, self.nested, spec, self.size, out)
        return (out * torch.tensor(1 / factor)).to(dtype)


def check(weight: Weight, m: int, dtype: torch.dtype, with_bias: bool = False) -> None:
    x = torch.randn(m, weight.shape[1]).to(dtype)
    bias = torch.randn(weight.shape[0]).to(dtype) if with_bias else None
    right = linear_exact(x, weight.dense(), bias)
    for batch_invariant in (False, True):
        error = (weight.linear(x, bias, batch_invariant).double() - right).norm()
        assert error <= BOUND[dtype] * right.norm(), f"{error / right.norm():.2e}"


@dtypes
@formats
def test_identity_gives_the_weights_to_the_bit(format: str, dtype: torch.dtype) -> None:
    """Every byte is there many times over; nothing is added but zeros."""
    for nested in {False, FORMATS[format].nests}:
        for size in (32, 64, 128):
            weight, one = Weight(format, 70, 256, size, nested), torch.eye(256, dtype=dtype)
            for batch_invariant in (False, True):
                assert torch.equal(weight.linear(one, None, batch_invariant).t(), weight.as_multiplied(dtype))


@pytest.mark.parametrize("m", [1, 2, 3, 4, 5, 7, 8, 9, 17, 18, 19, 20, 21, 22, 64])
@dtypes
@formats
def test_rows_of_x(format: str, dtype: torch.dtype, m: int) -> None:
    check(Weight(format, 37, 384, 64, nested=FORMATS[format].nests), m, dtype, with_bias=m % 2 == 0)


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 6, 7, 8, 31, 32, 33, 129])
@formats
def test_rows_of_the_weight(format: str, n: int) -> None:
    check(Weight(format, n, 256, 128), 5, torch.float32, with_bias=True)
    for m in (13, 23):
        check(Weight(format, n, 1280, 128), m, torch.bfloat16, with_bias=True)


@pytest.mark.parametrize("nested", [False, True], ids=["flat", "nested"])
@pytest.mark.parametrize("size", BLOCK_SIZES)
@pytest.mark.parametrize("format", FLAT)
def test_block_sizes(format: str, size: int, nested: bool) -> None:
    """Rows of whole blocks, rows that begin in the middle of a block, and rows that begin in the middle of a byte."""
    for k in (32, 96, 4096, 4160, 33, 63, 100, 4097):
        check(Weight(format, 9, k, size, nested), 5, torch.float32, with_bias=True)
    for k in (128, 384, 4096, 4224):  # multiplied in pairs, where a CPU does
        for m in (15, 18):
            check(Weight(format, 9, k, size, nested), m, torch.bfloat16, with_bias=True)


@dtypes
@pytest.mark.parametrize(("format", "size"), [(name, size) for name in ALONG_K for size in FORMATS[name].block_sizes])
def test_group_sizes(format: str, size: int, dtype: torch.dtype) -> None:
    for k in (size, 3 * size, 32 * size):
        weight = Weight(format, 9, k, size)
        check(weight, 5, dtype)
        if not weight.spec.has_exponents:
            weight.scale = weight.scale.to(dtype)
            check(weight, 5, dtype)


@pytest.fixture
def strips(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of numbers that are multiplied one by one, for any number of rows."""
    if not float_strips.supports(32):
        pytest.skip("this CPU has no AVX2")
    monkeypatch.setattr(float_strips, "MOST_FEW", 0)
    monkeypatch.setattr(paired_products, "is_for_this_cpu", lambda: False)


@pytest.mark.usefixtures("strips")
@dtypes
@formats
def test_strips(format: str, dtype: torch.dtype) -> None:
    """Any number of rows of x, in the last tile too, and of W, in the last strip; K that ends within a part."""
    for m, n, k in ((1, 37, 384), (3, 1, 32), (5, 16, 128), (6, 33, 288), (7, 31, 640), (9, 70, 64), (23, 65, 4128)):
        if k % min(FORMATS[format].block_sizes) == 0:
            size = max(size for size in FORMATS[format].block_sizes if format not in ALONG_K or k % size == 0)
            check(Weight(format, n, k, size, nested=FORMATS[format].nests), m, dtype, with_bias=m % 2 == 0)
    one = torch.eye(256, dtype=dtype)
    for size in (32, 64, 128):
        weight = Weight(format, 70, 256, size)
        assert torch.equal(weight.linear(one).t(), weight.dense(dtype))


@pytest.mark.usefixtures("strips")
@dtypes
def test_a_row_of_a_strip_does_not_know_of_others(dtype: torch.dtype) -> None:
    weight, x = Weight("nf4", 130, 1088, 32, nested=True), torch.randn(43, 1088).to(dtype)
    whole = weight.linear(x)
    for begin, end in ((0, 1), (22, 23), (0, 17), (1, 30), (20, 43), (9, 11)):
        assert torch.equal(weight.linear(x[begin:end].clone()), whole[begin:end])


@settings(max_examples=100)
@given(
    n=st.integers(0, 40),
    k=st.integers(1, 300),
    m=st.integers(0, 10) | st.integers(17, 40),
    format=st.sampled_from(FLAT),
    dtype=st.sampled_from(FLOAT_DTYPES),
    size=st.sampled_from(BLOCK_SIZES),
    nested=st.booleans(),
    with_bias=st.booleans(),
)
def test_any_shape(
    n: int, k: int, m: int, format: str, dtype: torch.dtype, size: int, nested: bool, with_bias: bool
) -> None:
    torch.manual_seed(n + 41 * k)
    check(Weight(format, n, k, size, nested), m, dtype, with_bias)


@pytest.mark.parametrize(
    ("k", "dtype"),
    [
        (256, torch.float32),
        (256, torch.bfloat16),
        (2432, torch.bfloat16),  # where eight rows of x come in parts of K, of which the last one is short
        (96, torch.float32),
        (99, torch.float32),
    ],
)
@formats
def test_a_row_does_not_know_of_others(format: str, k: int, dtype: torch.dtype) -> None:
    if format in ALONG_K and k % 32:
        pytest.skip("groups divide K")
    weight = Weight(format, 130, k, 32)
    x = torch.randn(43, k).to(dtype)
    whole = weight.linear(x, batch_invariant=True)
    for begin, end in ((0, 1), (22, 23), (3, 8), (1, 23), (9, 11)):
        assert torch.equal(weight.linear(x[begin:end].clone(), batch_invariant=True), whole[begin:end])
    x = torch.randn(73, k).to(dtype)
    whole = weight.linear(x)
    for begin, end in ((0, 33), (1, 45), (20, 73)):  # many, wherever they are in their tiles
        assert torch.equal(weight.linear(x[begin:end].clone()), whole[begin:end])


@pytest.mark.parametrize("m", [9, 29])
def test_the_same_bits_with_any_number_of_threads(m: int) -> None:
    weight = Weight("nf4", 4099, 1152, 64, nested=True)
    x = torch.randn(m, 1152).bfloat16()
    outs = []
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 3, 7):
            torch.set_num_threads(count)
            outs.append(weight.linear(x))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(out, outs[0]) for out in outs)


@pytest.mark.parametrize(("k", "dtype"), [(256, torch.float16), (256, torch.bfloat16), (99, torch.float16)])
def test_writes_nothing_past_its_end(k: int, dtype: torch.dtype) -> None:
    weight = Weight("fp4", 7, k, 32)
    poison = torch.tensor(POISON).to(dtype)
    for m in (1, 3, 6, 13, 19):
        around = torch.full((m * 7 + 128,), POISON, dtype=dtype)
        out = around[64 : 64 + m * 7].view(m, 7)
        x = torch.randn(m, k).to(dtype)
        cpu.linear(x, weight.packed, weight.scale, None, FORMATS["fp4"], 32, None, out, False)
        assert torch.equal(out, weight.linear(x))
        assert (around[:64] == poison).all()
        assert (around[64 + m * 7 :] == poison).all()


@pytest.mark.parametrize("m", [4, 19])
@dtypes
def test_special_values(dtype: torch.dtype, m: int) -> None:
    """NaN and infinity in x and in scales go where arithmetic sends them, and nowhere else. (Sums of a block may be
    scaled, so where x is infinite the scale is not.)"""
    weight = Weight("nf4", 6, 128, 64)
    weight.packed.fill_(0xFF)  # every weight is its scale
    weight.scale[2], weight.scale[4] = torch.nan, torch.inf
    x = torch.ones(m, 128, dtype=dtype)
    x[1, 7], x[2, 70] = torch.nan, -torch.inf
    out = weight.linear(x)
    right = linear_exact(x, weight.dense()).to(dtype)
    assert torch.equal(out.isnan(), right.isnan())
    assert torch.equal(out.isinf(), right.isinf())
    assert not out[0, 3:].isnan().any()


def test_every_fp16_and_bf16_is_read_and_written() -> None:
    """x * 1, for all of them: subnormals, infinities and NaN among them."""
    values = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    weight = Weight("nf4", 1, 32, 32)
    weight.packed.fill_(0x77)  # zeros, but for the first, which is one
    weight.packed[0] = 0xF7
    weight.scale.fill_(1)
    for dtype in (torch.float16, torch.bfloat16):
        x = torch.zeros(len(values), 32, dtype=dtype)
        x[:, 0] = values.view(dtype)
        out = weight.linear(x)[:, 0]
        same = (out == x[:, 0]) | (out.isnan() & x[:, 0].isnan())
        assert same.all(), x[~same, 0][:5]


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="names kinds of x86")
@pytest.mark.skipif("NUMBA_CPU_FEATURES" in os.environ, reason="runs inside itself")
@pytest.mark.parametrize(
    ("cpu_name", "features"),
    [
        ("haswell", "+avx,+avx2,+fma,+f16c"),
        ("x86-64", "+sse2"),
        pytest.param("nehalem", "+ssse3,+sse4.2", marks=pytest.mark.compile_all),
    ],
)
def test_on_other_cpus(cpu_name: str, features: str, tmp_path: Path) -> None:
    """The same tests, compiled for CPUs without AVX-512, without AVX2, without a byte shuffle."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        __file__,
        "-p",
        "no:cacheprovider",
        "-k",
        "identity or rows or special or strip",
    ]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment |= {
        "NUMBA_CPU_NAME": cpu_name,
        "NUMBA_CPU_FEATURES": features,
        "NUMBA_CACHE_DIR": str(tmp_path),
    }
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert result.returncode == 0, result.stdout + result.stderr
