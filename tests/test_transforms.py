"""torch.func, forward-mode AD and torch.jit.trace over the public functions: they work, or say what does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

import halfbyte as hb
from halfbyte.formats.spec import FORMATS

formats = pytest.mark.parametrize("format", FORMATS)
Function = Callable[[Tensor], Tensor]


def loss(function: Function) -> Function:
    return lambda x: function(x).square().sum()


TRANSFORMS: dict[str, Callable[[Function], Function]] = {
    "vmap": vmap,
    "vmap, another dimension": lambda f: vmap(f, in_dims=1, out_dims=1),
    "vmap of vmap": lambda f: vmap(vmap(f)),
    "jvp": lambda f: lambda x: jvp(f, (x,), (x.cos(),))[1],
    "grad": lambda f: grad(loss(f)),
    "vjp": lambda f: lambda x: vjp(f, x)[1](f(x).cos())[0],
    "jacrev": jacrev,
    "jacfwd": jacfwd,
    "hessian": lambda f: hessian(loss(f)),
    "gradients of each": lambda f: vmap(grad(loss(f))),
    "jvp of grad": lambda f: lambda x: jvp(grad(loss(f)), (x,), (x.sin(),))[1],
}
transforms = pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)


@pytest.fixture(autouse=True)
def _anew() -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()


def weight(format: str) -> hb.QuantizedWeight:
    return hb.quantize(torch.randn(16, 32), format, **({"group_size": 32} if format == "int4" else {}))


def close(found: Tensor, right: Tensor) -> None:
    torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-5 * float(right.abs().max()))


@formats
@transforms
@pytest.mark.parametrize("invariant", [False, True])
def test_linear(format: str, transform: Any, invariant: bool) -> None:
    """Of x, like torch's own of the dense weight."""
    q, bias, x = weight(format), torch.randn(16), torch.randn(2, 3, 32)
    dense = hb.dequantize(q)
    found = transform(lambda x: hb.linear(x, q, bias, invariant).sin())(x)
    close(found, transform(lambda x: torch.nn.functional.linear(x, dense, bias).sin())(x))


@formats
@transforms
def test_dequantize_is_a_constant(format: str, transform: Any) -> None:
    q, x = weight(format), torch.randn(2, 3, 32)
    dense = hb.dequantize(q)
    found = transform(lambda x: (x @ hb.dequantize(q).t()).sin())(x)
    close(found, transform(lambda x: (x @ dense.t()).sin())(x))
    out = torch.empty(16, 32)
    vmap(lambda x: x @ hb.dequantize(q, out=out).t())(x)
    assert torch.equal(out, dense)


@formats
def test_biases(format: str) -> None:
    """Batched alone and with x, and what flows to them."""
    q, x, biases = weight(format), torch.randn(5, 3, 32), torch.randn(5, 16)
    dense = hb.dequantize(q)

    def ours(x: Tensor, bias: Tensor) -> Tensor:
        return hb.linear(x, q, bias)

    def theirs(x: Tensor, bias: Tensor) -> Tensor:
        return torch.nn.functional.linear(x, dense, bias)

    for dims in ((0, 0), (None, 0), (0, None), (1, 0)):
        bias = biases if dims[1] == 0 else biases[0]
        rows = x if dims[0] != 1 else x.transpose(0, 1)
        close(vmap(ours, dims)(rows, bias), vmap(theirs, dims)(rows, bias))
    for jacobian in (jacrev, jacfwd):
        for argument in (0, 1):
            close(jacobian(ours, argument)(x[:2], biases[0]), jacobian(theirs, argument)(x[:2], biases[0]))


@formats
def test_forward_mode(format: str) -> None:
    q, x, tangent, bias = weight(format), torch.randn(3, 32), torch.randn(3, 32), torch.randn(16)
    with forward_ad.dual_level():
        found = forward_ad.unpack_dual(hb.linear(forward_ad.make_dual(x, tangent), q, bias))
        of_bias = forward_ad.unpack_dual(hb.linear(x, q, forward_ad.make_dual(bias, bias.cos())))
        plain = forward_ad.unpack_dual(hb.linear(x, q, bias))
    assert torch.equal(found.primal, hb.linear(x, q, bias))
    close(found.tangent, tangent @ hb.dequantize(q).t())
    close(of_bias.tangent, bias.cos().expand(3, 16))
    assert plain.tangent is None


def test_a_module() -> None:
    layer = hb.nn.Linear4bit(32, 16)
    x, tangents = torch.randn(4, 32), torch.randn(4, 32)
    close(jvp(layer, (x,), (tangents,))[1], tangents @ hb.dequantize(layer.weight).t())
    parameters = dict(layer.named_parameters())
    each = vmap(grad(lambda p, row: functional_call(layer, p, (row,)).sum()), (None, 0))(parameters, x)
    assert torch.equal(each["bias"], torch.ones(4, 16))


def test_check_of_gradients() -> None:
    """By differences; fp64 is not accepted, so steps and tolerances are those of fp32."""
    q, x = weight("nf4"), torch.randn(2, 32, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda x: hb.linear(x, q), (x,), eps=1e-2, atol=1e-2, rtol=1e-2, check_forward_ad=True, nondet_tol=0.0
    )


@pytest.mark.parametrize("name", ["vmap", "vmap, another dimension", "vmap of vmap"])
def test_compiled(name: str) -> None:
    q, bias, x = weight("nf4"), torch.randn(16), torch.randn(2, 3, 32)
    function = TRANSFORMS[name](lambda x: hb.linear(x, q, bias))
    close(torch.compile(function, fullgraph=True, backend="aot_eager")(x), function(x))


@transforms
def test_what_cannot_be_transformed_says_so(transform: Any) -> None:
    x = torch.randn(2, 3, 32)
    with pytest.raises(
        RuntimeError, match=r"the weight of halfbyte\.quantize cannot be transformed .* Call it outside"
    ):
        transform(lambda x: hb.quantize(x).packed)(x)


def test_a_weight_cannot_be_batched() -> None:
    q = weight("nf4")
    x = torch.randn(3, 32)
    packed = torch.stack([q.packed, q.packed])

    def product(packed: Tensor) -> Tensor:
        return hb.linear(x, hb.QuantizedWeight("nf4", packed, q.scale, q.shape, q.dtype, 64, q.nested))

    def dense(packed: Tensor) -> Tensor:
        return hb.dequantize(hb.QuantizedWeight("nf4", packed, q.scale, q.shape, q.dtype, 64, q.nested))

    with pytest.raises(RuntimeError, match=r"the weight of halfbyte\.linear cannot be transformed"):
        vmap(product)(packed)
    with pytest.raises(RuntimeError, match=r"q or out of halfbyte\.dequantize cannot be transformed"):
        vmap(dense)(packed)
    with pytest.raises(RuntimeError, match=r"the weight of halfbyte\.linear cannot be batched"):
        torch.compile(vmap(product), backend="aot_eager", fullgraph=True)(packed)


TRACED: dict[str, Callable[[Tensor, hb.QuantizedWeight], Tensor]] = {
    "linear": hb.linear,
    "dequantize": lambda x, q: x @ hb.dequantize(q).t(),
    "quantize": lambda x, q: hb.quantize(x).packed,
}


@pytest.mark.parametrize("name", TRACED)
def test_jit_trace_is_refused(name: str) -> None:
    q = weight("nf4")
    with pytest.raises(RuntimeError, match=rf"halfbyte\.{name} cannot be recorded by torch\.jit\.trace; use torch\.co"):
        torch.jit.trace(lambda x: TRACED[name](x, q), (torch.randn(3, 32),))


SEARCHES: dict[str, Callable[[Tensor], Any]] = {
    "distances": lambda query: hb.distances(query, torch.ones(9, 32)),
    "nearest": lambda query: hb.nearest(query, torch.ones(9, 32), 2),
    "token_ranks": lambda query: hb.token_ranks(query, torch.ones(9, 32), torch.zeros(len(query), dtype=torch.int64)),
    "token_ranks, through fidelity": lambda query: hb.fidelity(
        query, torch.ones(9, 32), torch.zeros(len(query), dtype=torch.int64)
    ),
}


@pytest.mark.parametrize("name", SEARCHES)
def test_search_says_that_it_is_not_for_transforms(name: str) -> None:
    search, queries = SEARCHES[name], torch.randn(4, 3, 32)
    words = f"halfbyte.{name.partition(',')[0]} cannot be transformed by torch.func"
    with pytest.raises(RuntimeError, match=words):
        vmap(search)(queries)
    with pytest.raises(RuntimeError, match=words):
        jvp(search, (queries[0],), (queries[1],))
    with pytest.raises(RuntimeError, match=r"cannot be recorded by torch\.jit\.trace"):
        torch.jit.trace(search, (queries[0],), check_trace=False)
    vmap(lambda x: search(queries[0])[0] * x if name == "distances" else x)(torch.ones(2))  # of what is not transformed
