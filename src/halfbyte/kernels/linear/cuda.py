"""`linear` on an NVIDIA GPU: the kernel is chosen (dispatch.py), bound, kept (cache.py) and launched."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from halfbyte.formats.weight import QuantizedWeight
from halfbyte.kernels.common import slow
from halfbyte.kernels.common.device import properties_of
from halfbyte.kernels.linear import cache, dispatch, reach
from halfbyte.kernels.linear.dispatch import choose, choose_back, choose_fused, choose_group, choose_mlp
from halfbyte.kernels.linear.fusion import Beside, Fusion
from halfbyte.kernels.linear.kernel import FusedProduct, GroupProduct, MlpProduct, Product
from halfbyte.kernels.linear.problem import (
    ALIGNMENT,
    FIRST_WITH_BF16,
    INVARIANT_ROWS,
    Problem,
    addresses,
    key_of,
    problem_of,
)


def linear(x: Tensor, q: QuantizedWeight, bias: Tensor | None, batch_invariant: bool) -> Tensor | None:
    """x @ W.T + bias, or None where the dense weight is the faster way, or nothing can be compiled.

    x [..., K] and bias [N] or None, contiguous, aligned to 16 bytes, on the current device. Returns [..., N]. With
    batch_invariant the choice depends on the weight alone.
    """
    device, properties, (n, k) = x.device, properties_of(x.get_device()), q.shape
    m = x.numel() // max(k, 1)
    if min(m, n, k) == 0 or properties.kind == "hip":  # AMD GPUs have a kernel of their own (plan.py, triton.py)
        return None
    if (lack := reach.without_kernels(properties)) is not None:
        slow.warn("CUDA kernels", str(lack))
        return None
    problem, weight = problem_of(x, q, bias), addresses(q)
    if (lack := reach.without_scales(m, problem, properties)) is not None:
        slow.warn("CUDA kernels for scales", str(lack))
        return None
    if (reason := reach.without_tensor_cores(problem, properties, batch_invariant)) is not None:
        slow.warn("tensor cores", reason)
    most = INVARIANT_ROWS if batch_invariant else m
    choices = {}
    for rows in {min(m, most), m % most or most}:
        choice = choose(rows, problem, properties, batch_invariant)
        if choice is None:
            return None
        choices[rows] = choice
    out = x.new_empty((*x.shape[:-1], n))
    stream = torch._C._cuda_getCurrentRawStream(x.get_device())
    at, bias_at, out_at = x.data_ptr(), 0 if bias is None else bias.data_ptr(), out.data_ptr()
    for first in range(0, m, most):
        rows = min(most, m - first)
        product = cache.bind(choices[rows], device, rows, problem, weight)
        product(stream, at + first * k * x.itemsize, bias_at, out_at + first * n * x.itemsize, rows)
    if m <= most:
        key = key_of(x, q, bias, batch_invariant)
        cache.products.get(key, lambda: cache.Known(device, problem, weight, {})).keep(m, product)
    return out


def takes_halves(x: Tensor, q: QuantizedWeight, batch_invariant: bool) -> bool:
    """Whether x [..., K] is in bf16 and better multiplied as fp16: halves.py."""
    properties = properties_of(x.get_device())
    if properties.ptx >= FIRST_WITH_BF16 or properties.kind != "cuda":
        return False
    m = x.numel() // max(q.shape[1], 1)
    if min(m, *q.shape) == 0:
        return False
    if reach.without_kernels(properties) is not None:  # torch is left, which has no tensor cores for bf16 either
        return x.dtype is torch.bfloat16 and not batch_invariant
    return dispatch.takes_halves(m, problem_of(x, q, None), properties, batch_invariant)


def ready(x: Tensor, q: QuantizedWeight, bias: Tensor | None, batch_invariant: bool) -> Tensor | None:
    """x @ W.T + bias at the cost of little more than the launch, where this thread has had a product with this weight
    before. Otherwise None, whatever the reason; then the caller looks closer.

    x, bias: any plain tensors that need no gradients.
    """
    known = cache.products.entries.get(key_of(x, q, bias, batch_invariant))
    if known is None:
        return None
    n, k = q.shape
    index, sides = x.get_device(), x.shape
    # All that the key does not hold. x is often the transpose or a part of something; then it has to be copied first.
    if (
        not sides
        or sides[-1] != k
        or x.layout is not torch.strided
        or not x.is_contiguous()
        or x.is_neg()
        or q.packed.get_device() != index
        or torch._C._cuda_getDevice() != index
        or (product := known.products.get(m := x.numel() // k) or _of_other_rows(known, m, batch_invariant)) is None
    ):
        return None
    at, bias_at = x.data_ptr(), 0
    if bias is not None:
        if (
            bias.dtype is not x.dtype
            or bias.shape != (n,)
            or bias.get_device() != index
            or not bias.is_contiguous()
            or bias.is_neg()
        ):
            return None
        bias_at = bias.data_ptr()
    if (at | bias_at) % ALIGNMENT:
        return None
    out = x.new_empty((*sides[:-1], n))
    product(torch._C._cuda_getCurrentRawStream(index), at, bias_at, out.data_ptr(), m)
    return out


def _of_other_rows(known: cache.Known, m: int, batch_invariant: bool) -> Product | None:
    """The product of m rows, which a known weight has not had yet; None where more than m has to be looked at, or the
    dense weight is the faster way."""
    problem, properties = known.problem, properties_of(known.device.index)
    if m == 0 or batch_invariant or not problem.has_known_scales or properties.ptx < FIRST_WITH_BF16:
        return None
    choice = choose(m, problem, properties, False)
    if choice is None:
        return None
    return known.keep(m, cache.bind(choice, known.device, m, problem, known.weight))


def backward(grad: Tensor, q: QuantizedWeight) -> Callable[[Tensor], Tensor] | None:
    """What multiplies a gradient [..., N] with W, or None where the dense weight is the faster way, or nothing can be
    compiled. It takes the gradient contiguous, aligned to 16 bytes, on the current device, and returns [..., K].

    grad: of any strides; only its shape, dtype and device are looked at.
    """
    n, k = q.shape
    m = grad.numel() // max(n, 1)
    (product,) = cache.back.get((m, key_of(grad, q, None, False)), lambda: (bind_back(m, grad, q),))
    if product is None:
        return None

    def multiply(grad: Tensor) -> Tensor:
        out = grad.new_empty((*grad.shape[:-1], k))
        product(torch._C._cuda_getCurrentRawStream(grad.get_device()), grad.data_ptr(), 0, out.data_ptr(), m)
        return out

    return multiply


def linear_group(x: Tensor, weights: Sequence[QuantizedWeight], biases: Sequence[Tensor | None]) -> list[Tensor] | None:
    """[x @ W.T + bias] for several weights of the same K at once, or None where that gains nothing.

    x [..., K] and biases, contiguous, aligned to 16 bytes, on the current device. Returns [..., N] for each.
    """
    index, sides = x.get_device(), x.shape
    m = x.numel() // max(sides[-1], 1)
    key = cache.group_key(m, x, weights, biases)
    (product,) = cache.groups.get(key, lambda: (bind_group(m, x, weights, biases),))
    if product is None:
        return None
    out = [x.new_empty((*sides[:-1], q.shape[0])) for q in weights]
    results = []
    for bias, y in zip(biases, out, strict=True):
        results += [0 if bias is None else bias.data_ptr(), y.data_ptr()]
    product(torch._C._cuda_getCurrentRawStream(index), x.data_ptr(), m, results)
    return out


def fused(
    x: Tensor,
    weights: Sequence[QuantizedWeight],
    biases: Sequence[Tensor | None],
    beside: Beside,
) -> list[Tensor] | None:
    """The products of x with weights of the same K, and what stands beside them, in one launch; None where that gains
    nothing. What is fused: see fusion.py. No kernel just ahead in the stream may write the weights.

    x [..., K], biases, and what stands beside: contiguous, aligned to 16 bytes, of one dtype, on the current device.
    Returns [..., N] for each weight, or one result of a gated pair.
    """
    fusion = beside.fusion
    index, sides = x.get_device(), x.shape
    m = x.numel() // max(sides[-1], 1)
    key = (fusion, cache.group_key(m, x, weights, biases))
    (product,) = cache.fused.get(key, lambda: (bind_fused(m, x, weights, biases, fusion),))
    if product is None:
        return None
    out = [x.new_empty((*sides[:-1], q.shape[0])) for q in (weights[:1] if fusion.activation else weights)]
    results = []
    for place, bias in enumerate(biases):
        results += [0 if bias is None else bias.data_ptr(), out[place].data_ptr() if place < len(out) else 0]
    product(torch._C._cuda_getCurrentRawStream(index), x.data_ptr(), *beside.addresses, m, results)
    return out


def mlp(
    x: Tensor,
    weights: Sequence[QuantizedWeight],
    biases: Sequence[Tensor | None],
    beside: Beside,
) -> Tensor | None:
    """The residual plus its factor times down's product of activation(gate) * up, of x that is normed first; None where
    that takes the launches of the two products by themselves. weights, biases: of gate, up and down. Else as `fused`.
    """
    fusion, after = beside._replace(residual=None).fusion, Beside(residual=beside.residual).fusion
    index, sides = x.get_device(), x.shape
    m = x.numel() // max(sides[-1], 1)
    key = (fusion, after, cache.group_key(m, x, weights, biases))
    (product,) = cache.mlps.get(key, lambda: (bind_mlp(m, x, weights, biases, fusion, after),))
    if product is None:
        return None
    out = x.new_empty((*sides[:-1], weights[2].shape[0]))
    of_biases = [0 if bias is None else bias.data_ptr() for bias in biases]
    stream = torch._C._cuda_getCurrentRawStream(index)
    product(stream, x.data_ptr(), *beside.addresses, m, of_biases, out.data_ptr())
    return out


def takes_halves_back(grad: Tensor, q: QuantizedWeight) -> bool:
    """Whether a gradient [..., N] in bf16 is better multiplied with W as fp16: the dense weight is all there is."""
    properties = properties_of(grad.get_device())
    older = properties.kind == "cuda" and properties.ptx < FIRST_WITH_BF16
    return older and grad.dtype is torch.bfloat16 and grad.numel() > 0


def bind_back(m: int, grad: Tensor, q: QuantizedWeight) -> Product | None:
    """The product of m rows of a gradient with W itself, or None where no kernel is for it."""
    properties = properties_of(grad.get_device())
    if min(m, *q.shape) == 0 or reach.without_kernels(properties) is not None:
        return None
    problem = problem_of(grad, q, None)
    choice = choose_back(m, problem, properties)
    return None if choice is None else cache.bind(choice, grad.device, m, problem, addresses(q))


def bind_fused(
    m: int, x: Tensor, weights: Sequence[QuantizedWeight], biases: Sequence[Tensor | None], fusion: Fusion
) -> FusedProduct | None:
    """The products of m rows with what is fused, or None where launches of their own are as fast."""
    group = _group_of(m, x, weights, biases)
    choice = None if group is None else choose_fused(m, group, fusion, properties_of(x.get_device()))
    if group is None or choice is None:
        return None
    return cache.bind_fused(choice, x.device, m, group, tuple(map(addresses, weights)), fusion)


def bind_mlp(
    m: int,
    x: Tensor,
    weights: Sequence[QuantizedWeight],
    biases: Sequence[Tensor | None],
    fusion: Fusion,
    after: Fusion,
) -> MlpProduct | None:
    """The products of m rows with gate, up and down, or None where these have launches of their own."""
    group = _group_of(m, x, weights, biases)
    choice = None if group is None else choose_mlp(m, group, fusion, after, properties_of(x.get_device()))
    if group is None or choice is None:
        return None
    kernel, *plans = choice
    product: MlpProduct = kernel.bind_mlp(x.device, m, group, list(map(addresses, weights)), fusion, *plans, after)
    return product


def bind_group(
    m: int, x: Tensor, weights: Sequence[QuantizedWeight], biases: Sequence[Tensor | None]
) -> GroupProduct | None:
    """The products of m rows with several weights, or None where one after the other is as fast."""
    group = _group_of(m, x, weights, biases)
    choice = None if group is None else choose_group(m, group, properties_of(x.get_device()))
    if group is None or choice is None:
        return None
    return cache.bind_group(choice, x.device, m, group, tuple(map(addresses, weights)))


def _group_of(
    m: int, x: Tensor, weights: Sequence[QuantizedWeight], biases: Sequence[Tensor | None]
) -> tuple[Problem, ...] | None:
    """What is multiplied, or None where there is nothing to do, or no kernel can be compiled."""
    if m == 0 or min(min(q.shape) for q in weights) == 0:
        return None
    if reach.without_kernels(properties_of(x.get_device())) is not None:
        return None
    return tuple(problem_of(x, q, bias) for q, bias in zip(weights, biases, strict=True))
