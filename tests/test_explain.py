"""`explain` against the kernels: the same number, quantized in a tensor, must take the same way."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from halfbyte import ops
from halfbyte.explain import explain
from halfbyte.formats.bitsandbytes import FORMATS

VALUES = [0.0347, -0.0347, 1.0, -1.0, 0.0, 0.5, -0.3, 0.85, 1e-3, -0.9999]


@pytest.mark.parametrize("format", ["nf4", "fp4"])
@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("absmax", [1.0, 10.0, 0.013])
def test_same_way_as_quantize(format: str, value: float, absmax: float) -> None:
    """In a block with absmax and minus absmax, the number itself first."""
    weight = torch.zeros(1, 64)
    weight[0, :2] = torch.tensor([value * absmax, absmax])
    q = ops.quantize(weight, format, nested=False)
    e = explain(weight[0, 0].item(), weight[0, 1].item(), format)
    assert e.nibble == q.packed.view(-1)[0].item() >> 4
    assert e.result == ops.dequantize(q)[0, 0].item()
    assert e.error == e.result - e.value
    assert e.scale_bytes == q.scale.numpy().tobytes()
    assert e.candidates[e.chosen].low <= e.scaled <= e.candidates[e.chosen].high


@pytest.mark.parametrize("value", VALUES)
def test_same_way_as_int4(value: float) -> None:
    weight = torch.zeros(1, 128)
    weight[0, :2] = torch.tensor([value, 1.0])
    q = ops.quantize(weight, "int4")
    e = explain(value, 1.0, "int4")
    assert e.nibble == q.packed[0, 0].item() & 15
    assert e.result == ops.dequantize(q)[0, 0].item()
    assert e.nested is None


def test_nested_scale_takes_the_same_way() -> None:
    """Every scale of a real tensor, explained with the tensor's offset and absmax2, gets the byte it really has."""
    torch.manual_seed(0)
    weight = torch.randn(64, 256)
    flat, nested = ops.quantize(weight, nested=False), ops.quantize(weight)
    assert nested.nested is not None
    offset, absmax2 = nested.nested.offset.item(), nested.nested.absmax[0].item()
    dense = ops.dequantize(nested).view(-1, 64)
    for block in range(0, flat.scale.numel(), 7):
        absmax = flat.scale[block].item()
        e = explain(weight.view(-1, 64)[block, 0].item(), absmax, offset=offset, absmax2=absmax2)
        assert e.nested is not None
        assert e.nested.byte == nested.scale[block].item()
        assert e.nested.result == dense[block, 0].item()


@settings(max_examples=200)
@given(
    value=st.floats(-1, 1, width=32),
    absmax=st.floats(2**-100, 2**100, width=32),
    format=st.sampled_from(["nf4", "fp4"]),
)
def test_the_nearest_value_is_chosen(value: float, absmax: float, format: str) -> None:
    e = explain(value * absmax, absmax, format)
    codebook = FORMATS[format].codebook
    nearest = min(abs(e.scaled - c) for c in codebook)
    assert abs(e.scaled - e.code_value) == pytest.approx(nearest, abs=1e-7)
    assert codebook[e.nibble] == pytest.approx(e.code_value)
    assert [c.low for c in e.candidates[1:]] == [c.high for c in e.candidates[:-1]]


@settings(max_examples=200)
@given(value=st.floats(-1, 1, width=32), absmax=st.floats(2**-100, 2**100, width=32))
def test_powers_of_two_are_those_that_quantize_makes(value: float, absmax: float) -> None:
    e = explain(value * absmax, absmax, "mxfp4")
    weight = torch.zeros(1, 32)
    weight[0, 0], weight[0, 1] = absmax, e.value
    q = ops.quantize(weight, "mxfp4")
    assert (int(q.packed[0, 0]) >> 4, int(q.scale)) == (e.nibble, math.frexp(e.scale)[1] + 126)
    assert ops.dequantize(q)[0, 1] == e.result
    assert e.candidates[e.chosen].low <= e.scaled <= e.candidates[e.chosen].high
    assert [c.low for c in e.candidates[1:]] == [c.high for c in e.candidates[:-1]]


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ((2.0, 1.0), "larger than absmax"), ((0.0, 0.0), "must be above 0"), ((0.0, -1.0), "must be above 0"),
        ((math.nan, 1.0), "finite"), ((0.0, math.inf), "finite"), ((0.0, 1e39), "finite"),
        ((0.0, 1.0, "nf5"), "known formats"),
    ],
)  # fmt: skip
def test_numbers_that_cannot_be(arguments: tuple[float, ...], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        explain(*arguments)
    with pytest.raises(ValueError, match="absmax2 is"):
        explain(0.1, 1.0, offset=0.2, absmax2=0.1)
