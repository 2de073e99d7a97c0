"""sm90_decode's own source on a CPU: what a launch leaves is right, and no wait or barrier is missing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from cuda_on_cpu import needs_compiler
from hopper_on_cpu import (
    BF16,
    DEVICE,
    F16,
    F32,
    F64,
    SMALL,
    Driver,
    address,
    check,
    hopper,
    parts_of,
    weight,
)
from torch import Tensor
from torch.nn import functional

import halfbyte as hb
from halfbyte.kernels.experts import reference as stacks
from halfbyte.kernels.linear.fusion import ALONE, Fusion
from halfbyte.kernels.linear.problem import addresses, problem_of
from halfbyte.kernels.linear.sm90_decode import launch as decode
from halfbyte.kernels.linear.sm90_decode.plan import is_valid
from halfbyte.kernels.linear.sm90_decode.routed import Kind
from halfbyte.kernels.linear.tune import h200

__all__ = ["hopper"]
pytestmark = [needs_compiler, pytest.mark.slow]

# -- One weight, or several --------------------------------------------------------------------------------------------

RESIDUAL, STEP = Fusion(residual=0.5), Fusion(norm=(1e-5, 0.0), static=True)
GATED = Fusion(norm=(1e-6, 1.0), activation="silu")


class Case(NamedTuple):
    """m: rows of x. sides: of the weights. changes: to the plan."""

    m: int
    sides: tuple[int, ...]
    k: int
    dtype: torch.dtype
    fusion: Fusion = ALONE
    format: str = "nf4"
    options: dict[str, Any] = {}  # noqa: RUF012 nobody writes to it
    changes: dict[str, Any] = {}  # noqa: RUF012


CASES = {
    "two steps": Case(1, (116,), 1024, BF16, STEP, changes={"steps": 2, "stages": 3}),
    "integers": Case(9, (64, 32, 68), 1024, BF16, ALONE, "int4", {"group_size": 128}, {"computes": True}),
    "integers, gated": Case(3, (80, 80), 1024, BF16, GATED, "int4", {"group_size": 64}, {"computes": True}),
    "integers of fp16": Case(2, (80,), 4096, F16, RESIDUAL, "int4", {"group_size": 64}, {"computes": True}),
    "a cluster": Case(1, (132,), 14336, F16, STEP, "fp4"),
    "a cluster, many tiles": Case(2, (1000,), 2048, BF16, changes={"warps": 2, "cluster": 2}),
    "a cluster of four, gated": Case(1, (500, 500), 4096, F16, GATED, changes={"warps": 2, "cluster": 4}),
    "three weights": Case(9, (64, 32, 68), 1024, BF16, ALONE, "int4", {"group_size": 128}),
    "a gated pair": Case(5, (80, 80), 512, F16, GATED, options={"nested": False}),
    "batches": Case(13, (64,), 4096, BF16, format="mxfp4"),
    "registers": Case(
        13, (64,), 4096, F16, RESIDUAL, changes={"batches": 1, "m_tiles": 2, "warps": 16, "slice": 4, "steps": 1,
        "cluster": 1, "registers": 112, "reducers": 2},
    ),
    "scales in one piece": Case(
        8, (68,), 5376, BF16, RESIDUAL, changes={"warps": 11, "cluster": 1, "bulk_scales": True,
        "window_scales": False},
    ),
    "windows of scales": Case(
        20, (64,), 5376, F16, RESIDUAL, changes={"batches": 2, "m_tiles": 2, "warps": 7, "slice": 4, "steps": 1,
        "cluster": 3, "bulk_scales": False, "window_scales": True},
    ),
    "long blocks": Case(32, (32, 32), 4096, BF16, GATED, options={"block_size": 128}),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_a_product(hopper: Driver, case: Case) -> None:
    m, sides, k, dtype, fusion, format, options, changes = case
    torch.manual_seed(0)
    weights = [weight(n, k=k, dtype=dtype, format=format, **options) for n in sides]
    x, norm = torch.randn(m, k).to(dtype), (1 + torch.randn(k) / 8).to(dtype)
    biases = [torch.randn(n).to(dtype) for n in sides]
    residual = torch.randn(m, sides[0]).to(dtype)
    group = [problem_of(x, q, bias) for q, bias in zip(weights, biases, strict=True)]
    plan = decode.plan_fused(m, group, fusion, SMALL)
    assert plan is not None
    plan = replace(plan, **changes)
    assert is_valid(plan, sides[0], k, decode.scales_of(group[0]), SMALL)
    results = [torch.full((m + 1, n), 777.0, dtype=dtype) for n in sides[: 1 if fusion.activation else None]]
    hopper.readable = [part for q in weights for part in parts_of(q)]
    outs = [*results, *[None] * (len(sides) - len(results))]
    places = [address(of_each) for pair in zip(biases, outs, strict=True) for of_each in pair]
    multiply = decode.bind_fused(DEVICE, m, group, list(map(addresses, weights)), fusion, plan)
    multiply(0, address(x), address(norm) if fusion.norm else 0, address(residual) if fusion.residual else 0, m, places)

    def expected(kind: torch.dtype) -> list[Tensor]:
        rows = x.to(kind)
        if fusion.norm:
            epsilon, offset = fusion.norm
            rows = functional.rms_norm(rows, (k,), offset + norm.to(kind), epsilon)
        dense = [hb.dequantize(q, F32).to(kind) for q in weights]
        products = [functional.linear(rows, w, b.to(kind)) for w, b in zip(dense, biases, strict=True)]
        if fusion.activation:
            products = [functional.silu(products[0]) * products[1]]
        if fusion.residual:
            products = [residual.to(kind) + fusion.residual * products[0]]
        return products

    for y, right, theirs in zip(results, expected(F64), expected(dtype), strict=True):
        assert (y[m] == 777).all()
        check(y[:m], right, theirs)


@pytest.mark.parametrize(("k", "changes"), [(1024, {}), (5120, {}), (2048, {"cluster": 2, "warps": 2})], ids=str)
def test_a_row_is_normed_alike_among_others(hopper: Driver, k: int, changes: dict[str, int]) -> None:
    """The reducer finds the squares of one row or two, the multiplying warps those of more."""
    torch.manual_seed(0)
    q, x, norm = (
        weight(48, k=k, dtype=BF16, format="nf4"),
        torch.randn(8, k).to(BF16),
        (1 + torch.randn(k) / 8).to(BF16),
    )
    problem = problem_of(x, q, None)
    plan = decode.plan_fused(8, [problem], STEP, SMALL)
    assert plan is not None
    plan = replace(plan, **changes)
    assert is_valid(plan, 48, k, decode.scales_of(problem), SMALL)
    assert plan.registers == 0
    hopper.readable = parts_of(q)
    found = {m: torch.empty(m, 48, dtype=BF16) for m in (1, 2, 3, 8)}
    for m, y in found.items():
        multiply = decode.bind_fused(DEVICE, m, [problem], [addresses(q)], STEP, plan)
        multiply(0, address(x), address(norm), 0, m, [0, address(y)])
    for m, y in found.items():
        assert torch.equal(y, found[8][:m]), m


# -- Experts -----------------------------------------------------------------------------------------------------------

#    K, dtype, format, activation: one CTA along K and several, rows by a tensor map and in one piece
GROUPS = {"group_size": 128}
STACKS: list[tuple[int, torch.dtype, str, dict[str, Any], str]] = [
    (512, BF16, "nf4", {}, "silu"),
    (512, BF16, "nf4", {}, "swiglu_oai"),
    (512, BF16, "nf4", {}, ""),
    (768, F16, "int4", GROUPS, ""),
    (768, F16, "int4", GROUPS, "silu"),
    (2048, BF16, "mxfp4", {}, ""),
    (2880, BF16, "mxfp4", {}, "swiglu_oai"),
    (2880, BF16, "mxfp4", {}, ""),
    (2880, F16, "nf4", {}, "silu"),
    (5120, F16, "int4", GROUPS, "silu"),
    (5120, F16, "int4", GROUPS, ""),
    (8448, BF16, "nf4", {}, "silu"),
    (8448, F16, "int4", GROUPS, ""),
]


@pytest.mark.parametrize(("k", "dtype", "format", "options", "activation"), STACKS, ids=str)
def test_experts(
    hopper: Driver, k: int, dtype: torch.dtype, format: str, options: dict[str, Any], activation: str
) -> None:
    """More pairs of an expert than a unit has, and some whose id is no expert."""
    _check_experts(hopper, 15, k, dtype, format, options, activation)


@pytest.mark.parametrize("tokens", [1, 16, 40])  # with up to 32 pairs, and with more
@pytest.mark.parametrize(("activation", "early"), [("silu", False), ("silu", True), ("", False)])
def test_pairs_of_experts(
    hopper: Driver, activation: str, early: bool, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where W is asked for before x is there, all stages at once."""
    monkeypatch.setattr(h200, "ROUTED_EARLY", True)
    _check_experts(hopper, tokens, 512, BF16, "nf4", {}, activation, early)


def _check_experts(
    hopper: Driver,
    tokens: int,
    k: int,
    dtype: torch.dtype,
    format: str,
    options: dict[str, Any],
    activation: str,
    early: bool = False,
) -> None:
    torch.manual_seed(0)
    experts, n = 5, 64
    q = weight(experts, n, k=k, dtype=dtype, format=format, **options)
    x, bias = torch.randn(tokens, k).to(dtype), torch.randn(experts, n).to(dtype)
    ids = torch.randint(-1, experts + 1, (tokens, 2), dtype=torch.int32 if activation else torch.int64)
    ids[1::3] = 2
    found = _routed(hopper, x, ids, q, bias, activation, early)
    wanted = ((ids >= 0) & (ids < experts)).flatten()
    assert activation or not found[~wanted].any()

    def expected(kind: torch.dtype) -> Tensor:
        dense, rows = hb.dequantize(q, F32).to(kind), []
        for pair in wanted.nonzero().flatten().tolist():
            e = int(ids.flatten()[pair])
            row = functional.linear(x[pair // 2].to(kind), dense[e], bias[e].to(kind)).double()
            rows.append(stacks.activate(row[None], activation)[0] if activation else row)
        return torch.stack(rows).to(kind)

    check(found[wanted], expected(F64), expected(dtype))


def _routed(
    there: Driver, x: Tensor, ids: Tensor, q: hb.QuantizedWeight, bias: Tensor, activation: str, early: bool
) -> Tensor:
    """The results of all pairs of tokens [T, K] and their ids [T, k], zeros where an id is no expert."""
    experts, n, _ = q.shape
    flat = decode.rows_of(q)
    problem = problem_of(x, flat, bias.flatten())
    plan = decode.plan_routed(ids.numel(), problem, experts, Kind(activation, early=early), SMALL)
    assert plan is not None
    plan = replace(plan, neighbours=2)
    there.readable = parts_of(flat)
    out = torch.full((ids.numel() + 1, n // (2 if activation else 1)), 777.0, dtype=x.dtype)
    routing = decode.Routing(experts, ids.shape[1], ids.dtype is torch.int64, clears=not activation)
    multiply = decode.bind_routed(DEVICE, problem, addresses(flat), routing, plan)
    multiply(0, address(x), address(ids), address(bias), address(out), ids.numel())
    assert (out[-1] == 777).all()
    return out[:-1]


@pytest.mark.parametrize("tokens", [1, 7, 40])
@pytest.mark.parametrize(("k", "dtype", "narrow"), [(512, BF16, True), (2880, F16, False), (5120, BF16, False)])
def test_experts_are_added_up(
    hopper: Driver, k: int, dtype: torch.dtype, narrow: bool, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the launch that makes their results, twice in a row: pairs whose id is no expert are left out; a residual."""
    torch.manual_seed(0)
    monkeypatch.setattr(h200, "ROUTED_EARLY", tokens == 7)
    experts, n, top_k = 5, 64, 3
    q = weight(experts, n, k=k, dtype=dtype, format="nf4")
    x, bias = torch.randn(tokens * top_k, k).to(dtype), torch.randn(experts, n).to(dtype)
    ids = torch.randint(-1, experts + 1, (tokens, top_k), dtype=torch.int32 if narrow else torch.int64)
    shares = torch.rand(tokens, top_k).to(dtype if narrow else F32)
    residual = torch.randn(tokens, n).to(dtype) if narrow else None
    flat = decode.rows_of(q)
    problem = problem_of(x, flat, bias.flatten())
    plan = decode.plan_routed(ids.numel(), problem, experts, Kind("", True, True, top_k), SMALL)
    assert plan is not None
    assert plan.combines == top_k
    assert plan.static_weights is (tokens == 7)
    hopper.readable = parts_of(flat)
    routing = decode.Routing(experts, 1, not narrow)
    multiply = decode.bind_combined(DEVICE, problem, addresses(flat), routing, replace(plan, neighbours=2))
    dense = hb.dequantize(q, F32).double()
    for turn in range(2):
        x.mul_(1 - turn / 2)
        sums = decode.Sums(address(shares), narrow, address(residual), 0.5)
        out = torch.full((tokens + 1, n), 777.0, dtype=dtype)
        multiply(0, address(x), address(ids), address(bias), address(out), ids.numel(), sums)
        right = torch.zeros(tokens, n, dtype=F64)
        for token in range(tokens):
            for j, e in enumerate(ids[token].tolist()):
                if 0 <= e < experts:
                    row = dense[e] @ x[token * top_k + j].double() + bias[e].double()
                    right[token] += shares[token, j].double() * row
        if residual is not None:
            right = residual.double() + 0.5 * right
        assert (out[tokens:] == 777).all()
        assert float((out[:tokens].double() - right).norm()) <= 2.0**-8 * float(right.norm())
