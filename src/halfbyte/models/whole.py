"""A decoder layer as halfbyte computes it: products with what stands beside them, in place of transformers' modules.

What attention does with the projections differs between a prompt (prompt_layers.py) and a step (fused.py). All else is
here, and how a layer's result is compared with transformers' own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from halfbyte.eager_experts import choose, norm_and_choose
from halfbyte.eager_fused import finished, gated, has_many, products, rms_norm, whole_mlp
from halfbyte.formats.weight import QuantizedWeight
from halfbyte.kernels.attention.fresh import Fresh
from halfbyte.kernels.common.norm import Norm
from halfbyte.kernels.linear.fusion import NOTHING, Beside, Residual
from halfbyte.models.layers import Block, DecoderLayer, layer_of
from halfbyte.models.linears import layers_of
from halfbyte.models.patch import is_hooked
from halfbyte.nn.experts import Experts4bit

SHARE, ROUNDINGS = 0.1, 2  # how far results may be apart: of what the layer adds, and in units of the last place

Operands = tuple[tuple[QuantizedWeight, ...], tuple[Tensor | None, ...]]


def whole_of(module: nn.Module) -> DecoderLayer | None:
    """The parts of a decoder layer of which halfbyte computes some projections or the experts, or None."""
    layer = None if module.training else layer_of(module)
    if layer is None or any(map(is_hooked, layer.projections)):
        return None
    hosts = {part: layers_of(part) for part in layer.projections}
    applied = any(host is not None and host.is_applied(part) for part, host in hosts.items())
    return layer if applied or (layer.block is not None and isinstance(layer.block.experts, Experts4bit)) else None


class WholeLayer:
    """Computes a decoder layer but for what attention does, which prompts and steps have in classes of their own."""

    def __init__(self, module: nn.Module, layer: DecoderLayer) -> None:
        self.module, self.layer = module, layer
        self.hosts = {part: layers_of(part) for part in layer.projections}

    def _attend(self, x: Tensor, **kwargs: Any) -> Tensor | None:
        """x and what attention adds to it, or None where only transformers knows that, and nothing has happened."""
        raise NotImplementedError

    def _compute(self, x: Tensor, **kwargs: Any) -> Tensor | None:
        """The layer's result, or None as of `_attend`."""
        attended = self._attend(x, **kwargs)
        return None if attended is None else self._feed(attended)

    def _both_ways(self, x: Tensor, by_transformers: Callable[[], Any], **kwargs: Any) -> tuple[bool | None, Any]:
        """Whether the layer's result agrees with transformers', and the one to go on with: ours if it does. None where
        there is only theirs."""
        block_sees: list[Tensor] = []
        with _recorded(self.layer.block, block_sees):
            theirs = by_transformers()
        attended = self._attend(x, **kwargs)
        if attended is None:
            return None, theirs
        ours = self._feed(attended)
        agrees = self._agrees(x, attended, ours, theirs, block_sees)
        return agrees, ours if agrees else theirs

    def _agrees(self, x: Tensor, attended: Tensor, ours: Tensor, theirs: Any, block_sees: list[Tensor]) -> bool:
        """Of a layer with experts each half is compared by itself: a rounding in the first may choose other experts."""
        if self.layer.block is None:
            return agree(x, ours, theirs)
        if len(block_sees) != 1:
            return False
        normed, _ = _norm_and_route(self.layer.block, attended, self.layer.second)
        added = _first(self.layer.block.module(normed))
        return agree(rms_norm(x, self.layer.second), normed, block_sees[0]) and agree(
            attended, ours, torch.add(attended, added, alpha=self.layer.factor)
        )

    def _fresh(self, x: Tensor, position_embeddings: Any, slot: Tensor | None) -> tuple[Tensor, Fresh]:
        """The query [texts, heads, tokens, size] of x [texts, tokens, hidden], normed first, and what comes with it."""
        layer: Any = self.layer
        size = layer.attention.head_dim
        new = self._project(layer.queries, x, Beside(layer.first))
        if len(new) == 1:
            of_keys = layer.attention.config.num_key_value_heads * size
            new = list(new[0].split([new[0].shape[-1] - 2 * of_keys, of_keys, of_keys], dim=-1))
        query, key, value = (part.view(*x.shape[:2], -1, size).transpose(1, 2) for part in new)
        cos, sin = position_embeddings
        query_norm, key_norm = layer.head_norms or (None, None)
        return query, Fresh(key, value, cos, sin, slot, query_norm, key_norm, layer.halves)

    def _feed(self, x: Tensor) -> Tensor:
        """x and what the MLP or the experts add to it."""
        layer = self.layer
        if layer.block is not None:
            return _add_experts(layer.block, x, layer.second, layer.factor)
        assert layer.down is not None
        if len(layer.gates) == 2:
            operands = None if layer.added else self._operands((*layer.gates, layer.down), x)
            if operands is not None:
                return whole_mlp(x, *operands, Beside(layer.second, layer.activation, Residual(x, layer.factor)))
            (inner,) = self._project(layer.gates, x, Beside(layer.second, layer.activation))
        else:
            (both,) = self._project(layer.gates, x, Beside(layer.second))
            gate, up = both.chunk(2, dim=-1)
            inner = gated(gate, up, layer.activation)
        return self._add((layer.down,), inner, x, layer.added[1] if layer.added else None)

    def _add(self, module: tuple[nn.Module], x: Tensor, residual: Tensor, norm: Norm | None) -> Tensor:
        """The residual plus a product of x, which is normed first if there is a norm."""
        if norm is None:
            return self._project(module, x, Beside(residual=Residual(residual, self.layer.factor)))[0]
        return rms_norm(self._project(module, x)[0].contiguous(), norm, residual)

    def _project(self, modules: tuple[nn.Module, ...], x: Tensor, beside: Beside = NOTHING) -> list[Tensor]:
        """As `products`; of modules that are not all in 4 bits, with launches of their own."""
        operands = self._operands(modules, x)
        if operands is not None:
            return products(x, *operands, beside, has_many(x))
        if beside.norm is not None:
            x = rms_norm(x.contiguous(), beside.norm)
        return finished([module(x) for module in modules], beside)

    def _operands(self, modules: Sequence[nn.Module], x: Tensor) -> Operands | None:
        """Weights and biases of projections that multiply in the dtype of x, or None."""
        found = []
        for module in modules:
            host = self.hosts[module]
            inputs = None if host is None else host.operands(module, x)
            if inputs is None or not inputs.dtype is inputs.result is x.dtype:
                return None
            found.append((inputs.q, None if inputs.bias is None else inputs.bias.to(x.dtype)))
        return tuple(q for q, _ in found), tuple(bias for _, bias in found)


def _add_experts(block: Block, x: Tensor, norm: Norm, factor: float) -> Tensor:
    """x [texts, new tokens, hidden] and a factor times what a block of experts gives for it, normed first."""
    normed, routes = _norm_and_route(block, x, norm)
    if routes is None:
        return torch.add(x, _first(block.module(normed)), alpha=factor)
    rows = normed.view(-1, x.shape[-1])
    if isinstance(block.experts, Experts4bit) and "forward" not in vars(block.experts) and not is_hooked(block.experts):
        return block.experts.added(rows, *routes, Residual(x.view_as(rows), factor)).view_as(x)
    result: Tensor = block.experts(rows, *routes)
    return torch.add(x, result.view_as(x), alpha=factor)


def _norm_and_route(block: Block, x: Tensor, norm: Norm) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
    """x, normed, and the ids and weights of its tokens' experts, or None where only the block knows these."""
    router = block.router
    if router is None or router.weight.dtype is not x.dtype:
        return rms_norm(x, norm), None
    rows, dtype = x.view(-1, x.shape[-1]), x.dtype if router.narrow else torch.float32
    of_router = router.weight, router.bias, router.top_k, router.before, router.normalizes, dtype
    found = norm_and_choose(rows, norm, *of_router)
    if found is None:
        rows = rms_norm(rows, norm)
        found = rows, *choose(rows, *of_router)
    return found[0].view_as(x), found[1:]


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


def is_pair(position_embeddings: Any) -> bool:
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
