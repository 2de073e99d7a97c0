"""`halfbyte bench gradients`: dy @ W, the gradient of x, for more and more rows of dy, beside the ways through a dense
weight.

Every result is held against the fp64 product with the very weights its provider was given, and its error is recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from halfbyte import ops
from halfbyte.autograd import linear_backward
from halfbyte.bench import baselines
from halfbyte.bench.case import Case
from halfbyte.bench.dequantize import input_sets
from halfbyte.bench.linear import check, decoded, error_of, exact_products, facts_of, name_of, problems_of, quantized
from halfbyte.formats import bitsandbytes as layout
from halfbyte.formats.bitsandbytes import to_bitsandbytes
from halfbyte.formats.int4 import INT4
from halfbyte.formats.weight import QuantizedWeight
from halfbyte.kernels.common import nvrtc
from halfbyte.kernels.common.device import properties_of
from halfbyte.kernels.linear import dispatch, reach
from halfbyte.measure.report import BASELINE

GPU_ROWS = (16, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 2048, 4096, 8192)
CPU_ROWS = (16, 64, 256)

Product = Callable[[Tensor, int], Tensor]


def gradient_cases(
    device: torch.device,
    shapes: Sequence[tuple[int, int]],
    dtype: torch.dtype,
    format: str,
    nested: bool,
    rows: Sequence[int],
) -> Iterator[Case]:
    """One case a shape and number of rows: halfbyte, torch with dense weights, dequantize and torch, and what
    bitsandbytes' backward does."""
    if reach.can_compile(device):  # side by side what would else be compiled one by one
        found, problems = properties_of(device.index), problems_of(shapes, dtype, format, nested)
        choices = ((dispatch.choose_back(m, problem, found), problem) for m in rows for problem in problems)
        nvrtc.compile_ahead(choice.variant(problem, found) for choice, problem in choices if choice)
    for n, k in shapes:
        packed = quantized(torch.zeros(n, k, dtype=dtype, device="cpu"), format, nested).nbytes
        sets = input_sets(packed, device)
        dense = [torch.randn(n, k, dtype=torch.float32, device=device).to(dtype) for _ in range(sets)]
        weights = [quantized(weight, format, nested) for weight in dense]
        products, exact = _products(dense, weights)
        for m in rows:
            grads = [torch.randn(m, n, dtype=torch.float32, device=device).to(dtype) for _ in range(sets)]
            exactly = {weight: exact_products(grads, _transposed(weight)) for weight in exact.values()}
            ends = (m * k + m * n) * dtype.itemsize
            yield Case(
                f"{n}×{k}, M = {m}",
                {name: ends + (n * k * dtype.itemsize if name == name_of(dtype) else packed) for name in products},
                sets,
                {name: _bound(product, grads) for name, product in products.items()},
                {name: exactly[exact[name]] for name in products},
                partial(check, dtype=dtype),
                device,
                facts_of(m, weights, dtype),
                error_of,
            )


def _products(
    dense: list[Tensor], weights: list[QuantizedWeight]
) -> tuple[dict[str, Product], dict[str, Callable[[int], Tensor]]]:
    """What multiplies a gradient with weight number i, by provider, and the exact dense weight that each has."""
    dtype = dense[0].dtype
    products: dict[str, Product] = {
        "halfbyte": lambda grad, i: linear_backward(grad, weights[i]),
        name_of(dtype): lambda grad, i: grad @ dense[i],
        "dequantize + matmul": lambda grad, i: grad @ ops.dequantize(weights[i], dtype),
    }
    exact: dict[str, Callable[[int], Tensor]] = dict.fromkeys(products, decoded(weights))
    exact[name_of(dtype)] = lambda i: dense[i]
    if weights[0].format in layout.FORMATS:
        bitsandbytes = baselines.Bitsandbytes()
        states = [to_bitsandbytes(q) for q in weights]
        products[BASELINE] = lambda grad, i: grad @ bitsandbytes.dequantize(*states[i])  # all that its backward does
        exact[BASELINE] = exact["halfbyte"]
    if weights[0].spec is not INT4 and dense[0].shape[1] % INT4.block_size == 0:
        integers = [ops.quantize(weight, INT4.name) for weight in dense]
        products["halfbyte int4"] = lambda grad, i: linear_backward(grad, integers[i])
        exact["halfbyte int4"] = decoded(integers)
    return products, exact


def _bound(product: Product, grads: list[Tensor]) -> Callable[[int], Tensor]:
    return lambda i: product(grads[i], i)


def _transposed(weight: Callable[[int], Tensor]) -> Callable[[int], Tensor]:
    return lambda i: weight(i).t()
