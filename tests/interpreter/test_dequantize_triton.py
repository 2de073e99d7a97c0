"""The dequantize kernel gives the reference's bits under any plan, and writes nothing past its end.

The interpreter turns fp32 into bf16 by leaving bits out, where a GPU rounds, and gets bf16's subnormals wrong. So bf16
is compared with the fp32 result less its low half, at scales that make no subnormals; that a GPU rounds, and rounds
those too, is what the tests in gpu/ are for.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from pairs import every_pair
from torch import Tensor

from halfbyte.formats.bitsandbytes import FORMATS
from halfbyte.formats.int4 import INT4
from halfbyte.formats.nested import dynamic_code
from halfbyte.formats.spec import BLOCK_SIZES
from halfbyte.formats.weight import FLOAT_DTYPES, NestedScale
from halfbyte.kernels.common.device import HOST
from halfbyte.kernels.dequantize import reference, triton
from halfbyte.kernels.dequantize.plan import DequantizePlan, is_valid

pytestmark = pytest.mark.filterwarnings("ignore:(invalid value|overflow).*:RuntimeWarning")
CPU = torch.device("cpu")
POISON = 768.0  # the same in every dtype, and no weight's value
MARGIN = 64

formats = pytest.mark.parametrize("format", FORMATS)
dtypes = pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
block_sizes = pytest.mark.parametrize("block_size", BLOCK_SIZES)


def as_interpreted(exact: Tensor, dtype: torch.dtype) -> Tensor:
    """What the interpreter makes of fp32 `exact` in `dtype`."""
    return (exact.view(torch.int32) & -65536).view(torch.float32) if dtype == torch.bfloat16 else exact.to(dtype)


def assert_written(buffer: Tensor, exact: Tensor) -> None:
    """`buffer` begins with `exact`, and goes on with the poison it was filled with."""
    expected = as_interpreted(exact, buffer.dtype).to(buffer.dtype)
    integers = torch.int32 if buffer.dtype == torch.float32 else torch.int16
    written, after = buffer[: exact.numel()], buffer[exact.numel() :]
    wrong = (written.view(integers) != expected.view(integers)) & ~(written.isnan() & expected.isnan())
    assert not wrong.any(), f"{int(wrong.sum())} differ; got {written[wrong][:5]}, expected {expected[wrong][:5]}"
    assert (after == POISON).all()


def random_scales(blocks: int, nested_size: int) -> tuple[Tensor, NestedScale | None]:
    """Scales for `blocks` blocks; nested, with `nested_size` of them to an entry, unless that is 0."""
    if not nested_size:
        return torch.randn(blocks), None
    codes = torch.randint(0, 256, (blocks,), dtype=torch.uint8)
    return codes, NestedScale(dynamic_code(CPU), torch.rand(-(-blocks // nested_size)), torch.rand(()), nested_size)


def check(
    numel: int,
    format: str,
    dtype: torch.dtype,
    block_size: int,
    scale: Tensor,
    nested: NestedScale | None,
    plan: DequantizePlan | None = None,
) -> None:
    packed = torch.randint(0, 256, ((numel + 1) // 2,), dtype=torch.uint8)
    spec = FORMATS[format]
    buffer, exact = torch.full((numel + MARGIN,), POISON, dtype=dtype), torch.full((numel,), POISON)
    triton.dequantize(packed, scale, nested, spec, block_size, buffer[:numel], plan)
    reference.dequantize(packed, scale, nested, spec, block_size, exact)
    assert_written(buffer, exact)


@every_pair({"format": [*FORMATS], "dtype": FLOAT_DTYPES, "block_size": BLOCK_SIZES, "nested_size": [0, 256]})
def test_block_sizes_and_odd_sizes(format: str, dtype: torch.dtype, block_size: int, nested_size: int) -> None:
    for numel in (1, 2, 31, block_size - 1, block_size, 3 * block_size + 17, 40 * block_size + 2):
        check(numel, format, dtype, block_size, *random_scales(-(-numel // block_size), nested_size))


@dtypes
@formats
def test_special_scales(format: str, dtype: torch.dtype) -> None:
    """Zeros, NaN, infinities, what rounds to a subnormal, to zero and to infinity."""
    tiny = [1e-20] if dtype == torch.bfloat16 else [1e-38, 3e-42, 1e-45]
    special = [0.0, -0.0, torch.nan, torch.inf, -torch.inf, 3.4e38, 65520.0, 6e-8, *tiny]
    check(64 * len(special), format, dtype, 64, torch.tensor(special), None)
    codes = torch.arange(256, dtype=torch.uint8).repeat(4)
    absmax = torch.tensor([torch.nan, torch.inf, 0.0, tiny[0]])
    for offset in (0.0, torch.nan, torch.inf, *tiny):
        check(64 * 1024, format, dtype, 64, codes, NestedScale(dynamic_code(CPU), absmax, torch.tensor(offset)))


@settings(max_examples=150)
@given(
    plan=st.builds(
        DequantizePlan,
        blocks=st.sampled_from([1, 2, 4, 8, 16, 32, 64, 128, 256, 512]),
        warps=st.sampled_from([1, 2, 4, 8, 16]),
        chunk=st.sampled_from([1, 4]),
    ),
    numel=st.integers(1, 20_000),
    format=st.sampled_from(list(FORMATS)),
    dtype=st.sampled_from(FLOAT_DTYPES),
    block_size=st.sampled_from(BLOCK_SIZES),
    nested_size=st.sampled_from([0, 16, 64, 256, 1024]),
    seed=st.integers(0, 2**31),
)
def test_any_valid_plan(
    plan: DequantizePlan, numel: int, format: str, dtype: torch.dtype, block_size: int, nested_size: int, seed: int
) -> None:
    assume(is_valid(plan, block_size, nested_size or None, HOST))
    torch.manual_seed(seed)
    check(numel, format, dtype, block_size, *random_scales(-(-numel // block_size), nested_size), plan)


@pytest.mark.parametrize("scale_dtype", FLOAT_DTYPES, ids=str)
@pytest.mark.parametrize("group_size", INT4.block_sizes)
@dtypes
def test_int4(group_size: int, dtype: torch.dtype, scale_dtype: torch.dtype) -> None:
    """Every word, so every nibble, -8 among them."""
    for n, k in ((1, group_size), (5, 3 * group_size), (37, 5 * group_size)):
        packed = torch.randint(-(2**31), 2**31, (n, k // 8), dtype=torch.int32)
        scale = torch.randn(n, k // group_size).to(scale_dtype)
        scale.view(-1)[:1] = torch.nan
        buffer, exact = torch.full((n * k + MARGIN,), POISON, dtype=dtype), torch.full((n, k), POISON)
        triton.dequantize(packed, scale, None, INT4, group_size, buffer[: n * k].view(n, k))
        reference.dequantize(packed, scale, None, INT4, group_size, exact)
        assert_written(buffer, exact.view(-1))


def test_no_weights() -> None:
    triton.dequantize(torch.empty(0, dtype=torch.uint8), torch.empty(0), None, FORMATS["nf4"], 64, torch.empty(0, 64))
