"""torch.set_default_dtype and torch.set_default_device change nothing that halfbyte computes."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import astuple
from functools import _lru_cache_wrapper
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import halfbyte as hb
from halfbyte.explain import explain
from halfbyte.formats.layouts import LAYOUTS, layout_of
from halfbyte.formats.spec import FORMATS

SOURCES = Path(hb.__file__).parent
NESTED = {name: (True, False) if format.nests else (False,) for name, format in FORMATS.items()}
CASES = [(name, nested) for name in FORMATS for nested in NESTED[name]]

# Functions of torch that make a tensor from numbers or from nothing; `*_like` and `new_*` take theirs from a tensor.
FACTORIES = frozenset(
    (
        "arange", "as_tensor", "asarray", "empty", "empty_strided", "eye", "full", "linspace", "logspace", "ones",
        "rand", "randint", "randn", "randperm", "scalar_tensor", "tensor", "zeros",
    )
)  # fmt: skip
# Calls without a dtype or a device that mean what they do: the file, and how the call begins.
EXCEPTIONS = (
    ("options.py", "torch.empty(1, device=name)"),  # asks whether there is such a device; nothing is computed
)


def forget() -> None:
    """Whatever tensors halfbyte keeps from call to call are made anew."""
    for name, module in list(sys.modules.items()):
        if name.startswith("halfbyte."):
            for kept in vars(module).values():
                if isinstance(kept, _lru_cache_wrapper):
                    kept.cache_clear()


@pytest.fixture
def weight() -> Iterator[Tensor]:
    """fp32 [48, 128]. Afterwards the defaults are what they were."""
    dtype = torch.get_default_dtype()
    forget()
    yield torch.randn(48, 128, generator=torch.Generator().manual_seed(0), dtype=torch.float32)
    torch.set_default_dtype(dtype)
    forget()


def everything(weight: Tensor, format: str, nested: bool) -> list[Any]:
    """What the public functions give for one weight: tensors and numbers."""
    q = hb.quantize(weight, format, **{FORMATS[format].size_name: 32, "nested": nested})
    x = weight[:5].clone().requires_grad_()
    y = hb.linear(x, q)
    y.sum().backward()
    results = [*q.tensors, hb.dequantize(q), hb.dequantize(q, torch.float16), y, x.grad]
    if any(format in library.FORMATS for library in LAYOUTS):
        library = layout_of(format)
        saved = library.to_tensors("w", q)
        results += [*saved.values(), *library.from_tensors("w", saved).tensors]
    if format == "int4":
        results += hb.from_compressed_tensors(q.packed, q.scale, q.shape).tensors
    elif format == "mxfp4":
        results += hb.from_gpt_oss(q.packed, q.scale).tensors
    else:
        packed, state = hb.to_bitsandbytes(q)
        results += [packed, state.absmax, state.code, *hb.from_bitsandbytes(packed, state).tensors]
    query = weight[:3]
    for rows in (q, weight):
        results += [hb.distances(query, rows), *hb.nearest(query, rows, 4)]
        tokens = torch.tensor([1, 0, 2], dtype=torch.int64, device="cpu")
        results += [hb.token_ranks(query, rows, tokens), *astuple(hb.fidelity(query, rows, tokens))]
    results += [str(explain(0.3, 1.7, format, **({"offset": 0.1, "absmax2": 2.0} if nested else {})))]
    layer = hb.nn.Linear4bit.from_quantized(q, torch.nn.Parameter(weight[:, 0].clone()))
    return [*results, layer(weight[:2])]


def same(found: list[Any], expected: list[Any]) -> None:
    for one, right in zip(found, expected, strict=True):
        if isinstance(right, Tensor):
            assert (one.dtype, one.device) == (right.dtype, right.device)
            assert torch.equal(one, right)
        else:
            assert one == right


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize(("format", "nested"), CASES)
def test_results_do_not_depend_on_the_default_dtype(
    weight: Tensor, format: str, nested: bool, dtype: torch.dtype
) -> None:
    pytest.importorskip("bitsandbytes")
    expected = everything(weight, format, nested)
    forget()
    torch.set_default_dtype(dtype)
    same(everything(weight, format, nested), expected)


@pytest.mark.parametrize(("format", "nested"), CASES)
def test_results_do_not_depend_on_the_default_device(weight: Tensor, format: str, nested: bool) -> None:
    pytest.importorskip("bitsandbytes")
    expected = everything(weight, format, nested)
    forget()
    with torch.device("meta"):
        same(everything(weight, format, nested), expected)


def calls_without(source: str, *names: str) -> list[tuple[int, str]]:
    """(line, text) of every factory call of torch in a source that leaves one of the arguments to a default."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in FACTORIES):
            continue
        if isinstance(node.func.value, ast.Name) and node.func.value.id == "torch":
            given = {keyword.arg for keyword in node.keywords}
            if not given.issuperset(names) and None not in given:
                found.append((node.lineno, ast.get_source_segment(source, node) or ""))
    return found


def test_every_factory_call_names_its_dtype_and_device() -> None:
    careless = [
        f"{path.relative_to(SOURCES)}:{line}: {text}"
        for path in sorted(SOURCES.rglob("*.py"))
        for line, text in calls_without(path.read_text(encoding="utf-8"), "dtype", "device")
        if not any(path == SOURCES / file and text.startswith(call) for file, call in EXCEPTIONS)
    ]
    assert not careless, "a default dtype or device decides here; name it:\n" + "\n".join(careless)


def test_the_check_finds_what_it_looks_for() -> None:
    source = (
        "import torch\ntorch.tensor([0.5])\ntorch.zeros(3, dtype=torch.int8, device='cpu')\ntorch.ones(3, **kind)\n"
    )
    assert calls_without(source, "dtype", "device") == [(2, "torch.tensor([0.5])")]
