"""The kernel of a model's head without a GPU: that it multiplies right on a CPU, compiles into registers, and has a
shape for the K of every model."""

from __future__ import annotations

import struct
from pathlib import Path

import cuda_on_cpu
import pytest
import torch
from cuda_on_cpu import Shape
from gpus import H200
from rings import usage

from halfbyte.kernels.common.device import properties_for
from halfbyte.kernels.common.nvrtc import compile_cubin
from halfbyte.kernels.head import launch

BF16, F16 = torch.bfloat16, torch.float16
SHARED = H200.shared_memory
SIZES = (896, 1536, 2048, 2560, 2880, 3072, 3584, 4096, 5120, 6144, 7168, 8192)  # K of models
# Rows of x, rows of W, K, CTAs.
CASES = [(1, 100, 512, 3, BF16), (8, 64, 256, 1, F16), (11, 133, 640, 2, BF16), (16, 37, 896, 2, F16)]


@pytest.mark.slow
@cuda_on_cpu.needs_compiler
@pytest.mark.parametrize(("rows", "n", "k", "ctas", "dtype"), CASES, ids=str)
@pytest.mark.parametrize("has_bias", [False, True])
def test_multiplies(rows: int, n: int, k: int, ctas: int, dtype: torch.dtype, has_bias: bool, tmp_path: Path) -> None:
    """CTAs' rows of W are no multiple of a tile's, and stages are used more than once."""
    torch.manual_seed(0)
    x, weight = torch.randn(rows, k).to(dtype), torch.randn(n, k).to(dtype)
    bias = torch.randn(n).to(dtype)
    y = torch.full((rows + 1, n), 7.0, dtype=dtype)
    shape = launch.shape_for(k, rows, SHARED)
    assert shape is not None
    shape = shape._replace(stages=2)
    made = launch.variant(H200, dtype, shape, has_bias, overlaps=False)
    bits = struct.pack("".join(launch.LAYOUT), *(t.data_ptr() for t in (x, weight, bias, y)), rows, n)
    sizes = Shape(ctas, launch.threads(shape), shape.shared_bytes)
    assert cuda_on_cpu.run(tmp_path, made, "head", bits, sizes, [weight]) == 0
    right = x.double() @ weight.double().T + (bias.double() if has_bias else 0)
    torch.testing.assert_close(y[:rows].double(), right, rtol=torch.finfo(dtype).eps, atol=1e-3)
    assert (y[rows] == 7).all()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("capability", "k", "rows"), [(90, 4096, 8), (90, 4096, 16), (90, 8192, 1), (90, 2048, 32), (100, 2880, 8)]
)
def test_compiles_into_registers(capability: int, k: int, rows: int, tmp_path: Path) -> None:
    gpu = properties_for(f"sm_{capability}")
    shape = launch.shape_for(k, rows, gpu.shared_memory)
    assert shape is not None
    made = launch.variant(gpu, BF16, shape, bias=False)
    path = tmp_path / "head.cubin"
    path.write_bytes(compile_cubin(made.source, made.capability, dict(made.constants)))
    used = usage(path, "head")
    assert used["LOCAL"] == 0, used
    assert used["STACK"] <= 8, used  # NVRTC 13.0 keeps two words of k = 2048 there, 13.5 none
    assert used["REG"] * launch.threads(shape) <= launch.REGISTERS
    assert shape.shared_bytes <= gpu.shared_memory


@pytest.mark.parametrize("k", SIZES)
def test_every_model_has_a_shape(k: int) -> None:
    shape = launch.shape_for(k, 8, SHARED)
    assert shape is not None
    assert shape.shared_bytes <= SHARED < shape._replace(stages=shape.stages + 1).shared_bytes or shape.stages == 16
    assert k % (shape.warps * shape.pieces * launch.UNIT) == 0


def test_what_has_none() -> None:
    assert launch.shape_for(4096, 0, SHARED) is None
    assert launch.shape_for(4096, 17, SHARED) is None
    assert launch.shape_for(1024, 33, SHARED) is None
    assert launch.shape_for(4100, 1, SHARED) is None
    assert launch.shape_for(32 * 1009, 1, SHARED) is None
    assert not launch.supports(torch.ones(1, 4096), torch.ones(4096, 4096), None)


def test_variants() -> None:
    """One for up to eight rows, one for up to sixteen; none where a multiprocessor would have nothing to do."""
    assert len(launch.variants([1, 5, 8, 9, 40], (128256, 4096), BF16, False, H200)) == 2
    assert not launch.variants([1], (1000, 4096), BF16, False, H200)
    assert not launch.variants([1], (128256, 4096), torch.float32, False, H200)
    assert not launch.variants([1], (128256, 4096), BF16, False, properties_for("sm_89"))
