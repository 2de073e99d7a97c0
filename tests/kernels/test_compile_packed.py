"""The packed distance kernels compile for every target, and keep every number in the thread that decoded it."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from gpus import gpu_of, on_targets

from halfbyte.formats.weight import FLOAT_DTYPES, NestedScale, QuantizedWeight
from halfbyte.kernels.common.targets import compile_for, pointer

triton = pytest.importorskip("triton")

from halfbyte.kernels.distance import packed  # noqa: E402

pytestmark = pytest.mark.slow

F16, BF16, F32 = FLOAT_DTYPES


def empty(*shape: int, dtype: torch.dtype = F32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def candidates(format: str, dtype: torch.dtype, d: int, block_size: int, nested: bool = False) -> QuantizedWeight:
    v = 32000
    if format == "int4":
        words, scale = empty(v, d // 8, dtype=torch.int32), empty(v, d // block_size, dtype=dtype)
        return QuantizedWeight(format, words, scale, (v, d), dtype, block_size)
    blocks = v * d // block_size
    scale = empty(blocks, dtype=torch.uint8 if nested else F32)
    second = NestedScale(empty(256), empty(-(-blocks // 256)), empty(1)) if nested else None
    return QuantizedWeight(format, empty(v * d // 2, 1, dtype=torch.uint8), scale, (v, d), dtype, block_size, second)


WEIGHTS = {
    "nf4 nested bf16": candidates("nf4", BF16, 4096, 64, nested=True),
    "nf4 nested fp32": candidates("nf4", F32, 4096, 64, nested=True),
    "fp4 fp16": candidates("fp4", F16, 4096, 64),
    "nf4 bf16 odd": candidates("nf4", BF16, 96, 32),
    "int4 bf16": candidates("int4", BF16, 4096, 128),
}


@on_targets("name", list(WEIGHTS))
def test_compiles(name: str, target: int | str, monkeypatch: pytest.MonkeyPatch) -> None:
    properties = gpu_of(target)
    kept: list[tuple[Any, ...]] = []
    monkeypatch.setattr(packed, "launch", lambda *launch: kept.append(launch))
    q = WEIGHTS[name]
    packed.distances(empty(1, q.shape[1], dtype=q.dtype), q, empty(1, q.shape[0]))
    kernel, _, arguments, _, configure = kept[0]
    signature, unaligned = {}, []
    for parameter, value in zip(kernel.arg_names, arguments, strict=False):
        is_tensor = isinstance(value, torch.Tensor)
        signature[parameter] = pointer(value.dtype) if is_tensor else "i32"
        if not is_tensor and value % 16:
            unaligned.append(parameter)
    _, options = configure(properties)
    constants = {name: options.pop(name) for name in kernel.arg_names if name in options}
    compiled = compile_for(kernel, target, signature, constants, unaligned, **options)
    if not isinstance(target, int):
        assert compiled.asm["hsaco"]
        return
    assert compiled.metadata.shared <= properties.shared_memory
    # Look-ups count on the lane that a number is in.
    assert not re.findall(r"ttg\.convert_layout .*: tensor<(\d+x\d+x\w+)", compiled.asm["ttgir"])
    ptx = compiled.asm["ptx"]
    part = packed.plans.LOAD * constants["LOADS"]
    height = constants["ROWS"] // options["num_warps"]
    if constants["PARTS"] == 32:
        assert ptx.count("shfl.sync.idx.b32") == part * height
        assert ptx.count("ld.global.nc.v4.b32") == constants["LOADS"] * (height + 8)
