"""Stacks of experts: right, in the same bits every time, whichever tokens want whichever experts."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear as dense_linear

import halfbyte as hb
from halfbyte import eager_experts
from halfbyte.eager_fused import rms_norm
from halfbyte.kernels.common.norm import Norm
from halfbyte.kernels.experts import choose, cuda, reference, router_reference
from halfbyte.kernels.experts.block import Block
from halfbyte.kernels.linear.sm90_decode.routed import Kind
from halfbyte.kernels.linear.tune import h200

from .conftest import BF16, DEVICE, F16, F32, captured, error, poisoned, sixteen_bits

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability()[0] < 9, reason="needs Hopper or later"
)
KINDS = [
    ("nf4", {}),
    ("fp4", {"nested": False}),
    ("int4", {"group_size": 128}),
    ("nf4", {"block_size": 256}),
    ("mxfp4", {}),
]
#         experts, I, H, experts of a token: one CTA along K and several, scales that come in each way
SIZES = [
    (16, 256, 512, 4),
    (128, 768, 2048, 8),
    (8, 2048, 5120, 2),
    (4, 5120, 512, 1),
    (4, 8448, 512, 2),
    (8, 2880, 2880, 4),
]


def random(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype)


def stack(experts: int, n: int, k: int, format: str, dtype: torch.dtype, **options: Any) -> hb.QuantizedWeight:
    return hb.quantize((torch.randn((experts, n, k), device=DEVICE) / k**0.5).to(dtype), format, **options)


def routing(tokens: int, experts: int, k: int, kind: str) -> Tensor:
    """Of ids [tokens, k]: different experts for a token; all the same one; half of them out of range; none in range."""
    ids = torch.rand((tokens, experts), device=DEVICE).topk(k).indices
    if kind == "one expert":
        return torch.full_like(ids, experts - 1)
    if kind == "out of range":
        return torch.where(
            torch.rand(ids.shape, device=DEVICE) < 0.5, ids, torch.where(ids % 2 == 0, -1, experts + ids)
        )
    return torch.full_like(ids, -7) if kind == "none" else ids


def compose(
    x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, activation: str, biases: tuple[Any, Any]
) -> Tensor:
    """The block as transformers computes it, rounded where it rounds; exact in fp64."""
    out = torch.zeros_like(x)
    for token, (chosen, shares) in enumerate(zip(ids.tolist(), weights, strict=True)):
        for place, e in enumerate(chosen):
            if 0 <= e < len(gate_up):
                bias = [None if one is None else one[e].to(x.dtype) for one in biases]
                both = dense_linear(x[token], gate_up[e], bias[0])
                inner = activate(both, activation)
                out[token] += shares[place].to(x.dtype) * dense_linear(inner, down[e], bias[1])
    return out


def activate(both: Tensor, activation: str) -> Tensor:
    if both.dtype is not torch.float64:
        return reference.activate(both.float(), activation).to(both.dtype)
    gate, up = (both[::2], both[1::2]) if activation == "swiglu_oai" else both.chunk(2)
    if activation == "swiglu_oai":
        gate, up = gate.clamp(max=7), up.clamp(-7, 7)
        return (up + 1) * gate * torch.sigmoid(1.702 * gate)
    act = {"silu": torch.nn.functional.silu}.get(activation)
    approximate = "tanh" if activation == "gelu_tanh" else "none"
    return (act(gate) if act else torch.nn.functional.gelu(gate, approximate=approximate)) * up


@pytest.fixture(params=[False, True], ids=["apart", "combined"])
def _adding_up(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a launch of its own, and where results are made, however many tokens there are."""
    monkeypatch.setattr(cuda, "combined", lambda tokens, top_k: top_k if request.param else 0)
    cuda.products.entries.clear()


@pytest.mark.parametrize(("format", "options"), KINDS, ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@sixteen_bits
@pytest.mark.usefixtures("_adding_up")
def test_a_block(sizes: tuple[int, ...], dtype: torch.dtype, format: str, options: dict[str, Any]) -> None:
    """The error is not above that of dequantized experts in transformers' order; replays give the same bits."""
    experts, inner, hidden, k = sizes
    if hidden % options.get("group_size", 64) or inner % options.get("group_size", 64):
        pytest.skip("groups do not divide K")
    gate_up = stack(experts, 2 * inner, hidden, format, dtype, **options)
    down = stack(experts, hidden, inner, format, dtype, **options)
    exact = [hb.dequantize(q, F32) for q in (gate_up, down)]
    kinds = ("usual", "one expert", "out of range", "none")
    cases = zip((1, 2, 9, 3, 17), (*kinds, "usual"), (*reference.ACTIVATIONS, "silu"), strict=True)
    for tokens, kind, activation in cases:
        x, weights = random(tokens, hidden, dtype=dtype), torch.rand((tokens, k), device=DEVICE).to(dtype)
        ids = routing(tokens, experts, k, kind)
        biases: tuple[Any, Any] = (None, None)
        if tokens % 2:
            biases = random(experts, 2 * inner, dtype=dtype), random(experts, hidden, dtype=dtype)
        block = partial(cuda.moe, x, ids, weights, Block(gate_up, down, activation, *biases))
        found = block()
        if found is None:
            rows_of_4_bytes = options.get("block_size") != 256 and (hidden != 2880 or format != "int4")
            assert not rows_of_4_bytes or (format == "mxfp4" and dtype is F16)
            return
        right = compose(x.double(), ids, weights.double(), *(w.double() for w in exact), activation, biases)
        theirs = compose(x, ids, weights, *(hb.dequantize(q, dtype) for q in (gate_up, down)), activation, biases)
        if kind == "none":
            assert not found.any()
        else:
            assert error(found, right) <= error(theirs, right), (tokens, kind, activation)
        graph, replayed = captured(block)
        for _ in range(3):
            replayed.fill_(77)
            graph.replay()
            assert torch.equal(replayed, found)


@pytest.mark.parametrize("pairs", [1, 31, 32, 33, 128, 129, 512])
def test_grouped_linear(pairs: int) -> None:
    """As many units as there can be, and as few; nothing is written behind the result."""
    q = stack(40, 1040, 1024, "nf4", BF16)
    dense = hb.dequantize(q, F32).double()
    for high in (1, 8, 41):
        x, expert = random(pairs, 1024), torch.randint(-1 if high > 1 else 0, high, (pairs,), device=DEVICE)
        found = hb.grouped_linear(x, q, expert)
        valid = (expert >= 0) & (expert < 40)
        right = torch.einsum("sk,snk->sn", x.double(), dense[expert.clamp(0, 39)]) * valid[:, None]
        assert not found[~valid].any()
        assert error(found, right) < 3e-3
        assert torch.equal(found, hb.grouped_linear(x, q, expert))
        with poisoned((pairs, 1040), BF16) as out:
            out.zero_()
            product = cuda._product(x, q, None, pairs, expert, 1, Kind())
            assert product is not None
            cuda._launch(product, x, expert, None, out, pairs)
        assert not out[~valid].any()
        assert error(out, right) < 3e-3  # so many may have gone sorted above


def test_a_token_has_the_same_bits_among_others() -> None:
    """As long as no expert of it has more than eight tokens, which go by eights."""
    gate_up, down = stack(64, 512, 512, "nf4", BF16), stack(64, 512, 256, "nf4", BF16)
    x, weights = random(8, 512), torch.rand((8, 4), device=DEVICE)
    ids = routing(8, 64, 4, "usual")
    whole = hb.moe(x, ids, weights, gate_up, down)
    for token in range(8):
        alone = hb.moe(x[token : token + 1], ids[token : token + 1], weights[token : token + 1], gate_up, down)
        assert torch.equal(alone[0], whole[token])


def test_ids_of_both_kinds_and_other_streams() -> None:
    gate_up, down = stack(16, 512, 512, "nf4", BF16), stack(16, 512, 256, "nf4", BF16)
    x, weights, ids = random(3, 512), torch.rand((3, 4), device=DEVICE), routing(3, 16, 4, "usual")
    right = hb.moe(x, ids, weights, gate_up, down)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        found = hb.moe(x, ids.int(), weights, gate_up, down)
    torch.cuda.current_stream().wait_stream(side)
    assert torch.equal(found, right)


@pytest.mark.parametrize("sizes", SIZES[:3], ids=str)
@pytest.mark.parametrize("tokens", [1, 4, 20])
@pytest.mark.usefixtures("_adding_up")
def test_down_may_begin_early(tokens: int, sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Layer after layer, each with ids of its own that a kernel has just made, replay after replay with another x: the
    same bits as where it begins when gate and up have ended."""
    experts, inner, hidden, k = sizes
    block = Block(stack(experts, 2 * inner, hidden, "nf4", BF16), stack(experts, hidden, inner, "nf4", BF16), "silu")
    routers = [(random(experts, hidden) / hidden**0.5).to(BF16) for _ in range(12)]
    x = random(tokens, hidden)

    def layers() -> Tensor:
        y = x
        for router in routers:
            ids, weights = eager_experts.choose(y, router, None, k, True, True, F32)
            added = cuda.moe(y, ids, weights, block)
            assert added is not None
            y = torch.nn.functional.rms_norm(y + added, (hidden,))
        return y

    captures = []
    for early in (False, True):
        monkeypatch.setattr(h200, "ROUTED_EARLY", early)
        cuda.products.entries.clear()
        captures.append(captured(layers))
    for _ in range(20):
        x.copy_(random(tokens, hidden))
        for graph, _ in captures:
            graph.replay()
        (_, right), (_, found) = captures
        assert right.isfinite().all()
        assert torch.equal(found, right)


@pytest.mark.parametrize("kinds", [(True, True), (True, False), (False, True)], ids=["normalized", "all", "best"])
@pytest.mark.parametrize(("experts", "k", "top_k"), [(128, 2048, 8), (8, 4096, 2), (32, 2880, 4), (64, 2048, 6)])
@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_a_router(dtype: torch.dtype, experts: int, k: int, top_k: int, kinds: tuple[bool, bool]) -> None:
    """In one launch, and within a graph: what scores of torch's product make, but where two differ by a rounding."""
    for tokens in (1, 5, 32, 128):
        x, weight = random(tokens, k, dtype=dtype), (random(experts, k) / k**0.5).to(dtype)
        bias = random(experts, dtype=dtype) if top_k == 4 else None
        assert choose.supports(x, weight, bias, top_k, F32)
        scores = dense_linear(x, weight, bias)
        run = partial(eager_experts.choose, x, weight, bias, top_k, *kinds, F32)
        eager = run()
        graph, from_graph = captured(run)
        graph.replay()
        for ids, weights in (eager, from_graph):
            _, right = router_reference.route(scores, top_k, *kinds, F32)
            torch.testing.assert_close(weights, right, rtol=0.02, atol=2e-3)
            apart = scores.topk(top_k).values.float() - scores.gather(1, ids).float()
            assert (apart <= 2 * torch.finfo(dtype).eps * scores.abs().amax(1, keepdim=True)).all()


@pytest.mark.parametrize(("experts", "k"), [(128, 2048), (8, 4096), (256, 4096), (32, 2880)])
@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_a_router_behind_a_norm(dtype: torch.dtype, experts: int, k: int) -> None:
    """Rows are those that the norm's own kernel writes, but for a rounding, and experts those of such rows."""
    for tokens in (1, 5, 32, 128):
        x, weight = random(tokens, k, dtype=dtype), (random(experts, k) / k**0.5).to(dtype)
        norm = Norm((1 + random(k) / 8).to(dtype), 1e-6, 1.0 if experts == 8 else 0.0)
        run = partial(eager_experts.norm_and_choose, x, norm, weight, None, 4, True, True, F32)
        eager = run()
        graph, from_graph = captured(run)
        graph.replay()
        for normed, ids, weights in (eager, from_graph):
            torch.testing.assert_close(normed, rms_norm(x, norm), rtol=torch.finfo(dtype).eps, atol=0)
            scores = dense_linear(normed, weight)
            _, right = router_reference.route(scores, 4, True, True, F32)
            torch.testing.assert_close(weights, right, rtol=0.02, atol=2e-3)
            apart = scores.topk(4).values.float() - scores.gather(1, ids).float()
            assert (apart <= 2 * torch.finfo(dtype).eps * scores.abs().amax(1, keepdim=True)).all()


def test_a_router_of_many_tokens() -> None:
    x, weight = random(1000, 512), random(16, 512)
    assert not choose.supports(x, weight, None, 4, F32)
    ids, weights = eager_experts.choose(x, weight, None, 4, True, True, F32)
    right_ids, right = eager_experts.route(dense_linear(x, weight), 4, True, True, F32)
    assert torch.equal(ids, right_ids)
    assert torch.equal(weights, right)
