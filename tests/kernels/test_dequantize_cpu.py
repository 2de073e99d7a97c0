"""The CPU kernel and the reference give bitsandbytes' bits, for every byte, scale code, block size and dtype."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from halfbyte.formats.bitsandbytes import FORMATS
from halfbyte.formats.int4 import INT4
from halfbyte.formats.nested import dynamic_code
from halfbyte.formats.spec import BLOCK_SIZES, Format, codebook_tensor
from halfbyte.formats.weight import FLOAT_DTYPES, NestedScale
from halfbyte.kernels.dequantize import cpu, reference

bitsandbytes = pytest.importorskip("bitsandbytes", minversion="0.48")
CPU = torch.device("cpu")
POISON = 12345.0

formats = pytest.mark.parametrize("format", FORMATS)
dtypes = pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
block_sizes = pytest.mark.parametrize("block_size", BLOCK_SIZES)


@pytest.fixture(autouse=True)
def _eager():
    """bitsandbytes compiles its fallback anew for every shape; its eager code gives the same bits at once."""
    with torch.compiler.set_stance("force_eager"):
        yield


def bits(values: Tensor) -> Tensor:
    return values.view(torch.int32 if values.dtype == torch.float32 else torch.int16)


def assert_same_bits(ours: Tensor, theirs: Tensor) -> None:
    """Equal to the bit, NaN for NaN with any payload."""
    assert ours.dtype == theirs.dtype
    assert ours.shape == theirs.shape
    wrong = (bits(ours) != bits(theirs)) & ~(ours.isnan() & theirs.isnan())
    assert not wrong.any(), f"{int(wrong.sum())} differ; ours {ours[wrong][:5]}, theirs {theirs[wrong][:5]}"


def as_we_do(theirs: Tensor, ours: Tensor, exact: Tensor, negative_zero: Tensor) -> Tensor:
    """bitsandbytes' values, with its own answer replaced by ours in the three places where its CPU paths do not agree.

    FP4's nibble 8 is +0.0 in its AVX-512 path and -0.0 elsewhere (ours: the codebook's +0.0). A NaN has any payload
    (assert_same_bits). AVX512-BF16's conversion takes subnormals for zero (ours: rounded as IEEE 754 says).
    """
    zero = (theirs == 0) & (ours == 0) & negative_zero
    subnormal = exact.abs() < torch.finfo(torch.float32).smallest_normal
    flushed = (theirs == 0) & subnormal & (ours.dtype == torch.bfloat16)
    return torch.where(zero | flushed, ours, theirs)


def dequantize_bitsandbytes(
    packed: Tensor, scale: Tensor, nested: NestedScale | None, format: str, block_size: int, like: Tensor
) -> Tensor:
    state2 = offset = None
    if nested:
        state2 = bitsandbytes.functional.QuantState(
            absmax=nested.absmax, code=nested.code, blocksize=nested.block_size, dtype=torch.float32
        )
        offset = nested.offset
    state = bitsandbytes.functional.QuantState(
        absmax=scale,
        shape=like.shape,
        code=codebook_tensor(FORMATS[format], CPU),
        blocksize=block_size,
        quant_type=format,
        dtype=like.dtype,
        offset=offset,
        state2=state2,
    )
    return bitsandbytes.functional.dequantize_4bit(packed.view(-1, 1), state).reshape(like.shape)


def check(
    packed: Tensor,
    scale: Tensor,
    nested: NestedScale | None,
    format: str,
    block_size: int,
    dtype: torch.dtype,
    shape: tuple[int, ...],
) -> Tensor:
    """Compare kernel, reference and bitsandbytes; return the kernel's output."""
    spec = FORMATS[format]
    ours, slow = (torch.full(shape, POISON, dtype=dtype) for _ in range(2))
    cpu.dequantize(packed, scale, nested, spec, block_size, ours)
    reference.dequantize(packed, scale, nested, spec, block_size, slow)
    assert_same_bits(ours, slow)
    if ours.numel():
        theirs = dequantize_bitsandbytes(packed, scale, nested, format, block_size, ours)
        exact = torch.full(shape, POISON)
        reference.dequantize(packed, scale, nested, spec, block_size, exact)
        nibbles = torch.stack((packed >> 4, packed & 15), dim=1).view(-1)[: ours.numel()].view(shape)
        assert_same_bits(ours, as_we_do(theirs, ours, exact, (nibbles == 8) & (format == "fp4")))
    return ours


def random_weight(numel: int, block_size: int, nested: bool) -> tuple[Tensor, Tensor, NestedScale | None]:
    packed = torch.randint(0, 256, ((numel + 1) // 2,), dtype=torch.uint8)
    blocks = -(-numel // block_size)
    if not nested:
        return packed, torch.rand(blocks) * 2.0 ** torch.randint(-12, 12, (blocks,)), None
    codes = torch.randint(0, 256, (blocks,), dtype=torch.uint8)
    return packed, codes, NestedScale(dynamic_code(CPU), torch.rand(-(-blocks // 256)), torch.rand(()))


@dtypes
@formats
def test_every_byte_with_every_scale_code(format: str, dtype: torch.dtype) -> None:
    """65536 bytes in 256 blocks of 512 weights: block c holds every byte and has scale code c."""
    packed = torch.arange(256, dtype=torch.uint8).repeat(256)
    codes = torch.arange(256, dtype=torch.uint8)
    for absmax, offset in ((0.37, 0.51), (3.0, -0.25), (1e-3, 1e-5), (2e4, 4e4)):
        nested = NestedScale(dynamic_code(CPU), torch.tensor([absmax]), torch.tensor(offset))
        check(packed, codes, nested, format, 512, dtype, (256, 512))


@pytest.mark.parametrize("nested", [False, True], ids=["flat", "nested"])
@block_sizes
@dtypes
@formats
def test_block_sizes(format: str, dtype: torch.dtype, block_size: int, nested: bool) -> None:
    numel = 300 * block_size
    check(*random_weight(numel, block_size, nested), format, block_size, dtype, (100, 3 * block_size))


@pytest.mark.parametrize("nested", [False, True], ids=["flat", "nested"])
@pytest.mark.parametrize("numel", [0, 1, 2, 3, 15, 16, 17, 31, 32, 33, 63, 65, 127, 4095, 4097, 300_001])
@dtypes
@formats
def test_partial_blocks_and_odd_sizes(format: str, dtype: torch.dtype, numel: int, nested: bool) -> None:
    for block_size in (32, 64, 4096):
        check(*random_weight(numel, block_size, nested), format, block_size, dtype, (numel,))


@dtypes
@formats
def test_special_scales(format: str, dtype: torch.dtype) -> None:
    """NaN, infinities, zeros, the largest and smallest floats; what rounds to a subnormal, to zero, to infinity."""
    special = [torch.nan, torch.inf, -torch.inf, 0.0, -0.0, 3.4e38, -3.4e38, 1.1754944e-38, 1e-45, 3e-42, -9e-41]
    powers = (1.37 * 2.0 ** torch.arange(-149, 128)).tolist()
    scale = torch.tensor(special + powers + [65504.0, 65519.0, 65520.0, 65536.0, 131008.0])
    packed = torch.arange(256, dtype=torch.uint8).repeat(len(scale))
    out = check(packed, scale, None, format, 512, dtype, (len(scale), 512))
    assert out[0].isnan().all()


@dtypes
@formats
def test_special_nested_scales(format: str, dtype: torch.dtype) -> None:
    packed = torch.arange(256, dtype=torch.uint8).repeat(1024)
    codes = torch.arange(256, dtype=torch.uint8).repeat(4)
    for offset in (0.0, torch.nan, torch.inf, 1e-40):
        absmax2 = torch.tensor([torch.nan, torch.inf, 0.0, 1e-38])
        nested = NestedScale(dynamic_code(CPU), absmax2, torch.tensor(offset))
        check(packed, codes, nested, format, 512, dtype, (1024, 512))


def test_nested_scale_is_multiplied_then_added() -> None:
    """With one rounding for both, some of these would come out otherwise."""
    packed, codes, nested = random_weight(4_000_000, 32, nested=True)
    out = torch.full((4_000_000,), POISON)
    cpu.dequantize(packed, codes, nested, FORMATS["nf4"], 32, out)
    fused = (
        nested.code[codes.long()].double() * nested.absmax.repeat_interleave(256)[: len(codes)] + nested.offset
    ).float()
    other = torch.empty_like(out)
    cpu.dequantize(packed, fused, None, FORMATS["nf4"], 32, other)
    assert not torch.equal(out, other)
    check(packed, codes, nested, "nf4", 32, torch.float32, (4_000_000,))


@settings(max_examples=150)
@given(
    shape=st.lists(st.integers(1, 40), min_size=1, max_size=3),
    format=st.sampled_from(list(FORMATS)),
    dtype=st.sampled_from(FLOAT_DTYPES),
    block_size=st.sampled_from(BLOCK_SIZES),
    nested=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_any_shape(shape: list[int], format: str, dtype: torch.dtype, block_size: int, nested: bool, seed: int) -> None:
    torch.manual_seed(seed)
    numel = torch.Size(shape).numel()
    out = check(*random_weight(numel, block_size, nested), format, block_size, dtype, (numel,))
    shaped = torch.full(shape, POISON, dtype=dtype)
    torch.manual_seed(seed)
    weight = random_weight(numel, block_size, nested)
    cpu.dequantize(*weight, FORMATS[format], block_size, shaped)
    assert_same_bits(shaped.view(-1), out)


def test_writes_nothing_past_its_end() -> None:
    for numel in (1, 2, 31, 33, 63, 100, 4097):
        packed, scale, _ = random_weight(numel, 64, nested=False)
        around = torch.full((numel + 256,), POISON, dtype=torch.bfloat16)
        cpu.dequantize(packed, scale, None, FORMATS["nf4"], 64, around[128 : 128 + numel])
        assert (around[:128] == around[0]).all()
        assert (around[128 + numel :] == around[0]).all()


def test_any_codebook_and_packed_shape() -> None:
    packed, scale, _ = random_weight(999, 32, nested=False)
    spec = Format("any", tuple(torch.randn(16).tolist()), (32,), 32)
    outs = [torch.full((999,), POISON, dtype=torch.float16) for _ in range(2)]
    cpu.dequantize(packed.view(-1, 1), scale, None, spec, 32, outs[0])
    reference.dequantize(packed, scale, None, spec, 32, outs[1])
    assert_same_bits(*outs)


def test_more_weights_than_one_thread_takes() -> None:
    """The same bits with any number of threads, and in fresh memory, behind which huge pages are asked for."""
    numel = 20_000_001
    packed, codes, nested = random_weight(numel, 64, nested=True)
    outs = []
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 7):
            torch.set_num_threads(count)
            outs.append(torch.empty(numel, dtype=torch.bfloat16))
            cpu.dequantize(packed, codes, nested, FORMATS["nf4"], 64, outs[-1])
    finally:
        torch.set_num_threads(threads)
    expected = torch.empty(numel, dtype=torch.bfloat16)
    reference.dequantize(packed, codes, nested, FORMATS["nf4"], 64, expected)
    for out in outs:
        assert torch.equal(out, expected)


def check_grouped(packed: Tensor, scale: Tensor, group_size: int, dtype: torch.dtype) -> Tensor:
    n, words = packed.shape
    outs = [torch.full((n, words * 8), POISON, dtype=dtype) for _ in range(2)]
    cpu.dequantize(packed, scale, None, INT4, group_size, outs[0])
    reference.dequantize(packed, scale, None, INT4, group_size, outs[1])
    assert_same_bits(*outs)
    return outs[0]


@pytest.mark.parametrize("scale_dtype", FLOAT_DTYPES, ids=str)
@pytest.mark.parametrize("group_size", INT4.block_sizes)
@dtypes
def test_grouped(group_size: int, dtype: torch.dtype, scale_dtype: torch.dtype) -> None:
    """Every word, so every nibble, -8 among them, and every kind of scale; the value spelled out for each weight."""
    n, k = 257, 3 * group_size
    packed = torch.randint(-(2**31), 2**31, (n, k // 8), dtype=torch.int32)
    scale = (torch.randn(n, 3) * 2.0 ** torch.randint(-30, 16, (n, 3))).to(scale_dtype)
    scale[0] = torch.tensor([torch.nan, torch.inf, 0.0])
    out = check_grouped(packed, scale, group_size, dtype)
    for row, column in ((5, 0), (77, 1), (77, 2 * group_size - 1), (256, k - 1)):
        nibble = (packed[row, column // 8].item() >> (4 * (column % 8))) & 15
        expected = (torch.tensor(float(nibble - 8)) * scale[row, column // group_size].float()).to(dtype)
        assert out[row, column] == expected


def test_grouped_without_weights() -> None:
    for n, k in ((0, 128), (4, 0)):
        check_grouped(torch.empty(n, k // 8, dtype=torch.int32), torch.empty(n, k // 128), 128, torch.bfloat16)
