"""What a decoder layer of transformers consists of, where it is of a family that a captured step computes as a whole.

Such a layer norms its input, attends to it, adds the result to the input, and does the same with an MLP that gates, or
with a block of experts. Gemma norms each result once more before it is added. Which attribute of which class holds what
is said here alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor, nn

from halfbyte.kernels.common.norm import Norm
from halfbyte.kernels.linear.fusion import Fusion
from halfbyte.models import norms
from halfbyte.models.patch import is_hooked, is_method_of

DENSE = ("Llama", "Mistral", "Qwen2", "Qwen3", "Gemma2", "Gemma3", "Phi3", "Granite")
OF_EXPERTS = ("Qwen3Moe", "Mixtral", "GptOss")  # whose MLP is a block of experts, or in some layers of Qwen3Moe
FAMILIES = (*DENSE, *OF_EXPERTS)
ONE_MORE = ("Gemma2", "Gemma3")  # whose norms store their weights less one, and that norm what is added
ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}  # as configurations name them


def fusions(family: str, activation: str) -> dict[tuple[str, ...], Fusion]:
    """What stands beside the products of such a layer in their launches, by the names of their projections."""
    norm, add = (0.0, 0.0), None if family in ONE_MORE else 1.0
    normed, added = Fusion(norm, static=True), Fusion(residual=add, static=True)
    found = {("q_proj", "k_proj", "v_proj"): normed, ("gate_proj", "up_proj"): Fusion(norm, activation, static=True)}
    found |= {("qkv_proj",): normed, ("gate_up_proj",): normed}
    return found | {(name,): added for name in ("o_proj", "down_proj") if add is not None}


class Router(NamedTuple):
    """scores = x @ weight.T + bias of each expert; the rest as `route` in kernels/experts/router_reference.py takes it.
    narrow: weights are rounded to x's dtype, else fp32."""

    weight: Tensor
    bias: Tensor | None
    top_k: int
    before: bool
    normalizes: bool
    narrow: bool


class Block(NamedTuple):
    """A block of experts, in the place of an MLP. module: all of it. router: None where only the module knows."""

    module: nn.Module
    experts: nn.Module
    router: Router | None


@dataclass(frozen=True)
class DecoderLayer:
    """Of one layer. queries: the projections of query, key and value, or one for all three. gates: of gate and up, or
    one for both. first, second: the norms ahead of attention and of the MLP. added: those of what these give, or none.
    head_norms: of query and key, or none.

    activation: of kernels/linear/fusion.py's. factor: of what is added to the residual. softcap, sinks: of attention,
    or None. halves: its angles are for half of what turns. block: of experts, instead of gates and down.
    """

    attention: nn.Module
    queries: tuple[nn.Module, ...]
    out: nn.Module
    gates: tuple[nn.Module, ...]
    down: nn.Module | None
    first: Norm
    second: Norm
    added: tuple[Norm, ...]
    head_norms: tuple[Norm, ...]
    activation: str
    factor: float
    softcap: float | None
    sinks: Tensor | None = None
    halves: bool = False
    block: Block | None = None

    @property
    def projections(self) -> tuple[nn.Module, ...]:
        return (*self.queries, self.out, *self.gates, *(() if self.down is None else (self.down,)))

    @property
    def norms(self) -> tuple[Norm, ...]:
        return (self.first, self.second, *self.added, *self.head_norms)


def activation_of(config: Any) -> str | None:
    """The activation of an MLP by its configuration, or None of one that no product gates with."""
    named = getattr(config, "hidden_activation", None) or getattr(config, "hidden_act", None)
    return ACTIVATIONS.get(named or "")


def family_of_type(model_type: str) -> str | None:
    """The family that a configuration calls by this name, such as "gemma3_text"."""
    name = model_type.removesuffix("_text").replace("_", "")
    return next((family for family in FAMILIES if name == family.lower()), None)


def family_of(module: nn.Module, kind: str) -> str | None:
    """The family of a module of transformers whose class is called that and `kind`."""
    name = type(module).__name__
    known = type(module).__module__.startswith("transformers.models.") and name.endswith(kind)
    return next((family for family in FAMILIES if known and name == family + kind), None)


def layer_of(module: Any) -> DecoderLayer | None:
    """The parts of a decoder layer, or None of any other module, and of one whose parts are not as transformers makes
    them: replaced, hooked, or lacking. Ask before anything else is put in the place of their forwards."""
    family = family_of(module, "DecoderLayer")
    if family is None:
        return None
    try:
        layer = _taken_apart(module, family)
    except AttributeError:  # another version of transformers
        return None
    return layer if layer is not None and all(map(_is_plain, (module.self_attn, module.mlp))) else None


def _taken_apart(module: Any, family: str) -> DecoderLayer | None:
    attention, mlp = module.self_attn, module.mlp
    block = _block_of(mlp, family)
    if type(attention).__name__ != family + "Attention" or (block is None and type(mlp).__name__ != family + "MLP"):
        return None
    gates: tuple[nn.Module, ...] = ()
    activation = ""
    if block is None:
        named = activation_of(mlp.config)
        if named is None or not _is_of(mlp.activation_fn if family == "Phi3" else mlp.act_fn, named):
            return None
        activation = named
        gates = (mlp.gate_up_proj,) if family == "Phi3" else (mlp.gate_proj, mlp.up_proj)
    queries: tuple[nn.Module, ...] = (attention.qkv_proj,) if family == "Phi3" else (
        attention.q_proj, attention.k_proj, attention.v_proj,
    )  # fmt: skip
    if family in ONE_MORE:
        added: tuple[Any, ...] = (module.post_attention_layernorm, module.post_feedforward_layernorm)
        ahead = (module.input_layernorm, module.pre_feedforward_layernorm)
    else:
        added, ahead = (), (module.input_layernorm, module.post_attention_layernorm)
    of_heads = (attention.q_norm, attention.k_norm) if hasattr(attention, "q_norm") else ()
    norms = tuple(norm for one in (*ahead, *added, *of_heads) if (norm := norm_of(one)) is not None)
    if len(norms) < len(ahead) + len(added) + len(of_heads):
        return None
    first, second, *more = norms
    factor = float(getattr(module, "residual_multiplier", 1.0))
    softcap = attention.attn_logit_softcapping if family == "Gemma2" else None
    return DecoderLayer(
        attention, queries, attention.o_proj, gates, None if block else mlp.down_proj, first, second,
        tuple(more[: len(added)]), tuple(more[len(added) :]), activation, factor, softcap,
        attention.sinks if family == "GptOss" else None, family == "GptOss", block,
    )  # fmt: skip


def _block_of(mlp: Any, family: str) -> Block | None:
    """The block of experts that an MLP is, or None."""
    name = type(mlp).__name__
    if family not in OF_EXPERTS or name != (family + ("MLP" if family == "GptOss" else "SparseMoeBlock")):
        return None
    if family == "GptOss":
        router, before, normalizes, narrow = mlp.router, False, True, True
    else:
        router, before = mlp.gate, True
        normalizes, narrow = getattr(router, "norm_topk_prob", True), family != "Mixtral"
    known = type(router).__name__ == family + "TopKRouter" and _is_plain(router)
    facts = (router.weight, getattr(router, "bias", None), router.top_k, before, normalizes, narrow) if known else None
    return Block(mlp, mlp.experts, None if facts is None else Router(*facts))


def norm_of(module: Any) -> Norm | None:
    """What an RMS norm of these families computes, or None of any other module."""
    family = family_of(module, "RMSNorm")
    if family is None or not _is_plain(module):
        return None
    epsilon = module.eps if family in ONE_MORE else module.variance_epsilon
    return Norm(module.weight, float(epsilon), 1.0 if family in ONE_MORE else 0.0)


def _is_plain(module: nn.Module) -> bool:
    """True if calling it is calling its class's forward, or ours in its place."""
    own = vars(module).get("forward")
    return not is_hooked(module) and (own is None or is_method_of(norms.forward, own))


def _is_of(module: nn.Module, activation: str) -> bool:
    from transformers.activations import ACT2FN

    kinds = {type(ACT2FN[name]) for name, known in ACTIVATIONS.items() if known == activation}
    return type(module) in kinds and not is_hooked(module)
