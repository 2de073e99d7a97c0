"""Products with what stands beside them in a decoder layer, eager and traced, of weights one by one and merged."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import halfbyte as hb
from halfbyte.formats.parts import group_parts
from halfbyte.kernels.common.norm import Norm
from halfbyte.serving.products import added_mlp, added_product, apart, gated_product, merged, normed_product

K, SIZES = 128, (192, 192)
F64 = torch.float64


@pytest.fixture(params=[("nf4", {"nested": True}), ("int4", {"group_size": 64})], ids=["apart", "merged"])
def gate_up(request: pytest.FixtureRequest) -> list[Any]:
    """Two weights, as a served layer keeps them."""
    torch.manual_seed(0)
    format, settings = request.param
    return merged([hb.quantize(torch.randn(n, K) / K**0.5, format, **settings) for n in SIZES])


@pytest.fixture
def down(gate_up: list[Any]) -> Any:
    format, nested = gate_up[0].format, gate_up[0].nested is not None
    return hb.quantize(
        torch.randn(K, SIZES[0]) / K**0.5, format, **({"nested": True} if nested else {"group_size": 64})
    )


def random(*shape: int) -> Tensor:
    return torch.randn(shape)


def dense(weights: list[Any]) -> Tensor:
    return torch.cat([hb.dequantize(q) for q in weights]).to(F64)


def close(found: Tensor, right: Tensor) -> None:
    torch.testing.assert_close(found.to(F64), right, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rows", [1, 100])  # of a step, and of a prompt
@pytest.mark.parametrize("way", [lambda call: call, lambda call: torch.compile(call, backend="aot_eager")])
def test_products(gate_up: list[Any], down: Any, rows: int, way: Callable[..., Any]) -> None:
    torch.compiler.reset()
    x, bias, norm = random(rows, K), random(sum(SIZES)), Norm(1 + random(K) / 8, 1e-5)
    gates, residual, last = apart(gate_up, SIZES), random(rows, K), random(K)
    rms = functional.rms_norm(x.to(F64), (K,), norm.weight.to(F64), norm.epsilon)
    both = functional.linear(rms, dense(gate_up), bias.to(F64))
    gated = functional.silu(both[:, : SIZES[0]]) * both[:, SIZES[0] :]
    close(way(normed_product)(x, gate_up, bias, norm), both)
    close(way(gated_product)(x, gates, bias, norm), gated)
    inner = random(rows, SIZES[0])
    close(
        way(added_product)(inner, down, last, residual),
        residual.to(F64) + functional.linear(inner.to(F64), dense([down]), last.to(F64)),
    )
    right = x.to(F64) + functional.linear(gated, dense([down]), last.to(F64))
    close(way(added_mlp)(x, gates, down, (bias, last), norm), right)


def test_what_is_apart_shares_memory(gate_up: list[Any]) -> None:
    first, second = apart(gate_up, SIZES)
    assert torch.equal(dense([first, second]), dense(gate_up))
    assert first.packed.data_ptr() == gate_up[0].packed.data_ptr()


def test_operators(gate_up: list[Any], down: Any) -> None:
    x, norm, gates = random(3, K), 1 + random(K) / 8, apart(gate_up, SIZES)
    operators = torch.ops.halfbyte
    arguments = (x, *group_parts(gates), [None, None], norm, 1e-5, "", None)
    torch.library.opcheck(operators.fused_products.default, arguments)
    arguments = (random(3, SIZES[0]), *group_parts([down]), [random(K)], None, 0.0, "", random(3, K))
    torch.library.opcheck(operators.fused_products.default, arguments)
    arguments = (x, *group_parts(gates), *down.parts, [None, None, None], norm, 1e-5, "silu")
    torch.library.opcheck(operators.fused_mlp.default, arguments)
