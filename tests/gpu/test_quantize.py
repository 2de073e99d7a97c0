"""quantize on a GPU: the nibbles and scales that bitsandbytes' CUDA kernels make."""

import itertools

import pytest
import torch

import halfbyte as hb
from halfbyte.formats.bitsandbytes import FORMATS
from halfbyte.formats.int4 import INT4
from halfbyte.formats.spec import BLOCK_SIZES
from halfbyte.kernels.quantize import reference

from .conftest import DEVICE

bnb = pytest.importorskip("bitsandbytes") if torch.cuda.is_available() else None
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def assert_like_bitsandbytes(weight: torch.Tensor, format: str, block_size: int, nested: bool) -> None:
    q = hb.quantize(weight, format, block_size=block_size, nested=nested)
    packed, state = bnb.functional.quantize_4bit(
        weight, blocksize=block_size, quant_type=format, compress_statistics=nested
    )
    pairs = [(q.packed.view(-1), packed.view(-1)), (q.scale, state.absmax)]
    if nested:
        pairs += [
            (q.nested.offset, state.offset),
            (q.nested.absmax, state.state2.absmax),
            (q.nested.code, state.state2.code),
        ]
    for name, (ours, theirs) in zip(("nibbles", "scale", "offset", "nested absmax", "code"), pairs, strict=False):
        assert ours.shape == theirs.shape, name
        both_nan = ours.isnan() & theirs.isnan()
        same = (ours.view(-1).view(torch.uint8) == theirs.view(-1).view(torch.uint8)).view(ours.numel(), -1).all(1)
        wrong = ~(same | both_nan.view(-1))
        assert not wrong.any(), f"{name}: {int(wrong.sum())} of {ours.numel()} differ"


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize(("format", "dtype"), list(itertools.product(FORMATS, DTYPES)))
def test_like_bitsandbytes(format: str, dtype: torch.dtype, nested: bool, block_size: int) -> None:
    for shape in ((1024, 4096), (7, 33), (1, 1), (100, 4098), (513, 1001)):
        assert_like_bitsandbytes(torch.randn(shape, device=DEVICE).to(dtype), format, block_size, nested)
    assert_like_bitsandbytes(torch.rand((512, 4096), device=DEVICE).to(dtype) * 1e-3, format, block_size, nested)
    assert_like_bitsandbytes(torch.randn((512, 4096), device=DEVICE).to(dtype) * 1e4, format, block_size, nested)


@pytest.mark.parametrize(("format", "dtype"), list(itertools.product(FORMATS, DTYPES)))
def test_unusual_weights(format: str, dtype: torch.dtype) -> None:
    for value in (0.0, -0.0, float("nan"), float("inf"), -float("inf"), 1e-38, 1e-40, 6e-8, 3e38):
        for every in (1, 7, 64, 640):
            weight = torch.randn((64, 640), device=DEVICE).to(dtype)
            weight.view(-1)[::every] = value
            assert_like_bitsandbytes(weight, format, 64, False)
    assert_like_bitsandbytes(torch.zeros((64, 64), dtype=dtype, device=DEVICE), format, 64, True)
    subnormal = torch.finfo(dtype).smallest_normal * torch.rand((64, 640), device=DEVICE)
    assert_like_bitsandbytes(subnormal.to(dtype), format, 64, False)


@pytest.mark.parametrize("format", FORMATS)
def test_ties(format: str) -> None:
    """Weights on the very thresholds, and one step to either side."""
    thresholds = torch.tensor(FORMATS[format].thresholds, device=DEVICE)
    thresholds = torch.cat((thresholds, -thresholds))
    down, up = (torch.nextafter(thresholds, torch.full_like(thresholds, way)) for way in (-2.0, 2.0))
    values = torch.cat((thresholds, down, up))
    for scale in (*torch.rand(64).tolist(), 1.0, 2.0, 0.5, 3.0):
        blocks = torch.nn.functional.pad(values * scale, (0, -values.numel() % 63)).view(-1, 63)
        weight = torch.nn.functional.pad(blocks, (0, 1), value=scale)
        assert_like_bitsandbytes(weight.contiguous(), format, 64, True)


def test_int4_like_the_reference() -> None:
    for dtype, group_size in itertools.product(DTYPES, (32, 64, 128)):
        weight = torch.randn((300, 1024), device=DEVICE).to(dtype)
        weight[0], weight[1, 5], weight[2, 7] = 0, float("nan"), float("inf")
        q = hb.quantize(weight, "int4", group_size=group_size)
        packed, scale = torch.empty_like(q.packed), torch.empty_like(q.scale)
        reference.quantize(weight, INT4, group_size, packed, scale)
        assert torch.equal(q.packed, packed)
        assert torch.equal(q.scale.isnan(), scale.isnan())
        assert torch.equal(q.scale.nan_to_num(), scale.nan_to_num())


def test_more_than_two_to_the_31() -> None:
    rows, k = 2**19 + 3, 4096 + 64
    weight = torch.empty((rows, k), dtype=torch.bfloat16, device=DEVICE).normal_()
    q = hb.quantize(weight, nested=False)
    for start in (0, 2**18, rows - 2**14):
        part = hb.quantize(weight[start : start + 2**14], nested=False)
        assert torch.equal(q.packed.view(rows, -1)[start : start + 2**14].reshape(-1), part.packed.view(-1))
        assert torch.equal(q.scale.view(rows, -1)[start : start + 2**14].reshape(-1), part.scale)


def test_opcheck() -> None:
    torch.library.opcheck(torch.ops.halfbyte.quantize.default, (torch.randn(33, 65, device=DEVICE), "nf4", 64, True))
