"""The product on CUDA cores, for all that kernels on tensor cores do not take: how kernel.cu is launched.

Every x and every 4-bit W of two dimensions has a plan. Weights are the fp32 numbers that `dequantize` rounds, sums are
fp32, and the plan has no say in their order: a row of x gives the same bits under every plan, whatever its neighbours.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from halfbyte.formats.spec import FORMATS, Format, codebook_tensor
from halfbyte.formats.weight import QuantizedWeight
from halfbyte.kernels.common.device import DeviceFacts, facts_of
from halfbyte.kernels.common.driver import Arguments, Launch, kernels, prepared
from halfbyte.kernels.common.nvrtc import Constant, Variant, read_source
from halfbyte.kernels.linear.constants import TYPES
from halfbyte.kernels.linear.operands import Addresses, Operands, operands_of
from halfbyte.kernels.linear.ready import Product, run
from halfbyte.kernels.linear.simt.plan import WARPS, ExactPlan, exact_plan

MOST_TILES = 65535  # along a grid's y; with more, a warp makes several
LAYOUT = ("6Q", "4Q", "2Q2I")  # its Arguments: x, bias, out and m change


def find_plan(m: int, operands: Operands, facts: DeviceFacts, batch_invariant: bool = False) -> ExactPlan:
    """The plan for x [m, K]; there is one for all operands, and batch_invariant makes no difference to any."""
    aligned = operands.align_packed >= 8 and operands.align_x >= 16
    return exact_plan(m, operands.n, operands.k, aligned, facts)


def plan_for(x: Tensor, q: QuantizedWeight, bias: Tensor | None) -> ExactPlan:
    """The plan for these very tensors."""
    return find_plan(len(x), operands_of(x, q, bias), facts_of(x.get_device()))


def linear(x: Tensor, q: QuantizedWeight, bias: Tensor | None, out: Tensor, plan: ExactPlan) -> None:
    """out = x @ W.T + bias, each sum rounded once.

    x [M, K], bias [N] or None and out [M, N] of one dtype, contiguous, on the current device; the plan is from
    `plan_for`, for these very tensors.
    """
    (m, k), n = x.shape, out.shape[1]
    if m == 0 or n == 0:
        return
    if k == 0:
        out.copy_(out.new_zeros(n) if bias is None else bias)
        return
    run(product, x, q, bias, out, plan)


def product(device: torch.device, m: int, operands: Operands, weight: Addresses, plan: ExactPlan) -> Product:
    """The product with a weight on the current device, of any number of rows."""
    o, index = operands, device.index
    compiled = variant(o, plan, facts_of(index))
    launch = prepared(("exact", index, compiled), lambda: _launch(index, compiled))
    codebook = codebook_tensor(FORMATS[o.format], device)
    shifts = o.block_size.bit_length() - 1, max(o.nested, 1).bit_length() - 1
    arguments = Arguments(LAYOUT, (*weight, codebook.data_ptr()), (o.n, o.k, *shifts))
    across = -(-o.n // (WARPS * plan.columns))

    def multiply(stream: int, x: int, bias: int, out: int, m: int) -> None:
        arguments.set(x, bias, out, m)
        launch.set_grid(across, min(-(-m // plan.rows), MOST_TILES))
        launch(stream, arguments.parameters)

    return multiply


def _launch(index: int, compiled: Variant) -> Launch:
    (function,) = kernels(index, compiled, (("exact", 0),))
    return Launch(function, (1, 1), 32 * WARPS)


def variant(operands: Operands, plan: ExactPlan, facts: DeviceFacts) -> Variant:
    """What is compiled for such operands."""
    settings = constants(operands.dtype, operands.scale, FORMATS[operands.format], plan)
    return Variant.of(source(), facts.capability, settings)


def constants(dtype: torch.dtype, scale: torch.dtype, format: Format, plan: ExactPlan) -> dict[str, Constant]:
    """kernel.cu's Config, for dtypes of x and of q.scale."""
    return {
        "x": TYPES[dtype], "scale": TYPES[scale], "low_first": format.low_first, "flushes": format.flushes,
        "aligned": plan.whole, "tile_m": plan.rows, "tile_n": plan.columns, "warps": WARPS,
    }  # fmt: skip


@cache
def source() -> str:
    path = Path(__file__).with_name("kernel.cu")
    return read_source(path, root=path.parents[1])
