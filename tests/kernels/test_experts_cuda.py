"""Stacks of experts on a GPU: what is planned, what launches are handed, and that they compile."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from drivers import BF16, F16, F32, Driver, pretend
from gpus import A100, H200
from torch import Tensor

import halfbyte as hb
from halfbyte.kernels.common import nvrtc
from halfbyte.kernels.experts import combine, cuda, reference, serves
from halfbyte.kernels.experts.block import Block
from halfbyte.kernels.linear import reach
from halfbyte.kernels.linear.problem import Problem, addresses
from halfbyte.kernels.linear.sm90_decode import launch as decode
from halfbyte.kernels.linear.sm90_decode.plan import is_valid
from halfbyte.kernels.linear.sm90_decode.routed import PAIRS, Kind
from halfbyte.kernels.linear.tune import h200

#         experts, I, H, experts of a token
MODELS = {
    "qwen3-30b": (128, 768, 2048, 8), "mixtral": (8, 14336, 4096, 2), "deepseek-v3": (256, 2048, 7168, 8),
    "gpt-oss-20b": (32, 2880, 2880, 4),
}  # fmt: skip
MXFP4 = {"format": "mxfp4", "block_size": 32, "nested": 0}


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    monkeypatch.setattr(cuda, "properties_of", lambda index: H200)
    cuda.products.entries.clear()
    yield from pretend(monkeypatch, H200)
    cuda.products.entries.clear()


def problem(n: int, k: int, **changes: Any) -> Problem:
    return Problem(**{"dtype": BF16, "n": n, "k": k, "format": "nf4", "block_size": 64, "scale": torch.uint8,
                      "nested": 256} | changes)  # fmt: skip


@pytest.mark.parametrize("pairs", [1, 8, 33, 512])
@pytest.mark.parametrize("model", MODELS)
def test_models_are_supported(model: str, pairs: int) -> None:
    experts, inner, hidden, _ = MODELS[model]
    for n, k, activation, wide in ((2 * inner, hidden, "silu", False), (hidden, inner, "", True)):
        o = problem(experts * n, k, **(MXFP4 if model == "gpt-oss-20b" else {}))
        plan = decode.plan_routed(pairs, o, experts, Kind(activation, wide), H200)
        assert plan is not None
        assert is_valid(plan, o.n, k, decode.scales_of(o), H200)
        assert pairs <= plan.pairs in PAIRS
        assert plan.experts >= experts


def test_what_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reach, "without_kernels", lambda properties: None)
    q = hb.quantize(torch.randn(4, 64, 256))
    many = "sm90_streamk and sm90_gemm"
    both = f"experts: CUDA C++ sm90_decode where tokens are few, {many} where they are many (sm_90)"
    assert serves._on_cuda(q, H200) == both
    assert serves._on_cuda(hb.quantize(torch.randn(4, 72, 256)), H200) == f"experts: CUDA C++ {many} (sm_90)"
    assert serves._on_cuda(q, A100) == "experts: CUDA C++ sm80_gemm (sm_80)"
    assert "no kernel is for such a stack" in serves._on_cuda(hb.quantize(torch.randn(4, 64, 250)), H200)


def test_what_is_not_supported() -> None:
    def plan(pairs: int = 8, experts: int = 8, activation: str = "", n: int = 64, k: int = 1024, **changes: Any) -> Any:
        return decode.plan_routed(pairs, problem(experts * n, k, **changes), experts, Kind(activation), H200)

    assert plan() is not None
    assert plan(pairs=513) is None
    assert plan(pairs=0) is None
    assert plan(experts=1025) is None
    assert plan(n=72) is None
    assert plan(n=80) is not None
    assert plan(n=80, activation="silu") is None  # a tile would have gate and up rows
    assert plan(n=80, activation="swiglu_oai") is not None
    assert plan(dtype=F32) is None
    assert plan(block_size=32, scale=BF16, nested=0) is None
    assert decode.plan_routed(8, problem(512, 1024), 8, Kind(), A100) is None


def test_who_begins_early_clears_nothing(gpu: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(h200, "ROUTED_EARLY", True)
    o = problem(4 * 64, 512)
    plan = decode.plan_routed(8, o, 4, Kind(wide=True, early=True), H200)
    assert plan is not None
    assert plan.static_weights
    assert plan.first_stages == plan.stages
    q = hb.quantize(torch.randn(4, 64, 512))
    routing = decode.Routing(4, 1, True, clears=True)
    with pytest.raises(ValueError, match="may not clear results"):
        decode.bind_routed(torch.device("cuda", 0), o, addresses(decode.rows_of(q)), routing, plan)


@pytest.mark.parametrize("dtype", [F16, BF16])
@pytest.mark.parametrize("activation", reference.ACTIVATIONS)
@pytest.mark.parametrize("narrow", [True, False])
def test_a_block(gpu: Driver, dtype: torch.dtype, activation: str, narrow: bool) -> None:
    """Of tokens that share experts, of ids that are none, and of tokens that come and go."""
    experts, inner, hidden = 5, 256, 512
    gate_up, down = (hb.quantize(torch.randn(experts, n, k)) for n, k in ((2 * inner, hidden), (hidden, inner)))
    biases = torch.randn(experts, 2 * inner).to(dtype), torch.randn(experts, hidden).to(dtype)
    gpu.dtype, gpu.activation = dtype, activation
    for tokens, kind in ((1, torch.int64), (3, torch.int32), (1, torch.int64), (40, torch.int64)):
        x = 0.1 * torch.randn(tokens, hidden).to(dtype)
        index = torch.randint(-1, experts + 1, (tokens, 3), dtype=kind)
        weights = torch.rand(tokens, 3).to(dtype if narrow else F32)
        for bias in (biases, (None, None)):
            found = two_stacks(gpu, x, index, weights, Block(gate_up, down, activation, *bias))
            right = hb.moe(
                x.float(), index, weights.float(), gate_up, down, activation,
                *(None if one is None else one.float() for one in bias),
            )  # fmt: skip
            assert (found.float() - right).norm() <= 0.02 * right.norm()


def two_stacks(gpu: Driver, x: Tensor, index: Tensor, weights: Tensor, block: Block) -> Tensor:
    """The block; the driver is told which stack comes next, and torch adds up."""
    launch, stacks = cuda._launch, iter(block.stacks)

    def tell(*launched: Any) -> None:
        gpu.like = next(stacks)
        launch(*launched)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda, "_launch", tell)
        patch.setattr(combine, "combine", added_up)
        found = cuda.moe(x, index, weights, block)
    assert found is not None
    return found


def added_up(rows: Tensor, ids: Tensor, weights: Tensor, out: Tensor, experts: int, residual: Any = None) -> None:
    assert residual is None
    known = (ids >= 0) & (ids < experts)
    rows = torch.where(known.view(-1, 1), rows, 0).view(*ids.shape, -1)
    out.copy_(reference.combine(rows, torch.where(known, weights.float(), 0), out.dtype))


@pytest.mark.parametrize("format", ["nf4", "int4"])
def test_grouped_linear(gpu: Driver, format: str) -> None:
    q = gpu.like = hb.quantize(torch.randn(4, 48, 256).bfloat16(), format)
    for rows, kind in ((1, torch.int64), (5, torch.int32), (40, torch.int64)):
        x, expert = torch.randn(rows, 256).bfloat16(), torch.randint(-1, 5, (rows,), dtype=kind)
        bias = torch.randn(4, 48).bfloat16()
        found = cuda.grouped_linear(x, q, expert, bias)
        assert found is not None
        torch.testing.assert_close(found, hb.grouped_linear(x, q, expert, bias), rtol=2e-2, atol=0.2)
        assert not found[(expert < 0) | (expert >= 4)].any()
    assert cuda.grouped_linear(x[:0], q, expert[:0], None) is None
    assert cuda.grouped_linear(torch.randn(513, 256).bfloat16(), q, torch.zeros(513, dtype=torch.int64), None) is None


def test_a_stack_as_one_weight() -> None:
    for format in ("nf4", "int4", "mxfp4"):
        q = hb.quantize(torch.randn(3, 16, 128), format)
        rows = decode.rows_of(q)
        assert torch.equal(hb.dequantize(rows).view(3, 16, 128), hb.dequantize(q))
        assert rows.packed.data_ptr() == q.packed.data_ptr()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "which", "tokens", "dtype"),
    [
        ("qwen3-30b", "gate_up", 1, BF16), ("qwen3-30b", "down", 64, F16), ("mixtral", "down", 4, BF16),
        ("deepseek-v3", "gate_up", 16, F16), ("gpt-oss-20b", "interleaved", 4, BF16), ("qwen3-30b", "grouped", 1, BF16),
    ],
)  # fmt: skip
def test_it_compiles(model: str, which: str, tokens: int, dtype: torch.dtype) -> None:
    experts, inner, hidden, k = MODELS[model]
    n, depth = (hidden, inner) if which == "down" else (2 * inner, hidden)
    others = MXFP4 if model == "gpt-oss-20b" else {}
    o = problem(experts * n, depth, dtype=dtype, bias=which != "gate_up", **others)
    activation = {"gate_up": "silu", "interleaved": "swiglu_oai"}.get(which, "")
    plan = decode.plan_routed(tokens * k, o, experts, Kind(activation, which == "down"), H200)
    assert plan is not None
    assert len(nvrtc.cubin(decode.variant(o, plan, H200))) > 1000
