"""Decoder layers in a captured step, with five launches each where transformers has thirty.

Query, key and value are one product, which norms x as it reads it. Attention norms and rotates the heads and puts the
new token into the cache; where texts have several, which guesses are, that is a launch more. The product of its result
adds the residual, gate and up are one product that norms and gates, and the product behind them adds the residual
again. Gemma norms what it adds: that is a launch more, twice. In the place of an MLP there may be experts: a norm, the
router's product and its choice, two launches of experts, and a sum.

The first step of a bucket computes each layer both ways. A layer that disagrees with transformers, of a version that
computes something else, stays as it was.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from halfbyte.eager_experts import route
from halfbyte.eager_fused import finished, gated, products, rms_norm
from halfbyte.formats.weight import QuantizedWeight
from halfbyte.kernels.attention.fresh import Fresh
from halfbyte.kernels.attention.plan import MOST_NEW
from halfbyte.kernels.common.norm import Norm
from halfbyte.kernels.linear.fusion import Residual
from halfbyte.models.attention import StepAttention
from halfbyte.models.layers import Block, DecoderLayer, layer_of, norm_of
from halfbyte.models.linears import layers_of
from halfbyte.models.patch import is_hooked
from halfbyte.models.regions import put_back, uncompiled
from halfbyte.models.rotation import slot_of
from halfbyte.nn.experts import Experts4bit

# Attribute of a layer that was computed both ways: whether the results agree, by the number of new tokens of a text.
AGREES = "_halfbyte_agrees"
MOST_ROWS = 64  # of x; beyond, launches are little of the time
SHARE, ROUNDINGS = 0.1, 2  # how far results may be apart: of what the layer adds, and in units of the last place

Operands = tuple[tuple[QuantizedWeight, ...], tuple[Tensor | None, ...]]


@contextmanager
def fused_layers(model: nn.Module, attention: StepAttention) -> Iterator[None]:
    """Within, decoder layers of `model` of which halfbyte computes some projections or the experts, and norms outside
    of them, compute a few new tokens of each text in few launches, where the cache puts them at slots (rotation.py)."""
    with ExitStack() as stack:
        inside: set[nn.Module] = set()
        found = {module: layer for module in model.modules() if (layer := _fusible(module)) is not None}
        for number, (module, layer) in enumerate(found.items()):
            inside.update(module.modules())
            _replace(stack, module, _Layer(module, layer, attention, is_first=number == 0))
        if found:
            for module in model.modules():
                if module not in inside and (norm := norm_of(module)) is not None:
                    _replace(stack, module, _NormOutside(module, norm))
        yield


def _fusible(module: nn.Module) -> DecoderLayer | None:
    if "forward" in vars(module) or False in vars(module).get(AGREES, {}).values() or module.training:
        return None
    layer = layer_of(module)
    if layer is None:
        return None
    if any(map(is_hooked, layer.projections)):
        return None
    hosts = {part: layers_of(part) for part in layer.projections}
    applied = any(host is not None and host.is_applied(part) for part, host in hosts.items())
    return layer if applied or (layer.block is not None and isinstance(layer.block.experts, Experts4bit)) else None


def _replace(stack: ExitStack, module: nn.Module, forward: Any) -> None:
    before = vars(module).get("forward")
    module.forward = forward
    stack.callback(put_back, module, before)


class _NormOutside:
    """In the place of the forward of a norm that belongs to no layer."""

    def __init__(self, module: nn.Module, norm: Norm) -> None:
        self.theirs, self.norm = module.forward, norm

    def __call__(self, x: Tensor) -> Any:
        if not _may_fuse(x, self.norm):
            return self.theirs(x)
        return rms_norm(x.contiguous(), self.norm)


class _Layer:
    """In the place of the forward of a decoder layer. is_first: of those of a step."""

    def __init__(self, module: nn.Module, layer: DecoderLayer, attention: StepAttention, is_first: bool) -> None:
        self.module, self.layer, self.attention, self.is_first = module, layer, attention, is_first
        self.theirs = module.forward

    def __call__(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        known = vars(self.module).get(AGREES, {})
        new = hidden_states.shape[1] if hidden_states.dim() == 3 else 0
        agrees = known.get(new)
        if args or agrees is False:
            return self.theirs(hidden_states, *args, **kwargs)
        if agrees or (hidden_states.is_cuda and torch.cuda.is_current_stream_capturing()):
            ours = self._compute(hidden_states, **kwargs)
            return self.theirs(hidden_states, **kwargs) if ours is None else ours
        block_sees: list[Tensor] = []
        with uncompiled(), _recorded(self.layer.block, block_sees):
            theirs = self.theirs(hidden_states, **kwargs)
        attended = self._attend(hidden_states, **kwargs)  # and puts the tokens into the cache a second time
        if attended is None:
            return theirs
        ours = self._feed(attended)
        agrees = self._agrees(hidden_states, attended, ours, theirs, block_sees)
        setattr(self.module, AGREES, {**known, new: agrees})
        if agrees:
            return ours
        warnings.warn(
            f"halfbyte leaves {type(self.module).__name__} to transformers, whose version computes something else than "
            "the versions that are known. Decoding is slower than it could be; please report this version",
            stacklevel=2,
        )
        return theirs

    def _agrees(self, x: Tensor, attended: Tensor, ours: Tensor, theirs: Any, block_sees: list[Tensor]) -> bool:
        """Of a layer with experts each half is compared by itself: a rounding in the first may choose other experts."""
        if self.layer.block is None:
            return agree(x, ours, theirs)
        if len(block_sees) != 1:
            return False
        normed = rms_norm(attended, self.layer.second)
        added = _first(self.layer.block.module(normed))
        return agree(rms_norm(x, self.layer.second), normed, block_sees[0]) and agree(
            attended, ours, torch.add(attended, added, alpha=self.layer.factor)
        )

    def _compute(self, x: Tensor, **others: Any) -> Tensor | None:
        """The layer's result, or None where only transformers knows it, and nothing has happened."""
        attended = self._attend(x, **others)
        return None if attended is None else self._feed(attended)

    def _attend(
        self,
        x: Tensor,
        attention_mask: Any = None,
        position_embeddings: Any = None,
        past_key_values: Any = None,
        **others: Any,
    ) -> Tensor | None:
        """x and what attention adds to it, or None."""
        layer, attention = self.layer, cast(Any, self.layer.attention)
        if x.dim() != 3 or x.shape[1] > MOST_NEW or past_key_values is None or not _is_pair(position_embeddings):
            return None
        kept = past_key_values.layers[attention.layer_idx]
        slot, mask = slot_of(kept), attention_mask
        if slot is None or not all(_may_fuse(x, norm) for norm in layer.norms):
            return None
        new = self._project(layer.queries, x, layer.first)
        if len(new) == 1:
            size, most = attention.head_dim, new[0].shape[-1]
            of_keys = kept.keys.shape[1] * size
            new = list(new[0].split([most - 2 * of_keys, of_keys, of_keys], dim=-1))
        query, key, value = (part.view(*x.shape[:2], -1, attention.head_dim).transpose(1, 2) for part in new)
        cos, sin = position_embeddings
        norms = layer.head_norms or (None, None)
        fresh = Fresh(key, value, cos, sin, slot, norms[0], norms[1], layer.halves)
        # Behind another layer's attention, which waited for all that came before it, only the projections are new.
        settled = not self.is_first
        seen = self.attention.of_new_tokens(
            query, kept.keys, kept.values, mask, float(attention.scaling), layer.softcap, layer.sinks, fresh, settled
        )
        if seen is None:
            return None
        return self._add((layer.out,), seen.reshape(*x.shape[:2], -1), x, layer.added[0] if layer.added else None)

    def _feed(self, x: Tensor) -> Tensor:
        """x and what the MLP or the experts add to it."""
        layer = self.layer
        if layer.block is not None:
            return _add_experts(layer.block, rms_norm(x, layer.second), Residual(x, layer.factor))
        assert layer.down is not None
        if len(layer.gates) == 2:
            (inner,) = self._project(layer.gates, x, layer.second, layer.activation)
        else:
            (both,) = self._project(layer.gates, x, layer.second)
            gate, up = both.chunk(2, dim=-1)
            inner = gated(gate, up, layer.activation)
        return self._add((layer.down,), inner, x, layer.added[1] if layer.added else None)

    def _add(self, module: tuple[nn.Module], x: Tensor, residual: Tensor, norm: Norm | None) -> Tensor:
        """The residual plus a product of x, which is normed first if there is a norm."""
        if norm is None:
            return self._project(module, x, residual=Residual(residual, self.layer.factor))[0]
        return rms_norm(self._project(module, x)[0].contiguous(), norm, residual)

    def _project(
        self,
        modules: tuple[nn.Module, ...],
        x: Tensor,
        norm: Norm | None = None,
        activation: str = "",
        residual: Residual | None = None,
    ) -> list[Tensor]:
        """As `products`; of modules that are not all in 4 bits, with launches of their own."""
        operands = self._operands(modules, x)
        if operands is not None:
            return products(x, *operands, norm, activation, residual)
        if norm is not None:
            x = rms_norm(x.contiguous(), norm)
        return finished([module(x) for module in modules], activation, residual)

    def _operands(self, modules: Sequence[nn.Module], x: Tensor) -> Operands | None:
        """Weights and biases of projections that multiply in the dtype of x, or None."""
        found = []
        for module in modules:
            host = layers_of(module)
            inputs = None if host is None else host.operands(module, x)
            if inputs is None or not inputs.dtype is inputs.result is x.dtype:
                return None
            found.append((inputs.q, None if inputs.bias is None else inputs.bias.to(x.dtype)))
        return tuple(q for q, _ in found), tuple(bias for _, bias in found)


def _add_experts(block: Block, x: Tensor, residual: Residual) -> Tensor:
    """The residual and what a block of experts gives for x [texts, new tokens, hidden], normed."""
    router, (value, factor) = block.router, residual
    if router is None or router.weight.dtype is not x.dtype:
        return torch.add(value, _first(block.module(x)), alpha=factor)
    rows = x.view(-1, x.shape[-1])
    dtype = x.dtype if router.narrow else torch.float32
    scores = linear(rows, router.weight, router.bias)
    ids, weights = route(scores, router.top_k, router.before, router.normalizes, dtype)
    if isinstance(block.experts, Experts4bit) and "forward" not in vars(block.experts) and not is_hooked(block.experts):
        return block.experts.added(rows, ids, weights, Residual(value.view_as(rows), factor)).view_as(x)
    result: Tensor = block.experts(rows, ids, weights)
    return torch.add(value, result.view_as(x), alpha=factor)


def _first(found: Any) -> Tensor:
    """The result of a block that may give its scores too."""
    return found[0] if isinstance(found, tuple) else found  # type: ignore[no-any-return]


@contextmanager
def _recorded(block: Block | None, inputs: list[Tensor]) -> Iterator[None]:
    """Within, what a block of experts is given goes to `inputs` too."""
    if block is None:
        yield
        return
    handle = block.module.register_forward_pre_hook(lambda module, args: inputs.extend(args[:1]))
    try:
        yield
    finally:
        handle.remove()


def _may_fuse(x: Tensor, norm: Norm) -> bool:
    return (
        x.numel() <= MOST_ROWS * x.shape[-1]
        and x.dtype is norm.weight.dtype
        and x.device == norm.weight.device
        and not (torch.is_grad_enabled() and (x.requires_grad or norm.weight.requires_grad))
        and not torch.is_autocast_enabled(x.device.type)
    )


def _is_pair(position_embeddings: Any) -> bool:
    return isinstance(position_embeddings, tuple) and len(position_embeddings) == 2


def agree(x: Tensor, ours: Tensor, theirs: Any) -> bool:
    """Whether two results [texts, new tokens, hidden] of a layer of x are the same but for rounding, in every row whose
    numbers are finite."""
    if not isinstance(theirs, Tensor) or theirs.shape != ours.shape or theirs.dtype is not ours.dtype:
        return False
    unit = torch.finfo(theirs.dtype).eps
    x, ours, theirs = x.float(), ours.float(), theirs.float()
    bound = SHARE * (theirs - x).norm(dim=-1) + ROUNDINGS * unit * theirs.norm(dim=-1)
    return bool(((ours - theirs).norm(dim=-1) <= bound).logical_or(~theirs.isfinite().all(-1)).all())
