"""Products with what stands beside them in one launch, chains of them that overlap, and layers made of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear as dense_linear

import halfbyte as hb
from halfbyte import eager_fused
from halfbyte.kernels.common.device import DeviceProperties, properties_of
from halfbyte.kernels.common.norm import Norm
from halfbyte.kernels.linear import cache, dispatch
from halfbyte.kernels.linear.fusion import Beside, Fusion, Residual
from halfbyte.kernels.linear.laid_out import span_of
from halfbyte.kernels.linear.problem import Problem, addresses, problem_of
from halfbyte.kernels.linear.sm90_decode import launch as decode
from halfbyte.kernels.linear.sm90_gemm import launch as gemm
from halfbyte.kernels.linear.sm90_gemm.plan import GemmGroup
from halfbyte.kernels.linear.sm90_gemm.shape import GemmPlan, decoding, is_valid
from halfbyte.kernels.linear.sm90_streamk import launch as streamk
from halfbyte.kernels.pointwise import reference as plain_torch
from halfbyte.models import fused
from halfbyte.models import transformers as host
from halfbyte.models.fused import AGREES
from halfbyte.models.layers import layer_of

from .conftest import BF16, DEVICE, F16, F32, captured, error, poisoned, sixteen_bits, weight

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability()[0] < 9, reason="needs Hopper or later"
)
#        format, its options
KINDS = [
    ("nf4", {}),
    ("fp4", {"nested": False}),
    ("int4", {"group_size": 128}),
    ("nf4", {"block_size": 256}),
]
#        rows, K: one CTA along K and several, a K that ends inside a CTA's part
SIZES = [(1, 4096), (3, 1024), (8, 14336), (13, 4096), (16, 5120), (29, 2048), (32, 8192), (5, 4160)]


def random(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype)


def multiply(
    x: Tensor,
    weights: Sequence[hb.QuantizedWeight],
    biases: Sequence[Tensor | None],
    beside: Beside,
    static: bool,
    kernel: Any = decode,
) -> list[Tensor] | None:
    """By the kernel, with poison under and around each result."""
    m = len(x)
    fusion = replace(beside.fusion, static=static)
    group = [problem_of(x, q, bias) for q, bias in zip(weights, biases, strict=True)]
    plan = kernel.plan_fused(m, group, fusion, properties_of(0))
    if plan is None:
        return None
    product = kernel.bind_fused(DEVICE, m, group, list(map(addresses, weights)), fusion, plan)
    with ExitStack() as stack:
        results = [stack.enter_context(poisoned((m, q.shape[0]), x.dtype)) for q in weights]
        pointers = []
        for bias, result in zip(biases, results, strict=True):
            pointers += [0 if bias is None else bias.data_ptr(), result.data_ptr()]
        if beside.activation:
            pointers[3] = 0
        product(torch.cuda.current_stream().cuda_stream, x.data_ptr(), *beside.addresses, m, pointers)
    return results[:1] if beside.activation else results


def compose(
    x: Tensor,
    dense: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    beside: Beside,
) -> list[Tensor]:
    """What transformers computes, rounded where it rounds; exact where x is fp64."""
    norm, activation, residual = beside
    if norm is not None:
        wide = x.double() if x.dtype is torch.float64 else x.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + norm.epsilon)
        x = (normed * (norm.offset + norm.weight.to(wide.dtype))).to(x.dtype)
    results = [dense_linear(x, w, None if b is None else b.to(x.dtype)) for w, b in zip(dense, biases, strict=True)]
    if activation:
        act = nn.functional.silu if activation == "silu" else lambda v: nn.functional.gelu(v, approximate="tanh")
        results = [act(results[0]) * results[1]]
    if residual is not None:
        results = [residual.value.to(x.dtype) + residual.factor * results[0]]
    return results


def most(rounded: Tensor, right: Tensor) -> float:
    """The error of what transformers computes; of few numbers, with what chance makes of another rounding."""
    return error(rounded, right) * (1.0 if right.numel() > 5000 else 1.2)


@pytest.mark.parametrize("kind", ["q, k, v", "silu", "gelu_tanh", "residual"])
@pytest.mark.parametrize(("format", "options"), KINDS, ids=str)
@sixteen_bits
def test_error(dtype: torch.dtype, format: str, options: dict[str, Any], kind: str) -> None:
    """Not above that of the same in several kernels; the same bits again, early or late."""
    tried = 0
    for m, k in SIZES:
        if k % options.get("group_size", options.get("block_size", 64)):
            continue
        sizes = {"q, k, v": (1024, 260, 256), "residual": (1028,)}.get(kind, (1300, 1300))
        weights = [weight(n, k, format, dtype, **options) for n in sizes]
        biases = [random(n, dtype=dtype) if (m + place) % 2 else None for place, n in enumerate(sizes)]
        norm = None if kind == "residual" and m % 2 else Norm(random(k, dtype=dtype), 1e-5, float(m % 2))
        residual = Residual(random(m, sizes[0], dtype=dtype), 0.5 if m % 3 else 1.0) if kind == "residual" else None
        activation = kind if kind in ("silu", "gelu_tanh") else ""
        x = 3 * random(m, k, dtype=dtype)
        given = biases, Beside(norm, activation, residual)
        ours = multiply(x, weights, *given, static=True)
        if ours is None:
            continue
        tried += 1
        again = multiply(x, weights, *given, static=False)
        assert again is not None
        exact = compose(x.double(), [hb.dequantize(q, F32).double() for q in weights], *given)
        theirs = compose(x, [hb.dequantize(q, dtype) for q in weights], *given)
        for one, other, right, rounded in zip(ours, again, exact, theirs, strict=True):
            assert torch.equal(one, other), (m, k)
            assert error(one, right) <= max(most(rounded, right), 1e-6), (m, k)
    assert tried >= len(SIZES) // 2


@pytest.mark.parametrize("kind", ["silu", "gelu_tanh", "residual"])
@pytest.mark.parametrize(("format", "options"), [*KINDS, ("nf4", {"block_size": 32})], ids=str)
@sixteen_bits
def test_error_where_x_is_laid_out(dtype: torch.dtype, format: str, options: dict[str, Any], kind: str) -> None:
    """sm90_streamk combines as it stores: in clusters, from shared sums, for an odd number of rows of W."""
    for m, n, k in ((1, 1029, 4160), (17, 2048, 4096), (40, 515, 1024), (64, 5120, 2048), (64, 300, 14336)):
        if k % options.get("group_size", options.get("block_size", 64)):
            continue
        weights = [weight(n, k, format, dtype, **options) for _ in range(1 if kind == "residual" else 2)]
        biases = [random(n, dtype=dtype), None][: len(weights)]
        residual = Residual(random(m, n, dtype=dtype), 0.5) if kind == "residual" else None
        activation = "" if kind == "residual" else kind
        x = random(m, k, dtype=dtype)
        check_twice(streamk, x, weights, biases, Beside(None, activation, residual))


def check_twice(kernel: Any, x: Tensor, weights: Sequence[hb.QuantizedWeight], *given: Any) -> None:
    """The same bits again, and an error not above that of what transformers computes."""
    ours, again = (multiply(x, weights, *given, static=True, kernel=kernel) for _ in range(2))
    assert ours is not None
    assert again is not None
    exact = compose(x.double(), [hb.dequantize(q, F32).double() for q in weights], *given)
    theirs = compose(x, [hb.dequantize(q, x.dtype) for q in weights], *given)
    for one, other, right, rounded in zip(ours, again, exact, theirs, strict=True):
        assert torch.equal(one, other), (x.shape, one.shape)
        assert error(one, right) <= most(rounded, right), (x.shape, one.shape)


@pytest.mark.parametrize("kind", ["one", "q, k, v", "silu", "gelu_tanh"])
@pytest.mark.parametrize(("format", "options"), [*KINDS, ("nf4", {"block_size": 32})], ids=str)
@sixteen_bits
def test_error_of_pairs_and_norms(dtype: torch.dtype, format: str, options: dict[str, Any], kind: str) -> None:
    """sm90_streamk norms x as it lays it out, and has gate and up in one launch; with x kept by its CTAs, too."""
    for m, n, k in ((1, 1029, 4160), (17, 2048, 4096), (40, 516, 1024), (100, 2820, 2048), (64, 300, 14336)):
        if k % options.get("group_size", options.get("block_size", 64)):
            continue
        sizes = {"one": (n,), "q, k, v": (n, 260, 256)}.get(kind, (n, n))
        weights = [weight(size, k, format, dtype, **options) for size in sizes]
        biases = [random(size, dtype=dtype) if place % 2 else None for place, size in enumerate(sizes)]
        activation = kind if kind in ("silu", "gelu_tanh") else ""
        norms = [Norm(random(k, dtype=dtype), 1e-5, float(m % 2)), *([None] if activation else [])]
        x = 3 * random(m, k, dtype=dtype)
        for norm in norms:
            check_twice(streamk, x, weights, biases, Beside(norm, activation))


@pytest.mark.parametrize(("format", "options"), [*KINDS, ("nf4", {"block_size": 32})], ids=str)
@sixteen_bits
def test_error_of_pairs_of_many_rows(dtype: torch.dtype, format: str, options: dict[str, Any]) -> None:
    """sm90_gemm has gate and up in one launch, in chunks of rows, too."""
    for m, n, k in ((100, 1029, 4160), (300, 2048, 4096), (513, 515, 1024), (9000, 520, 1024)):
        if k % options.get("group_size", options.get("block_size", 64)):
            continue
        weights = [weight(n, k, format, dtype, **options) for _ in range(2)]
        biases, x = [random(n, dtype=dtype), None], random(m, k, dtype=dtype)
        check_twice(gemm, x, weights, biases, Beside(None, "silu"))


@pytest.mark.parametrize("in_order", [False, True])
def test_error_of_pairs_by_twins(in_order: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two CTAs of a cluster have neighbouring rows of both, the last of them perhaps none."""

    def planned(m: int, group: list[Problem], fusion: Fusion, properties: DeviceProperties) -> GemmGroup:
        n, k = group[0].n, group[0].k
        workers = min(66, -(-n // 128) * -(-k // 256))
        shape = GemmPlan(256, 2, 3, 3, workers, 1, 512, activation=fusion.activation, paired=True, in_order=in_order)
        plan = decoding(replace(shape, twins=2), group[0])
        assert is_valid(plan, m, n, k, span_of(group[0]), properties)
        return GemmGroup((plan, plan), 0.0, is_one_launch=True)

    monkeypatch.setattr(gemm, "plan_fused", planned)
    for m, n, k in ((300, 1029, 4160), (700, 2000, 4096), (1100, 60, 1024)):
        weights, x = [weight(n, k) for _ in range(2)], random(m, k)
        check_twice(gemm, x, weights, [random(n), None], Beside(None, "silu"))


@pytest.mark.parametrize("m", [1, 7, 16])
def test_a_row_has_the_same_bits_among_others(m: int) -> None:
    weights, norm = [weight(512, 4096), weight(512, 4096)], Norm(random(4096), 1e-5)
    x = random(m, 4096)
    whole = multiply(x, weights, [None, None], Beside(norm, "silu"), True)
    other = x.clone()
    other[1:] = random(m - 1, 4096) * 100
    again = multiply(other, weights, [None, None], Beside(norm, "silu"), True)
    assert whole is not None
    assert again is not None
    assert torch.equal(whole[0][0], again[0][0])


@pytest.mark.parametrize("m", [20, 32, 64, 100])
def test_a_chain_of_mlps(m: int) -> None:
    """Down takes what gate and up have laid out for it: the bits are those of the two products one after the other,
    and many layers overlap."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs Hopper")
    hidden, inner, layers = 4096, 14336, 3
    every = [[weight(inner, hidden), weight(inner, hidden), weight(hidden, inner)] for _ in range(layers)]
    norms = [Norm(1 + 0.1 * random(hidden), 1e-5) for _ in range(layers)]
    start = random(m, hidden)

    def run(together: bool) -> Tensor:
        x = start.clone()
        for weights, norm in zip(every, norms, strict=True):
            if together:
                added = eager_fused.mlp(x, weights, [None] * 3, Beside(norm, "silu", Residual(x)))
                assert added is not None
                x = added
            else:
                (inside,) = eager_fused.products(x, weights[:2], [None] * 2, Beside(norm, "silu"))
                (x,) = eager_fused.products(inside, weights[2:], [None], Beside(residual=Residual(x)))
                torch.cuda.synchronize()
        return x

    right = run(together=False)
    assert torch.equal(run(together=True), right)
    graph, result = captured(lambda: run(together=True))
    for _ in range(20):
        result.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(result, right)
    dispatch.choose_mlp.cache_clear()
    cache.mlps.entries.clear()


@pytest.mark.parametrize("m", [1, 8, 16])
def test_a_chain_that_overlaps(m: int) -> None:
    """Each product reads what the one ahead of it has just written, and overwrites what an earlier one still read."""
    hidden, inner, layers = 1024, 2816, 12
    gates = [[weight(inner, hidden), weight(inner, hidden)] for _ in range(layers)]
    downs = [weight(hidden, inner) for _ in range(layers)]
    norms = [Norm(1 + 0.1 * random(hidden), 1e-5) for _ in range(layers)]

    def run(wait: bool) -> Tensor:
        x = start.clone()
        for pair, down, norm in zip(gates, downs, norms, strict=True):
            (inside,) = eager_fused.products(x, pair, [None, None], Beside(norm, "silu"))
            if wait:
                torch.cuda.synchronize()
            (x,) = eager_fused.products(inside, [down], [None], Beside(residual=Residual(x)))
            if wait:
                torch.cuda.synchronize()
        return x

    start = random(m, hidden)
    group = tuple(problem_of(start, q, None) for q in gates[0])
    assert dispatch.choose_fused(m, group, Fusion((1e-5, 0.0), "silu", None, True), properties_of(0)) is not None
    right = run(wait=True)
    graph, result = captured(lambda: run(wait=False))
    for _ in range(20):
        result.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(result, right)


@sixteen_bits
def test_norms_and_gates(dtype: torch.dtype) -> None:
    from halfbyte.kernels.pointwise import triton

    for rows, columns in ((1, 4096), (64, 8192), (7, 5000), (3, 1 << 15)):
        x, weights, added = (
            20 * random(rows, columns, dtype=dtype),
            random(columns, dtype=dtype),
            random(rows, columns, dtype=dtype),
        )
        for offset, residual in ((0.0, None), (1.0, added)):
            right = plain_torch.rms_norm(x, weights, 1e-6, offset, residual)
            torch.testing.assert_close(triton.rms_norm(x, weights, 1e-6, offset, residual), right)
        both = random(rows, 2 * columns, dtype=dtype)
        for activation in plain_torch.GATES:
            gate, up = both.chunk(2, dim=-1)
            torch.testing.assert_close(triton.gated(gate, up, activation), plain_torch.gated(gate, up, activation))


FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {}, "mistral": {"sliding_window": 40}, "qwen2": {}, "qwen3": {"head_dim": 64},
    "gemma2": {"head_dim": 64, "sliding_window": 40}, "gemma3_text": {"head_dim": 64, "sliding_window": 40},
    "phi3": {"sliding_window": None}, "granite": {"residual_multiplier": 0.3},
    "qwen3_moe": {"head_dim": 64, "num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 256},
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": None},
    "gpt_oss": {"head_dim": 64, "num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": 40},
}  # fmt: skip
OF_EXPERTS = ("qwen3_moe", "mixtral", "gpt_oss")
SIDES = {
    "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2,
    "num_hidden_layers": 3, "vocab_size": 512, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip


def model_of(family: str) -> Any:
    """Small, random, and accelerated."""
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(family, **SIDES | FAMILIES[family])
    model = transformers.AutoModelForCausalLM.from_config(config).to(DEVICE, BF16).eval().requires_grad_(False)
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear) and name != "lm_head":
                setattr(parent, name, hb.nn.Linear4bit.from_linear(child))
    for name, parameter in model.named_parameters():
        if name.endswith((".router.weight", ".mlp.gate.weight")):
            parameter.mul_(50)  # so that a rounding seldom chooses another expert
    model.generation_config.eos_token_id = None
    hb.accelerate(model, experts="nf4" if family in OF_EXPERTS else None)
    return model


@pytest.fixture
def libraries() -> Iterator[None]:
    yield
    host.undo_in_library()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("texts", [1, 3, 40])
@pytest.mark.usefixtures("libraries")
def test_layers_of_every_family(family: str, texts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not farther from fp32 than transformers' own, with padding, over a window that fills."""
    model = model_of(family)
    layers = [module for module in model.modules() if layer_of(module) is not None]
    assert len(layers) == 3
    ids = torch.randint(3, 500, (texts, 30), device=DEVICE)
    mask = torch.ones_like(ids)
    mask[0, :7] = 0

    def run() -> tuple[Tensor, Tensor]:
        out = model.generate(
            ids, attention_mask=mask, max_new_tokens=24, do_sample=False, output_logits=True,
            return_dict_in_generate=True,
        )  # fmt: skip
        return torch.stack(out.logits, 1).float(), out.sequences[:, 30:]

    ours, our_tokens = run()
    assert [vars(layer).get(AGREES) for layer in layers] == [{1: True}] * 3
    monkeypatch.setattr(fused, "whole_of", lambda module: None)
    hb.release(model)
    theirs, their_tokens = run()
    model.float()
    exact, tokens = run()
    # Steps that have been fed the same tokens in all three: roundings lead elsewhere sooner or later.
    same = ((our_tokens == tokens) & (their_tokens == tokens)).cumprod(1).bool()
    fed = torch.cat((torch.zeros_like(same[:, :1]), same[:, :-1]), 1)  # the first is prefill's
    assert fed.sum() >= texts
    measure = typical_error if family in OF_EXPERTS else error
    assert measure(ours[fed], exact[fed]) <= 1.2 * measure(theirs[fed], exact[fed])
    hb.restore(model)


@pytest.mark.parametrize("family", ["llama", "qwen3", "phi3", "qwen3_moe"])
@pytest.mark.parametrize("options", [{"prompt_lookup_num_tokens": 7}, {"num_beams": 3}], ids=["guesses", "beams"])
@pytest.mark.usefixtures("libraries")
def test_several_new_tokens(family: str, options: dict[str, int]) -> None:
    """Every layer agrees with transformers', and each token of a greedy text is the likeliest but for rounding."""
    model = model_of(family)
    ids = torch.randint(3, 500, (1, 30), device=DEVICE)
    found = model.generate(ids, max_new_tokens=60, do_sample=False, **options)
    width = 1 if "num_beams" in options else 8
    assert all(vars(layer)[AGREES][width] for layer in model.modules() if layer_of(layer) is not None)
    if width == 1 or family in OF_EXPERTS:  # whose router may choose others where transformers has rounded otherwise
        return
    with torch.no_grad():
        ours = model(found).logits[0, 29:-1].float()
        exact = model.float()(found).logits[0, 29:-1]
    short = exact.max(-1).values - exact.gather(1, found[0, 30:, None])[:, 0]
    assert short.max() <= 4 * (ours - exact).abs().max()


def typical_error(logits: Tensor, right: Tensor) -> float:
    """A token's, in the median: noise has a router choose another expert for one token in a hundred, whose logits are
    then far off, in transformers' own steps as in ours."""
    return float(((logits - right).norm(dim=-1) / right.norm(dim=-1)).median())


def test_dtypes() -> None:
    """What is fused is 16 bits; a norm of another dtype goes its own way."""
    q, x = weight(512, 1024), random(1, 1024)
    assert multiply(x.float(), [q], [None], Beside(residual=Residual(random(1, 512).float())), True) is None
    beside = Beside(Norm(random(1024, dtype=F16), 1e-5))
    found = eager_fused.products(x.half(), [weight(512, 1024, dtype=F16)], [None], beside)
    assert found[0].dtype is F16
