"""The operations of experts.py without checks of arguments: rows are sorted by expert, and each expert is multiplied
with by the fused kernel of the device or, dequantized, by torch.

There, where an expert's rows are is read on the host. On a GPU that waits for the stream, so no CUDA graph can capture
it. A Hopper GPU has kernels that need no host, gradients included.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from halfbyte.eager import aligned, backend, dense_dtype_for, dequantize, on, plain
from halfbyte.formats.weight import QuantizedWeight
from halfbyte.kernels.common import slow
from halfbyte.kernels.common.device import cpu_capability
from halfbyte.kernels.common.norm import Norm
from halfbyte.kernels.experts import reference, router_reference
from halfbyte.kernels.experts.block import Block
from halfbyte.kernels.experts.plan import Group, plan
from halfbyte.kernels.linear import reference as products
from halfbyte.kernels.linear.fusion import Residual


def grouped_linear(x: Tensor, q: QuantizedWeight, expert: Tensor, bias: Tensor | None) -> Tensor:
    """x [S, K] times the expert of each row, plus its bias -> [S, N]; zeros for ids that are out of range."""
    with on(x.device):
        x, bias = plain(x.detach()), None if bias is None else plain(bias.detach())
        if x.is_cuda:
            found: Tensor | None = cuda_kernels().grouped_linear(aligned(x), q, plain(expert), _aligned(bias))
            if found is not None:
                return found
        out = x.new_zeros((len(x), q.shape[1]))
        if not x.is_meta:
            order, groups = reference.sort(expert, q.shape[0])
            _multiply(x, order, q, groups, bias, out, order)
    return out


def grouped_linear_backward(grad: Tensor, q: QuantizedWeight, expert: Tensor) -> Tensor:
    """grad [S, N] times the transpose of the expert of each row -> [S, K]; zeros for ids that are out of range."""
    with on(grad.device):
        grad = grad.detach()
        if grad.is_cuda:
            found: Tensor | None = cuda_kernels().grouped_linear_backward(aligned(plain(grad)), q, plain(expert))
            if found is not None:
                return found
            _warn_of_dense_experts()
        out = grad.new_zeros((len(grad), q.shape[2]))
        if not grad.is_meta:
            order, groups = reference.sort(expert, q.shape[0])

            def multiply(rows: Tensor, number: int) -> Tensor:
                return products.linear(rows, dense_expert(q, number, grad.dtype).t(), None)

            reference.grouped_linear(grad, order, groups, multiply, out, order)
    return out


def moe(
    x: Tensor, top_k_index: Tensor, top_k_weights: Tensor, block: Block, residual: Residual | None = None
) -> Tensor:
    """The experts of each token of x [T, H], weighted and added up. Sums and activations are fp32; what goes into the
    down product is rounded to x's dtype, and so is the result. With a residual, contiguous and of x's shape and dtype,
    the result is that plus its factor times the sum."""
    if x.is_meta:
        return torch.empty_like(x, memory_format=torch.contiguous_format)
    with on(x.device):
        x, weights = plain(x.detach()), top_k_weights.detach()
        block = block.with_biases(*(None if bias is None else plain(bias.detach()) for bias in block.biases))
        if x.is_cuda:
            shares = plain(weights if weights.dtype is x.dtype else weights.float())
            there = block.with_biases(*map(_aligned, block.biases))
            found: Tensor | None = cuda_kernels().moe(aligned(x), plain(top_k_index), shares, there, residual)
            if found is not None:
                return found
        weights = weights.float()
        summed = few_pairs().moe(x, top_k_index, weights, block) if x.is_cpu and slow.has_numba() else None
        if summed is None:
            summed = _sorted_moe(x, top_k_index, weights, block)
        return summed if residual is None else torch.add(residual.value, summed, alpha=residual.factor)


def _sorted_moe(x: Tensor, top_k_index: Tensor, weights: Tensor, block: Block) -> Tensor:
    """`moe` of pairs that are sorted by expert. x, biases: contiguous. weights: fp32."""
    (tokens, hidden), k = x.shape, top_k_index.shape[1]
    count, twice, _ = block.gate_up.shape
    order, groups = reference.sort(top_k_index.reshape(-1), count)
    pairs = x.new_empty((len(order), twice), dtype=torch.float32)
    rows = torch.arange(len(order), dtype=torch.int64, device=x.device)
    _multiply(x, order // max(k, 1), block.gate_up, groups, block.gate_up_bias, pairs, rows)
    inner = reference.activate(pairs, block.activation).to(x.dtype)
    y = x.new_zeros((tokens * k, hidden), dtype=torch.float32)
    _multiply(inner, rows, block.down, groups, block.down_bias, y, order)
    valid = (top_k_index >= 0) & (top_k_index < count)
    if x.is_cpu and slow.has_numba():
        row_of = torch.where(valid, torch.arange(tokens * k, dtype=torch.int64, device=x.device).view(tokens, k), -1)
        summed: Tensor = backend("experts", "cpu").combine(y.numpy(), row_of.numpy(), weights, x.dtype)
        return summed
    return reference.combine(y.view(tokens, k, hidden), torch.where(valid, weights, 0), x.dtype)


def route(scores: Tensor, k: int, before: bool, normalizes: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(ids, weights) [T, k] of a router's scores [T, E], as in kernels/experts/router_reference.py."""
    if scores.is_cuda and slow.no_kernels(scores.device.type) is None:
        from halfbyte.kernels.experts import router

        if router.supports(scores, k):
            with on(scores.device):
                return router.route(plain(scores), k, before, normalizes, dtype)
    return router_reference.route(scores, k, before, normalizes, dtype)


def choose(
    x: Tensor, weight: Tensor, bias: Tensor | None, k: int, before: bool, normalizes: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """(ids, weights) [T, k] that a router's weight and bias give x [T, K], as in kernels/experts/router_reference.py.
    Scores may differ by a rounding from those of torch's product."""
    found = _in_one_launch(x, None, weight, bias, k, before, normalizes, dtype)
    return route(linear(x, weight, bias), k, before, normalizes, dtype) if found is None else found[1:]


def norm_and_choose(
    x: Tensor, norm: Norm, weight: Tensor, bias: Tensor | None, k: int, before: bool, normalizes: bool,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor] | None:  # fmt: skip
    """x, normed, and what `choose` gives for that, in one launch, or None where no kernel is for it. Kernels that run
    just ahead in the stream must not write the weights."""
    return _in_one_launch(x, norm, weight, bias, k, before, normalizes, dtype)


def _in_one_launch(
    x: Tensor, norm: Norm | None, weight: Tensor, bias: Tensor | None, *how: Any
) -> tuple[Tensor, Tensor, Tensor] | None:
    """how: k, before, normalizes and dtype of `choose`."""
    if not x.is_cuda or slow.no_kernels(x.device.type) is not None:
        return None
    from halfbyte.kernels.experts import choose as fused

    x, weight, bias = plain(x), plain(weight), None if bias is None else plain(bias)
    if not fused.supports(x, weight, bias, how[0], how[-1]):
        return None
    if norm is not None and not fused.supports_norm(norm, x, len(weight)):
        return None
    with on(x.device):
        return fused.choose(x, norm, weight, bias, *how)


@cache
def cuda_kernels() -> ModuleType:
    """The CUDA kernels, which say themselves whether one is for a product."""
    return import_module("halfbyte.kernels.experts.cuda")


@cache
def few_pairs() -> ModuleType:
    """The CPU kernels for a few pairs of a token and an expert, which say themselves whether they are for a call."""
    return import_module("halfbyte.kernels.experts.few_cpu")


def _aligned(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else aligned(bias)


def _multiply(
    x: Tensor,
    source: Tensor,
    q: QuantizedWeight,
    groups: tuple[Group, ...],
    bias: Tensor | None,
    out: Tensor,
    target: Tensor,
) -> None:
    """out[target[i]] = x[source[i]] @ W.T + bias, of the expert whose group has row i; all contiguous."""
    _, n, k = q.shape
    kind = x.device.type if slow.no_kernels(x.device.type) is None else "other"
    if x.is_cuda:
        _warn_of_dense_experts()
    way = plan(groups, n, k, x.dtype, kind, cpu_capability())
    if way.fused:
        kernels = backend("experts", x.device.type)
        kernels.grouped_linear(
            x, source, way.fused, q.packed, q.scale, q.nested, q.spec, q.block_size, bias, out, target
        )

    wide = dense_dtype_for(x)

    def multiply(rows: Tensor, expert: int) -> Tensor:
        own_bias = None if bias is None else bias[expert].to(wide)
        return products.linear(rows.to(wide), dense_expert(q, expert, wide), own_bias).to(x.dtype)

    reference.grouped_linear(x, source, way.dense, multiply, out, target)


def _warn_of_dense_experts() -> None:
    slow.warn(
        "experts on cuda",
        "no CUDA kernel is for these experts on this GPU, which are dequantized one by one and multiplied with by "
        "torch, slowly; Hopper GPUs have kernels for x in 16 bits",
    )


def dense_expert(q: QuantizedWeight, expert: int, dtype: torch.dtype) -> Tensor:
    """The dense weight [N, K] of one expert of a stack, wherever in a scale block it begins."""
    _, n, k = q.shape
    if q.spec.along_k:
        return dequantize(q[expert], q.scale.new_empty((n, k), dtype=dtype))
    size, side = q.block_size, n * k
    first, last = expert * side // size, -(-(expert + 1) * side // size)
    begin, end = first * size, min(last * size, q.numel)
    scale = q.scale.view(-1)[first:last]
    if q.nested is not None:
        # A rounded multiply, then a rounded add: a group of scales may begin anywhere in one of `absmax`.
        group = torch.arange(first, last, dtype=torch.int64, device=scale.device) // q.nested.block_size
        scale = q.nested.code[scale.long()] * q.nested.absmax.view(-1)[group] + q.nested.offset
    packed = q.packed.reshape(-1, 1)[begin // 2 : -(-end // 2)]
    blocks = QuantizedWeight(q.format, packed, scale, (end - begin,), q.dtype, size)
    weights = dequantize(blocks, scale.new_empty((end - begin,), dtype=dtype))
    return weights[expert * side - begin :][:side].view(n, k)
