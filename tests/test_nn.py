"""`halfbyte.nn.Linear4bit`: a torch module in every way, and one that bitsandbytes can read and write."""

from __future__ import annotations

import copy
import io
import json
import pickle
import re
from typing import Any

import pytest
import torch
from pairs import every_pair
from torch import Tensor

import halfbyte as hb
from halfbyte.nn import Linear4bit

# Format and options.
KINDS: list[tuple[str, dict[str, Any]]] = [
    ("nf4", {}),
    ("nf4", {"nested": False, "block_size": 128}),
    ("fp4", {}),
    ("int4", {"group_size": 64}),
    ("mxfp4", {}),
]
kinds = pytest.mark.parametrize(("format", "options"), KINDS)


@pytest.fixture(autouse=True)
def _anew() -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()


def layer(format: str, options: dict[str, Any], **more: Any) -> Linear4bit:
    return Linear4bit(256, 48, format=format, **options, **more)


def same(a: Linear4bit, b: Linear4bit) -> bool:
    x = torch.randn(3, 256)
    tensors = zip(a.weight.tensors, b.weight.tensors, strict=True)
    return torch.equal(a(x), b(x)) and all(torch.equal(one.view(-1), other.view(-1)) for one, other in tensors)


def apart(a: Linear4bit, b: Linear4bit) -> bool:
    """They share no memory."""
    return not {t.data_ptr() for t in a.weight.tensors} & {t.data_ptr() for t in b.weight.tensors}


# What is computed.


@kinds
@pytest.mark.parametrize("bias", [True, False])
def test_is_linear(format: str, options: dict[str, Any], bias: bool) -> None:
    dense = torch.nn.Linear(256, 48, bias=bias, dtype=torch.bfloat16).eval()
    ours = Linear4bit.from_linear(dense, format, **options)
    q = hb.quantize(dense.weight, format, **options)
    x = torch.randn(2, 3, 256, dtype=torch.bfloat16)
    assert torch.equal(ours(x), hb.linear(x, q, dense.bias))
    assert ours.bias is dense.bias
    assert not ours.training
    assert (ours.in_features, ours.out_features) == (256, 48)
    assert ours.weight.format == format
    assert ours.weight.dtype == torch.bfloat16
    assert [name for name, _ in ours.named_parameters()] == (["bias"] if bias else [])


@kinds
def test_made_from_nothing_is_what_torch_would_make(format: str, options: dict[str, Any]) -> None:
    torch.manual_seed(1)
    ours = layer(format, options, dtype=torch.float16)
    torch.manual_seed(1)
    dense = torch.nn.Linear(256, 48, dtype=torch.float16)
    assert torch.equal(ours.weight.packed, hb.quantize(dense.weight, format, **options).packed)
    assert torch.equal(ours.bias, dense.bias)


@kinds
def test_trains_what_is_around_it(format: str, options: dict[str, Any]) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(32, 256), layer(format, options))
    before = [tensor.clone() for tensor in model[1].weight.tensors]
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    x, losses = torch.randn(16, 32), []
    for _ in range(5):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert all(map(torch.equal, model[1].weight.tensors, before))


@kinds
def test_compiles_whole(format: str, options: dict[str, Any]) -> None:
    model = layer(format, options)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    x = torch.randn(3, 256, requires_grad=True)
    [ours] = torch.autograd.grad(compiled(x).square().sum(), x)
    [eager] = torch.autograd.grad(model(x).square().sum(), x)
    assert torch.allclose(ours, eager)
    assert torch.equal(compiled(x), model(x))


# Moved, cast, copied.


@kinds
def test_casts_leave_the_weight_alone(format: str, options: dict[str, Any]) -> None:
    ours = layer(format, options)
    before = [tensor.clone() for tensor in ours.weight.tensors]
    for cast in (
        ours.half,
        ours.bfloat16,
        ours.double,
        lambda: ours.to(torch.float16),
        lambda: ours.to("cpu", torch.half),
    ):
        cast()
        assert [tensor.dtype for tensor in ours.weight.tensors] == [tensor.dtype for tensor in before]
        assert all(map(torch.equal, ours.weight.tensors, before))
    assert ours.bias.dtype == torch.float16
    assert ours(torch.randn(3, 256).half()).dtype == torch.float16


@kinds
def test_moves(format: str, options: dict[str, Any]) -> None:
    ours = torch.nn.Sequential(layer(format, options))
    ours.to("meta")
    assert {tensor.device.type for tensor in (*ours[0].weight.tensors, ours[0].bias)} == {"meta"}
    assert ours(torch.empty(3, 256, device="meta")).shape == (3, 48)
    ours.to_empty(device="cpu")
    assert {tensor.device.type for tensor in (*ours[0].weight.tensors, ours[0].bias)} == {"cpu"}
    assert ours(torch.randn(3, 256)).shape == (3, 48)


@kinds
def test_copies(format: str, options: dict[str, Any]) -> None:
    ours = layer(format, options)
    file = io.BytesIO()
    torch.save(ours, file)
    file.seek(0)
    copies = copy.deepcopy(ours), pickle.loads(pickle.dumps(ours)), torch.load(file, weights_only=False)
    for other in copies:
        assert same(ours, other)
        assert apart(ours, other)


def test_says_what_it_is() -> None:
    assert repr(layer("nf4", {})) == (
        "Linear4bit(in_features=256, out_features=48, bias=True, format=nf4, block_size=64, nested)"
    )
    assert "bias=False, format=int4, group_size=64)" in repr(layer("int4", {"group_size": 64}, bias=False))


# Saved and loaded.


@kinds
@pytest.mark.parametrize("assign", [False, True])
def test_state_dict(format: str, options: dict[str, Any], assign: bool) -> None:
    ours, other = (torch.nn.Sequential(layer(format, options)) for _ in range(2))
    state = ours.state_dict()
    assert all(type(key) is str and not tensor.requires_grad for key, tensor in state.items())
    if format == "int4":
        assert list(state) == ["0.weight_packed", "0.weight_scale", "0.weight_shape", "0.bias"]
    elif format == "mxfp4":
        assert list(state) == ["0.weight_blocks", "0.weight_scales", "0.bias"]
    else:
        nested = ["0.weight.nested_absmax", "0.weight.nested_quant_map"] if ours[0].weight.nested else []
        mark = f"0.weight.quant_state.bitsandbytes__{format}"
        assert list(state) == ["0.weight", "0.weight.absmax", "0.weight.quant_map", *nested, mark, "0.bias"]
    held = other[0].weight.packed.data_ptr()
    result = other.load_state_dict(state, assign=assign)
    assert not result.missing_keys
    assert not result.unexpected_keys
    assert same(ours[0], other[0])
    assert apart(ours[0], other[0]) != assign
    assert (other[0].weight.packed.data_ptr() == held) != assign


@kinds
def test_made_without_memory_then_loaded(format: str, options: dict[str, Any]) -> None:
    ours = layer(format, options)
    with torch.device("meta"):
        empty = layer(format, options)
    assert list(empty.state_dict()) == list(ours.state_dict())
    words = "'weight' would be copied to a layer without memory; pass assign=True"
    with pytest.raises(RuntimeError, match=words), pytest.warns(UserWarning, match="for bias: copying from a non-meta"):
        empty.load_state_dict(ours.state_dict())
    empty.load_state_dict(ours.state_dict(), assign=True)
    assert same(ours, empty)


@pytest.mark.filterwarnings("ignore")
def test_through_torch_save_and_safetensors(tmp_path: Any) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    for format, options in KINDS:
        ours, others = layer(format, options), [layer(format, options) for _ in range(2)]
        torch.save(ours.state_dict(), tmp_path / "torch")
        others[0].load_state_dict(torch.load(tmp_path / "torch", weights_only=True))
        safetensors.save_file(ours.state_dict(), tmp_path / "safetensors")
        others[1].load_state_dict(safetensors.load_file(tmp_path / "safetensors"))
        assert all(same(ours, other) for other in others)


def test_keys_that_do_not_fit() -> None:
    nf4, fp4 = layer("nf4", {}), layer("fp4", {})
    mark = "weight.quant_state.bitsandbytes__"
    words = rf'Missing key.*"{mark}nf4".*\s+Unexpected key.*"{mark}fp4"'
    with pytest.raises(RuntimeError, match=words):
        nf4.load_state_dict(fp4.state_dict())
    with pytest.raises(RuntimeError, match=r'Missing key.*"weight.absmax"'):
        nf4.load_state_dict(torch.nn.Linear(256, 48).state_dict())
    before = [tensor.clone() for tensor in nf4.weight.tensors]
    result = nf4.load_state_dict({"bias": torch.zeros(48), "other": torch.zeros(1)}, strict=False)
    assert result.unexpected_keys == ["other"]
    assert not nf4.bias.any()
    assert all(map(torch.equal, nf4.weight.tensors, before))


def test_loading_leaves_the_code_of_others_alone() -> None:
    """Every weight quantized by halfbyte is made with one and the same code tensor."""
    ours, other = layer("nf4", {}), hb.quantize(torch.randn(4, 64))
    state = ours.state_dict()
    state["weight.nested_quant_map"] = torch.rand(256)
    ours.load_state_dict(state)
    assert other.nested is not None
    assert torch.equal(other.nested.code, hb.quantize(torch.randn(4, 64)).nested.code)
    assert not torch.equal(other.nested.code, state["weight.nested_quant_map"])


def test_weights_that_do_not_fit() -> None:
    ours = layer("nf4", {})
    for other, words in (
        (Linear4bit(128, 48), "'weight' has shape [48, 128] and the layer [48, 256]"),
        (layer("nf4", {"block_size": 128}), "'weight' has block_size 128 and the layer 64"),
    ):
        with pytest.raises(RuntimeError, match=re.escape(words)):
            ours.load_state_dict(other.state_dict())
    int4, half = layer("int4", {}), layer("int4", {}, dtype=torch.float16)
    with pytest.raises(RuntimeError, match=re.escape("has scales in torch.float16 and the layer in torch.float32")):
        int4.load_state_dict(half.state_dict())
    broken = {**ours.state_dict(), "weight.absmax": torch.zeros(3, dtype=torch.uint8)}
    with pytest.raises(RuntimeError, match=r"'weight' does not fit together: scale has shape \[3\]"):
        ours.load_state_dict(broken)


def test_refuses() -> None:
    with pytest.raises(TypeError, match=r"linear is a Conv2d; from_linear takes a torch.nn.Linear"):
        Linear4bit.from_linear(torch.nn.Conv2d(1, 1, 1))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="format is 'nf5'"):
        Linear4bit(256, 48, format="nf5")
    with pytest.raises(ValueError, match=r"the weight has shape \[2, 4, 64\]; a layer takes one of two"):
        Linear4bit.from_quantized(hb.quantize(torch.randn(2, 4, 64)))


# bitsandbytes itself.


@pytest.mark.parametrize("nested", [False, True], ids=["flat", "nested"])
@pytest.mark.parametrize("format", ["nf4", "fp4"])
def test_bitsandbytes_reads_it_and_is_read(format: str, nested: bool) -> None:
    bitsandbytes = pytest.importorskip("bitsandbytes", minversion="0.48")
    ours = layer(format, {"nested": nested}, dtype=torch.bfloat16)
    state = ours.state_dict()

    def dense(weight: Tensor) -> Tensor:
        with torch.compiler.set_stance("force_eager"):
            return bitsandbytes.functional.dequantize_4bit(weight.data, weight.quant_state)

    parts = {key: tensor for key, tensor in state.items() if key.startswith("weight.")}
    parameter = bitsandbytes.nn.Params4bit.from_prequantized(state["weight"], parts, device="cpu")
    assert torch.equal(dense(parameter), hb.dequantize(ours.weight))

    theirs = (
        bitsandbytes.nn.Linear4bit(256, 48, quant_type=format, compress_statistics=nested).to(torch.bfloat16).to("cpu")
    )
    saved = theirs.state_dict()
    assert set(saved) == set(state)
    ours.load_state_dict(saved)
    assert torch.equal(hb.dequantize(ours.weight), dense(theirs.weight))
    assert torch.equal(ours.bias, theirs.bias)
    mark = f"weight.quant_state.bitsandbytes__{format}"
    facts = [json.loads(bytes(tensors[mark].tolist())) for tensors in (ours.state_dict(), saved)]
    assert facts[0] == facts[1]


# Under autocast.


HALVES = (torch.bfloat16, torch.float16)
halves = pytest.mark.parametrize("half", HALVES, ids=str)
biases = pytest.mark.parametrize("bias", [True, False])


@kinds
@biases
@halves
def test_autocast_is_that_of_linear(format: str, options: dict[str, Any], bias: bool, half: torch.dtype) -> None:
    """The same dtypes, forward and back, whatever x has; what it computes is `linear` of the cast arguments."""
    ours = layer(format, options, bias=bias)
    dense = torch.nn.Linear(256, 48, bias=bias)
    for given in (torch.float32, *HALVES):
        x, other = (torch.randn(2, 3, 256).to(given).requires_grad_() for _ in range(2))
        with torch.autocast("cpu", half):
            y, right = ours(x), dense(other)
            assert torch.equal(y, hb.linear(x.to(half), ours.weight, None if ours.bias is None else ours.bias.to(half)))
        assert y.dtype is right.dtype is half
        y.float().square().sum().backward()
        right.float().square().sum().backward()
        assert x.grad.dtype is other.grad.dtype is given
        if bias:
            assert ours.bias.grad.dtype is dense.bias.grad.dtype is torch.float32
    with torch.autocast("cpu", half, enabled=False):
        assert ours(torch.randn(3, 256)).dtype is torch.float32
    with torch.autocast("cpu", half), pytest.raises(TypeError, match=r"x has dtype torch\.float64; linear takes"):
        ours(torch.randn(3, 256, dtype=torch.float64))


@every_pair({"format, options": KINDS, "bias": [True, False], "half": HALVES})
def test_autocast_compiles_whole(format: str, options: dict[str, Any], bias: bool, half: torch.dtype) -> None:
    """With autocast around the compiled call, and inside it."""
    ours = layer(format, options, bias=bias)

    def inside(x: Tensor) -> Tensor:
        with torch.autocast("cpu", half):
            return ours(x)

    x = torch.randn(3, 256, requires_grad=True)
    right = inside(x)
    [gradient] = torch.autograd.grad(right.float().square().sum(), x)
    for function, outside in ((inside, False), (ours, True)):
        torch._dynamo.reset()
        compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
        with torch.autocast("cpu", half, enabled=outside):
            y = compiled(x)
        [found] = torch.autograd.grad(y.float().square().sum(), x)
        assert y.dtype is half
        assert found.dtype is torch.float32
        assert torch.equal(y, right)
        assert torch.allclose(found, gradient)


@kinds
def test_linear_itself_keeps_the_dtypes_of_its_arguments(format: str, options: dict[str, Any]) -> None:
    """Under autocast as without it, backward too: the same bits."""
    q = layer(format, options).weight
    x, bias = torch.randn(3, 256, requires_grad=True), torch.randn(48, requires_grad=True)

    def run(rows: Tensor) -> list[Tensor]:
        y = hb.linear(rows, q, bias)
        return [y, *torch.autograd.grad(y.square().sum(), (x, bias))]

    for rows in (x, x.expand(40, 3, 256)):  # few rows, and so many that the dense weight is made
        right = run(rows)
        with torch.autocast("cpu", torch.bfloat16):
            found = run(rows)
        assert all(tensor.dtype is torch.float32 for tensor in found)
        assert all(map(torch.equal, found, right))
