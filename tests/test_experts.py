"""`halfbyte.grouped_linear` and `halfbyte.moe` on the CPU: errors, gradients, tracing, and what they refuse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from kinds import KINDS, kinds, quantize
from pairs import every_pair
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import functional

import halfbyte as hb
from halfbyte import eager_experts
from halfbyte.formats.weight import FLOAT_DTYPES
from halfbyte.kernels.common import paired_products
from halfbyte.kernels.experts.reference import ACTIVATIONS, activate, activate_backward
from halfbyte.measure.error import relative_error

dtypes = pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
activations = pytest.mark.parametrize("activation", ACTIVATIONS)


@pytest.fixture(autouse=True)
def _anew() -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()


# What they are held against: the same in torch, of dense stacks and in their dtype.


def dense_linear(x: Tensor, stack: Tensor, expert: Tensor, bias: Tensor | None = None) -> Tensor:
    out = x.new_zeros(len(x), stack.shape[1])
    for number, weight in enumerate(stack):
        rows = (expert == number).nonzero().flatten()
        added = None if bias is None else bias[number]
        out = out.index_add(0, rows, functional.linear(x[rows], weight, added))
    return out


def dense_activation(gate_up: Tensor, activation: str) -> Tensor:
    if activation == "swiglu_oai":
        gate, up = gate_up[..., ::2].clamp(max=7), gate_up[..., 1::2].clamp(-7, 7)
        return (up + 1) * (gate * torch.sigmoid(1.702 * gate))
    gate, up = gate_up.chunk(2, dim=-1)
    if activation == "silu":
        return functional.silu(gate) * up
    return functional.gelu(gate, approximate="tanh" if activation == "gelu_tanh" else "none") * up


def dense_moe(
    x: Tensor, index: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, activation: str = "silu",
    gate_up_bias: Tensor | None = None, down_bias: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """As transformers' experts do it, expert by expert."""
    out = torch.zeros_like(x)
    for number in range(len(gate_up)):
        token, place = (index == number).nonzero(as_tuple=True)
        added = [None if bias is None else bias[number] for bias in (gate_up_bias, down_bias)]
        inner = dense_activation(functional.linear(x[token], gate_up[number], added[0]), activation)
        y = functional.linear(inner, down[number], added[1]) * weights[token, place, None]
        out = out.index_add(0, token, y.to(x.dtype))
    return out


class Block:
    """A block's arguments; ids from -1 to E, so some are out of range."""

    def __init__(
        self, dtype: torch.dtype, tokens: int = 9, k: int = 3, experts: int = 6, hidden: int = 128, inner: int = 96,
        make: Callable[[Tensor], hb.QuantizedWeight] = hb.quantize, biased: bool = True,
    ) -> None:  # fmt: skip
        self.gate_up = make((torch.randn(experts, 2 * inner, hidden) / hidden**0.5).to(dtype))
        self.down = make((torch.randn(experts, hidden, inner) / inner**0.5).to(dtype))
        self.x = torch.randn(tokens, hidden).to(dtype)
        self.index = torch.randint(-1, experts + 1, (tokens, k))
        self.weights = torch.rand(tokens, k)
        shapes = (experts, 2 * inner), (experts, hidden)
        self.biases = tuple(torch.randn(shape).to(dtype) if biased else None for shape in shapes)

    def ours(self, activation: str = "silu") -> Tensor:
        return hb.moe(self.x, self.index, self.weights, self.gate_up, self.down, activation, *self.biases)

    def dense(self, dtype: torch.dtype, activation: str = "silu", exact: bool = False) -> Tensor:
        """The same with dense stacks of `dtype`; exact: in float64, of the fp32 stacks."""
        stacks = hb.dequantize(self.gate_up, dtype), hb.dequantize(self.down, dtype)
        if not exact:
            return dense_moe(self.x, self.index, self.weights, *stacks, activation, *self.biases)
        given = [None if t is None else t.double() for t in (self.x, self.weights, *stacks, *self.biases)]
        x, weights, gate_up, down, *biases = given
        assert x is not None and weights is not None and gate_up is not None and down is not None  # noqa: PT018
        return dense_moe(x, self.index, weights, gate_up, down, activation, *biases)


def slack(q: hb.QuantizedWeight, dtype: torch.dtype) -> float:
    """How much larger than torch's an error may be. Where no weight is rounded to `dtype`, both multiply the same
    numbers, and how the last rounding falls is luck."""
    is_exact = dtype != torch.float32 and torch.equal(hb.dequantize(q, dtype).float(), hb.dequantize(q, torch.float32))
    return 1 + 1e-5 if is_exact else 1.0


# What is computed.


@dtypes
@kinds
def test_grouped_linear_is_no_less_exact_than_dequantizing(
    format: str, size: int, nested: bool, dtype: torch.dtype
) -> None:
    q = quantize(torch.randn(4, 96, 1024).to(dtype), format, size, nested)
    bias = torch.randn(4, 96).to(dtype)
    for rows in (1, 9, 200):
        x, expert = torch.randn(rows, 1024).to(dtype), torch.randint(0, 4, (rows,))
        for added in (None, bias):
            wide = None if added is None else added.double()
            right = dense_linear(x.double(), hb.dequantize(q, torch.float32).double(), expert, wide)
            theirs = dense_linear(x, hb.dequantize(q, dtype), expert, added)
            ours = hb.grouped_linear(x, q, expert, added)
            assert ours.dtype == dtype
            assert relative_error(ours, right) <= relative_error(theirs, right) * slack(q, dtype)


@every_pair({"format, size, nested": KINDS, "dtype": FLOAT_DTYPES, "activation": [*ACTIVATIONS]})
def test_moe_is_no_less_exact_than_dequantizing(
    format: str, size: int, nested: bool, dtype: torch.dtype, activation: str
) -> None:
    # In fp32 both are one or two roundings from what is right. Whose are fewer depends on how a CPU's library adds up.
    slack = 1.25 if dtype == torch.float32 else 1.0
    for tokens in (1, 8, 100):
        block = Block(
            dtype, tokens, hidden=512, inner=256, biased=tokens != 8,
            make=lambda weight: quantize(weight, format, size, nested),
        )  # fmt: skip
        ours, right = block.ours(activation), block.dense(torch.float32, activation, exact=True)
        assert ours.dtype == dtype
        assert relative_error(ours, right) <= relative_error(block.dense(dtype, activation), right) * slack


@dtypes
@kinds
def test_identity_gives_the_weights(format: str, size: int, nested: bool, dtype: torch.dtype) -> None:
    q = quantize(torch.randn(3, 40, 128), format, size, nested)
    x = torch.eye(128, dtype=dtype)
    dense = hb.dequantize(q, dtype)
    for number in range(3):
        result = hb.grouped_linear(x, q, torch.full((128,), number))
        if format == "nf4" and paired_products.supports(dtype, 128):  # whose codebook is rounded
            torch.testing.assert_close(result.t(), dense[number], rtol=torch.finfo(dtype).eps, atol=0)
        else:
            assert torch.equal(result.t(), dense[number])


@pytest.mark.parametrize("shape", [(3, 7, 99), (5, 3, 33), (2, 130, 64), (4, 1, 4096)])
@pytest.mark.parametrize("nested", [True, False])
def test_any_shape(shape: tuple[int, int, int], nested: bool) -> None:
    """Experts may begin in the middle of a byte, of a block and of a group of nested scales."""
    q = hb.quantize(torch.randn(shape), block_size=64, nested=nested)
    dense = hb.dequantize(q)
    for number in range(shape[0]):
        assert torch.equal(eager_experts.dense_expert(q, number, torch.float32), dense[number])
    for rows in (0, 1, 50):
        x, expert = torch.randn(rows, shape[2]), torch.randint(-1, shape[0] + 1, (rows,))
        torch.testing.assert_close(
            hb.grouped_linear(x, q, expert), dense_linear(x, dense, expert), rtol=1e-5, atol=1e-3
        )


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_ids_out_of_range(dtype: torch.dtype) -> None:
    """Zeros, without bias; and no weight of theirs, whatever it is, reaches the sum."""
    q, bias = hb.quantize(torch.randn(3, 8, 64)), torch.randn(3, 8)
    expert = torch.tensor([-1, 3, 2, -(2**31), 2**31 - 1], dtype=dtype)
    y = hb.grouped_linear(torch.randn(5, 64), q, expert, bias)
    assert y[[0, 1, 3, 4]].eq(0).all()
    assert y[2].ne(0).all()
    block = Block(torch.float32)
    block.index = block.index.to(dtype)
    missing = (block.index < 0) | (block.index > 5)
    assert missing.any()
    right = block.ours()
    block.weights[missing] = torch.nan
    assert torch.equal(block.ours(), right)
    block.index.fill_(-1)
    assert block.ours().eq(0).all()


@pytest.mark.parametrize("tokens", [0, 1, 300])
@dtypes
def test_all_tokens_to_one_expert(dtype: torch.dtype, tokens: int) -> None:
    block = Block(dtype, tokens, k=1, inner=64)
    block.index.fill_(4)
    right = block.dense(torch.float32, exact=True)
    assert block.ours().shape == right.shape
    torch.testing.assert_close(block.ours().double(), right, rtol=0.05, atol=0.05)


def test_a_router_that_chooses_none() -> None:
    block = Block(torch.float32, k=0)
    assert block.ours().eq(0).all()


def test_an_expert_twice() -> None:
    """A token may name the same expert several times, as a sum of weights."""
    block = Block(torch.float32, k=2)
    block.index[:, 1] = block.index[:, 0]
    twice = block.ours()
    block.index, block.weights = block.index[:, :1], block.weights.sum(1, keepdim=True)
    torch.testing.assert_close(twice, block.ours())


def test_strides_and_repetition() -> None:
    block = Block(torch.bfloat16, tokens=40)
    right = block.ours()
    assert torch.equal(block.ours(), right)
    block.x, block.index = block.x.t().contiguous().t(), block.index.t().contiguous().t()
    block.weights = block.weights.repeat_interleave(2, 1)[:, ::2]
    assert torch.equal(block.ours(), right)
    expert = block.index[:, 0].contiguous()
    rows = hb.grouped_linear(block.x.contiguous(), block.gate_up, expert)
    assert torch.equal(hb.grouped_linear(block.x, block.gate_up, block.index[:, 0]), rows)


def test_many_rows_take_torch_and_few_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways in one call give what either gives."""
    block = Block(torch.bfloat16, tokens=64, k=2, biased=True)
    block.index[:60] = 1
    right = block.dense(torch.float32, exact=True)
    for most in (0, 10, 1000):
        monkeypatch.setattr("halfbyte.kernels.experts.plan.most_fused_rows", lambda *_, most=most: most)
        assert relative_error(block.ours(), right) < 6e-3


def test_meta_tensors() -> None:
    block = Block(torch.float32)
    stack = block.gate_up.to("meta")
    assert hb.grouped_linear(block.x.to("meta"), stack, block.index[:, 0].to("meta")).shape == (9, 192)
    y = hb.moe(*(t.to("meta") for t in (block.x, block.index, block.weights)), stack, block.down.to("meta"))
    assert y.is_meta
    assert y.shape == (9, 128)


# Gradients.


def leaves(*tensors: Tensor | None) -> list[Tensor]:
    return [tensor.detach().clone().requires_grad_() for tensor in tensors if tensor is not None]


def test_gradients_of_grouped_linear() -> None:
    q, expert = hb.quantize(torch.randn(4, 24, 64)), torch.randint(-1, 5, (30,))
    tensors = torch.randn(30, 64), torch.randn(4, 24)
    grad = torch.randn(30, 24)
    ours, theirs = leaves(*tensors), leaves(*tensors)
    hb.grouped_linear(ours[0], q, expert, ours[1]).backward(grad)
    dense_linear(theirs[0], hb.dequantize(q), expert, theirs[1]).backward(grad)
    for mine, right in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.grad, right.grad, rtol=1e-4, atol=1e-4)
    x = torch.randn(30, 64, requires_grad=True)
    y = hb.grouped_linear(x, q, expert)
    [first] = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    [second] = torch.autograd.grad(first.sum(), x)
    z = dense_linear(x, hb.dequantize(q), expert)
    [first] = torch.autograd.grad(z.square().sum(), x, create_graph=True)
    torch.testing.assert_close(second, torch.autograd.grad(first.sum(), x)[0], rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("biased", [True, False])
@activations
def test_gradients_of_moe(activation: str, biased: bool) -> None:
    """Against autograd of the dense composition, whose values clamps cut off for gpt-oss."""
    block = Block(torch.float32, biased=biased)
    block.x *= 4
    grad = torch.randn(9, 128)
    stacks = hb.dequantize(block.gate_up), hb.dequantize(block.down)
    tensors = block.x, block.weights, *block.biases
    ours, theirs = leaves(*tensors), leaves(*tensors)
    hb.moe(ours[0], block.index, ours[1], block.gate_up, block.down, activation, *ours[2:]).backward(grad)
    dense_moe(theirs[0], block.index, theirs[1], *stacks, activation, *theirs[2:]).backward(grad)
    for mine, right in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.grad, right.grad, rtol=1e-4, atol=1e-4)


@dtypes
def test_gradients_alone(dtype: torch.dtype) -> None:
    """Of one argument at a time, in its own dtype, also where the backward pass runs under autocast."""
    block = Block(dtype)
    block.weights = block.weights.to(dtype)
    tensors = [block.x, block.weights, *block.biases]
    for place in range(4):
        found = []
        for autocast in (False, True):
            [leaf] = leaves(tensors[place])
            given: list[Any] = [*tensors[:place], leaf, *tensors[place + 1 :]]
            y = hb.moe(given[0], block.index, given[1], block.gate_up, block.down, "silu", *given[2:])
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                y.sum().backward()
            assert leaf.grad is not None
            assert leaf.grad.dtype == dtype
            found.append(leaf.grad)
        assert torch.equal(*found)


@activations
def test_second_gradients_of_moe(activation: str) -> None:
    block = Block(torch.float32, tokens=4, hidden=32, inner=32)
    stacks = hb.dequantize(block.gate_up), hb.dequantize(block.down)
    found = []
    for moe, first, second in ((hb.moe, block.gate_up, block.down), (dense_moe, *stacks)):
        x, weights, *biases = leaves(block.x, block.weights, *block.biases)
        y = moe(x, block.index, weights, first, second, activation, *biases)
        [of_x] = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        found.append(torch.autograd.grad(of_x.square().sum(), (x, weights, *biases)))
    for mine, right in zip(*found, strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-3, atol=1e-3 * float(right.abs().max()))


@activations
def test_slopes_of_activations(activation: str) -> None:
    gate_up = 6 * torch.randn(20, 12, dtype=torch.float64, requires_grad=True)
    grad = torch.randn(20, 6, dtype=torch.float64)
    right = torch.autograd.grad(activate(gate_up, activation), gate_up, grad)[0]
    torch.testing.assert_close(activate_backward(grad, gate_up, activation), right)


# Tracing.


@kinds
def test_compiles_whole(format: str, size: int, nested: bool) -> None:
    """One operator each, with the bits of eager calls; gradients, too."""
    block = Block(torch.float32, hidden=256, inner=128, make=lambda weight: quantize(weight, format, size, nested))
    seen: list[str] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        seen.extend(str(node.target) for node in graph.graph.nodes if "halfbyte" in str(node.target))
        return graph

    def run(x: Tensor, weights: Tensor, first: Tensor, second: Tensor) -> Tensor:
        y = hb.moe(x, block.index, weights, block.gate_up, block.down, "gelu_tanh", first, second)
        return hb.grouped_linear(y, block.gate_up, block.index[:, 0], first)

    tensors = block.x, block.weights, *block.biases
    right = run(*tensors)  # type: ignore[arg-type]
    assert torch.equal(torch.compile(run, fullgraph=True, backend=backend)(*tensors), right)
    assert seen == ["halfbyte.moe", "halfbyte.grouped_linear"]
    ours, theirs = leaves(*tensors), leaves(*tensors)
    torch.compile(run, fullgraph=True, backend="aot_eager")(*ours).square().sum().backward()
    run(*theirs).square().sum().backward()
    for mine, eager in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.grad, eager.grad)


@pytest.mark.parametrize("name", ["grouped_linear", "grouped_linear_backward", "moe"])
def test_operators_are_sound(name: str) -> None:
    block = Block(torch.float32, tokens=5)
    expert = block.index[:, 0].contiguous()
    x, weights, *biases = leaves(block.x, block.weights, *block.biases)
    arguments: dict[str, tuple[Any, ...]] = {
        "grouped_linear": (x, *block.gate_up.parts, expert, biases[0]),
        "grouped_linear_backward": (torch.randn(5, 192), *block.gate_up.parts, expert),
        "moe": (x, block.index, weights, *block.gate_up.parts, *block.down.parts, "swiglu_oai", *biases),
    }
    operator = getattr(torch.ops.halfbyte, name).default
    torch.library.opcheck(operator, arguments[name], atol=1e-4, rtol=1e-4)


# What is refused.


def test_refuses_what_does_not_fit() -> None:
    q, flat, x = hb.quantize(torch.randn(3, 8, 64)), hb.quantize(torch.randn(8, 64)), torch.randn(5, 64)
    expert = torch.zeros(5, dtype=torch.int64)
    cases: list[tuple[type[Exception], str, tuple[Any, ...]]] = [
        (TypeError, r"q is a Tensor; grouped_linear takes a QuantizedWeight", (x, torch.randn(3, 8, 64), expert)),
        (ValueError, r"q has shape \[8, 64\]; grouped_linear takes a stack", (x, flat, expert)),
        (TypeError, "x is a list", ([1.0], q, expert)),
        (TypeError, "x has dtype torch.float64", (x.double(), q, expert)),
        (ValueError, r"x has shape \[5, 63\].* takes \[S, 64\]", (x[:, 1:], q, expert)),
        (ValueError, r"x has shape \[1, 5, 64\]", (x[None], q, expert)),
        (ValueError, "x is on meta and the weight on cpu", (x.to("meta"), q, expert)),
        (TypeError, "expert is a list", (x, q, [0] * 5)),
        (TypeError, "expert has dtype torch.float32; .* torch.int32 or torch.int64", (x, q, expert.float())),
        (ValueError, r"expert has shape \[4\]; x of shape \[5, 64\] takes \[5\]", (x, q, expert[1:])),
        (ValueError, "expert is on meta and x on cpu", (x, q, expert.to("meta"))),
        (TypeError, "bias has dtype torch.float16 and x torch.float32", (x, q, expert, torch.randn(3, 8).half())),
        (ValueError, r"bias has shape \[8\].* takes \[3, 8\]", (x, q, expert, torch.randn(8))),
    ]
    for error, words, arguments in cases:
        with pytest.raises(error, match=words):
            hb.grouped_linear(*arguments)


def test_moe_refuses_what_does_not_fit() -> None:
    block = Block(torch.float32)
    fine: dict[str, Any] = {
        "x": block.x, "top_k_index": block.index, "top_k_weights": block.weights, "gate_up": block.gate_up,
        "down": block.down,
    }  # fmt: skip
    cases: list[tuple[type[Exception], str, dict[str, Any]]] = [
        (
            ValueError,
            "activation is .relu.; moe knows .silu., .gelu., ",
            {"activation": "relu"},
        ),
        (TypeError, "down is a Tensor; moe takes a QuantizedWeight", {"down": torch.randn(6, 128, 96)}),
        (ValueError, "gate_up has shape .* stack of experts", {"gate_up": hb.quantize(torch.randn(192, 128))}),
        (ValueError, r"must be \[E, 2I, H\] and \[E, H, I\]", {"down": block.gate_up}),
        (ValueError, r"takes \[T, 128\]", {"x": block.x[:, 1:]}),
        (ValueError, r"top_k_index has shape \[9\]", {"top_k_index": block.index[:, 0]}),
        (ValueError, r"top_k_index has shape \[8, 3\]; .* takes \[9, 3\]", {"top_k_index": block.index[1:]}),
        (TypeError, "top_k_index has dtype torch.uint8", {"top_k_index": block.index.byte()}),
        (TypeError, "top_k_index is a NoneType", {"top_k_index": None}),
        (TypeError, "top_k_weights has dtype torch.int64", {"top_k_weights": block.index}),
        (ValueError, "there is one weight for each id", {"top_k_weights": block.weights[:, 1:]}),
        (ValueError, "top_k_weights is on meta", {"top_k_weights": block.weights.to("meta")}),
        (ValueError, r"gate_up_bias has shape \[6, 128\].* takes \[6, 192\]", {"gate_up_bias": block.biases[1]}),
        (TypeError, "down_bias is a float", {"down_bias": 1.0}),
    ]
    for error, words, changed in cases:
        with pytest.raises(error, match=words):
            hb.moe(**fine | changed)


def test_refuses_transforms() -> None:
    block = Block(torch.float32)

    def of(x: Tensor) -> Tensor:
        return hb.moe(x, block.index, block.weights, block.gate_up, block.down)

    plain = of(block.x)
    with pytest.raises(RuntimeError, match=r"of halfbyte\.moe cannot be transformed by torch\.func"):
        torch.func.jacrev(of)(block.x)
    with forward_ad.dual_level():
        assert torch.equal(of(block.x), plain)
        with pytest.raises(RuntimeError, match=r"halfbyte\.moe has no forward-mode derivative"):
            of(forward_ad.make_dual(block.x, block.x))
    with pytest.raises(RuntimeError, match=r"torch\.jit\.trace"):
        torch.jit.trace(of, (block.x,))
