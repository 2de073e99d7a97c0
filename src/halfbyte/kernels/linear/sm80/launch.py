"""The CUDA product for tensor cores from sm_75 on: which shape of kernel.cu, and how it is launched."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from halfbyte.formats.spec import FORMATS
from halfbyte.formats.weight import QuantizedWeight
from halfbyte.kernels.common.device import DeviceFacts, facts_of
from halfbyte.kernels.common.driver import Arguments, Launch, kernels, prepared
from halfbyte.kernels.common.nvrtc import Constant, Variant, read_source
from halfbyte.kernels.linear.codebook import unit_and_codebook
from halfbyte.kernels.linear.constants import TYPES
from halfbyte.kernels.linear.operands import Addresses, Operands, operands_of
from halfbyte.kernels.linear.ready import Product, run
from halfbyte.kernels.linear.sm80.plan import DTYPES, TensorPlan, tensor_plan

AHEAD = 4  # spans of W on their way to a warp
# Rows of x that a plan is for where the sums of a row must not depend on how many there are.
INVARIANT_ROWS = 16
LAYOUT = ("5Q", "4QI", "4If64s")  # Arguments in kernel.cu: x, bias, out, partial and m change


def find_plan(m: int, operands: Operands, facts: DeviceFacts, batch_invariant: bool) -> TensorPlan | None:
    """The plan for x [m, K], or None where this kernel is not for such operands.

    It is for every format, x of 16 bits (on sm_75 fp16), K % 32 == 0, any N and any rows of x; what is many rows, and
    better served by a dense product, is the caller's to say. With batch_invariant the plan is the same for all of them:
    a row's sums are then always made in the same order.
    """
    o = operands
    if o.dtype not in DTYPES or not o.has_usual_nesting or o.align_packed < 8 or o.align_x < 16:
        return None
    return tensor_plan(INVARIANT_ROWS if batch_invariant and m else m, o.n, o.k, o.block_size, o.dtype, facts)


def plan_for(x: Tensor, q: QuantizedWeight, bias: Tensor | None, batch_invariant: bool) -> TensorPlan | None:
    """The plan for these very tensors."""
    return find_plan(len(x), operands_of(x, q, bias), facts_of(x.get_device()), batch_invariant)


def linear(x: Tensor, q: QuantizedWeight, bias: Tensor | None, out: Tensor, plan: TensorPlan) -> None:
    """out = x @ W.T + bias.

    x [M, K], aligned to 16 bytes, and out [M, N], contiguous, on the current device; the plan is from `plan_for`.
    """
    run(product, x, q, bias, out, plan)


def product(device: torch.device, m: int, operands: Operands, weight: Addresses, plan: TensorPlan) -> Product:
    """The product with a weight on the current device, of as many rows as there are tiles of x for m."""
    o, index = operands, device.index
    columns = plan.tiles(m)
    compiled = variant(o, plan, facts_of(index))
    key = ("tensor", index, columns, o.n, plan, compiled)
    launch, combine = prepared(key, lambda: _launches(index, columns, o.n, plan, compiled))
    shift = (o.block_size // plan.span).bit_length() - 1
    arguments = Arguments(LAYOUT, weight, (o.n, o.k, plan.splits, shift, *unit_and_codebook(o.format, o.dtype)))

    def multiply(stream: int, x: int, bias: int, out: int, m: int) -> None:
        if plan.splits == 1:
            arguments.set(x, bias, out, 0, m)
            launch(stream, arguments.parameters)
            return
        partial = torch.empty(plan.splits * m * o.n, dtype=torch.float32, device=device)
        arguments.set(x, bias, out, partial.data_ptr(), m)
        launch(stream, arguments.parameters)
        combine(stream, arguments.parameters)

    return multiply


def _launches(index: int, columns: int, n: int, plan: TensorPlan, compiled: Variant) -> tuple[Launch, Launch]:
    """The product, and what adds up its partial sums, of as many rows as the tiles of x may hold."""
    product, combine = kernels(index, compiled, (("product", plan.sum_bytes), ("combine", 0)))
    sums = -(-columns * 8 * plan.columns * n // 256)
    return (
        Launch(product, grid(n, columns, plan, facts_of(index).sms), 32 * plan.warps, plan.sum_bytes),
        Launch(combine, (sums, 1), 256),
    )


def variant(operands: Operands, plan: TensorPlan, facts: DeviceFacts) -> Variant:
    """What is compiled for such operands."""
    settings = constants(operands.format, operands.scale, operands.dtype, plan)
    return Variant.of(source(), facts.capability, settings)


def constants(format: str, scale_dtype: torch.dtype, dtype: torch.dtype, plan: TensorPlan) -> dict[str, Constant]:
    """kernel.cu's Config."""
    return {
        "x": TYPES[dtype], "scale": TYPES[scale_dtype], "low_first": FORMATS[format].low_first, "span": plan.span,
        "mma_k": plan.step, "m_tiles": plan.columns, "n_warps": plan.row_warps, "k_warps": plan.k_warps,
        "prefetch": AHEAD, "resident_ctas": plan.resident,
    }  # fmt: skip


@cache
def source() -> str:
    path = Path(__file__).with_name("kernel.cu")
    return read_source(path, root=path.parents[1])


def grid(n: int, columns: int, plan: TensorPlan, sms: int) -> tuple[int, int]:
    """CTAs for `columns` tiles of x: along x these times the splits, along y those that stride over the tiles of W, as
    many as the SMs hold at once."""
    across, tiles = columns * plan.splits, -(-n // plan.rows)
    return across, min(tiles, max(1, sms * plan.resident // across))
