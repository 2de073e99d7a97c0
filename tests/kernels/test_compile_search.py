"""The distance and rank kernels compile for every target: tensor cores where there are any, nothing spilled."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from gpus import gpu_of, on_targets

from halfbyte.kernels.common.targets import compile_for, pointer

triton = pytest.importorskip("triton")

from triton.tools.tensor_descriptor import TensorDescriptor  # noqa: E402

from halfbyte.kernels.distance import products, select, shards_triton  # noqa: E402
from halfbyte.kernels.distance import triton as distance  # noqa: E402
from halfbyte.kernels.rank import triton as rank  # noqa: E402

pytestmark = pytest.mark.slow

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32


def empty(*shape: int, dtype: torch.dtype = F32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def pair(p: int, dtype: torch.dtype, d: int = 4096) -> tuple[torch.Tensor, torch.Tensor]:
    return empty(p, d, dtype=dtype), empty(32000, d, dtype=dtype)


def examine(k: int) -> None:
    products._examine(*pair(64, BF16), empty(64, 2000), empty(64), k)


LAUNCHES: dict[str, Callable[[], object]] = {
    "distances bf16": lambda: distance.distances(*pair(1, BF16), empty(1, 32000)),
    "distances fp32 odd": lambda: distance.distances(*pair(1, F32, 4095), empty(1, 32000)),
    "select 1": lambda: select.select(empty(1, 32000), 1),
    "select 10": lambda: select.select(empty(1, 32000), 10),
    "select 10 of few keys": lambda: select.select(empty(1, 512, dtype=torch.int64), 10),
    "select 128": lambda: select.select(empty(1, 32000), 128),
    "select 100 of 100": lambda: select.select(empty(1, 100), 100),
    "products fp16": lambda: products.distances(*pair(64, F16), empty(64, 32000)),
    "products bf16": lambda: products.distances(*pair(64, BF16), empty(64, 32000)),
    "products fp32 odd": lambda: products.distances(*pair(5, F32, 4095), empty(5, 32000)),
    "bounds bf16": lambda: products._bounds(*pair(64, BF16)),
    "examine 10": lambda: examine(10),
    "examine 128": lambda: examine(128),
    "pack 5": lambda: shards_triton.pack(empty(1, 5), empty(1, 5, dtype=torch.int64), 32000, 5),
    "merge 5 of 2": lambda: shards_triton.merge(empty(2, 6, dtype=torch.int64), 1, 5),
    "merge 128 of 8": lambda: shards_triton.merge(empty(8, 1 + 64 * 128, dtype=torch.int64), 64, 128),
    "own": lambda: rank.own_logits(*pair(64, BF16), empty(64, dtype=torch.int64)),
    "pairs": lambda: count_above(BF16),
    "ranks fp16": lambda: count_above(F16),
    "ranks bf16": lambda: count_above(BF16),
    "ranks fp32": lambda: count_above(F32),
}


def count_above(dtype: torch.dtype) -> None:
    integers = empty(512, dtype=torch.int64), 0, empty(512, dtype=torch.int64)
    rank.count_above(*pair(512, dtype), empty(2, 512, dtype=torch.float64), *integers)


def signature_of(value: object) -> str:
    if isinstance(value, TensorDescriptor):
        return f"tensordesc<{pointer(value.base.dtype)[1:]}{value.block_shape}>"
    return pointer(value.dtype) if isinstance(value, torch.Tensor) else "i32"


@on_targets("name", list(LAUNCHES))
def test_compiles(name: str, target: int | str, monkeypatch: pytest.MonkeyPatch) -> None:
    properties = gpu_of(target)
    kept: list[tuple[Any, ...]] = []
    for module in (distance, products, select, shards_triton, rank):
        monkeypatch.setattr(module, "launch", lambda *launch: kept.append(launch))
        if hasattr(module, "properties_of"):
            monkeypatch.setattr(module, "properties_of", lambda index: properties)
    LAUNCHES[name]()
    kernel, _, arguments, _, configure = kept[-1 if name == "pairs" else 0]
    values = dict(zip(kernel.arg_names, arguments, strict=False))
    signature = {parameter: signature_of(value) for parameter, value in values.items()}
    unaligned = [
        parameter
        for parameter, value in values.items()
        if isinstance(value, TensorDescriptor) or (isinstance(value, int) and value % 16)
    ]
    _, options = configure(properties)
    constants = {name: options.pop(name) for name in kernel.arg_names if name in options}
    compiled = compile_for(kernel, target, signature, constants, unaligned, **options)
    if isinstance(target, int):
        assert compiled.metadata.shared <= properties.shared_memory
        multiplies = re.search(r"\b(w?mma|wgmma|tcgen05)\.", compiled.asm["ptx"])
        if any(word in name for word in ("products", "bounds", "ranks")) and target >= 80:
            assert multiplies
    else:
        assert compiled.asm["hsaco"]
