"""device/scale.cuh: weights times their scale before the MMA have the bits of a product in 16 bits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from halfbyte.kernels.common.cuda_types import TYPES
from halfbyte.kernels.common.device import properties_of
from halfbyte.kernels.common.driver import Arguments, Launch, kernels
from halfbyte.kernels.common.nvrtc import Variant, read_source
from halfbyte.kernels.linear.simt import launch as simt

FOLD = """
struct Arguments {
  const u32 *weights, *scales;
  u32* products;
};
extern "C" __global__ void fold_all(const __grid_constant__ Arguments a) {
  const u32 i = blockIdx.x * blockDim.x + threadIdx.x;
  a.products[i] = fold(a.weights[i], a.scales[i]);
}
"""


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_fold_rounds_once(dtype: torch.dtype) -> None:
    """Every product of two numbers: among them are zeros of both signs, subnormals, infinities and NaN."""
    device = torch.device("cuda", torch.cuda.current_device())
    root = Path(simt.__file__).parents[1]
    source = read_source(root / "device" / "scale.cuh", root) + FOLD
    constants = {"x": TYPES[dtype], "scale": TYPES[torch.float32]}
    variant = Variant.of(source, properties_of(device.index).capability, constants)
    (function,) = kernels(device.index, variant, (("fold_all", 0),))

    weights = torch.arange(-(1 << 15), 1 << 15, device=device).to(torch.int16).view(dtype)
    scales = torch.randn(1 << 15, device=device).to(dtype).repeat_interleave(2)
    products = torch.full_like(weights, 777)
    stream = torch.cuda.current_stream(device).cuda_stream
    arguments = Arguments(("", "3Q", ""), (), ())
    arguments.set(weights.data_ptr(), scales.data_ptr(), products.data_ptr())
    Launch(function, (256, 1), 128)(stream, arguments.parameters)
    right = weights * scales
    assert torch.equal(products.nan_to_num(nan=1.5), right.nan_to_num(nan=1.5))
    assert torch.equal(products.isnan(), right.isnan())
    assert torch.equal(products.signbit() | products.isnan(), right.signbit() | right.isnan())
