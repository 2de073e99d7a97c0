"""Products of a decoding step or a prompt with what stands beside them: the norm of x before, a gate or a residual sum
after.

One launch does it all where a kernel is for it, or all but the norm; else each has its own. There are neither gradients
nor operators.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

import torch
from torch import Tensor

from halfbyte import eager
from halfbyte.formats.weight import QuantizedWeight
from halfbyte.kernels.common import slow
from halfbyte.kernels.common.norm import Norm
from halfbyte.kernels.linear.fusion import NOTHING, Beside
from halfbyte.kernels.pointwise import reference as plain_torch

MOST_ROWS = 64  # of x, with a norm or a sum in a product's launch; beyond, launches are little of the time


def has_many(x: Tensor) -> bool:
    """Whether x [..., K] has the many rows of a prompt."""
    return x.numel() > MOST_ROWS * x.shape[-1]


def products(
    x: Tensor,
    weights: Sequence[QuantizedWeight],
    biases: Sequence[Tensor | None],
    beside: Beside = NOTHING,
    many: bool = False,
) -> list[Tensor]:
    """[x @ W.T + bias] of the weights, of the same K, on the current device, with what stands beside them: with an
    activation there are two weights and one result, and to the product of one weight a residual may be added.

    many: x has the many rows of a prompt; a norm and a sum then have launches of their own, but not what gates, which
    would read and write more than they do.

    x [..., K], and all others of its dtype. Kernels that run just ahead in the stream must not write the weights.
    """
    x, biases, beside = eager.plain(x), _plain(biases), _plain_beside(beside)
    norm, activation, residual = beside
    found = None if many else _in_one_launch(x, weights, biases, beside)
    if found is None and norm is not None:
        x, beside = rms_norm(x, norm), beside._replace(norm=None)
    if found is None and (activation if many else norm is not None and (activation or residual is not None)):
        found = _in_one_launch(x, weights, biases, beside)
    if found is not None:
        return found
    results = eager.linear_group(x, weights, biases)
    if results is None:
        results = [eager.linear(x, q, bias, False) for q, bias in zip(weights, biases, strict=True)]
    return finished(results, beside)


def mlp(
    x: Tensor, weights: Sequence[QuantizedWeight], biases: Sequence[Tensor | None], beside: Beside
) -> Tensor | None:
    """The residual plus its factor times (activation(n @ gate.T) * (n @ up.T)) @ down.T, n being x normed, in launches
    that hand over to each other what they read; None where there are no such, and `products` are as fast.

    weights, biases: of gate, up and down. Else as `products`.
    """
    x, biases, beside = eager.plain(x), _plain(biases), _plain_beside(beside)
    if not _fit(x, biases, beside):
        return None
    found: Tensor | None = eager.cuda_products().mlp(x, weights, biases, beside)
    return found


def whole_mlp(x: Tensor, weights: Sequence[QuantizedWeight], biases: Sequence[Tensor | None], beside: Beside) -> Tensor:
    """As `mlp`, in the launches that there are."""
    many = has_many(x)
    found = None if many else mlp(x, weights, biases, beside)
    if found is None:
        (inner,) = products(x, weights[:2], biases[:2], beside._replace(residual=None), many)
        (found,) = products(inner, weights[2:], biases[2:], Beside(residual=beside.residual), many)
    return found


def finished(results: list[Tensor], beside: Beside) -> list[Tensor]:
    """Products with what follows them, in launches of their own."""
    _, activation, residual = beside
    if activation:
        gate, up = results
        results = [gated(gate, up, activation)]
    if residual is not None:
        results = [torch.add(residual.value, results[0], alpha=residual.factor)]
    return results


def _plain(biases: Sequence[Tensor | None]) -> list[Tensor | None]:
    return [None if bias is None else eager.plain(bias) for bias in biases]


def _plain_beside(beside: Beside) -> Beside:
    added = beside.residual
    return beside if added is None else beside._replace(residual=added._replace(value=eager.plain(added.value)))


def _in_one_launch(
    x: Tensor, weights: Sequence[QuantizedWeight], biases: Sequence[Tensor | None], beside: Beside
) -> list[Tensor] | None:
    if not _fit(x, biases, beside):
        return None
    found: list[Tensor] | None = eager.cuda_products().fused(x, weights, biases, beside)
    return found


def _fit(x: Tensor, biases: Sequence[Tensor | None], beside: Beside) -> bool:
    """Whether CUDA kernels can read them where they are."""
    norm, _, residual = beside
    tensors = [x, *biases, norm and norm.weight, residual and residual.value]
    return x.is_cuda and all(tensor is None or eager.is_aligned(tensor) for tensor in tensors)


def rms_norm(x: Tensor, norm: Norm, residual: Tensor | None = None) -> Tensor:
    """x, contiguous, normed, plus residual."""
    normed: Tensor = _kernels(x).rms_norm(x, norm.weight, norm.epsilon, norm.offset, residual)
    return normed


def gated(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """activation(gate) * up, each [..., columns], contiguous or columns of what is."""
    result: Tensor = _kernels(up).gated(gate, up, activation)
    return result


def _kernels(x: Tensor) -> ModuleType:
    if x.is_cuda and slow.no_kernels(x.device.type) is None:
        from halfbyte.kernels.pointwise import triton

        if triton.supports(x):
            return triton
    return plain_torch
