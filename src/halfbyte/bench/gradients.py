"""`halfbyte bench gradients`: dy @ W, the gradient of x, for more and more rows of dy, beside the ways through a dense
weight.

Every result is held against the fp64 product with the very weights its provider was given, and its error is recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from halfbyte import ops
from halfbyte.autograd import linear_backward
from halfbyte.bench import baselines
from halfbyte.bench.case import Case
from halfbyte.bench.linear import Product, Products, cases_of, decoded, name_of, problems_of
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
    yield from cases_of(device, shapes, dtype, format, nested, rows, _products, back=True)


def _products(dense: list[Tensor], weights: list[QuantizedWeight]) -> Products:
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
    return Products(products, exact, {})
