"""The quantize kernels give the nibbles and scales of the reference under bitsandbytes' CUDA rules.

The interpreter has neither PTX's approximate reciprocal nor flush-to-zero: divisions are exact, subnormals kept.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from halfbyte.formats.bitsandbytes import FORMATS
from halfbyte.formats.int4 import INT4
from halfbyte.formats.nested import dynamic_code
from halfbyte.formats.spec import BLOCK_SIZES
from halfbyte.formats.weight import FLOAT_DTYPES
from halfbyte.kernels.quantize import reference, triton

pytestmark = pytest.mark.filterwarnings("ignore:(divide by zero|invalid value|overflow|All-NaN).*:RuntimeWarning")
CPU = torch.device("cpu")
MARGIN = 64

formats = pytest.mark.parametrize("format", FORMATS)
dtypes = pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
block_sizes = pytest.mark.parametrize("block_size", BLOCK_SIZES)


def poisoned(numel: int, dtype: torch.dtype) -> Tensor:
    """Rubbish in place of the output, and after it as much again as must stay."""
    return torch.full((numel + MARGIN,), 77, dtype=dtype)


def assert_written(buffer: Tensor, expected: Tensor) -> None:
    written, after = buffer[: expected.numel()], buffer[expected.numel() :]
    torch.testing.assert_close(written, expected.reshape(-1), rtol=0, atol=0, equal_nan=True)
    assert (after == 77).all()


def check(weight: Tensor, format: str, block_size: int) -> None:
    n_bytes, blocks = (weight.numel() + 1) // 2, -(-weight.numel() // block_size)
    ours = poisoned(n_bytes, torch.uint8), poisoned(blocks, torch.float32)
    expected = torch.empty(n_bytes, dtype=torch.uint8), torch.empty(blocks)
    triton.quantize(weight, FORMATS[format], block_size, ours[0][:n_bytes], ours[1][:blocks])
    reference.quantize(weight, FORMATS[format], block_size, *expected, like="cuda")
    for buffer, right in zip(ours, expected, strict=True):
        assert_written(buffer, right)


@block_sizes
@dtypes
@formats
def test_block_sizes_and_odd_sizes(format: str, dtype: torch.dtype, block_size: int) -> None:
    for numel in (1, 2, 33, block_size - 1, 3 * block_size, 5 * block_size + 17, 2 * block_size + 2):
        check(torch.randn(numel).to(dtype), format, block_size)


@dtypes
@formats
def test_special_weights(format: str, dtype: torch.dtype) -> None:
    """Blocks with one unusual number, full of it, and a last block that is not full."""
    special = [0.0, -0.0, torch.nan, torch.inf, -torch.inf, torch.finfo(dtype).max, torch.finfo(dtype).smallest_normal]
    blocks = torch.randn(2 * len(special), 64)
    for i, value in enumerate(special):
        blocks[2 * i, i] = value
        blocks[2 * i + 1] = value
    for numel in (blocks.numel(), blocks.numel() - 1, blocks.numel() - 30):
        check(blocks.view(-1)[:numel].to(dtype), format, 64)


@formats
def test_thresholds_and_their_neighbours(format: str) -> None:
    """The one look-up and one comparison agree with all comparisons, one float to either side of each threshold."""
    thresholds = torch.tensor(FORMATS[format].thresholds)
    thresholds = torch.cat((thresholds, -thresholds))
    down, up = (thresholds.nextafter(torch.tensor(way)) for way in (-2.0, 2.0))
    cells = torch.arange(-32, 33) / 32
    values = torch.cat((thresholds, down, up, cells, cells.nextafter(torch.tensor(-2.0)), torch.ones(1)))
    for absmax in (1.0, 0.5, 2.0**-100, 2.0**-130, 0.3, 1.7):
        check(values * absmax, format, 512)


@settings(max_examples=100)
@given(
    numel=st.integers(1, 10_000),
    format=st.sampled_from(list(FORMATS)),
    dtype=st.sampled_from(FLOAT_DTYPES),
    block_size=st.sampled_from(BLOCK_SIZES),
    exponent=st.integers(-150, 10),
    seed=st.integers(0, 2**31),
)
def test_any_size(numel: int, format: str, dtype: torch.dtype, block_size: int, exponent: int, seed: int) -> None:
    torch.manual_seed(seed)
    if dtype == torch.bfloat16:
        exponent = max(exponent, -100)  # the interpreter does not know bf16's subnormal numbers
    check((torch.randn(numel) * 2.0**exponent).to(dtype), format, block_size)


@pytest.mark.parametrize("count", [1, 255, 256, 257, 1023, 1024, 1025, 5000])
def test_scales(count: int) -> None:
    code = dynamic_code(CPU)
    special = torch.tensor([0.0, torch.nan, torch.inf, 3e38])
    for scales in (
        torch.rand(count),
        torch.zeros(count),
        torch.randn(count) * 10.0 ** torch.randint(-9, 3, (count,)),
        code.repeat(20)[:count],
        ((code[:-1] + code[1:]) / 2).repeat(20)[:count],
        torch.cat((special, torch.randn(count)))[:count],
    ):
        for offset in (scales.mean(), torch.tensor(0.0)):
            ours = triton.quantize_scales(scales, offset)
            expected = reference.quantize_scales(scales, offset, like="cuda")
            torch.testing.assert_close(ours, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("group_size", INT4.block_sizes)
@dtypes
def test_int4(group_size: int, dtype: torch.dtype) -> None:
    """Scales in fp32 for bf16 weights: the interpreter leaves bits out where a GPU rounds to bf16."""
    scale_dtype = torch.float32 if dtype == torch.bfloat16 else dtype
    for n, k in ((1, group_size), (5, 3 * group_size), (37, 5 * group_size)):
        halves = torch.randint(-14, 15, (n, k)) / 2
        special = torch.randn(n, k)
        special[0, :5] = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0, -0.0])
        for weight in (
            torch.randn(n, k).to(dtype),
            halves.to(dtype),
            special.to(dtype),
            torch.zeros(n, k, dtype=dtype),
        ):
            words, groups = n * k // 8, n * k // group_size
            packed, scale = poisoned(words, torch.int32), poisoned(groups, scale_dtype)
            expected = torch.empty(n, k // 8, dtype=torch.int32), torch.empty(n, k // group_size, dtype=scale_dtype)
            triton.quantize(
                weight, INT4, group_size, packed[:words].view(n, -1), scale[:groups].view(n, k // group_size)
            )
            reference.quantize(weight, INT4, group_size, *expected)
            assert_written(packed, expected[0])
            assert_written(scale, expected[1])


def test_no_weights() -> None:
    triton.quantize(torch.empty(0), FORMATS["nf4"], 64, torch.empty(0, dtype=torch.uint8), torch.empty(0))
    codes, absmax = triton.quantize_scales(torch.empty(0), torch.tensor(0.0))
    assert codes.numel() == absmax.numel() == 0
