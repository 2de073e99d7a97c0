"""The product on CUDA cores, for all that kernels on tensor cores do not take: how kernel.cu is launched.

Every x and every 4-bit W of two dimensions has a plan. Weights are the fp32 numbers that `dequantize` rounds, sums are
fp32, and the plan has no say in their order: a row of x gives the same bits under every plan, whatever its neighbours.
"""

from __future__ import annotations

from collections.abc import Hashable
from functools import cache
from pathlib import Path

import torch

from halfbyte.formats.spec import FORMATS, codebook_tensor
from halfbyte.kernels.common.cuda_types import TYPES
from halfbyte.kernels.common.device import DeviceProperties, properties_of
from halfbyte.kernels.common.driver import Arguments, Launch, kernels
from halfbyte.kernels.common.nvrtc import Constant, Variant, read_source
from halfbyte.kernels.common.thread_cache import ThreadCache
from halfbyte.kernels.linear.kernel import Product
from halfbyte.kernels.linear.problem import Addresses, Problem
from halfbyte.kernels.linear.simt.plan import WARPS, SimtPlan, simt_plan

NAME = "simt"
MOST_TILES = 65535  # along a grid's y; with more, a warp makes several
LAYOUT = ("6Q", "4Q", "2Q2I")  # its Arguments: x, bias, out and m change
launches: ThreadCache[Hashable, Launch] = ThreadCache()


def plan(m: int, problem: Problem, properties: DeviceProperties, batch_invariant: bool = False) -> SimtPlan | None:
    """The plan for x [m, K], or None where scales are exponents; batch_invariant makes no difference to any."""
    if not problem.has_known_scales:
        return None
    return simt_plan(m, problem.n, problem.k, problem.align_packed >= 8, properties)


def bind(device: torch.device, m: int, problem: Problem, weight: Addresses, plan: SimtPlan) -> Product:
    """The product with a weight on the current device, of any number of rows."""
    o, index = problem, device.index
    compiled = variant(o, plan, properties_of(index))
    launch = launches.get((index, compiled), lambda: _launch(index, compiled))
    codebook = codebook_tensor(FORMATS[o.format], device)
    shifts = o.block_size.bit_length() - 1, max(o.nested, 1).bit_length() - 1
    arguments = Arguments(LAYOUT, (*weight, codebook.data_ptr()), (o.n, o.k, *shifts))
    across = -(-o.n // (WARPS * plan.tile_n))

    def multiply(stream: int, x: int, bias: int, out: int, m: int) -> None:
        arguments.set(x, bias, out, m)
        launch.set_grid(across, min(-(-m // plan.tile_m), MOST_TILES))
        launch(stream, arguments.parameters)

    return multiply


def _launch(index: int, compiled: Variant) -> Launch:
    (function,) = kernels(index, compiled, (("exact", 0),))
    return Launch(function, (1, 1), 32 * WARPS)


def variant(problem: Problem, plan: SimtPlan, properties: DeviceProperties) -> Variant:
    """What is compiled."""
    return Variant.of(source(), properties.capability, constants(problem, plan))


def constants(problem: Problem, plan: SimtPlan) -> dict[str, Constant]:
    """kernel.cu's Config."""
    return {
        "x": TYPES[problem.dtype], "scale": TYPES[problem.scale], "low_first": problem.low_first,
        "flushes": FORMATS[problem.format].flushes, "aligned": plan.aligned, "tile_m": plan.tile_m,
        "tile_n": plan.tile_n, "warps": WARPS,
    }  # fmt: skip


@cache
def source() -> str:
    path = Path(__file__).with_name("kernel.cu")
    return read_source(path, root=path.parents[1])
