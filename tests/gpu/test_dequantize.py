"""dequantize on a GPU: bitsandbytes' bits for everything it can read, and nothing written beyond its end."""

import itertools

import pytest
import torch

import halfbyte as hb
from halfbyte.formats.int4 import INT4
from halfbyte.formats.nested import dynamic_code
from halfbyte.formats.nf4 import NF4
from halfbyte.formats.spec import BLOCK_SIZES
from halfbyte.kernels.dequantize import reference
from halfbyte.kernels.dequantize.triton import dequantize

from .conftest import DEVICE, POISON, captured, needs_two_gpus, poisoned, sixteen_bits

bnb = pytest.importorskip("bitsandbytes") if torch.cuda.is_available() else None
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
FORMATS = ("nf4", "fp4")


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def assert_same_bits(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    assert ours.shape == theirs.shape
    assert ours.dtype == theirs.dtype
    different = int((bits(ours) != bits(theirs)).sum())
    assert different == 0, f"{different} bytes of {ours.nbytes} differ"


def random_weight(
    shape: tuple[int, ...], format: str, block_size: int, nested: bool, dtype: torch.dtype
) -> hb.QuantizedWeight:
    numel = torch.Size(shape).numel()
    blocks = -(-numel // block_size)
    packed = torch.randint(0, 256, ((numel + 1) // 2,), dtype=torch.uint8, device=DEVICE)
    if not nested:
        scale = torch.randn(blocks, device=DEVICE)
        return hb.QuantizedWeight(format, packed, scale, shape, dtype, block_size)
    scale = torch.randint(0, 256, (blocks,), dtype=torch.uint8, device=DEVICE)
    absmax = torch.rand(-(-blocks // 256), device=DEVICE)
    nested_scale = hb.NestedScale(dynamic_code(DEVICE), absmax, torch.rand((), device=DEVICE))
    return hb.QuantizedWeight(format, packed, scale, shape, dtype, block_size, nested_scale)


def by_bitsandbytes(q: hb.QuantizedWeight) -> torch.Tensor:
    packed, state = hb.to_bitsandbytes(q)
    return bnb.functional.dequantize_4bit(packed, state)


@pytest.mark.parametrize(("format", "dtype"), list(itertools.product(FORMATS, DTYPES)))
def test_every_byte_with_every_scale_code(format: str, dtype: torch.dtype) -> None:
    """Block b holds the bytes of b % 8 and has scale code b // 8: all 256 x 256 pairs."""
    packed = torch.arange(256, dtype=torch.uint8, device=DEVICE).view(8, 32).repeat(256, 1)
    scale = torch.arange(256, dtype=torch.uint8, device=DEVICE).repeat_interleave(8)
    absmax = torch.rand(8, device=DEVICE) + 0.1
    nested = hb.NestedScale(dynamic_code(DEVICE), absmax, torch.rand((), device=DEVICE))
    q = hb.QuantizedWeight(format, packed, scale, (2048, 64), dtype, 64, nested)
    assert_same_bits(hb.dequantize(q), by_bitsandbytes(q))


@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize(("format", "dtype"), list(itertools.product(FORMATS, DTYPES)))
def test_block_sizes_and_shapes(format: str, dtype: torch.dtype, block_size: int, nested: bool) -> None:
    for shape in ((3, 4096), (1, 1), (7, 33), (64, 64), (1001,), (257, 4099), (2, 96, 100), (8192, 512)):
        q = random_weight(shape, format, block_size, nested, dtype)
        with poisoned(shape, dtype, before=0) as out:
            hb.dequantize(q, out=out)
        assert_same_bits(out, by_bitsandbytes(q))


@pytest.mark.parametrize(
    "value", [float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1e-38, 1e-39, 3e-45, 1e38, -2.5]
)
@pytest.mark.parametrize(("format", "dtype"), list(itertools.product(FORMATS, DTYPES)))
def test_unusual_scales(format: str, dtype: torch.dtype, value: float) -> None:
    packed = torch.arange(256, dtype=torch.uint8, device=DEVICE).repeat(8)
    scale = torch.full((64,), value, device=DEVICE)
    q = hb.QuantizedWeight(format, packed, scale, (64, 64), dtype, 64)
    assert_same_bits(hb.dequantize(q), by_bitsandbytes(q))
    for absmax, offset in ((value, 0.5), (1.0, value), (1e-38, 1e-38)):
        nested = hb.NestedScale(
            dynamic_code(DEVICE), torch.full((1,), absmax, device=DEVICE), torch.tensor(offset, device=DEVICE)
        )
        codes = torch.arange(0, 256, 4, dtype=torch.uint8, device=DEVICE)
        q = hb.QuantizedWeight(format, packed, codes, (64, 64), dtype, 64, nested)
        assert_same_bits(hb.dequantize(q), by_bitsandbytes(q))


@pytest.mark.parametrize("offset", range(1, 9))
@pytest.mark.parametrize("dtype", DTYPES)
def test_any_alignment(dtype: torch.dtype, offset: int) -> None:
    """`out` and the packed bytes may start anywhere."""
    q = random_weight((33, 100), "nf4", 64, True, dtype)
    shifted = torch.empty(q.packed.numel() + offset, dtype=torch.uint8, device=DEVICE)[offset:]
    shifted.copy_(q.packed)
    moved = hb.QuantizedWeight("nf4", shifted, q.scale, q.shape, dtype, 64, q.nested)
    with poisoned(q.shape, dtype, before=offset) as out:
        hb.dequantize(moved, out=out)
    assert_same_bits(out, hb.dequantize(q))


@pytest.mark.parametrize("group_size", [32, 64, 128])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale_dtype", DTYPES)
def test_int4(dtype: torch.dtype, scale_dtype: torch.dtype, group_size: int) -> None:
    for n, k in ((1, 128), (5, 384), (1000, 1024)):
        packed = torch.randint(-(2**31), 2**31, (n, k // 8), dtype=torch.int32, device=DEVICE)
        scale = torch.randn((n, k // group_size), device=DEVICE).to(scale_dtype)
        q = hb.QuantizedWeight("int4", packed, scale, (n, k), dtype, group_size)
        with poisoned((n, k), dtype, before=0) as out:
            hb.dequantize(q, out=out)
        expected = torch.empty((n, k), dtype=dtype, device=DEVICE)
        reference.dequantize(packed, scale, None, INT4, group_size, expected)
        assert_same_bits(out, expected)


def test_zero_rows() -> None:
    q = hb.quantize(torch.empty((0, 64), dtype=torch.bfloat16, device=DEVICE))
    assert hb.dequantize(q).shape == (0, 64)


def test_a_repeated_call_reads_fresh_bytes() -> None:
    """The direct launch keeps nothing of a weight: not its pointers, not its values."""
    for _ in range(3):
        q = random_weight((128, 4096), "nf4", 64, True, torch.bfloat16)
        assert_same_bits(hb.dequantize(q), by_bitsandbytes(q))
        q.packed.random_(0, 256)
        assert_same_bits(hb.dequantize(q), by_bitsandbytes(q))


def test_other_streams_and_threads() -> None:
    from concurrent.futures import ThreadPoolExecutor

    weights = [random_weight((512, 512), "nf4", 64, True, torch.bfloat16) for _ in range(8)]
    expected = [by_bitsandbytes(q) for q in weights]
    torch.cuda.synchronize()

    def work(index: int) -> torch.Tensor:
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(50):
                result = hb.dequantize(weights[index])
            torch.cuda.current_stream().synchronize()
        return result

    with ThreadPoolExecutor(8) as pool:
        for ours, theirs in zip(pool.map(work, range(8)), expected, strict=True):
            assert_same_bits(ours, theirs)


@needs_two_gpus
def test_a_device_that_is_not_current() -> None:
    q = random_weight((512, 512), "nf4", 64, True, torch.bfloat16)
    there = q.to("cuda:1")
    for _ in range(2):
        ours = hb.dequantize(there)
        assert ours.device == torch.device("cuda", 1)
        assert_same_bits(ours.to(DEVICE), hb.dequantize(q))
    assert torch.cuda.current_device() == 0


def test_cuda_graph() -> None:
    q = random_weight((1024, 1024), "nf4", 64, True, torch.float16)
    out = hb.dequantize(q)
    graph, _ = captured(lambda: hb.dequantize(q, out=out))
    q.packed.random_(0, 256)
    out.fill_(POISON)
    graph.replay()
    assert_same_bits(out, by_bitsandbytes(q))


@sixteen_bits
def test_torch_compile(dtype: torch.dtype) -> None:
    q = random_weight((256, 512), "nf4", 64, True, dtype)
    x = torch.randn((4, 512), dtype=dtype, device=DEVICE)
    compiled = torch.compile(lambda x, q: x @ hb.dequantize(q).t(), fullgraph=True)
    torch.testing.assert_close(compiled(x, q), x @ by_bitsandbytes(q).t())


def test_opcheck() -> None:
    q = random_weight((33, 65), "fp4", 64, True, torch.bfloat16)
    arguments = (q.packed, q.scale, list(q.nested[:3]), "fp4", [33, 65], 64, 256, torch.float16)
    torch.library.opcheck(torch.ops.halfbyte.dequantize.default, arguments)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_more_than_two_to_the_31(dtype: torch.dtype) -> None:
    """Checked piece by piece against the same kernel on pieces that need no 64-bit index."""
    rows, k = 2**19 + 3, 4096 + 64
    q = random_weight((rows, k), "nf4", 64, True, dtype)
    assert q.numel > 2**31
    out = hb.dequantize(q)
    piece = 2**14
    scales = reference.dequantize_scales(q.scale, q.nested, q.spec)
    for start in (0, 2**17, 2**18 - piece, 2**19 - piece, rows - piece):
        part = slice(start * k // 2, (start + piece) * k // 2)
        expected = torch.empty((piece, k), dtype=dtype, device=DEVICE)
        scale = scales[start * k // 64 : (start + piece) * k // 64].contiguous()
        dequantize(q.packed[part].contiguous(), scale, None, NF4, 64, expected)
        assert_same_bits(out[start : start + piece], expected)
