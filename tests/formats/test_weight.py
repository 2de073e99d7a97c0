"""A QuantizedWeight saved and loaded by torch, moved, and asked for what it does not do."""

from __future__ import annotations

import copy
import io
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from kinds import kinds, options_of

import halfbyte as hb


def weight(format: str = "nf4", **options: Any) -> hb.QuantizedWeight:
    return hb.quantize(torch.randn(48, 256).to(options.pop("dtype", torch.bfloat16)), format, **options)


def same(a: hb.QuantizedWeight, b: hb.QuantizedWeight) -> bool:
    return repr(a) == repr(b) and a.kind == b.kind and all(map(torch.equal, a.tensors, b.tensors))


def reloaded(thing: Any, **options: Any) -> Any:
    file = io.BytesIO()
    torch.save(thing, file)
    file.seek(0)
    return torch.load(file, **options)


@kinds
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_torch_load(format: str, size: int, nested: bool, dtype: torch.dtype) -> None:
    q = weight(format, dtype=dtype, **options_of(format, size, nested))
    for found in (reloaded(q), reloaded(q, weights_only=False), pickle.loads(pickle.dumps(q)), copy.deepcopy(q)):
        assert same(found, q)
        assert type(found.shape) is tuple
        assert torch.equal(hb.dequantize(found), hb.dequantize(q))


def test_torch_load_among_others_and_of_shared_tensors(tmp_path: Path) -> None:
    """All weights that halfbyte quantizes share one code, and one weight may be there twice."""
    one, other = weight(), weight()
    assert one.nested.code is other.nested.code
    path = tmp_path / "weights.pt"
    torch.save({"layers": [one, other], "again": one, "bias": torch.ones(3)}, path)
    found = torch.load(path, mmap=True)
    assert same(found["layers"][0], one)
    assert same(found["layers"][1], other)
    assert found["again"] is found["layers"][0]
    codes = [q.nested.code.data_ptr() for q in found["layers"]]
    assert codes[0] == codes[1]


def test_a_shape_of_torch_is_a_tuple_in_the_file() -> None:
    q = weight()
    odd = hb.QuantizedWeight("nf4", q.packed, q.scale, torch.Size(q.shape), q.dtype, q.block_size, q.nested)
    assert same(reloaded(odd), q)


def damaged(q: hb.QuantizedWeight, index: int, value: Any) -> Any:
    """What a file would hold of a weight, with one field another one."""

    class Damaged:
        def __reduce__(self) -> Any:
            kind, fields = q.__reduce__()
            return kind, (*fields[:index], value, *fields[index + 1 :])

    return Damaged()


@pytest.mark.parametrize(
    ("index", "value", "words"),
    [
        (0, "nf5", "format is 'nf5'; known formats are"),
        (1, torch.zeros(3, dtype=torch.uint8), "packed has shape [3]"),
        (1, "text", "packed is a str; it must be a torch.Tensor"),
        (3, (4, 4), "needs 8 elements"),
        (4, torch.int8, "dtype is torch.int8"),
        (5, 63, "block_size is 63"),
        (6, None, "scale has dtype torch.uint8"),
    ],
)
def test_a_damaged_file_says_what_is_wrong(index: int, value: Any, words: str) -> None:
    for weights_only in (True, False):
        with pytest.raises((TypeError, ValueError), match=re.escape(words)):
            reloaded(damaged(weight(), index, value), weights_only=weights_only)


def test_fields_by_name_are_checked_as_well() -> None:
    """So the first release's pickles hold them."""

    class Old:
        def __init__(self, **change: Any) -> None:
            self.change = change

        def __reduce__(self) -> Any:
            return object.__new__, (hb.QuantizedWeight,), vars(q) | self.change

    q = weight()
    assert same(pickle.loads(pickle.dumps(Old())), q)
    with pytest.raises(ValueError, match="block_size is 63"):
        pickle.loads(pickle.dumps(Old(block_size=63)))


CASTS: dict[str, Callable[[hb.QuantizedWeight], Any]] = {
    "to(dtype)": lambda q: q.to(torch.float16),  # type: ignore[arg-type]
    "to(device, dtype)": lambda q: q.to("cpu", torch.float16),  # type: ignore[arg-type]
    "to(dtype=)": lambda q: q.to("cpu", dtype=torch.float16),
    "half": lambda q: q.half(),
    "bfloat16": lambda q: q.bfloat16(),
    "float": lambda q: q.float(),
    "double": lambda q: q.double(),
}


@pytest.mark.parametrize("cast", CASTS.values(), ids=CASTS)
def test_a_dtype_is_refused_with_what_to_do(cast: Callable[[hb.QuantizedWeight], Any]) -> None:
    words = r"4-bit weights have none: q\.to moves between devices\. Pass the dtype to dequantize\(q, dtype\)"
    with pytest.raises(TypeError, match=words):
        cast(weight())


@kinds
def test_moves(format: str, size: int, nested: bool) -> None:
    q = weight(format, **options_of(format, size, nested))
    assert q.cpu() is q
    assert q.to("cpu") is q
    assert q.to(torch.device("meta")).device.type == "meta"
    with pytest.raises(TypeError, match=r"device is a Tensor; q\.to takes a torch\.device"):
        q.to(torch.ones(1))  # type: ignore[arg-type]
    if torch.cuda.is_available():
        assert q.cuda().device.type == q.cuda(0).device.type == "cuda"
        assert same(q.cuda().cpu(), q)
    else:
        with pytest.raises((AssertionError, RuntimeError)):  # torch's own words: it has no CUDA
            q.cuda()


def test_a_module_in_place_of_its_weight() -> None:
    bnb = pytest.importorskip("bitsandbytes")
    quantized = bnb.nn.Linear4bit(64, 32, quant_type="nf4").to("cpu")
    for layer in (quantized, bnb.nn.Linear4bit(64, 32), torch.nn.Linear(64, 32)):
        with pytest.raises(TypeError, match=r"a module; pass its weight: from_bitsandbytes\(layer\.weight\)"):
            hb.from_bitsandbytes(layer)
    with pytest.raises(TypeError, match=r"a module; pass its weight"):
        hb.from_bitsandbytes(quantized, quantized.weight.quant_state)
    with pytest.raises(TypeError, match=r"whose weight is a QuantizedWeight already: take layer\.weight"):
        hb.from_bitsandbytes(hb.nn.Linear4bit(64, 32))
    assert hb.from_bitsandbytes(quantized.weight).shape == (32, 64)
