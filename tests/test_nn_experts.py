"""`halfbyte.nn.Experts4bit`: a torch module in every way, in the place of transformers' experts."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from kinds import kinds, options_of, quantize
from torch import Tensor

import halfbyte as hb
from halfbyte.kernels.experts.reference import ACTIVATIONS
from halfbyte.nn import Experts4bit

E, H, I = 4, 128, 256  # noqa: E741


@pytest.fixture(autouse=True)
def _anew() -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()


def made(format: str, size: int = 0, bias: bool = True, **more: Any) -> Experts4bit:
    options = options_of(format, size, False) if size else {}
    options.pop("nested", None)
    return Experts4bit(E, H, I, bias, format, **options, **more)


def given(dtype: torch.dtype = torch.float32, tokens: int = 5) -> tuple[Tensor, Tensor, Tensor]:
    """Ids from -1 to E, so some are out of range."""
    return torch.randn(tokens, H).to(dtype), torch.randint(-1, E + 1, (tokens, 2)), torch.rand(tokens, 2)


def same(one: Experts4bit, other: Experts4bit) -> bool:
    arguments = given(one.down_proj_bias.dtype if one.down_proj_bias is not None else torch.float32)
    return torch.equal(one(*arguments), other(*arguments))


@kinds
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_is_moe(format: str, size: int, nested: bool, activation: str) -> None:
    gate_up, down = (quantize(torch.randn(shape), format, size, nested) for shape in ((E, 2 * I, H), (E, H, I)))
    biases = [torch.nn.Parameter(torch.randn(E, n)) for n in (2 * I, H)]
    experts = Experts4bit.from_quantized(gate_up, down, activation, *biases)
    x, index, weights = given()
    expected = hb.moe(x, index, weights, gate_up, down, activation, *biases)
    # Nested scales are written out, to the numbers that dequantizing uses.
    assert torch.equal(hb.dequantize(experts.gate_up), hb.dequantize(gate_up))
    torch.testing.assert_close(experts(x, index, weights), expected, rtol=1e-5, atol=1e-5)
    assert experts.gate_up_proj.data_ptr() == gate_up.packed.data_ptr()
    assert [name for name, p in experts.named_parameters() if p.requires_grad] == [
        "gate_up_proj_bias", "down_proj_bias"
    ]  # fmt: skip


@kinds
def test_what_it_makes(format: str, size: int, nested: bool) -> None:
    experts = made(format, size, dtype=torch.bfloat16)
    assert experts.gate_up.shape == (E, 2 * I, H)
    assert experts.down.shape == (E, H, I)
    assert experts.gate_up.block_size == size
    assert experts.gate_up_proj.shape[:1] == experts.gate_up_proj_scale.shape[:1] == (E,)
    assert f"{experts.gate_up.spec.size_name}={size}" in repr(experts)
    assert experts(*given(torch.bfloat16)).dtype == torch.bfloat16
    assert list(experts.state_dict()) == [
        f"{name}{suffix}" for name in ("gate_up_proj", "down_proj") for suffix in ("", "_scale", "_bias")
    ]


@pytest.mark.parametrize("format", ["nf4", "int4", "mxfp4"])
def test_saved_and_loaded(format: str) -> None:
    experts, other = made(format), made(format)
    other.load_state_dict(experts.state_dict())
    assert same(experts, other)
    assert other.gate_up_proj.data_ptr() != experts.gate_up_proj.data_ptr()
    with torch.device("meta"):
        assigned = made(format)
    assigned.load_state_dict(experts.state_dict(), assign=True)
    assert same(experts, assigned)
    for copied in (copy.deepcopy(experts), pickle.loads(pickle.dumps(experts))):
        assert same(experts, copied)
        assert copied.gate_up_proj.data_ptr() != experts.gate_up_proj.data_ptr()
    file = io.BytesIO()
    torch.save(experts.state_dict(), file)
    file.seek(0)
    other = made(format)
    other.load_state_dict(torch.load(file))
    assert same(experts, other)
    with pytest.raises(RuntimeError, match="size mismatch for gate_up_proj"):
        Experts4bit(E + 1, H, I, True, format).load_state_dict(experts.state_dict())


@pytest.mark.parametrize("format", ["nf4", "int4", "mxfp4"])
def test_casting_leaves_the_weights(format: str) -> None:
    experts = made(format)
    before = {name: tensor.clone() for name, tensor in experts.state_dict().items()}
    for cast in (experts.half, experts.bfloat16, experts.float):
        cast()
    for name, tensor in experts.state_dict().items():
        assert tensor.dtype == before[name].dtype
        if not name.endswith("bias"):
            assert torch.equal(tensor, before[name])
    assert experts.half().down_proj_bias.dtype == torch.float16  # type: ignore[union-attr]
    moved = experts.to("meta")
    assert moved.gate_up.device.type == "meta"
    assert moved.gate_up_proj.ds_shape == (E, 2 * I, H)  # where PEFT reads it
    assert not any(parameter.requires_grad for name, parameter in moved.named_parameters() if "bias" not in name)


def test_gradients_autocast_and_compile() -> None:
    experts = made("nf4")
    x, index, weights = given()
    x.requires_grad_()
    weights.requires_grad_()
    experts(x, index, weights).square().sum().backward()
    assert x.grad is not None
    assert weights.grad is not None
    assert experts.gate_up_proj_bias.grad is not None  # type: ignore[union-attr]
    expected = experts(x, index, weights)
    with torch.autocast("cpu", torch.bfloat16):
        y = experts(x, index, weights)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.float(), expected, rtol=0.05, atol=0.05)
    compiled = torch.compile(experts, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, index, weights), expected)


def test_parameters_that_are_replaced_are_used() -> None:
    """As those who shard or move a model do it."""
    experts, other = made("nf4", bias=False), made("nf4", bias=False)
    for name, parameter in other.named_parameters():
        experts._parameters[name] = parameter
    assert same(experts, other)
    half = Experts4bit.from_quantized(other.gate_up[:2], other.down[:2])
    for name, parameter in half.named_parameters():
        experts._parameters[name] = parameter
    assert experts.gate_up.shape == (2, 2 * I, H)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"activation": "relu"}, "activation is 'relu'; known are 'silu'"),
        ({"down_proj": hb.quantize(torch.randn(E, H, I // 2))}, r"must be \[E, 2I, H\] and \[E, H, I\]"),
        ({"down_proj": hb.quantize(torch.randn(H, I))}, r"a stack of experts \[E, N, K\] is accepted"),
        ({"down_proj_bias": torch.nn.Parameter(torch.zeros(E, I))}, r"down_proj_bias has shape \[4, 256\]"),
        ({"down_proj": hb.quantize(torch.randn(3, 5, 7))}, "not whole blocks of 64"),
    ],
)
def test_what_does_not_fit(arguments: dict[str, Any], message: str) -> None:
    fitting = {"gate_up_proj": hb.quantize(torch.randn(E, 2 * I, H)), "down_proj": hb.quantize(torch.randn(E, H, I))}
    with pytest.raises(ValueError, match=message):
        Experts4bit.from_quantized(**fitting | arguments)
