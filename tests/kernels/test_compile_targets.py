"""Every Triton kernel compiles for every target, into the instructions it was written for. No GPU is needed.

What is compiled is what would be launched: the launchers run here up to the launch itself, whose arguments are kept and
configured for a GPU that is not there. "meta" tensors stand for weights of any size: without memory, at
address 0.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from gpus import gpu_of

from halfbyte.formats.int4 import INT4
from halfbyte.formats.mxfp4 import MXFP4
from halfbyte.formats.spec import FORMATS
from halfbyte.formats.weight import NestedScale
from halfbyte.kernels.common.targets import CUDA_TARGETS, HIP_TARGETS, compile_for, pointer

triton = pytest.importorskip("triton")

from halfbyte.kernels.dequantize import triton as dequantize  # noqa: E402
from halfbyte.kernels.quantize import triton as quantize  # noqa: E402

pytestmark = pytest.mark.slow

META = torch.device("meta")
F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
targets = pytest.mark.parametrize("target", [*CUDA_TARGETS, *HIP_TARGETS])
cuda_targets = pytest.mark.parametrize("target", CUDA_TARGETS)


@pytest.fixture(scope="module", autouse=True)
def _fresh_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Compile anew: a cached result would say nothing about today's compiler."""
    with triton.knobs.cache.scope():
        triton.knobs.cache.dir = str(tmp_path_factory.mktemp("triton"))
        yield


def empty(*shape: int, dtype: torch.dtype = F32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=META)


def dequantize_blockwise(
    format: str, nested: bool, dtype: torch.dtype, numel: int = 2**16, block_size: int = 64, unaligned: bool = False
) -> None:
    blocks = -(-numel // block_size)
    scale = empty(blocks, dtype=torch.uint8 if nested else F32)
    nested_scale = NestedScale(empty(256), empty(-(-blocks // 256)), empty(1)) if nested else None
    out = torch.empty(numel + 1, dtype=dtype)[1:] if unaligned else empty(numel, dtype=dtype)
    packed = empty((numel + 1) // 2, dtype=torch.uint8)
    dequantize.dequantize(packed, scale, nested_scale, FORMATS[format], block_size, out)


def dequantize_grouped(dtype: torch.dtype, scale_dtype: torch.dtype, group_size: int) -> None:
    packed, scale = empty(512, 128, dtype=torch.int32), empty(512, 1024 // group_size, dtype=scale_dtype)
    dequantize.dequantize(packed, scale, None, INT4, group_size, empty(512, 1024, dtype=dtype))


def quantize_blockwise(format: str, dtype: torch.dtype, numel: int = 2**16, block_size: int = 64) -> None:
    packed, absmax = empty((numel + 1) // 2, dtype=torch.uint8), empty(-(-numel // block_size))
    quantize.quantize(empty(numel, dtype=dtype), FORMATS[format], block_size, packed, absmax)


def dequantize_exponents(dtype: torch.dtype, rows: int = 512) -> None:
    packed, scale = empty(rows, 512, dtype=torch.uint8), empty(rows, 32, dtype=torch.uint8)
    dequantize.dequantize(packed, scale, None, MXFP4, 32, empty(rows, 1024, dtype=dtype))


def quantize_exponents(dtype: torch.dtype, rows: int = 512) -> None:
    packed, scale = empty(rows, 512, dtype=torch.uint8), empty(rows, 32, dtype=torch.uint8)
    quantize.quantize(empty(rows, 1024, dtype=dtype), MXFP4, 32, packed, scale)


def quantize_scales() -> None:
    quantize.quantize_scales(empty(4096), empty(1))


def quantize_grouped(dtype: torch.dtype, group_size: int) -> None:
    packed, scale = empty(512, 128, dtype=torch.int32), empty(512, 1024 // group_size, dtype=dtype)
    quantize.quantize(empty(512, 1024, dtype=dtype), INT4, group_size, packed, scale)


LARGE, ODD, BEYOND = 2**26, 2**16 + 1, 2**32
LAUNCHES: dict[str, Callable[[], None]] = {
    "dequantize nf4 nested bf16": lambda: dequantize_blockwise("nf4", True, BF16),
    "dequantize nf4 nested fp16": lambda: dequantize_blockwise("nf4", True, F16),
    "dequantize nf4 nested fp32": lambda: dequantize_blockwise("nf4", True, F32),
    "dequantize nf4 nested bf16 large": lambda: dequantize_blockwise("nf4", True, BF16, LARGE),
    "dequantize nf4 nested bf16 odd": lambda: dequantize_blockwise("nf4", True, BF16, ODD),
    "dequantize nf4 nested bf16 unaligned": lambda: dequantize_blockwise("nf4", True, BF16, unaligned=True),
    "dequantize nf4 flat bf16": lambda: dequantize_blockwise("nf4", False, BF16),
    "dequantize fp4 flat fp32 odd": lambda: dequantize_blockwise("fp4", False, F32, ODD),
    "dequantize nf4 nested bf16 blocks of 32": lambda: dequantize_blockwise("nf4", True, BF16, block_size=32),
    "dequantize nf4 nested bf16 blocks of 4096": lambda: dequantize_blockwise("nf4", True, BF16, block_size=4096),
    "dequantize int4 bf16": lambda: dequantize_grouped(BF16, BF16, 128),
    "dequantize int4 fp16 from fp32": lambda: dequantize_grouped(F16, F32, 32),
    "dequantize nf4 nested bf16 beyond 32 bits": lambda: dequantize_blockwise("nf4", True, BF16, BEYOND),
    "dequantize mxfp4 bf16": lambda: dequantize_exponents(BF16),
    "dequantize mxfp4 fp32 beyond 32 bits": lambda: dequantize_exponents(F32, 2**22),
    "quantize nf4 bf16": lambda: quantize_blockwise("nf4", BF16),
    "quantize nf4 fp32 odd": lambda: quantize_blockwise("nf4", F32, ODD),
    "quantize fp4 fp16": lambda: quantize_blockwise("fp4", F16),
    "quantize nf4 bf16 blocks of 4096": lambda: quantize_blockwise("nf4", BF16, block_size=4096),
    "quantize nf4 bf16 beyond 32 bits": lambda: quantize_blockwise("nf4", BF16, BEYOND),
    "quantize mxfp4 bf16": lambda: quantize_exponents(BF16),
    "quantize mxfp4 bf16 beyond 32 bits": lambda: quantize_exponents(BF16, 2**22),
    "quantize scales": quantize_scales,
    "quantize int4 bf16": lambda: quantize_grouped(BF16, 128),
    "quantize int4 fp16": lambda: quantize_grouped(F16, 32),
}
DEQUANTIZE = [name for name in LAUNCHES if name.startswith("dequantize")]


def launches(names: Iterable[str]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("name", list(names))


Compile = Callable[[str, int | str], Any]


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Compile:
    """Compiles what the launch of a name would run on a GPU of a kind."""
    kept: list[tuple[Any, ...]] = []
    for module in (dequantize, quantize):
        monkeypatch.setattr(module, "launch", lambda *launch: kept.append(launch))

    def compile(name: str, target: int | str) -> Any:
        LAUNCHES[name]()
        kernel, _, arguments, _, configure = kept.pop()
        signature, unaligned = {}, []
        for parameter, value in zip(kernel.arg_names, arguments, strict=False):
            is_tensor = isinstance(value, torch.Tensor)
            signature[parameter] = pointer(value.dtype) if is_tensor else ("i32" if value < 2**31 else "i64")
            if (value.data_ptr() if is_tensor else value) % 16:
                unaligned.append(parameter)
        properties = gpu_of(target)
        _, options = configure(properties)
        constants = {name: options.pop(name) for name in kernel.arg_names if name in options}
        return compile_for(kernel, target, signature, constants, unaligned, **options)

    return compile


def resources(cubin: bytes, folder: Path) -> str:
    """What cuobjdump says a kernel uses: "REG:32 STACK:0 SHARED:64 LOCAL:0 ..."."""
    file = folder / "kernel.cubin"
    file.write_bytes(cubin)
    tool = triton.knobs.nvidia.cuobjdump.path
    return subprocess.run([tool, "-res-usage", file], capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize(
    ("name", "target"),
    [
        pytest.param(name, target, marks=[pytest.mark.compile_all] if (i + j) % 2 else [])
        for i, name in enumerate(LAUNCHES)
        for j, target in enumerate([*CUDA_TARGETS, *HIP_TARGETS])
    ],
)
def test_compiles(name: str, target: int | str, compiled: Compile, tmp_path: Path) -> None:
    """With everything in registers, and little shared memory. Each kernel for half of the targets, and in
    `make compile-all` for all of them."""
    kernel = compiled(name, target)
    assert kernel.metadata.shared <= 9 * 1024
    if isinstance(target, int):
        assert f".target sm_{target}" in kernel.asm["ptx"]
        usage = resources(kernel.asm["cubin"], tmp_path)
        assert "STACK:0 " in usage
        assert "LOCAL:0 " in usage
    else:
        assert kernel.asm["hsaco"]
        assert re.search(r"\.private_segment_fixed_size: 0\b", kernel.asm["amdgcn"])
        assert re.search(r"\.vgpr_spill_count: 0\b", kernel.asm["amdgcn"])


@targets
@launches(name for name in LAUNCHES if "mxfp4" in name)
def test_powers_of_two_keep_subnormal_numbers(name: str, target: int | str, compiled: Compile) -> None:
    """The least scale is one, and so are weights of such blocks."""
    asm = compiled(name, target).asm
    if isinstance(target, int):
        assert ".ftz" not in asm["ptx"]


@targets
@launches(DEQUANTIZE)
def test_dequantize_fuses_nothing(name: str, target: int | str, compiled: Compile) -> None:
    """A nested scale is a rounded product and then a rounded sum; with a multiply-add some bits would differ."""
    asm = compiled(name, target).asm
    if isinstance(target, int):
        assert not re.search(r"\b(fma|mad)\.\S*f32", asm["ptx"])
    else:
        assert not re.search(r"\bv_\w*(fma|mac|mad)\w*_f32\b", asm["amdgcn"])


@cuda_targets
@launches(name for name in DEQUANTIZE if "odd" not in name and "unaligned" not in name)
def test_dequantize_stores_16_bytes(name: str, target: int, compiled: Compile) -> None:
    """A thread's neighbouring numbers leave as one access, and all of them do."""
    ptx = compiled(name, target).asm["ptx"]
    assert set(re.findall(r"st\.global\S*", ptx)) == {"st.global.v4.b32"}


@cuda_targets
@launches(name for name in DEQUANTIZE if not re.search("fp32|odd|unaligned|4096", name))
def test_dequantize_keeps_one_layout(name: str, target: int, compiled: Compile) -> None:
    """What a thread loads is what it stores: nothing is passed between threads on the way."""
    assert "convert_layout" not in compiled(name, target).asm["ttgir"]


@cuda_targets
@launches(name for name in LAUNCHES if "quantize nf4" in name or "quantize fp4" in name)
def test_what_is_read_once_leaves_the_cache_first(name: str, target: int, compiled: Compile) -> None:
    assert ".L1::evict_first" in compiled(name, target).asm["ptx"]


@cuda_targets
@launches(["dequantize nf4 nested bf16", "dequantize nf4 nested bf16 large"])
def test_large_weights_are_fetched_ahead(name: str, target: int, compiled: Compile) -> None:
    """Where the instruction exists: from sm_90 on."""
    fetches = "cp.async.bulk.prefetch.L2" in compiled(name, target).asm["ptx"]
    assert fetches == ("large" in name and target >= 90)
