"""`halfbyte bench linear`: x @ W.T for more and more rows of x: where a fused kernel wins, and where it stops.

Every result is held against the fp64 product of the very weights its provider was given, and its error is recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import lru_cache, partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from halfbyte import ops
from halfbyte.bench import baselines
from halfbyte.bench.case import Case, first_line
from halfbyte.bench.dequantize import input_sets
from halfbyte.bench.humming import HummingLinear
from halfbyte.formats import bitsandbytes as layout
from halfbyte.formats.bitsandbytes import to_bitsandbytes
from halfbyte.formats.int4 import INT4
from halfbyte.formats.spec import FORMATS
from halfbyte.formats.weight import QuantizedWeight
from halfbyte.kernels.common import nvrtc
from halfbyte.kernels.common.device import DeviceProperties, properties_for, properties_of
from halfbyte.kernels.linear import dispatch, reach
from halfbyte.kernels.linear.kernel import run
from halfbyte.kernels.linear.problem import Problem, problem_of
from halfbyte.kernels.linear.reference import linear_exact
from halfbyte.measure.error import relative_error
from halfbyte.measure.report import BASELINE

# A small one; Llama-3 8B, which is Mistral 7B too; Qwen3 32B; Gemma-3 27B; Llama-3 70B; an odd number of rows.
GPU_SHAPES = (
    (2048, 2048),
    *((1024, 4096), (4096, 4096), (14336, 4096), (4096, 14336)),
    *((8192, 5120), (5120, 8192), (25600, 5120), (5120, 25600)),
    *((4096, 5376), (5376, 4096), (21504, 5376), (5376, 21504)),
    *((1024, 8192), (8192, 8192), (28672, 8192), (8192, 28672)),
    (14337, 4096),
)
CPU_SHAPES = ((4096, 4096), (14336, 4096))
GPU_ROWS = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 2048, 4096, 8192)
CPU_ROWS = (1, 4, 16, 64)
COMPARED = ("nf4", "fp4", "int4")  # formats that peers have

HUMMING = "humming"
REPACKED = "bitsandbytes repacked"  # its module in eval mode on a CPU with AVX512-BF16

# The largest ‖y - y64‖ / ‖y64‖ that passes: twice the rounding of weights and results, a little more in fp32 for sums,
# and in bf16 three times, because humming rounds some of its sums twice.
BOUND = {torch.bfloat16: 1.5 * 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-19}


def linear_cases(
    device: torch.device,
    shapes: Sequence[tuple[int, int]],
    dtype: torch.dtype,
    format: str,
    nested: bool,
    rows: Sequence[int],
    alone: bool = False,
    properties: DeviceProperties | None = None,
) -> Iterator[Case]:
    """One case a shape and number of rows: halfbyte, torch on dense weights, dequantize and torch, the 4-bit peers.

    alone: without peers, some of which take seconds to pack a weight. properties: of another GPU, whose kernels and
    grids halfbyte takes on this one.
    """
    ours = ops.linear if properties is None else partial(linear_of_another, properties=properties)
    other = {} if properties is None else {"target": f"sm_{properties.capability}", "sms": properties.sms}
    _compile_ahead(device, shapes, dtype, format, nested, rows, properties)
    products = partial(_products, ours=ours, alone=alone)
    yield from cases_of(device, shapes, dtype, format, nested, rows, products, other=other)


Product = Callable[[Tensor, int], Tensor]


class Products(NamedTuple):
    """What multiplies with weight number i, by provider; the exact dense weight that each of them has; and peers that
    are left out, with the reason."""

    each: dict[str, Product]
    exact: dict[str, Callable[[int], Tensor]]
    left_out: dict[str, str]


def cases_of(
    device: torch.device,
    shapes: Sequence[tuple[int, int]],
    dtype: torch.dtype,
    format: str,
    nested: bool,
    rows: Sequence[int],
    products_of: Callable[[list[Tensor], list[QuantizedWeight]], Products],
    back: bool = False,
    other: Mapping[str, Any] = MappingProxyType({}),
) -> Iterator[Case]:
    """One case a shape and number of rows, of x [M, K] @ W.T or, with `back`, of dy [M, N] @ W. products_of: dense
    weights, and the same quantized. other: facts besides."""
    for n, k in shapes:
        packed = _quantized(torch.zeros(n, k, dtype=dtype, device="cpu"), format, nested).nbytes
        sets = input_sets(packed, device)
        dense = [torch.randn(n, k, dtype=torch.float32, device=device).to(dtype) for _ in range(sets)]
        weights = [_quantized(weight, format, nested) for weight in dense]
        products, exact, left_out = products_of(dense, weights)
        for m in rows:
            x = [torch.randn(m, n if back else k, dtype=torch.float32, device=device).to(dtype) for _ in range(sets)]
            exactly = {weight: _exact_products(x, weight, back) for weight in exact.values()}
            ends = (m * k + m * n) * dtype.itemsize
            yield Case(
                f"{n}×{k}, M = {m}",
                {name: ends + (n * k * dtype.itemsize if name == name_of(dtype) else packed) for name in products},
                sets,
                {name: _bound(name, product, x) for name, product in products.items()},
                {name: exactly[exact[name]] for name in products},
                partial(_check, dtype=dtype),
                device,
                {
                    "shape": [n, k], "m": m, "n": n, "k": k, "dtype": str(dtype).removeprefix("torch."),
                    "format": format, "block_size": weights[0].block_size, "nested": nested, "inputs": sets, **other,
                },
                lambda result, right: {"relative_error": float(f"{relative_error(result, right):.4g}")},
                left_out,
            )  # fmt: skip


def _compile_ahead(
    device: torch.device,
    shapes: Sequence[tuple[int, int]],
    dtype: torch.dtype,
    format: str,
    nested: bool,
    rows: Sequence[int],
    properties: DeviceProperties | None,
) -> None:
    """Begins to compile all kernels of the cases side by side, which would else be compiled one by one."""
    if not reach.can_compile(device):
        return
    found, problems = properties or properties_of(device.index), problems_of(shapes, dtype, format, nested)
    variants = (dispatch.variant_of(m, (problem,), found, False) for m in rows for problem in problems)
    nvrtc.compile_ahead(filter(None, variants))


def problems_of(shapes: Sequence[tuple[int, int]], dtype: torch.dtype, format: str, nested: bool) -> list[Problem]:
    """What halfbyte is asked for weights of these shapes, in their format and in INT4."""
    x = torch.empty(0, dtype=dtype, device="cpu")
    return [
        replace(problem_of(x, _quantized(torch.zeros(8, k, dtype=dtype, device="cpu"), name, nested), None), n=n)
        for n, k in shapes
        for name in sorted({format, INT4.name})
        if name != INT4.name or k % INT4.block_size == 0
    ]


def another_gpu(target: str, sms: int | None) -> DeviceProperties:
    """The properties of a GPU that is not here, with as many multiprocessors as the one that is, or `sms`.

    Raises ValueError where the GPU at hand cannot run its kernels, or has fewer.
    """
    if not torch.cuda.is_available():
        raise ValueError("--target runs another GPU's kernels on an NVIDIA GPU, and there is none")
    here = properties_of(torch.cuda.current_device())
    found = properties_for(target, sms or here.sms)
    if found.capability > here.capability or found.sms > here.sms:
        raise ValueError(f"this GPU, sm_{here.capability} with {here.sms} multiprocessors, cannot be a {target}")
    return found


def linear_of_another(x: Tensor, q: QuantizedWeight, properties: DeviceProperties) -> Tensor:
    """x [M, K] @ W.T on this GPU, by the kernel and the grid that `linear` has for a GPU of such properties."""
    choice = dispatch.choose(len(x), problem_of(x, q, None), properties, False)
    if choice is None:
        return torch.nn.functional.linear(x, ops.dequantize(q, x.dtype))
    out = x.new_empty((len(x), q.shape[0]))
    run(choice.kernel, x, q, None, out, choice.plan)
    return out


def _check(result: Tensor, right: Tensor, dtype: torch.dtype) -> str | None:
    """dtype: of x. A provider that rounds to another one may be as far off as either of them allows."""
    bound = max(BOUND[result.dtype], BOUND[dtype])
    error = relative_error(result, right)
    return None if error <= bound else f"error {error:.2e}, more than {bound:.1e}"


def _products(
    dense: list[Tensor],
    weights: list[QuantizedWeight],
    ours: Callable[[Tensor, QuantizedWeight], Tensor],
    alone: bool,
) -> Products:
    device = dense[0].device
    functional, dtype = torch.nn.functional, dense[0].dtype
    products: dict[str, Product] = {
        "halfbyte": lambda x, i: ours(x, weights[i]),
        name_of(dtype): lambda x, i: functional.linear(x, dense[i]),
        "dequantize + linear": lambda x, i: functional.linear(x, ops.dequantize(weights[i], dtype)),
    }
    left_out: dict[str, str] = {}
    numbers = decoded(weights)
    exact: dict[str, Callable[[int], Tensor]] = dict.fromkeys(products, numbers)
    exact[name_of(dtype)] = lambda i: dense[i]
    if weights[0].format in layout.FORMATS and not alone:
        bitsandbytes = baselines.Bitsandbytes()
        states = [to_bitsandbytes(q) for q in weights]
        if reason := bitsandbytes.why_no_linear(weights[0]):
            left_out[BASELINE] = reason
        else:
            products[BASELINE] = lambda x, i: bitsandbytes.linear(x, *states[i])
            exact[BASELINE] = numbers
        if device.type == "cpu":
            if reason := bitsandbytes.why_not_repacked(weights[0], dtype):
                left_out[REPACKED] = reason
            else:
                modules = [bitsandbytes.repacked(q) for q in weights]
                products[REPACKED] = lambda x, i: modules[i](x)
                exact[REPACKED] = numbers
    if dense[0].shape[1] % 128:
        return Products(products, exact, left_out)
    integers = weights if weights[0].spec is INT4 else [ops.quantize(w, INT4.name) for w in dense]
    decoded_integers = numbers if integers is weights else decoded(integers)
    if integers is not weights:
        products["halfbyte int4"] = lambda x, i: ours(x, integers[i])
        exact["halfbyte int4"] = decoded_integers
    if alone:
        return Products(products, exact, left_out)
    if dtype == torch.bfloat16 and baselines.Tinygemm.fits(dense[0].shape):
        tinygemm = [baselines.Tinygemm(q) for q in integers]
        products["tinygemm"] = lambda x, i: tinygemm[i](x)
        exact["tinygemm"] = decoded_integers
    if integers[0].block_size == baselines.Marlin.GROUP_SIZE and baselines.Marlin.fits(dense[0].shape, device):
        packed = baselines.Marlin(integers[0])  # which takes seconds on the host
        marlin = [packed, *(deepcopy(packed) for _ in integers[1:])]
        products["marlin"] = lambda x, i: marlin[i](x)
        exact["marlin"] = decoded(integers[:1] * len(integers))
    if dtype != torch.float32 and HummingLinear.is_here(device):
        try:
            humming = HummingLinear(dense[0], len(dense))
            humming(dense[0][:1], 0)  # which compiles
        except Exception as error:  # it compiles on this machine, which may fail in many ways; the others are timed
            left_out[HUMMING] = f"it cannot take {list(dense[0].shape)}: {first_line(error)}"
        else:
            the_one = humming.exact()
            products[HUMMING] = humming
            exact[HUMMING] = lambda i: the_one
    return Products(products, exact, left_out)


def _bound(name: str, product: Product, x: list[Tensor]) -> Callable[[int], Tensor]:
    given = [tensor.half() for tensor in x] if name == "marlin" else x  # which takes nothing else
    return lambda i: product(given[i], i)


def decoded(weights: list[QuantizedWeight]) -> Callable[[int], Tensor]:
    return lambda i: ops.dequantize(weights[i], torch.float32)


def _exact_products(x: list[Tensor], weight: Callable[[int], Tensor], back: bool) -> Callable[[int], Tensor]:
    """Of input number i. Only the last is kept: those of a large product are gigabytes."""
    return lru_cache(maxsize=1)(lambda i: linear_exact(x[i], weight(i).t() if back else weight(i)))


def _quantized(weight: Tensor, format: str, nested: bool) -> QuantizedWeight:
    return ops.quantize(weight, format, nested=nested and FORMATS[format].nests)


def name_of(dtype: torch.dtype) -> str:
    return {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}[dtype]
