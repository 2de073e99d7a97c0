"""MXFP4 against the OCP specification, weight by weight, and gpt-oss' tensors against transformers' own reading."""

from __future__ import annotations

import re
from typing import Any

import ocp
import pytest
import torch
from torch import Tensor

import halfbyte as hb
from halfbyte.formats.mxfp4 import MXFP4
from halfbyte.formats.spec import Format, exponents_tensor
from halfbyte.formats.weight import FLOAT_DTYPES
from halfbyte.kernels.dequantize import cpu as dequantize_cpu
from halfbyte.kernels.dequantize import reference as dequantize_reference
from halfbyte.kernels.quantize import cpu as quantize_cpu
from halfbyte.kernels.quantize import reference as quantize_reference

dtypes = pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)


def random_stack(e: int = 3, rows: int = 10, k: int = 96) -> tuple[Tensor, Tensor]:
    """Blocks and scales as gpt-oss has them; every scale but NaN."""
    torch.manual_seed(0)
    blocks = torch.randint(0, 256, (e, rows, k // 32, 16), dtype=torch.uint8)
    return blocks, torch.randint(0, 255, (e, rows, k // 32), dtype=torch.uint8)


def assert_same(ours: Tensor, right: Tensor) -> None:
    """To the bit, the sign of zeros included; a NaN is as good as any."""
    assert ours.dtype == right.dtype
    torch.testing.assert_close(ours, right, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(ours.signbit() & ~ours.isnan(), right.signbit() & ~right.isnan())


def test_the_codebook_and_the_scales() -> None:
    assert_same(torch.tensor(MXFP4.codebook), torch.tensor(ocp.E2M1))
    assert_same(exponents_tensor(torch.device("cpu")), torch.tensor([ocp.scale_of(byte) for byte in range(256)]))
    assert MXFP4.largest_exponent == 2


@pytest.mark.parametrize("kernels", [quantize_cpu, quantize_reference], ids=["numba", "reference"])
@dtypes
def test_quantize(dtype: torch.dtype, kernels: Any) -> None:
    weight = ocp.edges(dtype)
    packed, scale = ocp.quantize(weight)
    ours, our_scale = torch.full_like(packed, 77), torch.full_like(scale, 77)
    kernels.quantize(weight, MXFP4, 32, ours, our_scale)
    assert torch.equal(our_scale, scale)
    assert torch.equal(ours, packed)


@pytest.mark.parametrize("kernels", [dequantize_cpu, dequantize_reference], ids=["numba", "reference"])
@dtypes
def test_every_byte_with_every_scale(dtype: torch.dtype, kernels: Any) -> None:
    packed = torch.arange(256, dtype=torch.uint8).repeat(256, 1)
    scale = torch.arange(256, dtype=torch.uint8)[:, None].repeat(1, 16)
    out = torch.full((256, 512), 12345.0, dtype=dtype)
    kernels.dequantize(packed, scale, None, MXFP4, 32, out)
    assert_same(out, ocp.dequantize(packed, scale, dtype))


@dtypes
def test_a_weight_that_has_such_values_comes_back(dtype: torch.dtype) -> None:
    """Of a stack, whatever the number of its blocks."""
    blocks, scales = random_stack(k=32 * 9)
    q = hb.from_gpt_oss(blocks, scales.clamp(120, 130), dtype)
    q.packed.view(3, 10, 9, 16)[..., 0] = 0x7E  # 4 and 6 fix the scale
    again = hb.quantize(hb.dequantize(q), "mxfp4")
    assert (again.shape, again.dtype) == ((3, 10, 288), dtype)
    assert torch.equal(again.scale, q.scale)
    assert torch.equal(again.packed, q.packed)


def test_the_rule_is_one_for_all_devices() -> None:
    weight = ocp.edges(torch.float32)
    found = []
    for like in ("cpu", "cuda"):
        packed, scale = ocp.quantize(weight)
        quantize_reference.quantize(weight, MXFP4, 32, packed.fill_(77), scale.fill_(77), like=like)
        found.append((packed, scale))
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("held", ["checkpoint", "model"])
@dtypes
def test_gpt_oss(dtype: torch.dtype, held: str) -> None:
    blocks, scales = random_stack()
    given = blocks if held == "checkpoint" else blocks.view(3, 10, 48)
    q = hb.from_gpt_oss(given, scales, dtype)
    assert (q.format, q.shape, q.dtype, q.block_size) == ("mxfp4", (3, 10, 96), dtype, 32)
    assert (q.packed.data_ptr(), q.scale.data_ptr()) == (blocks.data_ptr(), scales.data_ptr())
    assert_same(hb.dequantize(q), ocp.dequantize(blocks, scales, dtype))
    one = hb.from_gpt_oss(given[1], scales[1], dtype)
    assert_same(hb.dequantize(one), hb.dequantize(q[1]))
    assert hb.from_gpt_oss(given, scales).dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_gpt_oss_as_transformers_reads_it(dtype: torch.dtype) -> None:
    """It writes [E, K, rows]. Its smallest scale is a bf16 number, so nothing is rounded."""
    theirs = pytest.importorskip("transformers.integrations.mxfp4")
    blocks, scales = random_stack(k=256)
    dense = theirs.convert_moe_packed_tensors(blocks, scales.clamp(3, 251), dtype=dtype)
    ours = hb.dequantize(hb.from_gpt_oss(blocks, scales.clamp(3, 251), dtype))
    assert_same(ours, dense.transpose(1, 2).contiguous())


def test_gpt_oss_tensors_that_do_not_fit() -> None:
    blocks, scales = random_stack()

    def refused(error: type[Exception], words: str, *arguments: Any) -> None:
        with pytest.raises(error, match=re.escape(words)):
            hb.from_gpt_oss(*arguments)

    refused(TypeError, "blocks is a list; it must be a torch.Tensor", [1], scales)
    refused(TypeError, "scales is a NoneType", blocks, None)
    refused(TypeError, "packed has dtype torch.int8", blocks.view(torch.int8), scales)
    refused(TypeError, "scale has dtype torch.float32", blocks, scales.float())
    refused(TypeError, "dtype is torch.int8", blocks, scales, torch.int8)
    refused(ValueError, "blocks is not contiguous", blocks.transpose(0, 1), scales)
    refused(ValueError, "scales is not contiguous", blocks, scales.transpose(0, 1))
    refused(ValueError, "scales has shape [3]; [E, rows, K / 32]", blocks, scales[:, 0, 0].contiguous())
    words = "blocks has shape [3, 10, 3, 8] and scales [3, 10, 3]; blocks must be [3, 10, 3, 16] or [3, 10, 48]"
    refused(ValueError, words, blocks[..., :8].contiguous(), scales)
    refused(ValueError, "scale is on meta and packed on cpu", blocks, scales.to("meta"))


def test_what_does_not_fit() -> None:
    with pytest.raises(ValueError, match="K is 48, not a multiple of block_size 32; choose"):
        hb.quantize(torch.randn(4, 48), "mxfp4")
    with pytest.raises(ValueError, match=r"block_size is 64; mxfp4 takes one of \(32,\)"):
        hb.quantize(torch.randn(4, 64), "mxfp4", block_size=64)
    with pytest.raises(ValueError, match="nested is for nf4 and fp4; mxfp4 has scales of its own"):
        hb.quantize(torch.randn(4, 64), "mxfp4", nested=True)
    q = hb.quantize(torch.randn(4, 64), "mxfp4")
    with pytest.raises(ValueError, match=r"packed has shape \[128, 1\]; mxfp4 of shape \[4, 64\]"):
        hb.QuantizedWeight("mxfp4", q.packed.view(-1, 1), q.scale, q.shape, q.dtype, 32)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"scale_encoding": "e4m3"}, "scale_encoding is 'e4m3'"),
        ({"scale_dtype": "float32"}, "e8m0 scales are uint8"),
        ({"along_k": False}, "e8m0 scales are uint8"),
        ({"signed_magnitude": False, "thresholds": ()}, "e8m0 scales are uint8"),
    ],
)
def test_a_description_that_cannot_be(change: dict[str, Any], words: str) -> None:
    given = {name: getattr(MXFP4, name) for name in Format.__dataclass_fields__} | change
    with pytest.raises(ValueError, match=words):
        Format(**given)
