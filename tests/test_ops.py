"""The public functions on the CPU: what they refuse and how they say it, and everything that traces them."""

from __future__ import annotations

import copy
import pickle
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from kinds import kinds, quantize
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import halfbyte as hb
from halfbyte.formats.int4 import INT4
from halfbyte.formats.spec import BLOCK_SIZES, FORMATS
from halfbyte.formats.weight import FLOAT_DTYPES
from halfbyte.measure.error import relative_error


@pytest.fixture(autouse=True)
def _compile_anew() -> None:
    """Dynamo keeps what it compiled by the code of a function, whoever wrapped it."""
    torch._dynamo.reset()


def random_weight(*shape: int) -> Tensor:
    torch.manual_seed(0)
    return torch.randn(shape)


def same(a: hb.QuantizedWeight, b: hb.QuantizedWeight) -> bool:
    facts = [(q.format, q.shape, q.dtype, q.block_size, q.nested and q.nested.block_size) for q in (a, b)]
    return facts[0] == facts[1] and all(map(torch.equal, a.tensors, b.tensors))


def refused(error: type[Exception], words: str, function: Callable[..., Any], *arguments: Any, **keywords: Any) -> None:
    """The call fails, and says `words`: what was given; then what is accepted."""
    with pytest.raises(error, match=re.escape(words)):
        function(*arguments, **keywords)


# What is computed.


@kinds
def test_there_and_back(format: str, size: int, nested: bool) -> None:
    weight = random_weight(64, 256)
    q = quantize(weight, format, size, nested)
    assert (q.format, q.shape, q.dtype, q.block_size) == (format, (64, 256), torch.float32, size)
    assert (q.nested is not None) == nested
    for dtype in FLOAT_DTYPES:
        dense = hb.dequantize(q, dtype)
        assert dense.dtype == dtype
        assert relative_error(dense, weight.double()) < 0.15
        out = torch.full((64, 256), 12345.0, dtype=dtype)
        assert hb.dequantize(q, out=out) is out
        assert torch.equal(out, dense)
    assert torch.equal(hb.dequantize(q), hb.dequantize(q, torch.float32))


def test_defaults() -> None:
    q = hb.quantize(random_weight(4, 128))
    assert (q.format, q.block_size, q.nested is not None) == ("nf4", 64, True)
    assert hb.quantize(random_weight(4, 128), "int4").block_size == 128


def test_any_number_of_dimensions() -> None:
    weight = random_weight(3 * 5 * 64)
    flat = hb.quantize(weight)
    for shape in ((3, 5, 64), (3, 320), (960, 1), (1, 960)):
        q = hb.quantize(weight.view(shape))
        assert all(map(torch.equal, q.tensors, flat.tensors))
        assert torch.equal(hb.dequantize(q), hb.dequantize(flat).view(shape))
    assert hb.dequantize(hb.quantize(torch.tensor(3.0))).item() == 3


@kinds
def test_no_rows(format: str, size: int, nested: bool) -> None:
    q = quantize(torch.empty(0, 256), format, size, nested)
    assert hb.dequantize(q).shape == (0, 256)
    assert q.nbytes == (1024 + 4 if nested else 0)  # the code and the offset


@kinds
def test_the_layout_of_a_weight_does_not_matter(format: str, size: int, nested: bool) -> None:
    weight = random_weight(128, 128)
    for view in (weight.t(), weight.view(64, 2, 128)[:, 1], weight.bfloat16()[::2], torch._neg_view(weight)):
        expected = quantize(view.clone(memory_format=torch.contiguous_format), format, size, nested)
        assert same(quantize(view, format, size, nested), expected)


def test_no_gradients() -> None:
    weight = torch.nn.Parameter(random_weight(4, 64))
    q = hb.quantize(weight)
    assert not any(tensor.requires_grad for tensor in q.tensors)
    assert not hb.dequantize(q).requires_grad


def test_autograd_sees_that_out_was_written() -> None:
    out, x = torch.ones(4, 64), torch.ones(4, 64, requires_grad=True)
    product = x * out
    hb.dequantize(hb.quantize(random_weight(4, 64)), out=out)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()


@kinds
def test_copies(format: str, size: int, nested: bool) -> None:
    q = quantize(random_weight(8, 256), format, size, nested)
    assert same(copy.deepcopy(q), q)
    assert same(pickle.loads(pickle.dumps(q)), q)
    assert copy.deepcopy(q).packed is not q.packed
    assert q.to("cpu") is q
    assert f"{format}, [8, 256], {'group_size' if format == 'int4' else 'block_size'}={size}" in repr(q)


@kinds
def test_on_a_device_without_memory(format: str, size: int, nested: bool) -> None:
    """The reference serves every device that has no kernels, "meta" among them."""
    q = quantize(torch.empty(8, 256, device="meta"), format, size, nested)
    here = quantize(random_weight(8, 256), format, size, nested)
    assert [(t.shape, t.dtype) for t in q.tensors] == [(t.shape, t.dtype) for t in here.to("meta").tensors]
    assert hb.dequantize(q).device.type == "meta"


# What is refused.


def test_quantize_refuses() -> None:
    weight = random_weight(8, 256)
    refused(TypeError, "weight is a ndarray; quantize takes a torch.Tensor", hb.quantize, np.ones((4, 64)))
    for dtype in (torch.int8, torch.float64, torch.complex64, torch.float8_e4m3fn):
        words = f"weight has dtype {dtype}; quantize takes torch.float16, torch.bfloat16 or torch.float32"
        refused(TypeError, words, hb.quantize, weight.to(dtype))
    refused(TypeError, "weight has layout torch.sparse_coo; quantize takes a dense", hb.quantize, weight.to_sparse())
    for format in ("nf5", "NF4", None, ["nf4"]):
        words = f"format is {format!r}; known formats are 'nf4', 'fp4', 'int4'"
        refused(ValueError, words, hb.quantize, weight, format)
    for size in (0, -64, 16, 63, 96, 8192, 64.0, "64", True):
        words = f"block_size is {size!r}; nf4 takes one of {BLOCK_SIZES}"
        refused(ValueError, words, hb.quantize, weight, block_size=size)
        words = f"group_size is {size!r}; int4 takes one of {INT4.block_sizes}"
        refused(ValueError, words, hb.quantize, weight, "int4", group_size=size) if size != 64 else None
    refused(ValueError, "group_size is for int4; fp4 takes block_size", hb.quantize, weight, "fp4", group_size=64)
    words = "block_size is for nf4, fp4 and mxfp4; int4 takes group_size"
    refused(ValueError, words, hb.quantize, weight, "int4", block_size=64)
    words = "nested is for nf4 and fp4; int4 has scales of its own dtype"
    refused(ValueError, words, hb.quantize, weight, "int4", nested=True)
    refused(ValueError, "K is 250, not a multiple of group_size 128", hb.quantize, weight[:, :250], "int4")
    refused(ValueError, "shape is [1, 2, 4, 256]; int4 takes a weight", hb.quantize, weight.view(1, 2, 4, 256), "int4")


@pytest.mark.parametrize("format", FORMATS)
def test_a_stack_is_its_weights_one_after_another(format: str) -> None:
    """[E, N, K], the scales of nf4 and fp4 plain: nested ones share numbers beyond a weight."""
    stack = torch.randn(3, 8, 256)
    q = hb.quantize(stack, format, nested=False)
    ones = [hb.quantize(weight, format, nested=False) for weight in stack]
    assert all(same(expert, one) for expert, one in zip(q, ones, strict=True))
    assert torch.equal(q.packed.view(3, -1), torch.stack([one.packed.view(-1) for one in ones]))
    assert torch.equal(q.scale.view(3, -1), torch.stack([one.scale.view(-1) for one in ones]))
    assert torch.equal(hb.dequantize(q), torch.stack([hb.dequantize(one) for one in ones]))
    words = (
        "linear takes one of two dimensions [N, K]; grouped_linear multiplies with stacks, and linear with one expert"
    )
    refused(ValueError, words, hb.linear, stack[0], q)
    assert torch.equal(hb.linear(stack[0], q[1]), hb.linear(stack[0], ones[1]))


@kinds
def test_dequantize_refuses(format: str, size: int, nested: bool) -> None:
    q = quantize(random_weight(8, 256), format, size, nested)
    refused(
        TypeError, "q is a Tensor; dequantize takes a QuantizedWeight, from halfbyte.quantize", hb.dequantize, q.packed
    )
    for dtype in (torch.float64, torch.int8, "float16"):
        words = f"dtype is {dtype}; dequantize returns torch.float16, torch.bfloat16 or torch.float32"
        refused(TypeError, words, hb.dequantize, q, dtype)
    refused(TypeError, "dtype is torch.int32; dequantize returns", hb.dequantize, q, out=torch.empty(8, 256).int())
    refused(TypeError, "out is a list; it must be a torch.Tensor", hb.dequantize, q, out=[])
    poison = torch.full((8, 512), 12345.0)
    for words, out in (
        ("out has shape [256, 8]; the weight needs [8, 256]", poison[:, :256].reshape(256, 8)),
        ("out has shape [8, 255]; the weight needs [8, 256]", poison[:, :255]),
        ("out is not contiguous", poison[:, ::2]),
        ("out is not contiguous", torch.empty(1, 256).expand(8, 256)),
        ("out is on meta and the weight on cpu", torch.empty(8, 256, device="meta")),
        ("out requires gradients, and none flow", torch.empty(8, 256, requires_grad=True)),
    ):
        refused(ValueError, words, hb.dequantize, q, out=out)
    out = torch.empty(8, 256)
    refused(TypeError, "out has dtype torch.float32 and dtype is torch.float16", hb.dequantize, q, torch.float16, out)
    assert (poison == 12345).all()


def changed(tensor: Tensor) -> list[tuple[type[Exception], str, Any]]:
    """What a weight's tensor might wrongly be, the error it makes, and its words."""
    flat = tensor.reshape(-1)
    wrong = [
        (TypeError, "it must be a torch.Tensor", tensor.tolist()),
        (TypeError, "it must be torch.", tensor.to(torch.int64)),
        (ValueError, "move both to one device", tensor.to("meta")),
        (ValueError, "needs", torch.cat((flat, flat[:1]))),
        (ValueError, "needs", flat[:-1]),
    ]
    if flat.numel() > 1:
        wrong.append((ValueError, "is not contiguous", tensor.repeat_interleave(2, -1)[..., ::2]))
    return wrong


@kinds
def test_a_weight_refuses_tensors_that_do_not_fit(format: str, size: int, nested: bool) -> None:
    q = quantize(random_weight(8, 256), format, size, nested)
    for error, words, packed in changed(q.packed):
        if words != "move both to one device":  # the others are where packed is
            refused(error, words, replace, q, packed=packed)
    for error, words, scale in changed(q.scale):
        refused(error, words, replace, q, scale=scale)
    for field in ("code", "absmax", "offset") if q.nested else ():
        for error, words, tensor in changed(getattr(q.nested, field)):
            refused(error, words, replace, q, nested=q.nested._replace(**{field: tensor}))


def test_a_weight_refuses_facts_that_do_not_fit() -> None:
    q, flat, int4 = (
        quantize(random_weight(8, 256), *kind) for kind in (("nf4", 64, True), ("nf4", 64, False), ("int4", 32, False))
    )
    refused(ValueError, "format is 'nf5'; known formats are 'nf4', 'fp4', 'int4'", replace, q, format="nf5")
    refused(TypeError, "dtype is torch.float64; a dense weight is", replace, q, dtype=torch.float64)
    refused(ValueError, "block_size is 65; nf4 takes one of", replace, q, block_size=65)
    refused(ValueError, "block_size is 64.0; nf4 takes one of", replace, q, block_size=64.0)
    refused(ValueError, "group_size is 16; int4 takes one of", replace, int4, block_size=16)
    refused(ValueError, "shape is [-8, -256]; no side", replace, q, shape=(-8, -256))
    words = "nf4 of shape [8, 257] with a scale for every 64 weights needs 1028 elements"
    refused(ValueError, words, replace, q, shape=(8, 257))
    refused(ValueError, "nf4 of shape [8, 256] with a scale for every 128 weights needs 16", replace, q, block_size=128)
    refused(ValueError, "K is 250, not a multiple of group_size 32", replace, int4, shape=(8, 250))
    refused(ValueError, "needs shape [2, 4, 32]", replace, int4, shape=(2, 4, 256))
    refused(TypeError, "scale has dtype torch.float32; it must be torch.uint8", replace, flat, nested=q.nested)
    refused(TypeError, "scale has dtype torch.uint8; it must be torch.float32", replace, q, nested=None)
    for size in (0, 8, 100):
        nested = q.nested._replace(block_size=size)
        refused(ValueError, f"nested.block_size is {size}; it must be a power of two", replace, q, nested=nested)


# What traces.


@kinds
def test_opcheck(format: str, size: int, nested: bool) -> None:
    weight = random_weight(33, 128).bfloat16()
    torch.library.opcheck(torch.ops.halfbyte.quantize.default, (weight, format, size, nested))
    q = quantize(weight, format, size, nested)
    parts, nested_size = (list(q.nested[:3]), 256) if q.nested else ([], 0)
    for dtype in FLOAT_DTYPES:
        arguments = (q.packed, q.scale, parts, format, [33, 128], size, nested_size, dtype)
        torch.library.opcheck(torch.ops.halfbyte.dequantize.default, arguments)


@pytest.mark.slow
@kinds
def test_compiles_whole(format: str, size: int, nested: bool) -> None:
    """There and back, with a dtype and into an `out`, for one shape after another."""
    there = torch.compile(quantize, fullgraph=True, backend="aot_eager")
    back = torch.compile(hb.dequantize, fullgraph=True, backend="aot_eager", dynamic=True)
    for n, k in ((5, 256), (5, 512), (300, 256)):
        weight = random_weight(n, k)
        q = quantize(weight, format, size, nested)
        assert same(there(weight, format, size, nested), q)
        assert torch.equal(back(q), hb.dequantize(q))
        assert torch.equal(back(q, torch.float16), hb.dequantize(q, torch.float16))
        out = torch.full((n, k), 12345.0)
        assert back(q, out=out) is out
        assert torch.equal(out, hb.dequantize(q))


def test_compiled_calls_are_refused_too() -> None:
    compiled = torch.compile(hb.dequantize, fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match=r"out has shape \[4, 65\]; the weight needs \[4, 64\]"):
        compiled(hb.quantize(random_weight(4, 64)), out=torch.empty(4, 65))


def test_inductor() -> None:
    q = hb.quantize(random_weight(64, 128))
    x = torch.randn(3, 128)
    compiled = torch.compile(lambda x, q: torch.relu(x @ hb.dequantize(q).t()), fullgraph=True)
    torch.testing.assert_close(compiled(x, q), torch.relu(x @ hb.dequantize(q).t()))


class Linear(torch.nn.Module):
    def __init__(self, q: hb.QuantizedWeight) -> None:
        super().__init__()
        self.like = q
        for i, tensor in enumerate(q.tensors):
            self.register_buffer(f"part{i}", tensor)

    def forward(self, x: Tensor) -> Tensor:
        packed, scale, *rest = (getattr(self, f"part{i}") for i in range(len(self.like.tensors)))
        nested = hb.NestedScale(*rest) if rest else None
        q = hb.QuantizedWeight(
            self.like.format, packed, scale, self.like.shape, self.like.dtype, self.like.block_size, nested
        )
        return x @ hb.dequantize(q).t()


@kinds
def test_export(format: str, size: int, nested: bool) -> None:
    layer = Linear(quantize(random_weight(64, 256), format, size, nested))
    rows = torch.export.Dim("rows", min=2, max=100)
    program = torch.export.export(layer, (torch.randn(3, 256),), dynamic_shapes=({0: rows},))
    x = torch.randn(11, 256)
    assert torch.equal(program.module()(x), layer(x))
    assert sum(node.target is torch.ops.halfbyte.dequantize.default for node in program.graph.nodes) == 1


@kinds
def test_inference_mode(format: str, size: int, nested: bool) -> None:
    weight = random_weight(8, 256)
    with torch.inference_mode():
        q = quantize(weight, format, size, nested)
        dense, out = hb.dequantize(q), torch.empty(8, 256)
        hb.dequantize(q, out=out)
    assert dense.is_inference()
    assert torch.equal(out, dense)
    assert torch.equal(dense, hb.dequantize(quantize(weight, format, size, nested)))


@kinds
def test_fake_tensors(format: str, size: int, nested: bool) -> None:
    here = quantize(random_weight(33, 256), format, size, nested)
    with FakeTensorMode():
        q = quantize(torch.empty(33, 256), format, size, nested)
        dense = hb.dequantize(q, torch.float16)
    assert [(t.shape, t.dtype) for t in q.tensors] == [(t.shape, t.dtype) for t in here.tensors]
    assert (dense.shape, dense.dtype) == ((33, 256), torch.float16)


# What an import costs.


def run(code: str) -> str:
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stderr == ""
    return result.stdout


@pytest.mark.slow
def test_import_is_quiet_and_light() -> None:
    """Nothing printed, nothing compiled, no GPU started, and nothing imported that is not always needed."""
    heavy = ["triton", "numba", "transformers", "bitsandbytes", "peft", "matplotlib", "rich", "safetensors"]
    code = (
        "import sys, torch\n"
        "before = set(sys.modules)\n"
        "import halfbyte\n"
        "assert not torch.cuda.is_initialized()\n"
        f"print([name for name in {heavy} if name in set(sys.modules) - before])\n"
    )
    assert run(code) == "[]\n"


def test_import_is_quick() -> None:
    code = "import time, torch; start = time.perf_counter(); import halfbyte; print(time.perf_counter() - start)"
    assert any(float(run(code)) < 0.3 for _ in range(5))


@pytest.mark.slow
def test_works_without_triton() -> None:
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import torch, halfbyte as hb\n"
        "q = hb.quantize(torch.ones(2, 64)); print(hb.dequantize(q).sum().item())\n"
        "print(torch.equal(torch.compile(hb.dequantize, fullgraph=True, backend='eager')(q), hb.dequantize(q)))\n"
    )
    assert run(code) == "128.0\nTrue\n"


@pytest.mark.parametrize("nested", ["yes", 1, 0, "", torch.tensor(True)], ids=repr)
@pytest.mark.parametrize("format", FORMATS)
def test_nested_is_a_bool_or_none(format: str, nested: object) -> None:
    with pytest.raises(TypeError, match="nested takes True, False or None"):
        hb.quantize(torch.ones(2, 128), format, nested=nested)  # type: ignore[arg-type]
