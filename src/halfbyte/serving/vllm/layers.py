"""vLLM's decoder layers with a launch for each product, where vLLM has three more: two norms, each with the sum ahead
of it, and a gate.

The product of q, k and v norms x as it reads it, that of gate and up norms and gates, and those of o and down add to
what there is. Between two layers goes one tensor, the sum, and no residual beside it; the last layer of a process gives
both, as vLLM expects them there.

A class of layers takes part if it does what it is known to do: it is asked, with words in the place of tensors. Of its
layers those do whose four products are 4-bit weights, whole in this process. What LoRA or a draft model would see
between two modules must be as vLLM leaves it, so with these all layers stay as they are.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.models.utils import extract_layer_index

from halfbyte.formats.weight import QuantizedWeight
from halfbyte.kernels.common.device import HOPPER, properties_of
from halfbyte.kernels.common.norm import Norm
from halfbyte.serving.ahead import Ahead
from halfbyte.serving.products import added_mlp, added_product, apart, as_one, gated_product
from halfbyte.serving.vllm.linear import HalfbyteLinearMethod

MODELS = "vllm.model_executor.models."
KNOWN = (
    ("llama", "LlamaDecoderLayer"),
    ("mistral", "MistralDecoderLayer"),
    ("qwen2", "Qwen2DecoderLayer"),
    ("qwen3", "Qwen3DecoderLayer"),
)
OWN = "halfbyte"  # attribute of a layer: its Whole, or None


def watch() -> None:
    """From now on, have layers of the known classes take part. A model's own class is there while it is built."""
    for module, name in KNOWN:
        found = getattr(sys.modules.get(MODELS + module), name, None)
        if found is not None and OWN not in vars(found) and (without := behaves(found)) is not None:
            _extend(found, without)


def suits(device: torch.device) -> bool:
    """Whether products there take in what stands beside them."""
    return device.type == "cuda" and not torch.version.hip and properties_of(device.index).ptx >= HOPPER


class Whole:
    """A layer whose methods (linear.py) are those of q, k and v, of o, of gate and up, and of down. is_last: of those
    in this process. on: it computes as this file says, once all weights are there and fit."""

    def __init__(self, layer: Any, linears: tuple[Any, ...], is_last: bool) -> None:
        self.linears, self.is_last, self.on = linears, is_last, False
        self.norms = layer.input_layernorm, layer.post_attention_layernorm
        self.waits = {method.prefix for method in self.methods}
        for method in self.methods:
            method.whole = self

    @property
    def methods(self) -> tuple[Any, ...]:
        return tuple(linear.quant_method for linear in self.linears)

    def has_loaded(self, prefix: str, ahead: Ahead | None) -> None:
        """A weight is there. With the last one it is decided; a reload changes nothing."""
        if prefix not in self.waits:
            return
        self.waits.discard(prefix)
        if self.waits or not self._fits():
            return
        qkv, out, _, _ = self.methods
        self.on = qkv.norms = out.passes = True
        if ahead is not None:
            weights = [method.weights(linear) for method, linear in zip(self.methods, self.linears, strict=True)]
            weights[2] = apart(weights[2], self.methods[2].sizes)
            biased = [linear.bias is not None for linear in self.linears]
            ahead.layer(self.methods[0].dtype, weights, biased)

    def _fits(self) -> bool:
        for method, linear in zip(self.methods, self.linears, strict=True):
            weights = method.weights(linear)
            if not as_one(weights) or not suits(weights[0].device) or method.dtype is not self.norms[0].weight.dtype:
                return False
        kinds = [method.weights(linear)[0].kind for method, linear in zip(self.methods, self.linears, strict=True)]
        return bool(kinds[2] == kinds[3])

    def norm(self, number: int) -> Norm:
        """The first or the second."""
        return Norm(self.norms[number].weight, self.norms[number].variance_epsilon)

    def forward(self, attention: nn.Module, positions: Tensor, x: Tensor) -> tuple[Tensor, Tensor | None]:
        _, out, gate_up, down = self.linears
        seen = attention(positions=positions, hidden_states=x)  # q, k and v norm x, and o only passes on
        x = added_product(seen, _only(out), out.bias, x)
        gates = apart(gate_up.quant_method.weights(gate_up), gate_up.quant_method.sizes)
        if self.is_last:
            inner = gated_product(x, gates, gate_up.bias, self.norm(1))
            return down.quant_method.apply(down, inner, down.bias), x
        return added_mlp(x, gates, _only(down), (gate_up.bias, down.bias), self.norm(1)), None


def _only(linear: Any) -> QuantizedWeight:
    (weight,) = linear.quant_method.weights(linear)
    return weight  # type: ignore[no-any-return]


def _extend(cls: Any, without: set[str]) -> None:
    init, forward = cls.__init__, cls.forward

    @functools.wraps(init)
    def own_init(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        if type(self) is cls:
            setattr(self, OWN, _whole_of(self, without))

    def own_forward(
        self: Any, positions: Tensor, hidden_states: Tensor, residual: Tensor | None, **more: Any
    ) -> tuple[Tensor, Tensor | None]:
        if self.halfbyte is None or not self.halfbyte.on:
            found: tuple[Tensor, Tensor] = forward(self, positions, hidden_states, residual, **more)
            return found
        assert all(value is None for value in more.values()), "what a layer without such parts is told"
        x = hidden_states if residual is None else hidden_states + residual
        whole: Whole = self.halfbyte
        return whole.forward(self.self_attn, positions, x)

    cls.__init__, cls.forward = own_init, own_forward
    setattr(cls, OWN, None)


def _whole_of(layer: Any, without: set[str]) -> Whole | None:
    """without: names of parts that the layer must not have."""
    linears = layer.self_attn.qkv_proj, layer.self_attn.o_proj, layer.mlp.gate_up_proj, layer.mlp.down_proj
    methods: list[Any] = [getattr(linear, "quant_method", None) for linear in linears]
    norms = layer.input_layernorm, layer.post_attention_layernorm
    if not all(type(method) is HalfbyteLinearMethod for method in methods):
        return None
    scheme = methods[0].scheme
    fits = (
        scheme.layers is not None
        and all(getattr(layer, name, None) is None for name in without)
        and all(linear.tp_size == 1 for linear in linears)
        and all(type(norm) is RMSNorm and norm.variance_size_override is None for norm in norms)
        and type(layer.mlp.act_fn) is SiluAndMul
        and len(methods[2].sizes) == 2
        and len(methods[1].sizes) == len(methods[3].sizes) == 1
    )
    if not fits:
        return None
    number = extract_layer_index(methods[0].prefix)
    return Whole(layer, linears, is_last=number + 1 == scheme.layers)


# -- What a class is known to do ---------------------------------------------------------------------------------------


def behaves(cls: Any) -> set[str] | None:
    """Names of other parts, without which layers of the class do, and their attention and MLP, what `Whole` does in
    their place; None where they do something else."""
    try:
        attention, mlp = (vars(sys.modules[cls.__module__])[name] for name in _parts_of(cls))
        return _adds_and_norms(cls) if _projects(attention) and _gates(mlp) else None
    except Exception:  # of another version, that asks for what is not there
        return None


def _parts_of(cls: Any) -> tuple[str, str]:
    """Names of the attention and the MLP of a class of layers, as vLLM calls them."""
    stem = cls.__name__.removesuffix("DecoderLayer")
    return f"{stem}Attention", f"{stem}MLP"


class _Layer(SimpleNamespace):
    """In the place of a layer. asked: names of parts that it has been asked for, and does not have."""

    def __getattr__(self, name: str) -> None:
        self.asked.add(name)


def _adds_and_norms(cls: Any) -> set[str] | None:
    def norm(name: str) -> Callable[..., Any]:
        return lambda x, beside=None: (name, x) if beside is None else ((name, (x, beside)), (x, beside))

    layer = _Layer(
        asked=set(),
        input_layernorm=norm("first"),
        post_attention_layernorm=norm("second"),
        self_attn=lambda positions, hidden_states: ("attended", positions, hidden_states),
        mlp=lambda x: ("mlp", x),
    )

    def right(x: Any) -> Any:
        added = ("attended", "positions", ("first", x)), x
        return ("mlp", ("second", added)), added

    agrees = cls.forward(layer, "positions", "x", None) == right("x") and (
        cls.forward(layer, "positions", "x", "beside") == right(("x", "beside"))
    )
    return layer.asked if agrees else None


def _projects(cls: Any) -> bool:
    """Whether attention begins with the product of q, k and v alone, and gives o's as it is."""
    attention, x, result = MagicMock(), object(), object()
    projected, query, key = MagicMock(), MagicMock(), MagicMock()
    attention.qkv_proj.return_value = projected, None
    projected.split.return_value = query, key, MagicMock()
    attention.rotary_emb.return_value = query, key
    attention.o_proj.return_value = result, None
    found = cls.forward(attention, positions=MagicMock(), hidden_states=x)
    return found is result and attention.qkv_proj.call_args_list == [((x,),)] and attention.o_proj.call_count == 1


def _gates(cls: Any) -> bool:
    mlp = SimpleNamespace(
        gate_up_proj=lambda x: (("gate_up", x), None),
        act_fn=lambda x: ("gated", x),
        down_proj=lambda x: (("down", x), None),
    )
    return bool(cls.forward(mlp, "x") == ("down", ("gated", ("gate_up", "x"))))
